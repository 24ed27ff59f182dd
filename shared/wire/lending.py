"""The memory market: bodies of its REST API (JSON through msgspec), and what its answers let their holder do.

A *mempool* owns the pages and alone decides what is lent. The coordinator brings lender and borrower
together; what it answers is a capability that its holder presents to the owning mempool, and that has no
effect before the mempool takes it.

    producer --OfferMemory--> coordinator                    consumer --AskLease--> coordinator
        <--- OfferView                                           <------ Grant (an intention, journalled)
    mempool --MempoolReport (every interval)--> coordinator  consumer --Grant--> mempool: takes or refuses it
        <--- ReportReply: offers to know, reclaims, renewals, releases, the fence

POST   /v1/offers                     OfferMemory -> OfferView         GET /v1/offers -> OfferList
POST   /v1/leases                     AskLease -> Grant                GET /v1/leases -> LeaseList
POST   /v1/leases/{id}/renew          LeaseCall -> Renewed
POST   /v1/leases/{id}/release        LeaseCall -> 204
POST   /v1/reclaims                   AskReclaim -> ReclaimOrder       GET /v1/reclaims/{id} -> ReclaimView
PUT    /v1/mempools/{id}/report       MempoolReport -> ReportReply
GET    /v1/market                     MarketView                       PUT, GET /v1/placement  Placement

Rules that make it safe with lost, repeated, late and reordered messages (AQUA section 6 has none of them):
1. Only durations cross hosts. What is at least as long at the lender as at the borrower is counted from an
earlier instant by the borrower: a consumer stops first.
2. A mempool takes a Grant only if the boot generation is its own, the offer is one that it knows, the bytes
fit into what the offer has left, the token is not below its fence, and it did not take this token before and
end it since. A Grant whose lease it still holds is answered as the first time. It remembers the tokens it
took until its fence passed them.
3. The fence only grows; a mempool raises it to what ReportReply says and reports it back. So the coordinator
knows that a grant which is neither held nor at or above a reported fence is dead, and its bytes are free: no
second journal needed. A new leader's first fence is (its term, 0): every older leader's grants that were not
presented by then are refused.
4. A mempool ignores a ReportReply of a term below its fence's, or of another `seq` than its latest report's.
5. Orders in a ReportReply are repeated until a report shows them done, and carrying one out twice is
harmless. Deadlines never move back: the earliest one heard counts.
6. The mempool is the truth. After any loss the coordinator knows what the reports say, and grants nothing
until each mempool that it can know of has reported a fence of its term, or was silent for its time to live.
"""

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from shared.ids import Epoch, InstanceId, LeaseId, SpaceId

MAX_ID_CHARS = 128
MAX_LENT_BYTES = 1 << 50
MAX_DURATION_MS = 3_600_000
MAX_SPACES = 64  # that one AskLease may name

# CFS swap space; prefix-cache overflow. What a consumer has in lent pages it may read there, whatever the purpose: far
# places (mempool_far.py) are mapped read-only, page by page, by order of the owning mempool.
Purpose = Literal["swap", "overflow"]
LeaseState = Literal["granted", "held", "releasing", "reclaiming", "lapsing", "ended"]


class Token(Struct, frozen=True, order=True, array_like=True):
    """Fencing token, [term, number] in JSON; compares by term, then number. Each grant has its own."""

    term: int  # of the leader that granted; grows with every leader, across restarts and lost journals
    number: int  # of the grant within the term


class SpaceRef(Struct, frozen=True, kw_only=True):
    """One pool of pages: one device (GPU or host memory) in one mempool."""

    mempool: InstanceId
    space: SpaceId


# --- producer -> coordinator


class OfferMemory(Struct, frozen=True, kw_only=True):
    """POST /v1/offers, by the process that would spare the bytes.

    `producer_epoch`: of its membership; 0 for a process that is no member. `boot_generation`: of the mempool,
    as the producer heard it when it attached. Header Idempotency-Key: the same key brings the same offer
    again.
    """

    producer: InstanceId
    producer_epoch: Epoch = Epoch(0)
    mempool: InstanceId
    boot_generation: Epoch
    space: SpaceId
    length_bytes: int


class Offer(Struct, frozen=True, kw_only=True):
    """An offer as the mempool is to know it. The producer may also present it to its mempool itself, which is
    sooner.

    `length_bytes` is the most that leases on it may hold together; a mempool that can spare less reports
    less.
    """

    offer_id: str
    producer: InstanceId
    producer_epoch: Epoch
    mempool: InstanceId
    boot_generation: Epoch
    space: SpaceId
    length_bytes: int
    key: str = ""  # idempotency key, so that a coordinator that lost everything knows it again


class OfferView(Struct, frozen=True, kw_only=True):
    """An offer as the coordinator sees it."""

    offer: Offer
    state: str  # "proposed" (the mempool has not reported it yet) | "open" | "reclaiming" | "closed"
    limit_bytes: int  # what the mempool reported that it will lend, at most offer.length_bytes
    leased_bytes: int  # granted, held, and not yet proven dead


# --- consumer -> coordinator


class AskLease(Struct, frozen=True, kw_only=True):
    """POST /v1/leases. Header Idempotency-Key: the same key brings the same grant again, whatever was lost.

    `spaces`: those that the consumer can reach, best first (peer GPUs before slower ones). The coordinator
    answers with one offer's bytes, between min_bytes and length_bytes, each in whole pages of the lender's space
    (SpaceReport.unit_bytes), one at least; for more, ask again under another key.
    """

    consumer: InstanceId
    consumer_epoch: Epoch = Epoch(0)
    length_bytes: int
    min_bytes: int = 0  # 0: all of `length_bytes` or nothing
    purpose: Purpose
    spaces: list[SpaceRef]
    ttl_ms: int = 0  # wanted; 0: the coordinator's own


class Grant(Struct, frozen=True, kw_only=True):
    """An intention to lend: nothing is lent before the mempool named here has taken it (rule 2).

    Present it within `present_ms`, counted from when AskLease was sent. The mempool's lease ends `ttl_ms`
    after it took the grant, or after the last renewal; the consumer must count `consumer_ttl_ms`, which is
    shorter, from when it sent what was answered.
    """

    lease_id: LeaseId
    offer_id: str
    consumer: InstanceId
    purpose: Purpose
    mempool: InstanceId
    address: str  # of the mempool, as it reported it
    boot_generation: Epoch
    space: SpaceId
    length_bytes: int
    token: Token
    present_ms: int
    ttl_ms: int
    consumer_ttl_ms: int
    key: str = ""  # idempotency key, see Offer.key


class LeaseCall(Struct, frozen=True, kw_only=True):
    """POST /v1/leases/{id}/renew and .../release, by the lease's consumer. `token`: the grant's."""

    consumer: InstanceId
    token: Token


class Renewed(Struct, frozen=True, kw_only=True):
    """What the owning mempool has confirmed; a renewal asked for by this call reaches it with its next
    report.

    `consumer_ttl_ms` may be used, counted from when the call was sent. A consumer that talks to the mempool
    itself renews there, and needs this only to hear of reclaims.
    """

    lease_id: LeaseId
    state: LeaseState
    length_bytes: int
    consumer_ttl_ms: int
    keep_bytes: int  # below `length_bytes`: give the rest back within deadline_ms, or lose it by force
    deadline_ms: int = 0


# --- reclaims


class AskReclaim(Struct, frozen=True, kw_only=True):
    """POST /v1/reclaims: the producer wants `length_bytes` of its offer back within the deadline; 0: all of it."""

    offer_id: str
    producer: InstanceId
    length_bytes: int = 0
    deadline_ms: int


class ReclaimOrder(Struct, frozen=True, kw_only=True):
    """To the owning mempool: from now on the offer is worth `keep_bytes`, and within `deadline_ms` its leases
    fit.

    At once: no lease beyond keep_bytes. Until the deadline: lessees give back, by reclaim_shares(). At the
    deadline the mempool takes back what is missing, killing a process that still maps it (architecture: hard
    bound = deadline + kill + teardown). Idempotent: keep_bytes is a target, and the smallest one heard
    counts. The producer may present it too.
    """

    reclaim_id: str
    offer_id: str
    keep_bytes: int
    deadline_ms: int  # what is left of it


class ReclaimView(Struct, frozen=True, kw_only=True):
    """GET /v1/reclaims/{id}. While its mempool is silent it stays open, for a day; then it is unknown."""

    order: ReclaimOrder
    state: str  # "open" | "done": a report of its mempool proves it
    over_bytes: int  # still leased beyond keep_bytes, as last reported
    took_ms: int = 0  # when done


# --- mempool -> coordinator


class OfferReport(Struct, frozen=True, kw_only=True):
    """An offer that the mempool knows. offer.length_bytes: what it will lend by it, after reclaims it has
    heard of."""

    offer: Offer
    leased_bytes: int


class LeaseReport(Struct, frozen=True, kw_only=True):
    """A lease that the mempool took and has not ended. Its bytes count until the pages are back (rule 5 of
    pages)."""

    lease_id: LeaseId
    offer_id: str
    consumer: InstanceId
    purpose: Purpose
    length_bytes: int
    token: Token
    remaining_ms: int  # of its time to live, when the report was sent
    state: Literal["held", "reclaiming", "ending"] = "held"  # ending: over, but pages are not back yet
    key: str = ""


class SpaceReport(Struct, frozen=True, kw_only=True):
    """One space's memory."""

    space: SpaceId
    name: str  # for people, e.g. "cuda:0"
    total_bytes: int
    free_bytes: int
    unit_bytes: int = 1  # of a page on all ranks: the mempool lends whole ones


class MempoolReport(Struct, frozen=True, kw_only=True):
    """PUT /v1/mempools/{id}/report: everything the mempool lends and knows, every time (no differences).

    `seq` grows with every report of a boot generation. `fence`: grants below it are refused; Token(0, 0) at
    first.
    """

    boot_generation: Epoch
    seq: int
    fence: Token
    address: str = ""  # where its consumers reach it
    host: str = ""  # boot id of the host
    spaces: list[SpaceReport] = []
    offers: list[OfferReport] = []
    leases: list[LeaseReport] = []


class Renewal(Struct, frozen=True, kw_only=True):
    """The consumer asked for more time through REST: the lease ends ttl_ms from now, or later if it would
    anyway."""

    lease_id: LeaseId
    ttl_ms: int


class ReportReply(Struct, frozen=True, kw_only=True):
    """What the mempool should do (rules 3 to 5). An offer that it does not know and that is not listed stays
    unknown."""

    seq: int  # of the report that this answers
    fence: Token  # fence.term is the leader's term
    interval_ms: int  # until the next report
    ttl_ms: int  # silent for so long, it counts as gone
    offers: list[Offer] = []  # to know
    reclaims: list[ReclaimOrder] = []
    renewals: list[Renewal] = []
    releases: list[LeaseId] = []  # the consumer is done with these


# --- for people and the placer


class LeaseView(Struct, frozen=True, kw_only=True):
    """A lease as the coordinator sees it."""

    lease_id: LeaseId
    offer_id: str
    consumer: InstanceId
    producer: InstanceId
    mempool: InstanceId
    space: SpaceId
    purpose: Purpose
    length_bytes: int
    token: Token
    state: LeaseState
    remaining_ms: int = 0  # as its mempool confirmed
    keep_bytes: int = 0  # while reclaiming
    deadline_ms: int = 0  # while reclaiming


class OfferList(Struct, frozen=True, kw_only=True):
    """GET /v1/offers."""

    offers: list[OfferView]


class LeaseList(Struct, frozen=True, kw_only=True):
    """GET /v1/leases."""

    leases: list[LeaseView]


class MempoolView(Struct, frozen=True, kw_only=True):
    """A mempool as the coordinator sees it."""

    mempool: InstanceId
    address: str
    boot_generation: Epoch
    state: str  # "awaited" (not heard in this term) | "live" | "silent"
    age_ms: int
    fence: Token
    spaces: list[SpaceReport] = []


class HistoryEntry(Struct, frozen=True, kw_only=True):
    """Something that happened, newest last. `age_ms` is 0 for what an earlier leader wrote down."""

    event: str  # e.g. "lease_granted"
    subject: str  # id of the offer, lease or reclaim
    detail: str
    age_ms: int


class MarketView(Struct, frozen=True, kw_only=True):
    """GET /v1/market: everything."""

    term: int
    is_granting: bool
    why_not: str  # code of the refusal that AskLease would get; "" when granting
    mempools: list[MempoolView]
    offers: list[OfferView]
    leases: list[LeaseView]
    reclaims: list[ReclaimView]
    history: list[HistoryEntry]


class Pair(Struct, frozen=True, kw_only=True):
    """The consumer borrows from this producer first (AQUA section 5: one to one, inside a server)."""

    consumer: InstanceId
    producer: InstanceId


class Placement(Struct, frozen=True, kw_only=True):
    """PUT and GET /v1/placement: what the placer decided; it replaces the one before."""

    pairs: list[Pair] = []


class LendingRefused(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of every refusal; code and message as on all of the coordinator's routes.

    Codes: market.rebuilding, market.standby (see `leader`), market.full, journal.down, journal.not_durable,
    offers.exhausted (see `largest_bytes`), offer.unknown, offer.stale, lease.unknown, lease.ended, lease.stale,
    reclaim.unknown, mempool.unknown, epoch.stale, idempotency.mismatch, invalid_request, invalid_api_key.
    """

    code: str
    message: str
    retry_after_ms: int = 0  # 0: repeating the same call cannot help
    largest_bytes: int = 0  # that one lease could get now
    leader: str = ""  # address of the coordinator that leads


def reclaim_shares(leases: Iterable[tuple[Token, LeaseId, int]], keep_bytes: int) -> dict[LeaseId, int]:
    """How many bytes each lease of an offer may keep; newest leases give back first, the last one partly.

    Both sides use it, so that what a consumer hears from the coordinator is what its mempool will take.
    Cost: one sort.
    """
    shares, left_bytes = {}, keep_bytes
    for _, lease_id, held_bytes in sorted(leases):
        shares[lease_id] = min(held_bytes, max(0, left_bytes))
        left_bytes -= shares[lease_id]
    return shares
