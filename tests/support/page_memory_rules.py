"""Parts of page_model.py: memory goes to the system and comes back, the mempool wants pages, swapped blocks arrive."""

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from services.mempool.core.attachments import Claim
from tests.support.page_world import World


class MemoryRules(RuleBasedStateMachine):
    world: World
    claims: list[Claim]

    @rule(num_pages=st.integers(1, 24), regain=st.booleans())
    def change_memory(self, num_pages, regain):
        """Somebody presses for the pool's memory, or gives some back."""
        self.world.change_memory(num_pages, regain=regain)

    @rule()
    def answer_system(self):
        self.world.answer_system()

    def regain_all(self):
        """All memory that went to the system comes back."""
        self.world.change_memory(0, regain=True)
        while self.world.answer_system():
            continue

    @rule(count=st.integers(1, 6), cached=st.booleans())
    @precondition(lambda self: self.world.mempool is not None and self.world.links)
    def claim(self, count, cached):
        """The mempool wants pages for itself, or cached ones unpinned, from engines that have them all."""
        pool = self.world.mempool.pool
        if cached:
            pool.ask_unpin(count)
        elif len(self.claims) < 2 and pool.memory is not None:
            self.claims.append(pool.claim(count))
        self.world.mempool.run(pool.flush())

    @rule()
    @precondition(lambda self: self.claims)
    def ask_again(self):
        self.world.mempool.pool.ask_again(self.claims[0])
        self.world.mempool.run(self.world.mempool.pool.flush())

    @rule()
    @precondition(lambda self: self.claims)
    def end_claim(self):
        self.world.mempool.pool.cancel(self.claims.pop(0))
        self.world.mempool.run(self.world.mempool.pool.flush())

    @rule(holds=st.booleans())
    def hold_copies(self, holds):
        """Swapped blocks are on their way for as long as this says."""
        self.world.holds_copies = holds

    @rule(pick=st.integers(0, 3), failed=st.booleans())
    def end_copy(self, pick, failed):
        self.world.end_copy(pick, failed=failed)

    @rule()
    def settle(self):
        self.world.settle()

    def let_copies_end(self):
        """From now on they do, and well."""
        self.world.holds_copies = False
        self.world.settle()
