"""A group's kept times: read back as they were, and only where they belong and make sense."""

import json

import pytest

from shared.kernels.allreduce_rmsnorm.plan import Algorithm, Engine, Way, times_from_rows
from shared.kernels.allreduce_rmsnorm.times_file import pack_times, unpack_times

TIMES = times_from_rows(
    [
        (1 << 10, {Algorithm.ONE_SHOT: 5.0, Algorithm.TWO_SHOT: 8.0}),
        (1 << 20, {Algorithm.ONE_SHOT: 50.0, Algorithm.TWO_SHOT: 30.0}),
    ],
    [
        (1 << 20, {Way(Engine.PLAIN): 30.0, Way(Engine.BULK, 8): 31.0}),
        (1 << 24, {Way(Engine.PLAIN): 90.0, Way(Engine.BULK, 8): 80.0}),
    ],
    [
        (1 << 10, {Way(Engine.PLAIN): 7.0, Way(Engine.PUSH): 5.0}),
        (1 << 20, {Way(Engine.PLAIN): 50.0}),
    ],
)


def test_kept_times_pick_what_the_measured_ones_picked():
    found = unpack_times(pack_times("a", TIMES), "a")
    assert found is not None
    assert found == TIMES
    assert found.way(Algorithm.TWO_SHOT, 1 << 24) == Way(Engine.BULK, 8)
    assert found.way(Algorithm.ONE_SHOT, 1 << 11) == Way(Engine.PUSH)
    assert found.few_sms == 8


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1}, {"key": "b"}, {"sizes_bytes": []}, {"sizes_bytes": [1 << 20, 1 << 10]}, {"sizes_bytes": [0, 1]},
        {"times_us": {}}, {"times_us": {"one_shot": [1.0]}}, {"times_us": {"two_shot": [1.0, 0.0]}},
        {"times_us": {"three_shot": [1.0, 2.0]}}, {"ways": [[0, "plain", 0]]}, {"ways": [[1, "plain", 33]]},
        {"ways": [[1, "other", 0]]}, {"ways": [[1, "push", 0]]}, {"ways": [[1, "multimem", 0]]},
        {"one_shot_ways": [[1, "bulk", 0]]}, {"one_shot_ways": [[0, "push", 0]]}, {"few_sms": -1}, {"few_sms": 33},
        {"more": 1},
    ],
)  # fmt: skip
def test_another_groups_file_or_one_that_makes_no_sense_counts_as_none(change):
    assert unpack_times(json.dumps(json.loads(pack_times("a", TIMES)) | change).encode(), "a") is None


def test_bytes_that_are_no_file_count_as_none():
    assert unpack_times(b"", "a") is None
    assert unpack_times(pack_times("a", TIMES)[:-9], "a") is None
