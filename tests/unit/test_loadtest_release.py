"""bench_release: figures come from samples, the watcher's course says when memory was seen."""

import pytest

from loadtest import bench_release
from loadtest.results import check_metrics

GIB = 1 << 30


def sample(number: int, seconds: float, steps: list[float]) -> dict:
    return {
        "round": number, "is_pressed": True, "regain_s": 12.0, "regained_s": 12.5,
        "pressed_s": 10.0, "answered_s": 10.0 + seconds,
        "begin_s": 8.0, "released_bytes": 32 * GIB, "regained_bytes": 32 * GIB, "first_s": 10.1,
        "seen_s": 10.0 + seconds, "steps_before_ms": [10.0] * 99 + [20.0], "steps_during_ms": steps,
        "steps_after_ms": [10.0], "steps_regain_ms": [],
    }  # fmt: skip


def calm(number: int, steps: list[float]) -> dict:
    """A round in which nobody pressed; it has no bytes."""
    kept = ("round", "begin_s", "pressed_s", "answered_s", "regain_s", "regained_s", "steps_before_ms")
    one = sample(number, 0.5, steps)
    return {key: one[key] for key in kept} | {
        "is_pressed": False, "steps_during_ms": steps, "steps_after_ms": [12.5], "steps_regain_ms": [],
    }  # fmt: skip


def test_rates_are_medians_and_steps_of_all_rounds_are_compared_with_rounds_without_a_press():
    rounds = [sample(0, 0.5, [10.0, 11.0]), calm(0, [10.0]), sample(1, 0.8, [10.0, 22.0]), calm(1, [11.0])]
    found = bench_release.metrics_from_samples(rounds)
    assert found["release_gib_per_s"] == pytest.approx(40.0)
    assert found["release_slowest_gib_per_s"] == pytest.approx(40.0)
    assert found["release_before_step_p99_ratio"] == 1.0
    assert found["release_step_p99_ratio"] == pytest.approx(2.0)
    assert found["release_after_step_p50_ratio"] == pytest.approx(0.8)
    assert "regain_step_p99_ratio" not in found
    assert check_metrics(found) == []


def test_memory_is_seen_when_nearly_all_of_it_is_free_to_another_process():
    one = sample(0, 0.5, [])
    course = ["9.0 100", "10.1 1000000100", f"10.4 {int(31.9 * GIB)}", f"10.6 {33 * GIB}", "13.0 100"]
    bench_release.add_seen(course, [one])
    assert (one["first_s"], one["seen_s"]) == (10.1, 10.4)
    assert one["seen"][0] == [100.0, 1_000_000_000]
    bench_release.add_seen(course[:2], [one])
    assert one["seen_s"] == one["regain_s"], "never seen: as slow as could be looked at"
