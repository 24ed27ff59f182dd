"""Rows and ways of the fused all-reduce: every row has one owner, every rank picks alike, wrong calls are refused."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidRequest
from shared.kernels.allreduce_rmsnorm.calibrate import BUDGETS, one_shot_ways, sizes, two_shot_ways
from shared.kernels.allreduce_rmsnorm.plan import (
    MAX_TOKENS,
    Algorithm,
    Engine,
    Way,
    check_call,
    check_shape,
    fastest_way,
    fewest_sms,
    make_plan,
    num_ctas,
    owned_rows,
    pick,
    times_from_rows,
    two_shot_limit_us,
)

worlds = st.integers(1, 8)
tokens = st.integers(1, MAX_TOKENS)


@given(tokens, worlds)
def test_every_row_of_a_two_shot_sum_has_one_owner_and_none_has_two_rows_more(num_tokens, world):
    slices = [owned_rows(num_tokens, world, rank) for rank in range(world)]
    assert slices[0][0] == 0
    assert slices[-1][1] == num_tokens
    assert all(a[1] == b[0] for a, b in pairwise(slices))
    sizes = [stop - start for start, stop in slices]
    assert max(sizes) - min(sizes) <= 1


@given(tokens, worlds, st.sampled_from(list(Algorithm)), st.integers(1, 148))
def test_ctas_reach_every_row_stay_within_the_budget_and_do_not_depend_on_the_rank(
    num_tokens, world, algorithm, most
):
    count = num_ctas(algorithm, num_tokens, world, most)
    assert 1 <= count <= most
    for rank in range(world):
        plan = make_plan(algorithm, num_tokens, world, rank)
        taken = [len(range(plan.start + cta, plan.stop, count)) for cta in range(count)]
        assert sum(taken) == plan.stop - plan.start
        assert taken.count(0) <= 1 or plan.stop == plan.start


def test_one_shot_owns_every_row_everywhere():
    for rank in range(4):
        plan = make_plan(Algorithm.ONE_SHOT, 7, 4, rank)
        assert (plan.start, plan.stop) == (0, 7)


def test_the_faster_of_the_measured_ways_is_picked_and_two_shot_when_they_tie():
    times = times_from_rows(
        [
            (1 << 20, {Algorithm.ONE_SHOT: 20.0, Algorithm.TWO_SHOT: 20.0}),
            (1 << 10, {Algorithm.ONE_SHOT: 5.0, Algorithm.TWO_SHOT: 10.0}),
            (1 << 24, {Algorithm.ONE_SHOT: 400.0, Algorithm.TWO_SHOT: 100.0}),
        ]
    )
    assert pick(1, 4, times) is Algorithm.ONE_SHOT
    assert pick(1 << 15, 4, times) is Algorithm.ONE_SHOT
    assert pick(1 << 20, 4, times) is Algorithm.TWO_SHOT
    assert pick(1 << 30, 4, times) is Algorithm.TWO_SHOT


@given(st.integers(1, 1 << 31), worlds)
def test_multimem_is_picked_only_where_multicast_is_reported(num_bytes, world):
    assert pick(num_bytes, world) is not Algorithm.MULTIMEM
    assert pick(num_bytes, world, multicast=True) is not Algorithm.TWO_SHOT


PLAIN, PUSH, BULK, BULK_8 = Way(Engine.PLAIN), Way(Engine.PUSH), Way(Engine.BULK), Way(Engine.BULK, 8)


def test_the_engine_is_the_one_that_is_faster_at_a_size_also_beyond_one_where_the_other_won():
    # four H200s (loadtest/results/h200-fused-norm.json): registers win again from 64 MB up
    ways = [
        (1 << 25, {PLAIN: 164.4, BULK: 161.2}),
        (1 << 23, {PLAIN: 44.7, BULK: 45.7}),
        (1 << 26, {PLAIN: 324.8, BULK: 325.6}),
        (1 << 27, {PLAIN: 639.9, BULK: 659.9}),
    ]
    times = times_from_rows((), ways)
    asked = (1, 1 << 23, (1 << 24) - 1, 9 << 21, 1 << 25, 3 << 24, 15 << 22, 1 << 26, 1 << 29)
    found = [times.way(Algorithm.TWO_SHOT, size, list(Engine)) for size in asked]
    assert found == [PLAIN, PLAIN, PLAIN, BULK, BULK, BULK, PLAIN, PLAIN, PLAIN]
    assert times.way(Algorithm.TWO_SHOT, 1 << 25, [Engine.PLAIN]) == PLAIN, "where there are no bulk copies"
    for algorithm in (Algorithm.ONE_SHOT, Algorithm.MULTIMEM):
        assert times.way(algorithm, 1, list(Engine)) is times.us(algorithm, PLAIN, 1) is None
    assert times.way(Algorithm.TWO_SHOT, 1, [Engine.MULTIMEM]) is None
    assert times_from_rows((), [(1, {BULK_8: 1.0})]).way(Algorithm.TWO_SHOT, 1, list(Engine)) is None


def test_fewer_ctas_than_sms_are_taken_only_where_they_win_by_more_than_noise():
    few = Way(Engine.BULK, 8)
    assert fastest_way({PLAIN: 100.0, BULK: 101.0, few: 98.5}) == PLAIN
    assert fastest_way({PLAIN: 100.0, BULK: 99.0, few: 96.0}) == few
    assert fastest_way({PLAIN: 100.0, BULK: 100.0}) == PLAIN
    with pytest.raises(ValueError, match="empty"):
        fastest_way({few: 1.0})


def test_a_budget_is_the_least_that_is_as_good_as_any_at_every_size():
    def row(**us: float) -> dict[Way, float]:
        return {PLAIN: 1.0} | {Way(Engine.BULK, int(name[1:])): value for name, value in us.items()}

    assert fewest_sms([row(b4=150, b8=104, b16=100), row(b4=99, b8=103, b16=100)]) == 8
    assert fewest_sms([row(b4=150, b8=107, b16=100), row(b4=99, b8=103, b16=100)]) == 16
    assert fewest_sms([row(b4=100, b8=110), row(b4=110, b8=100)]) == 8, (
        "no budget is good everywhere: the largest"
    )
    assert fewest_sms([row(), {}]) == fewest_sms([]) == 0


# Medians of loadtest/results/h200-fused-norm.json (22 Nov 2026), us, 1K to 32K tokens of hidden size 8192: registers
# with 16 SMs and all, bulk copies with 4, 8, 16, 32 and all.
MEASURED_US = {
    2: [(78.2, 55.2, 184.8, 94.4, 61.5, 61.8, 54.8), (152.2, 104.5, 379.2, 193.8, 112.7, 115.9, 104.3),
        (291.5, 202.3, 751.4, 379.3, 218.0, 225.1, 203.1), (575.8, 398.5, 1497.7, 748.8, 427.9, 440.5, 396.8),
        (1131.7, 787.4, 2981.9, 1492.6, 852.3, 874.1, 786.4), (2228.9, 1574.0, 5933.4, 2978.7, 1701.9, 1746.6, 1568.0)],
    4: [(92.0, 83.2, 143.4, 89.1, 88.4, 88.3, 85.9), (174.0, 164.4, 276.0, 168.5, 171.5, 171.7, 161.2),
        (335.3, 324.8, 539.0, 327.9, 335.0, 335.5, 325.6), (653.5, 639.9, 1069.6, 645.1, 658.7, 662.4, 659.9),
        (1301.1, 1272.2, 2138.7, 1278.1, 1307.7, 1306.4, 1316.5),
        (2589.3, 2531.7, 4248.9, 2567.7, 2628.0, 2622.9, 2639.0)],
}  # fmt: skip
COLUMNS = (
    Way(Engine.PLAIN, 16), PLAIN, *(Way(Engine.BULK, sms) for sms in (4, 8, 16, 32)), BULK,
)  # fmt: skip


def measured_ways(world: int) -> list[tuple[int, dict[Way, float]]]:
    """(bytes, us by way)."""
    return [
        ((16 << 20) << power, dict(zip(COLUMNS, row, strict=True)))
        for power, row in enumerate(MEASURED_US[world])
    ]


@pytest.mark.parametrize(("world", "few"), [(2, 16), (4, 8)])
def test_what_is_tried_at_start_has_the_fastest_way_of_the_h200s_at_every_size_within_2_percent(world, few):
    rows = measured_ways(world)
    tried = two_shot_ways(Engine.BULK)
    times = times_from_rows(
        (),
        [(size, {way: us[way] for way in tried}) for size, us in rows if size <= 8192 * 8192 * 2],
    )
    for size, us in rows:  # sizes beyond those that an engine's buffers hold at its start, too
        way = times.way(Algorithm.TWO_SHOT, size, list(Engine))
        assert way is not None
        assert us[way] <= 1.02 * min(us.values()), (size, way)
    assert times.few_sms == few


def test_every_size_that_the_buffers_hold_is_measured_up_to_32k_tokens():
    assert sizes(2) == ([1, 2], [])
    few, many = sizes(8192)
    assert (few[-1], many) == (512, [1024, 2048, 4096, 8192])
    assert sizes(65_536)[1][-1] == 32_768
    assert sizes(8192, 204)[0][7:] == [128, 204, 256, 512], "the most that slots hold, too"
    assert sizes(8192, 1024) == ([*few, 1024], [2048, 4096, 8192])
    assert two_shot_ways(Engine.PLAIN) == [PLAIN, *(Way(Engine.PLAIN, sms) for sms in BUDGETS)]
    assert two_shot_ways(Engine.BULK) == [PLAIN, BULK, *(Way(Engine.BULK, sms) for sms in BUDGETS)]
    assert [one_shot_ways(count, 64)[:2] for count in (64, 65)] == [
        [PLAIN, PUSH],
        [PLAIN, Way(Engine.PLAIN, 4)],
    ]


def test_times_between_sizes_lie_between_and_grow_beyond_the_last():
    times = times_from_rows([(1024, {Algorithm.TWO_SHOT: 8.0}), (4096, {Algorithm.TWO_SHOT: 16.0})])
    found = [times.us(Algorithm.TWO_SHOT, PLAIN, size) for size in (10, 1024, 2048, 4096, 8192)]
    assert found == pytest.approx([8.0, 8.0, 128**0.5, 16.0, 32.0])


def test_the_time_of_a_budget_that_was_not_measured_is_that_of_the_nearest_one():
    times = times_from_rows((), [(1, {PLAIN: 1.0, BULK: 2.0, BULK_8: 3.0, Way(Engine.BULK, 16): 4.0})])
    budgets = (1, 8, 11, 12, 16, 32)
    found = [times.us(Algorithm.TWO_SHOT, Way(Engine.BULK, num_sms), 1) for num_sms in budgets]
    assert found == [3.0, 3.0, 3.0, 4.0, 4.0, 4.0]
    assert times.us(Algorithm.TWO_SHOT, Way(Engine.PLAIN, 8), 1) is None
    assert times.way(Algorithm.TWO_SHOT, 1, list(Engine), 9) == Way(Engine.BULK, 9)
    assert times.way(Algorithm.TWO_SHOT, 1, [Engine.PLAIN], 9) is None


@pytest.mark.parametrize(
    ("world", "rank", "hidden", "max_tokens"),
    [(9, 0, 4096, 1), (0, 0, 4096, 1), (2, 2, 4096, 1), (2, 0, 1016, 1), (2, 0, 4100, 1), (2, 0, 16392, 1),
     (2, 0, 4096, 0), (2, 0, 4096, 65537)],
)  # fmt: skip
def test_shapes_that_the_kernel_cannot_do_are_refused(world, rank, hidden, max_tokens):
    with pytest.raises(InvalidRequest):
        check_shape(world, rank, hidden, max_tokens)


@pytest.mark.parametrize(
    ("num_tokens", "lane", "num_sms"), [(0, 0, 0), (17, 0, 0), (1, 2, 0), (1, -1, 0), (1, 0, 33), (1, 0, -1)]
)
def test_calls_beyond_the_buffers_or_the_budget_are_refused(num_tokens, lane, num_sms):
    with pytest.raises(InvalidRequest):
        check_call(num_tokens, 16, lane, 2, num_sms)


def test_the_link_limit_is_the_published_formula():
    assert two_shot_limit_us(64 << 20, 8, 450.0) == pytest.approx(261, abs=1)
