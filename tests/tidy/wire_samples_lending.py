"""Samples of the memory market's REST bodies: JSON, so their golden files are readable."""

from typing import Any

from shared.ids import Epoch, InstanceId, LeaseId, SpaceId
from shared.wire.lending import (
    AskLease,
    AskReclaim,
    Grant,
    HistoryEntry,
    LeaseCall,
    LeaseList,
    LeaseReport,
    LeaseView,
    LendingRefused,
    MarketView,
    MempoolReport,
    MempoolView,
    Offer,
    OfferList,
    OfferMemory,
    OfferReport,
    OfferView,
    Pair,
    Placement,
    ReclaimOrder,
    ReclaimView,
    Renewal,
    Renewed,
    ReportReply,
    SpaceRef,
    SpaceReport,
    Token,
)

P, C, M = InstanceId("decode-1"), InstanceId("decode-0"), InstanceId("mempool-0")
LEASE = LeaseId("l-1700000000000001-3")
TOKEN = Token(1_700_000_000_000_001, 3)
OFFER = Offer(
    offer_id="o-1700000000000001-1",
    producer=P,
    producer_epoch=Epoch(7),
    mempool=M,
    boot_generation=Epoch(9),
    space=SpaceId(1),
    length_bytes=8 << 30,
    key="k1",
)
ORDER = ReclaimOrder(reclaim_id="r-1", offer_id=OFFER.offer_id, keep_bytes=4 << 30, deadline_ms=900)
SPACE = SpaceReport(space=SpaceId(1), name="cuda:1", total_bytes=80 << 30, free_bytes=9 << 30)
OFFER_VIEW = OfferView(offer=OFFER, state="reclaiming", limit_bytes=4 << 30, leased_bytes=5 << 30)
RECLAIM_VIEW = ReclaimView(order=ORDER, state="open", over_bytes=1 << 30)
LEASE_VIEW = LeaseView(
    lease_id=LEASE,
    offer_id=OFFER.offer_id,
    consumer=C,
    producer=P,
    mempool=M,
    space=SpaceId(1),
    purpose="swap",
    length_bytes=5 << 30,
    token=TOKEN,
    state="reclaiming",
    remaining_ms=8_000,
    keep_bytes=4 << 30,
    deadline_ms=900,
)

LENDING_SAMPLES: dict[str, Any] = {
    "offer-memory": OfferMemory(
        producer=P,
        producer_epoch=Epoch(7),
        mempool=M,
        boot_generation=Epoch(9),
        space=SpaceId(1),
        length_bytes=8 << 30,
    ),
    "offer-view": OFFER_VIEW,
    "ask-lease": AskLease(
        consumer=C,
        consumer_epoch=Epoch(8),
        length_bytes=5 << 30,
        min_bytes=1 << 30,
        purpose="swap",
        spaces=[SpaceRef(mempool=M, space=SpaceId(1))],
        ttl_ms=10_000,
    ),
    "grant": Grant(
        lease_id=LEASE,
        offer_id=OFFER.offer_id,
        consumer=C,
        purpose="swap",
        mempool=M,
        address="run/mempool.sock",
        boot_generation=Epoch(9),
        space=SpaceId(1),
        length_bytes=5 << 30,
        token=TOKEN,
        present_ms=2_000,
        ttl_ms=10_000,
        consumer_ttl_ms=9_000,
        key="k2",
    ),
    "lease-call": LeaseCall(consumer=C, token=TOKEN),
    "renewed": Renewed(
        lease_id=LEASE,
        state="reclaiming",
        length_bytes=5 << 30,
        consumer_ttl_ms=7_000,
        keep_bytes=4 << 30,
        deadline_ms=900,
    ),
    "ask-reclaim": AskReclaim(offer_id=OFFER.offer_id, producer=P, length_bytes=4 << 30, deadline_ms=1_000),
    "reclaim-order": ORDER,
    "reclaim-view": RECLAIM_VIEW,
    "mempool-report": MempoolReport(
        boot_generation=Epoch(9),
        seq=12,
        fence=Token(TOKEN.term, 0),
        address="run/mempool.sock",
        host="boot-1",
        spaces=[SPACE],
        offers=[OfferReport(offer=OFFER, leased_bytes=5 << 30)],
        leases=[
            LeaseReport(
                lease_id=LEASE,
                offer_id=OFFER.offer_id,
                consumer=C,
                purpose="swap",
                length_bytes=5 << 30,
                token=TOKEN,
                remaining_ms=8_000,
                state="reclaiming",
                key="k2",
            )
        ],
    ),
    "report-reply": ReportReply(
        seq=12,
        fence=Token(TOKEN.term, 4),
        interval_ms=250,
        ttl_ms=1_500,
        offers=[OFFER],
        reclaims=[ORDER],
        renewals=[Renewal(lease_id=LEASE, ttl_ms=10_000)],
        releases=[LEASE],
    ),
    "market-view": MarketView(
        term=TOKEN.term,
        is_granting=False,
        why_not="market.rebuilding",
        mempools=[
            MempoolView(
                mempool=M,
                address="run/mempool.sock",
                boot_generation=Epoch(9),
                state="live",
                age_ms=20,
                fence=Token(TOKEN.term, 0),
                spaces=[SPACE],
            )
        ],
        offers=[OFFER_VIEW],
        leases=[LEASE_VIEW],
        reclaims=[RECLAIM_VIEW],
        history=[HistoryEntry(event="lease_granted", subject=LEASE, detail="decode-0", age_ms=15)],
    ),
    "offers": OfferList(offers=[OFFER_VIEW]),
    "leases": LeaseList(leases=[LEASE_VIEW]),
    "placement": Placement(pairs=[Pair(consumer=C, producer=P)]),
    "refused": LendingRefused(
        code="offers.exhausted", message="m", retry_after_ms=250, largest_bytes=1 << 20, leader="127.0.0.1:1"
    ),
}
