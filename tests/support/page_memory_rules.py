"""The part of page_model.py in which memory goes to the system and comes back."""

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tests.support.page_world import World


class MemoryRules(RuleBasedStateMachine):
    world: World

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
