"""The memory market in one thread: coordinators over a journal, mempools that follow the wire's rules, a network that
loses, repeats and delays. The mempool here is the reference of shared/wire/lending.py's rules 2 to 5."""

from dataclasses import dataclass, field
from itertools import count

from services.coordinator.core.market import Market
from services.coordinator.core.market_records import MarketLimits
from shared.ids import Epoch, InstanceId, LeaseId, SpaceId
from shared.wire.lending import (
    Grant,
    LeaseReport,
    LendingRefused,
    MempoolReport,
    Offer,
    OfferReport,
    ReclaimOrder,
    ReportReply,
    SpaceReport,
    Token,
    reclaim_shares,
)

GIB = 1 << 30
SPACE = SpaceId(1)
LIMITS = MarketLimits(
    lease_ttl_ms=4_000,
    ttl_margin_ms=500,
    present_ms=1_000,
    report_ttl_ms=1_500,
    forget_after_ms=1_000_000,
    lost_after_ms=3_000_000,
    max_history=20,
)


@dataclass
class Lease:
    """As the mempool holds it."""

    grant: Grant
    length_bytes: int
    ends_at_ms: int


class ModelMempool:
    """The only one who lends. tests/support/real_lender.py says the same words with the mempool's own core."""

    space = SPACE
    is_copying = False  # then pages may be lent beyond a deadline

    def __init__(self, name, boots):
        self.name = InstanceId(name)
        self.boots = boots
        self.boot = Epoch(next(boots))
        self.fence = Token(0, 0)
        self.seq = 0
        self.unit_bytes = 1
        self.offers: dict[str, Offer] = {}
        self.orders: dict[str, tuple[int, int]] = {}  # offer -> (keep, deadline), the tightest heard
        self.leases: dict[LeaseId, Lease] = {}
        self.taken: set[Token] = set()
        self.promised: dict[str, int] = {}  # the most that an offer was ever worth

    def leased_bytes(self, offer_id):
        return sum(x.length_bytes for x in self.leases.values() if x.grant.offer_id == offer_id)

    def report(self, now_ms):
        self.seq += 1
        return MempoolReport(
            boot_generation=self.boot,
            seq=self.seq,
            fence=self.fence,
            address=f"{self.name}.sock",
            spaces=[
                SpaceReport(
                    space=SPACE, name="cuda:1", total_bytes=64 * GIB, free_bytes=0, unit_bytes=self.unit_bytes
                )
            ],
            offers=[
                OfferReport(offer=offer, leased_bytes=self.leased_bytes(offer.offer_id))
                for offer in self.offers.values()
            ],
            leases=[
                LeaseReport(
                    lease_id=lease.grant.lease_id,
                    offer_id=lease.grant.offer_id,
                    consumer=lease.grant.consumer,
                    purpose=lease.grant.purpose,
                    length_bytes=lease.length_bytes,
                    token=lease.grant.token,
                    remaining_ms=lease.ends_at_ms - now_ms,
                    key=lease.grant.key,
                )
                for lease in self.leases.values()
            ],
        )

    def hear(self, reply, now_ms):
        """A ReportReply, perhaps of long ago (rule 4)."""
        if reply.seq != self.seq or reply.fence.term < self.fence.term:
            return
        self.fence = max(self.fence, reply.fence)
        self.taken = {token for token in self.taken if token >= self.fence}
        for offer in reply.offers:
            self.know(offer)
        for order in reply.reclaims:
            self.take_back(order, now_ms)
        for renewal in reply.renewals:
            if lease := self.leases.get(renewal.lease_id):
                lease.ends_at_ms = max(lease.ends_at_ms, now_ms + renewal.ttl_ms)
        for lease_id in reply.releases:
            self.leases.pop(lease_id, None)
        self.tick(now_ms)

    def know(self, offer):
        if offer.boot_generation == self.boot and offer.offer_id not in self.offers:
            self.offers[offer.offer_id] = offer
            self.promised[offer.offer_id] = max(offer.length_bytes, self.promised.get(offer.offer_id, 0))

    def take_back(self, order: ReclaimOrder, now_ms):
        offer = self.offers.get(order.offer_id)
        if offer is None:
            return
        deadline_ms = now_ms + order.deadline_ms
        keep, earlier_ms = self.orders.get(order.offer_id, (order.keep_bytes, deadline_ms))
        if order.keep_bytes <= keep:
            keep, earlier_ms = order.keep_bytes, min(deadline_ms, earlier_ms)
        self.orders[order.offer_id] = keep, earlier_ms
        fields = {name: getattr(offer, name) for name in offer.__struct_fields__}
        self.offers[order.offer_id] = Offer(**{**fields, "length_bytes": min(keep, offer.length_bytes)})

    def present(self, grant, now_ms):
        """Whether the lease is held now (rule 2)."""
        offer = self.offers.get(grant.offer_id)
        if grant.boot_generation != self.boot or grant.mempool != self.name:
            return False
        if grant.lease_id in self.leases:
            return True
        if not self.would_take(grant) or offer is None:
            return False
        if self.leased_bytes(grant.offer_id) + grant.length_bytes > offer.length_bytes:
            return False
        self.leases[grant.lease_id] = Lease(grant, grant.length_bytes, now_ms + grant.ttl_ms)
        self.taken.add(grant.token)
        return True

    def would_take(self, grant):
        """Whether the grant's own words are good; bytes apart."""
        good_boot = grant.boot_generation == self.boot and grant.mempool == self.name
        return good_boot and grant.token >= self.fence and grant.token not in self.taken

    def give_back(self, lease_id):
        self.leases.pop(lease_id, None)

    def tick(self, now_ms):
        """Time to live, and reclaims by force."""
        for lease_id in [x for x, lease in self.leases.items() if lease.ends_at_ms <= now_ms]:
            del self.leases[lease_id]
        for offer_id, (keep_bytes, deadline_ms) in self.orders.items():
            if now_ms >= deadline_ms:
                held = [x for x in self.leases.values() if x.grant.offer_id == offer_id]
                shares = reclaim_shares(
                    ((x.grant.token, x.grant.lease_id, x.length_bytes) for x in held), keep_bytes
                )
                for lease_id, share_bytes in shares.items():
                    self.leases[lease_id].length_bytes = share_bytes
                    if share_bytes == 0:
                        del self.leases[lease_id]
        for offer_id in list(self.offers):
            if self.offers[offer_id].length_bytes == 0 and self.leased_bytes(offer_id) == 0:
                del self.offers[offer_id]
                self.orders.pop(offer_id, None)

    def restart(self, keeps):
        """A new process. With a keeper the pages, and what is lent of them, outlive the old one; fences do not."""
        self.boot, self.seq = Epoch(next(self.boots)), 0
        self.fence, self.taken = Token(0, 0), set()
        if not keeps:
            self.offers, self.leases, self.orders = {}, {}, {}
        fields = {x.offer_id: {n: getattr(x, n) for n in x.__struct_fields__} for x in self.offers.values()}
        self.offers = {
            name: Offer(**{**words, "boot_generation": self.boot}) for name, words in fields.items()
        }


@dataclass
class Store:
    """Redis: who leads until when, the last term, the journal."""

    term: int = 0
    leader: str = ""
    until_ms: int = 0
    fields: dict = field(default_factory=dict)

    def wipe(self):
        self.term, self.leader, self.until_ms, self.fields = 0, "", 0, {}


class World:
    """Two coordinators, two mempools, one store. `sent`: every grant that left a coordinator."""

    def __init__(self, lender=ModelMempool):
        self.now_ms = 10_000
        self.wall_us = count(1_000)
        self.store = Store()
        boots = count(1)
        self.mempools = {name: lender(name, boots) for name in ("m0", "m1")}
        self.coordinators = {name: Market(LIMITS) for name in ("a", "b")}
        self.sent: list[Grant] = []
        self.reports: list[tuple[str, MempoolReport]] = []
        self.replies: list[tuple[str, ReportReply]] = []

    # --- leadership

    def elect(self, name, *, lease_ms=2_000):
        """Become or stay the leader, if the store allows it. Returns whether it leads."""
        store, market = self.store, self.coordinators[name]
        if store.until_ms > self.now_ms and store.leader != name:
            return False
        is_same = store.until_ms > self.now_ms and store.leader == name
        store.leader, store.until_ms = name, self.now_ms + lease_ms
        if is_same and not market.deposing_term:
            market.extend(store.until_ms)
            return True
        store.term = max(store.term + 1, next(self.wall_us), market.deposing_term + 1)
        knows_all = any(field.startswith("mempool:") for field in store.fields)
        market.restore(store.fields.values(), replace=knows_all, now_ms=self.now_ms)
        market.lead(store.term, until_ms=store.until_ms, knows_all=knows_all, now_ms=self.now_ms)
        self.write(name)
        return True

    def write(self, name):
        """Store what a coordinator journalled, if it still leads. Returns whether it is stored."""
        if self.store.leader != name:
            return False
        for key, entry in self.coordinators[name].take_journal().items():
            if entry is None:
                self.store.fields.pop(key, None)
            else:
                self.store.fields[key] = entry
        return True

    def crash(self, name):
        """The process and all it knew is gone."""
        self.coordinators[name] = Market(LIMITS)

    # --- messages

    def report_to(self, mempool, name):
        """A whole exchange without losses. Returns the answer."""
        found = self.mempools[mempool]
        answer = self.coordinators[name].report(found.name, found.report(self.now_ms), now_ms=self.now_ms)
        self.write(name)
        if not isinstance(answer, LendingRefused):
            found.hear(answer, self.now_ms)
        return answer

    def settle(self, name, times=3):
        """Every mempool reports, a few times."""
        for _ in range(times):
            for mempool in self.mempools:
                self.report_to(mempool, name)

    def pass_ms(self, duration_ms):
        """Time goes by, in steps that everybody notices."""
        end_ms = self.now_ms + duration_ms
        while self.now_ms < end_ms:
            self.now_ms = min(end_ms, self.now_ms + 100)
            for mempool in self.mempools.values():
                mempool.tick(self.now_ms)
            for market in self.coordinators.values():
                market.tick(now_ms=self.now_ms)

    # --- what must hold

    def check(self):
        """Capabilities that could still be used, and leases, never exceed an offer; leases never exceed its promise."""
        for mempool in self.mempools.values():
            usable: dict[str, int] = {}
            for grant in {x.lease_id: x for x in self.sent}.values():
                if grant.lease_id not in mempool.leases and mempool.would_take(grant):
                    usable[grant.offer_id] = usable.get(grant.offer_id, 0) + grant.length_bytes
            for offer_id, promised_bytes in mempool.promised.items():
                held_bytes = mempool.leased_bytes(offer_id)
                assert held_bytes <= promised_bytes, f"{offer_id}: {held_bytes} of {promised_bytes} lent"
                total_bytes = held_bytes + usable.get(offer_id, 0)
                assert total_bytes <= promised_bytes, (
                    f"{offer_id}: double grant, {total_bytes} of {promised_bytes}"
                )
                keep_bytes, deadline_ms = mempool.orders.get(offer_id, (promised_bytes, 0))
                if self.now_ms >= deadline_ms and not mempool.is_copying:
                    assert held_bytes <= keep_bytes, f"{offer_id}: past the deadline"
