"""Of the ways that there are at a size and with a budget the fastest is taken, by times of H200s or any others."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.kernels.allreduce_rmsnorm import calibrate as calibrating
from shared.kernels.allreduce_rmsnorm.acted_driver import ActedDriver, ActedGroup
from shared.kernels.allreduce_rmsnorm.arenas import Arena
from shared.kernels.allreduce_rmsnorm.calibrate import BUDGETS, calibrate, sizes
from shared.kernels.allreduce_rmsnorm.fused import CudaFused, FusedSettings
from shared.kernels.allreduce_rmsnorm.plan import (
    FEWER_MARGIN_RATIO,
    Algorithm,
    Engine,
    Plan,
    Times,
    Way,
    pick,
    times_from_rows,
    way_of,
)

ONE, TWO = Algorithm.ONE_SHOT, Algorithm.TWO_SHOT
PLAIN, PUSH, BULK = Way(Engine.PLAIN), Way(Engine.PUSH), Way(Engine.BULK)
PLAIN_16, BULK_16 = Way(Engine.PLAIN, 16), Way(Engine.BULK, 16)
ROW_BYTES = 8192 * 2
PUSHED = 128  # tokens that slots hold of two ranks with a hidden size of 8,192
MOST = 4096  # tokens

# Medians of loadtest/results/h200-fused-norm.json, us on two H200s with a hidden size of 8,192, by tokens.
ONE_SHOT_US = {
    1: {PLAIN: 7.9, PUSH: 4.4}, 8: {PLAIN: 8.2, PUSH: 4.9}, 32: {PLAIN: 9.6, PUSH: 6.2}, 128: {PLAIN: 14.2, PUSH: 10.2},
    256: {PLAIN: 20.8}, 512: {PLAIN: 33.0, PLAIN_16: 54.0},
}  # fmt: skip
TWO_SHOT_US = {
    1: {PLAIN: 8.2, BULK: 8.9}, 8: {PLAIN: 8.0, BULK: 8.5}, 32: {PLAIN: 8.7, BULK: 9.3}, 128: {PLAIN: 12.1, BULK: 13.4},
    256: {PLAIN: 18.5, BULK: 19.4}, 512: {PLAIN: 30.8, BULK: 31.6, BULK_16: 34.5},
    1024: {PLAIN: 56.3, BULK: 55.9, BULK_16: 62.8},
}  # fmt: skip


def in_rows(us_by_tokens: dict[int, dict[Way, float]]) -> list[tuple[int, dict[Way, float]]]:
    return [(tokens * ROW_BYTES, us) for tokens, us in us_by_tokens.items()]


H200 = times_from_rows((), in_rows(TWO_SHOT_US), in_rows(ONE_SHOT_US))


def engines_of(num_tokens: int) -> dict[Algorithm, tuple[Engine, ...]]:
    pushed = (Engine.PUSH,) * (num_tokens <= PUSHED)
    return {ONE: (*pushed, Engine.PLAIN), TWO: (Engine.BULK, Engine.PLAIN)}


def taken(times: Times, num_tokens: int, num_sms: int = 0) -> tuple[Algorithm, Way]:
    num_bytes, engines = num_tokens * ROW_BYTES, engines_of(num_tokens)
    algorithm = pick(num_bytes, 2, times, engines, num_sms)
    return algorithm, way_of(algorithm, num_bytes, engines[algorithm], times, num_sms)


def all_us(times: Times, num_tokens: int, num_sms: int) -> Iterator[float]:
    """Of each way that there is and that was measured."""
    for algorithm, engines in engines_of(num_tokens).items():
        ways = [way for of, way in times.curves if of is algorithm and way.engine in engines]
        for way in [Way(engine, num_sms) for engine in engines] if num_sms else ways:
            us = times.us(algorithm, way, num_tokens * ROW_BYTES)
            if us is not None:
                yield us


@st.composite
def any_times(draw) -> Times:
    """Of every way that calibrate() tries, budgets included, at sizes of its own."""
    us = st.floats(0.1, 1e4)

    def rows(ways: list[Way], most_tokens: int) -> list[tuple[int, dict[Way, float]]]:
        tokens = draw(st.lists(st.integers(1, most_tokens), min_size=1, max_size=4, unique=True))
        return [(count * ROW_BYTES, {way: draw(us) for way in ways}) for count in tokens]

    def with_budgets(engine: Engine) -> list[Way]:
        return [Way(engine), *(Way(engine, num_sms) for num_sms in BUDGETS[:2])]

    two_shot = rows([PLAIN, *with_budgets(Engine.BULK)], MOST)
    read = rows(with_budgets(Engine.PLAIN), MOST)
    pushed = rows(with_budgets(Engine.PUSH), PUSHED)
    return times_from_rows((), two_shot, [*read, *pushed])


@given(any_times(), st.integers(1, MOST), st.sampled_from([0, 1, 4, 7, 8, 16, 32]))
def test_no_way_that_there_is_would_have_been_faster(times, num_tokens, num_sms):
    algorithm, way = taken(times, num_tokens, num_sms)
    assert way.engine in engines_of(num_tokens)[algorithm]
    assert not num_sms or way.num_sms == num_sms
    us = times.us(algorithm, way, num_tokens * ROW_BYTES)
    assert us is not None
    # every SM stays unless fewer win by a margin
    assert us * (1.0 - FEWER_MARGIN_RATIO) <= min(all_us(times, num_tokens, num_sms)) * (1.0 + 1e-9)


def test_on_two_h200s_the_fastest_way_is_taken_at_every_number_of_tokens():
    for num_tokens in range(1, 65_536 // 8):
        algorithm, way = taken(H200, num_tokens)
        assert H200.us(algorithm, way, num_tokens * ROW_BYTES) == min(all_us(H200, num_tokens, 0)), num_tokens


def test_behind_the_last_pushed_sum_nothing_is_thought_to_be_half_pushed():
    """Up to 192 tokens one-shot sums were taken, which are read there: 16.1 us for 13.9."""
    assert taken(H200, PUSHED) == (ONE, PUSH)
    assert [taken(H200, count) for count in (129, 160, 192, 255)] == [(TWO, PLAIN)] * 4


def test_a_pushed_sum_that_wins_at_the_last_size_says_nothing_of_larger_ones():
    """A hidden size of 2,048 on two H200s: 512 tokens are pushed, and all that was larger was one-shot."""
    us = {128: {PLAIN: 14.2, PUSH: 10.2}, 512: {PLAIN: 33.0}, 1024: {PLAIN: 60.0}}
    times = times_from_rows((), in_rows(TWO_SHOT_US), in_rows(us))
    assert taken(times, 128) == (ONE, PUSH)
    assert {taken(times, count)[0] for count in (129, 513, 2048, 65_536)} == {TWO}


def test_under_a_budget_the_ways_with_that_budget_are_compared():
    """8 MB with 16 SMs: one-shot sums, read, took 54 us where bulk copies take 34.5."""
    faster = {512: {PLAIN: 30.0, PLAIN_16: 54.0}}  # one-shot, if it may have every SM
    times = times_from_rows((), in_rows(TWO_SHOT_US), in_rows(ONE_SHOT_US | faster))
    assert taken(times, 512) == (ONE, PLAIN)
    assert taken(times, 512, 16) == (TWO, BULK_16)
    assert taken(times, 512, 12) == (TWO, Way(Engine.BULK, 12)), "the nearest one that was measured"
    slow = {512: {PLAIN: 30.8, BULK: 31.6, BULK_16: 64.5}}
    assert taken(times_from_rows((), in_rows(slow), in_rows(ONE_SHOT_US)), 512, 16) == (ONE, PLAIN_16)


def test_where_no_budget_was_measured_the_ways_with_every_sm_are_compared():
    times = times_from_rows((), [(1, {PLAIN: 1.0, BULK: 2.0})], [(1, {PLAIN: 1.5})])
    assert taken(times, 200, 16)[0] is TWO
    times = times_from_rows((), [(1, {PLAIN: 1.0, BULK: 2.0})], [(1, {PLAIN: 0.5})])
    assert taken(times, 200, 16)[0] is ONE


# -- what is measured at start --------------------------------------------------------------------------------


class Pretended:
    """A group whose sums take what a rule says; nothing is computed."""

    device, dtype, eps, world, rank, num_sms = torch.device("cpu"), torch.bfloat16, 1e-5, 2, 0, 132

    def __init__(self, hidden: int, push_tokens: int, max_tokens: int, us) -> None:
        self.hidden, self.push_tokens, self.max_tokens, self._us = hidden, push_tokens, max_tokens, us
        self.made: list[tuple[Algorithm, int, Way]] = []

    def engine(self, algorithm: Algorithm) -> Engine:
        return Engine.BULK

    def input(self, count: int) -> torch.Tensor:
        return torch.zeros(0)

    def run_as(self, plan: Plan, engine: Engine, *_: object, num_sms: int) -> float:
        assert engine is not Engine.PUSH or plan.num_tokens <= self.push_tokens
        self.made.append((plan.algorithm, plan.num_tokens, Way(engine, num_sms)))
        return self._us(plan.algorithm, plan.num_tokens, Way(engine, num_sms))

    def check(self) -> None:
        """Nobody is late."""

    def calibrated(self, monkeypatch) -> Times:
        clock = SimpleNamespace(measure=lambda call: [call()])
        monkeypatch.setattr(calibrating, "Clock", lambda *_, **__: clock)
        return calibrate(self, rows_given=(torch.zeros(self.max_tokens, 0), torch.zeros(0)))  # type: ignore[arg-type]


def push_wins(algorithm: Algorithm, count: int, way: Way) -> float:
    rate = {Engine.PUSH: 0.01, Engine.PLAIN: 0.03, Engine.BULK: 0.021}[way.engine]
    few = 1.0 if algorithm is ONE else 1.5
    shared = 0.02 if algorithm is TWO else rate
    return few + shared * count * (2.0 if 0 < way.num_sms < min(count, 32) else 1.0)


@pytest.mark.parametrize(
    ("hidden", "push_tokens"), [(8192, 128), (5120, 204), (2048, 512), (1024, 1024), (16384, 64)]
)
def test_one_size_beyond_the_last_push_win_is_measured_and_pushed_and_read_times_stay_apart(
    monkeypatch, hidden, push_tokens
):
    group = Pretended(hidden, push_tokens, 32_768, push_wins)
    times = group.calibrated(monkeypatch)
    tried = sorted({count for algorithm, count, way in group.made if (algorithm, way) == (ONE, PLAIN)})
    pushed = sorted({count for algorithm, count, way in group.made if (algorithm, way) == (ONE, PUSH)})
    assert pushed[-1] == push_tokens, "the cliff itself is measured"
    assert tried[-1] == {512: 1024, 1024: 2048}.get(push_tokens, 512)
    assert times.curves[ONE, PUSH][-1] == (push_tokens * hidden * 2, push_wins(ONE, push_tokens, PUSH))
    read_us = dict(times.curves[ONE, PLAIN])
    assert read_us[push_tokens * hidden * 2] == push_wins(ONE, push_tokens, PLAIN)
    assert len(group.made) <= 130, "about 30 ms each"
    assert len(set(group.made)) == len(group.made)


def test_one_shot_sums_are_measured_as_long_as_they_win(monkeypatch):
    def one_shot_wins(algorithm: Algorithm, count: int, way: Way) -> float:
        return 1.0 + count * (0.01 if algorithm is ONE and count < 4096 else 0.02)

    group = Pretended(1024, 64, 16_384, one_shot_wins)
    times = group.calibrated(monkeypatch)
    assert times.curves[ONE, PLAIN][-1][0] == 4096 * 1024 * 2


def test_budgets_are_measured_from_128_tokens_on_and_below_known_where_they_change_nothing(monkeypatch):
    group = Pretended(8192, 128, 4096, push_wins)
    times = group.calibrated(monkeypatch)
    assert {count for _, count, way in group.made if way.num_sms} == {128, 256, 512, 1024, 2048, 4096}
    sizes_of_16 = [size // ROW_BYTES for size, _ in times.curves[ONE, Way(Engine.PUSH, 16)]]
    assert sizes_of_16 == [1, 2, 4, 8, 16, 128]
    assert [size // ROW_BYTES for size, _ in times.curves[TWO, BULK_16]][:7] == [1, 2, 4, 8, 16, 32, 128]
    few = Pretended(8192, 64, 64, push_wins)
    assert few.calibrated(monkeypatch).us(ONE, PLAIN_16, 64 * ROW_BYTES) == push_wins(ONE, 64, PLAIN_16), (
        "the last size in any case"
    )
    assert sizes(64, 64) == ([1, 2, 4, 8, 16, 32, 64], [])


# -- a call ---------------------------------------------------------------------------------------------------


def test_a_call_is_made_and_its_rows_are_owned_as_its_budget_wants_it():
    settings = FusedSettings(2048, 1024)
    memories = [torch.zeros(settings.layout().num_bytes, dtype=torch.uint8) for _ in range(2)]
    bases = tuple(one.data_ptr() for one in memories)
    group = ActedGroup(2)
    fused = [
        CudaFused(
            settings, Arena(one, bases, 0, lambda: None), rank, torch.device("cpu"), driver=ActedDriver(group)
        )
        for rank, one in enumerate(memories)
    ]
    times = times_from_rows(
        (),
        [(1, {PLAIN: 3.0, BULK: 3.0, BULK_16: 4.0})],
        [(1, {PLAIN: 2.0, PLAIN_16: 5.0, PUSH: 1.0, Way(Engine.PUSH, 16): 6.0})],
    )
    weight = torch.ones(2048, dtype=torch.bfloat16)
    held = [torch.zeros(600, 2048, dtype=torch.bfloat16) for _ in fused]
    for one in fused:
        one.use(times)
        assert [one.plan(count).algorithm for count in (512, 600)] == [ONE, ONE]
        assert [one.plan(count, 16).algorithm for count in (512, 600)] == [TWO, TWO]
    for num_sms in (0, 16):
        for rank, one in enumerate(fused):
            one.run(one.input(600), held[rank], weight, 1e-5, num_sms=num_sms)
    assert [name for name, _ in group.launches] == ["fused_plain"] * 2 + ["fused_bulk"] * 2
    for one in fused:
        one.use(times_from_rows((), [(1, {PLAIN: 1.0, BULK: 2.0})], [(1, {PLAIN: 2.0})]))
        assert one.plan(600).algorithm is TWO, "what was picked before is not remembered"
