"""A group's kept times: read back as they were, and only where they belong and make sense."""

import json

import pytest

from shared.kernels.allreduce_rmsnorm.plan import Algorithm, Engine, Way, times_from_rows
from shared.kernels.allreduce_rmsnorm.times_file import pack_times, unpack_times

PLAIN, PUSH, BULK_8 = Way(Engine.PLAIN), Way(Engine.PUSH), Way(Engine.BULK, 8)
TIMES = times_from_rows(
    (),
    [
        (1 << 10, {PLAIN: 8.0}),
        (1 << 20, {PLAIN: 30.0, BULK_8: 31.0}),
        (1 << 24, {PLAIN: 90.0, BULK_8: 80.0}),
    ],
    [(1 << 10, {PLAIN: 7.0, PUSH: 5.0}), (1 << 20, {PLAIN: 50.0})],
)
# What version 2 of the file held of one GPU: one-shot's time was the pushed one's up to a size, the read one's beyond.
VERSION_2 = {
    "version": 2, "key": "a", "sizes_bytes": [1024, 1048576], "ways": [[1048576, "plain", 0]], "few_sms": 8,
    "times_us": {"one_shot": [5.0, 50.0], "two_shot": [8.0, 30.0]},
    "one_shot_ways": [[1024, "push", 0], [1048576, "plain", 0]],
}  # fmt: skip


def test_kept_times_pick_what_the_measured_ones_picked():
    found = unpack_times(pack_times("a", TIMES), "a")
    assert found is not None
    assert found == TIMES
    engines = list(Engine)
    assert found.way(Algorithm.TWO_SHOT, 1 << 24, engines) == Way(Engine.BULK, 8)
    assert found.way(Algorithm.ONE_SHOT, 1 << 10, engines) == Way(Engine.PUSH)
    assert found.us(Algorithm.ONE_SHOT, PLAIN, 1 << 20) == 50.0
    assert found.few_sms == 8


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1}, {"version": 2}, {"version": 4}, {"key": "b"}, {"few_sms": -1}, {"few_sms": 33}, {"more": 1},
        {"curves": []},
    ],
)  # fmt: skip
def test_another_groups_file_counts_as_none(change):
    assert unpack_times(json.dumps(json.loads(pack_times("a", TIMES)) | change).encode(), "a") is None


@pytest.mark.parametrize(
    "change",
    [
        {"points": []}, {"points": [[0, 1.0]]}, {"points": [[2, 1.0], [1, 1.0]]}, {"points": [[1, 1.0], [1, 1.0]]},
        {"points": [[1, 0.0]]}, {"points": [[1, -1.0]]}, {"points": [[1, 1.0, 1.0]]}, {"num_sms": 33}, {"num_sms": -1},
        {"engine": "push"}, {"engine": "multimem"}, {"engine": "other"}, {"algorithm": "three_shot"},
        {"algorithm": "one_shot", "engine": "bulk"}, {"algorithm": "multimem", "engine": "multimem"},
        {"num_sms": 0},
    ],
)  # fmt: skip
def test_a_file_that_makes_no_sense_counts_as_none(change):
    whole = json.loads(pack_times("a", TIMES))
    right = {"algorithm": "two_shot", "engine": "plain", "num_sms": 4, "points": [[1, 2.0], [2, 3.0]]}
    for curve in (right, right | change):  # {"num_sms": 0}: there is such a curve already
        data = json.dumps(whole | {"curves": [*whole["curves"], list(curve.values())]}).encode()
        assert (unpack_times(data, "a") is None) is (curve is not right)


@pytest.mark.parametrize("without", ["one_shot", "two_shot"])
def test_times_of_one_algorithm_alone_count_as_none(without):
    whole = json.loads(pack_times("a", TIMES))
    curves = [curve for curve in whole["curves"] if curve[0] != without]
    assert unpack_times(json.dumps(whole | {"curves": curves}).encode(), "a") is None


def test_a_file_in_which_pushed_and_read_sums_were_one_is_measured_anew():
    assert unpack_times(json.dumps(VERSION_2).encode(), "a") is None
    assert unpack_times(json.dumps(VERSION_2 | {"version": 3}).encode(), "a") is None


def test_bytes_that_are_no_file_count_as_none():
    assert unpack_times(b"", "a") is None
    assert unpack_times(pack_times("a", TIMES)[:-9], "a") is None
