"""Planning: every byte once, no call too large, and the result is the reference's whatever the choice."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.kernels.copy_pages.copies import Copies, Direction, InvalidCopies, check, ordered
from shared.kernels.copy_pages.costs import CostTable, Line, from_json, tally
from shared.kernels.copy_pages.plan import (
    Always,
    Choice,
    Limits,
    Method,
    Plan,
    cut,
    merge,
    plan_copies,
    share_out,
    stage,
)
from shared.kernels.copy_pages.reference import copy_pages_reference

MEMORY_BYTES = 1024
HALF = MEMORY_BYTES // 2
quick = settings(max_examples=150, deadline=None)


@st.composite
def copy_sets(draw) -> Copies:
    """Sources in the lower half, targets apart from each other in the upper one; many of them neighbours."""
    sizes = draw(st.lists(st.integers(0, 24), max_size=16))
    gaps = draw(st.lists(st.sampled_from([0, 0, 0, 1, 5]), min_size=len(sizes), max_size=len(sizes)))
    targets, place = [], HALF
    for size, gap in zip(sizes, gaps, strict=True):
        targets.append(place + gap)
        place += size + gap
    follow = draw(st.booleans())
    sources = [
        target - HALF if follow and draw(st.booleans()) else draw(st.integers(0, HALF - size))
        for target, size in zip(targets, sizes, strict=True)
    ]
    order = draw(st.permutations(range(len(sizes))))
    return Copies.of(*([column[i] for i in order] for column in (sources, targets, sizes)))


limits = st.builds(
    Limits,
    max_descriptors=st.integers(1, 6),
    max_run_bytes=st.integers(1, 64),
    max_lanes=st.integers(1, 4),
    slot_bytes=st.integers(1, 64),
)
choices = st.builds(Choice, st.sampled_from(list(Method)), st.integers(1, 5))
boundary_sets = st.lists(st.integers(0, MEMORY_BYTES), max_size=6).map(
    lambda places: np.unique(np.array(places, np.uint64))
)


def filled() -> bytearray:
    return bytearray((7 * i + i // 256) % 251 for i in range(MEMORY_BYTES))


def run(plan: Plan, memory: bytearray) -> None:
    """Do what the plan says: calls in any order, or groups through a slot."""
    for call in reversed(plan.calls):
        copy_pages_reference(memory, plan.runs.take(slice(call.first, call.last)))
    for group in plan.groups if plan.choice.method is Method.STAGED else ():
        slot = bytearray(group.num_bytes)
        host = list(zip(group.host.tolist(), group.offsets.tolist(), group.sizes.tolist(), strict=True))
        device = zip(group.device.tolist(), group.run_offsets.tolist(), group.run_sizes.tolist(), strict=True)
        if plan.direction is Direction.HOST_TO_DEVICE:
            for place, offset, size in host:
                slot[offset : offset + size] = memory[place : place + size]
            for place, offset, size in device:
                memory[place : place + size] = slot[offset : offset + size]
        else:
            for place, offset, size in device:
                slot[offset : offset + size] = memory[place : place + size]
            for place, offset, size in host:
                memory[place : place + size] = slot[offset : offset + size]


@quick
@given(
    copy_sets(),
    limits,
    choices,
    boundary_sets,
    st.sampled_from(list(Direction)),
    st.booleans(),
    st.booleans(),
)
def test_every_plan_copies_what_the_reference_copies(
    copies, bounds, choice, boundaries, direction, staging, merging
):
    plan = plan_copies(
        copies,
        direction,
        Always(choice),
        limits=bounds,
        boundaries=boundaries,
        staging=staging,
        merging=merging,
    )
    want, got = filled(), filled()
    copy_pages_reference(want, copies)
    run(plan, got)
    assert got == want
    assert plan.num_copies == len(copies)


@quick
@given(copy_sets(), limits, choices)
def test_every_run_is_in_one_call_and_no_call_exceeds_its_bounds(copies, bounds, choice):
    plan = plan_copies(copies, Direction.PEER, Always(choice), limits=bounds)
    runs = sorted(number for call in plan.calls for number in range(call.first, call.last))
    assert runs == list(range(len(plan.runs)))
    assert plan.runs.num_bytes == copies.num_bytes
    assert all(size <= bounds.max_run_bytes for _, _, size in plan.runs.rows())
    assert plan.lanes <= bounds.max_lanes
    if plan.choice.method is Method.BATCH:
        assert all(0 < call.last - call.first <= bounds.max_descriptors for call in plan.calls)


@quick
@given(copy_sets(), boundary_sets)
def test_merging_leaves_no_neighbours_and_crosses_no_boundary(copies, boundaries):
    runs = merge(ordered(copies), boundaries=boundaries)
    fences = set(boundaries.tolist())
    in_order = sorted(runs.rows(), key=lambda row: row[1])
    for (source, target, size), (next_source, next_target, _) in pairwise(in_order):
        neighbours = source + size == next_source and target + size == next_target
        assert not neighbours or next_source in fences or next_target in fences
    starts = {(source, target) for source, target, _ in copies.rows()}
    whole = {row for row in runs.rows() if (row[0], row[1]) in starts}
    assert whole == set(runs.rows())  # a run begins where a copy began
    for source, target, size in runs.rows():
        inner = range(1, size)
        began = {(s - source) for s, t, z in copies.rows() if z and s - source == t - target and s != source}
        assert not any(source + i in fences and i in began for i in inner)


@quick
@given(copy_sets(), st.integers(1, 64))
def test_staging_groups_fill_slots_without_gaps_and_join_device_neighbours(copies, slot_bytes):
    for group in stage(copies, Direction.HOST_TO_DEVICE, slot_bytes):
        assert 0 < group.num_bytes <= slot_bytes
        assert group.offsets.tolist() == [0, *np.cumsum(group.sizes)[:-1].tolist()]
        assert int(group.run_sizes.sum()) == group.num_bytes
        assert np.all(group.device[:-1] + group.run_sizes[:-1] < group.device[1:])


@given(st.integers(0, 40), st.integers(1, 8), st.integers(1, 9))
def test_lanes_get_about_the_same_bytes(num_runs, lanes, cap):
    sizes = np.full(num_runs, 10, np.uint64)
    calls = share_out(sizes, lanes, cap)
    by_lane: dict[int, int] = {}
    for call in calls:
        by_lane[call.lane] = by_lane.get(call.lane, 0) + call.last - call.first
    assert sum(by_lane.values()) == num_runs
    assert len(by_lane) == min(lanes, num_runs)
    assert max(by_lane.values(), default=0) - min(by_lane.values(), default=0) <= 1


@given(copy_sets())
def test_sets_whose_copies_depend_on_each_other_are_refused(copies):
    check(ordered(copies))
    rows = [row for row in copies.rows() if row[2]]
    for source, target, size in rows[:3]:
        for extra in ((0, target + size - 1, 1), (target, MEMORY_BYTES, 1), (0, source, 1)):
            more = Copies.of(*(list(column) for column in zip(*rows, extra, strict=True)))
            with pytest.raises(InvalidCopies):
                check(ordered(more))


@pytest.mark.parametrize("lanes", [1, 3])
def test_the_copy_engine_begins_behind_a_short_call_and_calls_grow_to_the_cap(lanes):
    calls = share_out(np.full(3000, 4096, np.uint64), lanes, 256, 16)
    for lane in range(lanes):
        sizes = [call.last - call.first for call in calls if call.lane == lane]
        assert sizes[:3] == [16, 64, 256]
        assert set(sizes[2:-1]) == {256}
    assert [call.lane for call in calls[:lanes]] == list(range(lanes)), "every lane begins before one goes on"


def test_close_sizes_are_counted_as_their_mean_and_others_apart():
    assert tally(np.array([4096, 8192, 4096, 4096], np.uint64)) == ((5120, 4),)
    assert tally(np.array([4096, 1 << 20, 4096], np.uint64)) == ((4096, 2), (1 << 20, 1))
    assert tally(np.zeros(0, np.uint64)) == ()


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        (([1, 2], [3], [4]), "give as many"),
        (([-1], [3], [4]), "not negative"),
        (([1.5], [3], [4]), "integers"),
        (([2**64 - 4], [0], [8]), "64-bit"),
        (([[1]], [[2]], [[3]]), "one dimension"),
    ],
)
def test_columns_that_mean_nothing_are_refused(columns, why):
    with pytest.raises(InvalidCopies, match=why):
        Copies.of(*columns)


def test_neighbouring_pages_become_one_plain_copy():
    page = 2 << 20
    copies = Copies.of([0, page, 2 * page], [7 * page, 8 * page, 9 * page], page)
    plan = plan_copies(copies, Direction.DEVICE_TO_HOST, Always(Choice(Method.BATCH, 4)))
    assert plan.choice.method is Method.ONE
    assert plan.runs.rows() == [(0, 7 * page, 3 * page)]


def test_a_long_run_is_cut_so_that_others_get_a_turn():
    copies = cut(Copies.of([0], [1000], [25]), 10)
    assert copies.rows() == [(0, 1000, 10), (10, 1010, 10), (20, 1020, 5)]


H2D = Direction.HOST_TO_DEVICE


def line(fixed_us: float, small_us: float, large_us: float) -> Line:
    return Line(fixed_us, (4096, 1 << 20), (small_us, large_us))


def table(**more) -> CostTable:
    lines = {
        (H2D, Method.LOOP, 1): line(1, 3.0, 20.0),
        (H2D, Method.BATCH, 1): line(8, 1.0, 20.5),
        (H2D, Method.BATCH, 2): line(30, 0.5, 20.5),
    }
    return CostTable("test", lines, **more)


@pytest.mark.parametrize(
    ("count", "size", "want"),
    [
        (2, 4096, (Method.LOOP, 1)),
        (20, 4096, (Method.BATCH, 1)),
        (2000, 4096, (Method.BATCH, 2)),
        (64, 1 << 20, (Method.LOOP, 1)),
    ],
)
def test_the_cheapest_measured_way_is_chosen_by_size_and_count(count, size, want):
    choice = table().choose(H2D, np.full(count, size, np.uint64), None, None)
    assert (choice.method, choice.lanes) == want
    assert choice.expected_us > 0


def test_staging_is_chosen_only_where_the_cpu_is_faster_than_descriptors():
    pieces = np.full(4000, 4096, np.uint64)
    one_run = np.array([4 << 20] * 4, np.uint64)
    fast, slow = table(cpu_move=line(0, 0.1, 30)), table(cpu_move=line(0, 5.0, 300))
    assert fast.choose(H2D, pieces, pieces, one_run).method is Method.STAGED
    assert slow.choose(H2D, pieces, pieces, one_run).method is Method.BATCH
    assert fast.choose(H2D, pieces, None, None).method is Method.BATCH


def test_what_was_not_measured_goes_out_as_a_batch_or_as_a_loop_without_one():
    runs = np.full(9, 4096, np.uint64)
    assert table().choose(Direction.PEER, runs, None, None) == Choice(Method.BATCH)
    assert table(has_batch=False).choose(Direction.PEER, runs, None, None) == Choice(Method.LOOP)
    assert table(has_batch=False).choose(H2D, runs, None, None).method is Method.LOOP


def test_costs_between_measured_sizes_lie_between_and_grow_with_the_bytes_beyond():
    cost = line(0, 1.0, 20.0)
    between = cost.cost_us(tally(np.array([512 << 10], np.uint64)))
    assert 1.0 < between < 20.0
    assert cost.cost_us(tally(np.array([4 << 20], np.uint64))) == pytest.approx(80.0)
    mixed = np.array([4096, 1 << 20, 4096, 100], np.uint64)
    assert cost.cost_us(tally(mixed)) == pytest.approx(
        sum(cost.cost_us(tally(mixed[i : i + 1])) for i in range(4))
    )


def test_a_cost_table_survives_its_file_and_no_other_machines_file_is_taken():
    before = table(cpu_move=line(0, 1, 2))
    after = from_json(before.to_json(), key="test")
    assert after == before
    assert from_json(before.to_json(), key="another") is None
    assert from_json("{", key="test") is None
    assert "batch x2" in before.render()
    assert "*" in before.render()
