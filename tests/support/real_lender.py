"""A mempool's own core in the place of tests/support/market_world.py's reference: the same words, real pages of a GiB.

The producer's engine has its pages in one space; those of two consumers, with host memory behind them, are in others.
What lies in lent pages leaves by copies, which end when the test says so.
"""

import msgspec

from services.mempool.core.actions import PoolLimits
from services.mempool.core.lending_report import make_report
from services.mempool.core.mempool import Mempool
from shared.ids import Epoch, InstanceId, LeaseId, SpaceId
from shared.wire import mempool as wire
from shared.wire import mempool_lending as calls
from shared.wire.lending import Token
from tests.unit.mempool_harness import DESCRIPTION, chain
from tests.unit.test_mempool_spaces import Spaces

GIB = 1 << 30
NUM_PAGES = 6  # of each space
PRODUCER, CONSUMERS, FRONT = 10, (20, 30), 1
LARGE_BLOCKS = msgspec.structs.replace(DESCRIPTION, block_bytes=GIB)


class LargePages(Spaces):
    """Spaces whose pages have a GiB, and of which nobody allocates any."""

    def __init__(self, boot: Epoch) -> None:
        super().__init__(NUM_PAGES)
        limits = PoolLimits(
            capacity_bytes=NUM_PAGES * GIB, dram_bytes=8 * GIB, dram_for_host=True, granted_share=1.0,
            kept_share=0.99, idle_punch_ms=0, pull_patience_ms=100, offer_patience_ms=300,
        )  # fmt: skip
        self.pool = self.core = Mempool(limits, boot)


class RealLender:
    """As ModelMempool. `promised`: the most that an offer was ever worth; `orders`: the tightest heard."""

    def __init__(self, name: str, boots) -> None:
        self.name = InstanceId(name)
        self._boots = boots
        self.promised: dict[str, int] = {}
        self.num_prompts = 0
        self.now_ms = 0
        self.restart(keeps=False)

    def restart(self, keeps: bool) -> None:
        self.boot, self.seq = Epoch(next(self._boots)), 0
        self.orders: dict[str, tuple[int, int]] = {}
        self.pool = LargePages(self.boot)
        self.pool.now_ms = self.now_ms
        self.pool.worker(PRODUCER, "cpu:0", quota=2, instance=f"p-{self.name}", description=LARGE_BLOCKS)
        for number, engine in enumerate(CONSUMERS):
            self.pool.worker(
                engine, f"cpu:{number + 1}", quota=2, instance=f"c{number}", description=LARGE_BLOCKS
            )
            self.pool.client(engine + FRONT, f"c{number}")

    @property
    def lending(self):
        return self.pool.core.lending

    @property
    def space(self) -> SpaceId:
        """The producer's."""
        number = self.pool.core.space_of(InstanceId(f"p-{self.name}"))
        assert number is not None
        return SpaceId(number)

    @property
    def fence(self) -> Token:
        return self.lending.loans.fence

    @property
    def leases(self):
        return self.lending.loans.loans

    def leased_bytes(self, offer_id: str) -> int:
        """On loan, also what is on its way back."""
        offer = self.lending.loans.offers.get(offer_id)
        return self.lending.loans.lent(offer) * GIB if offer is not None else 0

    @property
    def is_copying(self) -> bool:
        """Pages that a copy reads or writes are waited for, whatever the deadline."""
        return bool(self.pool.copies)

    # -- what is said -------------------------------------------------------------------------------

    def report(self, now_ms: int):
        self._at(now_ms)
        self.seq += 1
        core = self.pool.core
        return make_report(core.lending, core.pools, self.seq, now_ms, address=f"{self.name}.sock")

    def hear(self, reply, now_ms: int) -> None:
        """As the reporter does: an answer to an earlier report than the last says nothing."""
        self._at(now_ms)
        if reply.seq != self.seq or reply.fence.term < self.fence.term:
            return
        for offer in reply.offers:
            if offer.boot_generation == self.boot:
                self.promised[offer.offer_id] = max(offer.length_bytes, self.promised.get(offer.offer_id, 0))
        known = set(self.lending.loans.offers) | {offer.offer_id for offer in reply.offers}
        for order in reply.reclaims:
            if order.offer_id in known:
                deadline_ms = now_ms + order.deadline_ms
                keep, earlier_ms = self.orders.get(order.offer_id, (order.keep_bytes, deadline_ms))
                if order.keep_bytes <= keep:
                    keep, earlier_ms = order.keep_bytes, min(deadline_ms, earlier_ms)
                self.orders[order.offer_id] = keep, earlier_ms
        self.pool.run(self.pool.core.on_market_reply(reply, now_ms))

    def present(self, grant, now_ms: int) -> bool:
        """Whether the lease is held now."""
        self._at(now_ms)
        if grant.mempool == self.name:
            front = CONSUMERS[int(grant.consumer[1:])] + FRONT
            self.pool.say(front, calls.PresentGrant(call_id=1, grant=grant))
        return grant.lease_id in self.leases

    def would_take(self, grant) -> bool:
        """Whether the grant's own words are good; pages apart."""
        loans = self.lending.loans
        used = grant.token in loans._ended or any(loan.token == grant.token for loan in loans.loans.values())
        good_boot = grant.boot_generation == self.boot and grant.mempool == self.name
        return good_boot and grant.token >= loans.fence and not used

    def give_back(self, lease_id: LeaseId) -> None:
        self.pool.say(CONSUMERS[0] + FRONT, calls.ReleaseLoan(call_id=2, lease_id=lease_id))

    def tick(self, now_ms: int) -> None:
        self._at(now_ms)
        self.pool.run(self.pool.core.tick(now_ms))

    def _at(self, now_ms: int) -> None:
        self.now_ms = self.pool.now_ms = now_ms

    # -- what engines do ------------------------------------------------------------------------------

    def press(self, number: int) -> None:
        """A consumer computes what nobody else has and uses it no more: blocks leave, perhaps for lent pages."""
        engine = CONSUMERS[number]
        stock = self.pool.granted[engine]
        self.num_prompts += 1
        prompt = chain(f"{self.name} {self.num_prompts}", *range(len(stock)))[: len(stock)]
        pages = self.pool.save(engine, prompt)
        for page, epoch in pages:
            self.pool.say(engine, wire.Unpin(pages=_u32(page), epochs=_u64(epoch)))
        self.pool.need(engine, 2)

    def use_own(self, count: int) -> None:
        """The producer's engine takes pages, or gives back all that it has."""
        stock = self.pool.granted[PRODUCER]
        if count:
            self.pool.need(PRODUCER, count)
        elif stock:
            self.pool.granted[PRODUCER] = []
            self.pool.give_back(PRODUCER, stock)

    def end_copies(self) -> None:
        """All that run come well to their ends."""
        while self.pool.copies:
            self.pool.copied()

    # -- what must hold -------------------------------------------------------------------------------

    def check(self) -> None:
        """Pages add up, and no offer has more on loan than it is worth, nor any page twice."""
        self.pool.counts()
        loans = self.lending.loans
        pages: list[tuple[int, int]] = []
        for offer in loans.offers.values():
            pages += [(offer.producer, page) for page in offer.aside]
            held = sum(loan.keep for loan in loans.loans.values() if loan.offer is offer)
            assert held <= offer.limit, f"{offer.offer_id}: {held} pages of {offer.limit}"
        for shelf in loans.shelves.values():
            pages += [(shelf.producer, page) for page in shelf.lent]
            assert len(shelf.lent) == sum(loan.num_pages for loan in loans.on_shelf(shelf))
        assert len(set(pages)) == len(pages), "a page is lent twice"


def _u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def _u64(value: int) -> bytes:
    return value.to_bytes(8, "little")
