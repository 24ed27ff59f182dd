"""The slots of push.cuh in a model: in any order of steps every rank polls the rows of its own call, and no other's.

Ranks are streams of launches that meet nobody: a rank is calls ahead where the rows that it polls let it. Each launch
has several CTAs that begin when they like, the words of a row arrive one by one and at any time, graphs are replayed
(no number from the host), and calls that do not push come between. Each part of the protocol is left out once: the
model must see that.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.kernels.allreduce_rmsnorm.plan import Algorithm, num_ctas
from shared.kernels.allreduce_rmsnorm.shapes import NUM_SLOTS
from tests.support.examples import examples

WORD = 1 << 32
WORDS = 2  # of a row, as far as it matters
MAX_CTAS = 3
IDLE_STEPS = 4000


class Wrong(Exception):
    """Words of another call were read, or nobody can go on."""


@dataclass(frozen=True)
class Call:
    """What all ranks do together; without rows: a call of another engine, which need not hold anybody up."""

    num_tokens: int
    budget: int


@dataclass
class Rank:
    """One GPU's memory. A word is 0 or of which push it is, from 1."""

    turn: int
    slots: dict[tuple[int, int, int, int], int] = field(default_factory=dict)  # slot, row, source, word
    begun: int = 0  # CTAs that know the turn
    running: int = 0  # that have not ended


class Model:
    """Steps are generators that yield whether they could go on; a seeded scheduler picks who steps."""

    def __init__(
        self, world: int, graph: list[Call], replays: int, seed: int, *, first_turn: int = 0, flaw: str = ""
    ) -> None:
        self.world, self.graph, self.replays, self.flaw = world, graph, replays, flaw
        self.ranks = [Rank(first_turn) for _ in range(world)]
        self.draw = random.Random(seed)
        self.paces = [self.draw.choice([1.0, 1.0, 0.05]) for _ in range(world)]
        self.steps: list[tuple[int, Iterator[bool]]] = [(rank, self.stream(rank)) for rank in range(world)]

    def run(self) -> None:
        """Until every stream is at its end and all has arrived. Raises: Wrong."""
        idle = 0
        while self.steps:
            chosen = self.draw.choice(self.steps)
            if self.draw.random() > self.paces[chosen[0]]:
                continue
            try:
                idle = 0 if next(chosen[1]) else idle + 1
            except StopIteration:
                self.steps.remove(chosen)
                idle = 0
            if idle == IDLE_STEPS:  # a slow rank's turn may come late
                if not any(next(step, True) for _, step in self.steps):
                    raise Wrong("nobody can go on")
                idle = 0
        if any(any(rank.slots.values()) for rank in self.ranks):
            raise Wrong("words are left in a slot")

    def stream(self, me: int) -> Iterator[bool]:
        rank, number = self.ranks[me], 0
        for _ in range(self.replays):
            of_graph = 0
            for call in self.graph:
                yield True
                if call.num_tokens == 0:
                    continue
                number, of_graph = number + 1, of_graph + 1
                count = num_ctas(Algorithm.ONE_SHOT, call.num_tokens, self.world, call.budget)
                rank.running = count
                for cta in range(count):
                    rows = range(cta, call.num_tokens, count)
                    self.steps.append((me, self.cta(me, rows, count, number, of_graph)))
                while rank.running:
                    yield False

    def cta(self, me: int, rows: range, count: int, number: int, of_graph: int) -> Iterator[bool]:
        rank = self.ranks[me]
        turn = of_graph if self.flaw == "turn from host" else rank.turn
        slot = turn % (1 if self.flaw == "one slot" else NUM_SLOTS)
        yield True
        for row in rows:
            for other in range(self.world):
                for word in range(WORDS if other != me else 0):
                    self.steps.append((me, self.write(other, (slot, row, me, word), number)))
            yield True
        rank.begun += 1
        if rank.begun == (1 if self.flaw == "turn of the first CTA" else count):
            rank.turn = (rank.turn + 1) % WORD
        if rank.begun == count:
            rank.begun = 0
        for row in rows:
            for other in range(self.world):
                if other != me:
                    yield from self.poll(me, [(slot, row, other, word) for word in range(WORDS)], number)
        rank.running -= 1

    def poll(self, me: int, places: list[tuple[int, int, int, int]], number: int) -> Iterator[bool]:
        slots = self.ranks[me].slots
        looked_at = places[:1] if self.flaw == "first word only" else places
        while not all(slots.get(place) for place in looked_at):
            yield False
        found = [slots.get(place, 0) for place in places]
        if any(word != number for word in found):
            raise Wrong(f"rank {me} push {number}: words of {found} at {places}")
        if self.flaw == "no clearing":
            return
        for place in places:
            if self.flaw == "late clearing":
                self.steps.append((me, self.write(me, place, 0, steps=20)))
            else:
                slots[place] = 0
        yield True

    def write(
        self, to: int, place: tuple[int, int, int, int], value: int, *, steps: int = 1
    ) -> Iterator[bool]:
        for _ in range(steps):
            yield True
        self.ranks[to].slots[place] = value


calls = st.builds(Call, num_tokens=st.integers(0, 4), budget=st.integers(1, MAX_CTAS))
seeds = st.integers(0, 2**32)


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(1, 4), st.lists(calls, min_size=1, max_size=4), st.integers(1, 3), seeds)
def test_every_rank_polls_the_rows_of_its_own_call_in_any_order_of_steps(world, graph, replays, seed):
    Model(world, graph, replays, seed).run()


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(2, 3), st.lists(calls, min_size=2, max_size=4), seeds, st.integers(1, 4))
def test_turns_may_wrap(world, graph, seed, before):
    Model(world, graph, 2, seed, first_turn=WORD - before).run()


@pytest.mark.parametrize(
    "flaw",
    [
        "one slot",
        "no clearing",
        "late clearing",
        "first word only",
        "turn from host",
        "turn of the first CTA",
    ],
)
def test_the_model_sees_what_each_part_of_the_protocol_is_for(flaw):
    graph = [Call(4, 2), Call(0, 1), Call(3, 1), Call(4, 3)]
    for seed in range(100):
        Model(3, graph, 3, seed).run()
        try:
            Model(3, graph, 3, seed, flaw=flaw).run()
        except Wrong:
            return
    raise AssertionError("the flaw is never seen")
