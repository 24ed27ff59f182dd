"""Samples of what is presented to a mempool: grants, offers and orders of the memory market."""

from shared.ids import Epoch, InstanceId, LeaseId, SpaceId
from shared.wire.lending import Grant, Offer, ReclaimOrder, Token
from shared.wire.mempool import FROM_MEMPOOL, TO_MEMPOOL
from shared.wire.mempool_lending import (
    LendingDone,
    MemoryShares,
    PresentGrant,
    PresentOffer,
    PresentReclaim,
    ReleaseLoan,
    RenewLoan,
    ReportLoad,
)

OFFER = Offer(
    offer_id="o1", producer=InstanceId("decode-1"), producer_epoch=Epoch(3), mempool=InstanceId("mempool-0"),
    boot_generation=Epoch(9), space=SpaceId(1), length_bytes=8 << 30,
)  # fmt: skip
GRANT = Grant(
    lease_id=LeaseId("l1"), offer_id="o1", consumer=InstanceId("decode-0"), purpose="overflow",
    mempool=InstanceId("mempool-0"), address="", boot_generation=Epoch(9), space=SpaceId(1),
    length_bytes=4 << 30, token=Token(7, 2), present_ms=2_000, ttl_ms=10_000, consumer_ttl_ms=5_000,
)  # fmt: skip
ORDER = ReclaimOrder(reclaim_id="r1", offer_id="o1", keep_bytes=1 << 30, deadline_ms=500)

MEMPOOL_LENDING_SAMPLES = {
    "present-offer": (TO_MEMPOOL, PresentOffer(call_id=1, offer=OFFER), ()),
    "present-grant": (TO_MEMPOOL, PresentGrant(call_id=2, grant=GRANT), ()),
    "present-reclaim": (TO_MEMPOOL, PresentReclaim(call_id=3, order=ORDER), ()),
    "renew-loan": (TO_MEMPOOL, RenewLoan(call_id=4, lease_id=LeaseId("l1"), ttl_ms=10_000), ()),
    "release-loan": (TO_MEMPOOL, ReleaseLoan(call_id=5, lease_id=LeaseId("l1")), ()),
    "report-load": (
        TO_MEMPOOL,
        ReportLoad(
            instance_epoch=Epoch(3),
            model="m",
            num_running=2,
            num_waiting=1,
            num_arrived=70,
            num_preempted=4,
            kv_used_share=0.25,
        ),
        (),
    ),
    "report-load-pages": (TO_MEMPOOL, ReportLoad(instance_epoch=Epoch(3), num_pages_in_use=70), ()),
    "memory-shares": (
        FROM_MEMPOOL,
        MemoryShares(total_bytes=9 << 30, offered_bytes=4 << 30, lent_bytes=3 << 30, borrowed_bytes=1 << 30),
        (),
    ),
    "lending-done": (FROM_MEMPOOL, LendingDone(call_id=2, num_bytes=4 << 30), ()),
}
