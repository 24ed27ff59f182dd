"""The coordinator's core and the mempool's own, together, under the losses of test_market_model.py.

Offers settle for what engines give back, are hidden meanwhile, shrink, and end; blocks lie in lent pages and leave by
copies that are slow. At every step what is lent and what may still be taken is no more than was offered, and no page
is lent twice.
"""

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize, invariant, rule

from tests.property.test_market_model import MEMPOOLS, MarketModel
from tests.support.examples import examples
from tests.support.market_world import World
from tests.support.real_lender import RealLender


class BothCoresModel(MarketModel):
    def make_world(self) -> World:
        return World(RealLender)

    @initialize()
    def begin(self):
        """And consumers' spaces are full: whatever they compute pushes blocks out."""
        super().begin()
        for mempool in self.world.mempools.values():
            for number in (0, 1) * 4:
                mempool.press(number)

    @rule(mempool=MEMPOOLS, gib=st.integers(1, 2), times=st.integers(1, 3))
    def blocks_leave_for_lent_pages(self, mempool, gib, times):
        """An offer, loans on it and blocks in them, as a rule."""
        if len(self.offers) < 6:
            self.offer("leader", mempool, gib)
        self.world.settle(self._of("leader"))
        self.world.pass_ms(400)
        self.world.settle(self._of("leader"), 1)
        self.borrow("leader", gib)
        for _ in range(times):
            self.world.mempools[mempool].press(gib % 2)

    @rule(mempool=MEMPOOLS, number=st.integers(0, 1), times=st.integers(1, 4))
    def blocks_leave_a_consumer(self, mempool, number, times):
        for _ in range(times):
            self.world.mempools[mempool].press(number)

    @rule(mempool=MEMPOOLS, count=st.integers(0, 3))
    def the_producer_computes(self, mempool, count):
        self.world.mempools[mempool].use_own(count)

    @rule(mempool=MEMPOOLS)
    def copies_end(self, mempool):
        self.world.mempools[mempool].end_copies()

    @invariant()
    def pages_are_lent_once_and_within_their_offers(self):
        for mempool in self.world.mempools.values():
            mempool.check()

    def teardown(self):
        """What is reclaimed comes home, once copies have ended."""
        for mempool in self.world.mempools.values():
            mempool.end_copies()
        self.lead_calmly("a")
        # also those of a leader that could not write them down: mempools may have heard of them
        self.offers = [*dict.fromkeys([*self.offers, *self.world.coordinators["a"].book.offers])]
        for pick in range(len(self.offers)):
            self.reclaim("a", pick, 0, 0)
        for _ in range(4):
            for mempool in self.world.mempools.values():
                mempool.end_copies()
            self.world.settle("a")
            self.world.pass_ms(600)
        for name, mempool in self.world.mempools.items():
            assert not mempool.leases, f"{name} still lends {list(mempool.leases)}"


BothCoresModel.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestBothCores = BothCoresModel.TestCase
