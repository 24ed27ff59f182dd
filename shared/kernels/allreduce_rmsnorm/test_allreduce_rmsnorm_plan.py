"""Rows and ways of the fused all-reduce: every row has one owner, every rank picks alike, wrong calls are refused."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidRequest
from shared.kernels.allreduce_rmsnorm.plan import (
    MAX_TOKENS,
    Algorithm,
    check_call,
    check_shape,
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


def test_registers_are_taken_where_they_were_no_slower_at_the_nearest_size_also_beyond_one_where_they_were():
    # four H200s (loadtest/results/h200-fused-norm.json): registers win again from 64 MB up
    engines = [
        (1 << 25, 164.4, 161.2),
        (1 << 23, 44.7, 45.7),
        (1 << 26, 324.8, 325.6),
        (1 << 27, 639.9, 659.9),
    ]
    times = times_from_rows([(1, {Algorithm.TWO_SHOT: 1.0})], engines)
    sizes = (1, 1 << 23, (1 << 24) - 1, (1 << 24) + 1, 1 << 25, 3 << 24, 1 << 26, 1 << 29)
    assert [times.by_registers(size) for size in sizes] == [True, True, True, False, False, True, True, True]
    assert not times_from_rows([(1, {Algorithm.TWO_SHOT: 1.0})]).by_registers(1)


def test_times_between_sizes_lie_between_and_grow_beyond_the_last():
    times = times_from_rows([(1024, {Algorithm.TWO_SHOT: 8.0}), (4096, {Algorithm.TWO_SHOT: 16.0})])
    assert times.at(Algorithm.TWO_SHOT, 10) == 8.0
    assert 8.0 < times.at(Algorithm.TWO_SHOT, 2048) < 16.0
    assert times.at(Algorithm.TWO_SHOT, 8192) == 32.0


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
