"""The meetings of fused.cu in a model: in any order of steps nobody reads a row too early or overwrites one too soon.

Ranks are streams: write the input, run a kernel of several CTAs, read the normed rows, the next call. CTAs signal,
wait, read, send as the kernel does; sent rows arrive in any order, before the release behind them. Calls differ in
rows and CTAs, graphs are replayed (the same calls again, no number from the host), and flags wrap. Each meeting, and
the release, is left out once: the model must see that.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.kernels.allreduce_rmsnorm.plan import Algorithm, make_plan, num_ctas
from tests.support.examples import examples

WORD = 1 << 32
MAX_CTAS = 4


class Wrong(Exception):
    """A row of another call was read."""


@dataclass
class Rank:
    """One GPU's memory."""

    rows: int
    world: int
    first_epoch: int
    input: list[int] = field(default_factory=list)  # which call each row is of
    out: list[int] = field(default_factory=list)
    flags: list[list[int]] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    running: int = 0  # CTAs of the kernel that have not ended

    def __post_init__(self) -> None:
        self.input, self.out = [-1] * self.rows, [-1] * self.rows
        self.flags = [[self.first_epoch] * self.world for _ in range(MAX_CTAS)]
        self.epochs = [self.first_epoch] * MAX_CTAS


@dataclass(frozen=True)
class Call:
    """What all ranks do together."""

    num_tokens: int
    algorithm: Algorithm
    budget: int


class Model:
    """Steps are generators that yield whether they could go on; a seeded scheduler picks who steps."""

    def __init__(
        self, world: int, calls: list[Call], seed: int, *, first_epoch: int = 0, flaw: str = ""
    ) -> None:
        self.world, self.calls, self.flaw = world, calls, flaw
        rows = max(call.num_tokens for call in calls)
        self.ranks = [Rank(rows, world, first_epoch) for _ in range(world)]
        self.draw = random.Random(seed)
        self.steps: list[Iterator[bool]] = [self.stream(rank) for rank in range(world)]

    def run(self) -> None:
        """Until every stream is at its end. Raises: Wrong; AssertionError when nobody can go on."""
        idle = 0
        while self.steps:
            step = self.draw.choice(self.steps)
            try:
                idle = 0 if next(step) else idle + 1
            except StopIteration:
                self.steps.remove(step)
                idle = 0
            assert idle < 4000, "nobody can go on"

    def stream(self, me: int) -> Iterator[bool]:
        rank = self.ranks[me]
        for number, call in enumerate(self.calls):
            for row in range(call.num_tokens):  # the GEMM
                rank.input[row] = number
                yield True
            plan = make_plan(call.algorithm, call.num_tokens, self.world, me)
            count = num_ctas(call.algorithm, call.num_tokens, self.world, min(call.budget, MAX_CTAS))
            rank.running = count
            for cta in range(count):
                rows = range(plan.start + cta, plan.stop, count)
                self.steps.append(self.cta(me, cta, rows, number, call.algorithm))
            while rank.running:
                yield False
            for row in range(call.num_tokens):  # the next GEMM
                if rank.out[row] != number:
                    raise Wrong(f"rank {me} call {number} row {row}: normed row is of call {rank.out[row]}")
                yield True

    def cta(self, me: int, cta: int, rows: range, number: int, algorithm: Algorithm) -> Iterator[bool]:
        rank = self.ranks[me]
        epoch = 3 * number if self.flaw == "epoch from host" else rank.epochs[cta]
        if self.flaw != "no arrival":
            yield from self.meet(me, cta, epoch + 1)
        targets = [me] if algorithm is Algorithm.ONE_SHOT else list(range(self.world))
        flying: list[tuple[int, int]] = []
        for row in rows:
            for other in range(self.world):
                if self.ranks[other].input[row] != number:
                    raise Wrong(
                        f"rank {me} call {number} row {row}: read call {self.ranks[other].input[row]}"
                    )
                yield True
            for other in targets:
                flying.append((other, row))
                if self.draw.random() < 0.5:
                    self.land(flying, number)
                yield True
        if self.flaw == "relaxed":
            self.steps.append(self.arrive_later(flying, number))
        else:
            while flying:  # what a release waits for
                self.land(flying, number)
                yield True
        if self.flaw != "no leave":
            yield from self.meet(me, cta, epoch + 2)
        rank.epochs[cta] = (epoch + 2) % WORD
        rank.running -= 1

    def land(self, flying: list[tuple[int, int]], number: int) -> None:
        other, row = flying.pop(self.draw.randrange(len(flying)))
        self.ranks[other].out[row] = number

    def arrive_later(self, flying: list[tuple[int, int]], number: int) -> Iterator[bool]:
        while flying:
            self.land(flying, number)
            yield True

    def meet(self, me: int, cta: int, word: int) -> Iterator[bool]:
        for other in range(self.world):
            self.ranks[other].flags[cta][me] = word % WORD
            yield True
        for other in range(self.world):
            while not seen(self.ranks[me].flags[cta][other], word % WORD):
                yield False


def seen(flag: int, word: int) -> bool:
    """fused.cu's comparison: signed, so that words may wrap."""
    return (flag - word) % WORD < WORD // 2


calls = st.builds(
    Call,
    num_tokens=st.integers(1, 7),
    algorithm=st.sampled_from([Algorithm.ONE_SHOT, Algorithm.TWO_SHOT]),
    budget=st.integers(1, MAX_CTAS),
)
seeds = st.integers(0, 2**32)


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(1, 4), st.lists(calls, min_size=1, max_size=3), st.integers(1, 3), seeds)
def test_no_row_is_read_early_or_overwritten_late_in_any_order_of_steps(world, graph, replays, seed):
    Model(world, graph * replays, seed).run()


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(2, 3), st.lists(calls, min_size=2, max_size=4), seeds, st.integers(1, 6))
def test_words_may_wrap(world, graph, seed, before):
    Model(world, graph * 2, seed, first_epoch=WORD - before).run()


@pytest.mark.parametrize("flaw", ["no arrival", "no leave", "relaxed", "epoch from host"])
def test_the_model_sees_what_each_part_of_the_protocol_is_for(flaw):
    graph = [Call(5, Algorithm.TWO_SHOT, 2), Call(3, Algorithm.TWO_SHOT, 1), Call(6, Algorithm.TWO_SHOT, 3)]
    found = 0
    for seed in range(200):
        try:
            if flaw == "epoch from host":  # a replayed graph brings the numbers of its capture again
                model = Model(2, graph, seed, flaw=flaw)
                model.run()
                model.steps = [model.stream(rank) for rank in range(2)]
                for rank in model.ranks:
                    rank.input, rank.out = [-1] * 6, [-1] * 6
                model.run()
            else:
                Model(3, graph, seed, flaw=flaw).run()
        except Wrong:
            found += 1
    assert found, "the flaw is never seen"
