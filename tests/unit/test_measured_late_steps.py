"""A late step is written down with what its thread, and who shares its processor, did meanwhile."""

import gc
import json

from loadtest.core_steps import late_steps
from shared.engine.measured_late_steps import USUAL_STEPS, Clocks, LateSteps, Spent

CALM = Spent(2.0, 3.0, 0.0, 0.0, 0)
LATE = Spent(2.0, 9.5, 0.5, 3.0, 2)


def noted(intervals, spent):
    """What is late of steps of these lengths."""
    total = [Spent(0, 0, 0, 0, 0)]
    for each in spent:
        total.append(Spent(*(a + b for a, b in zip(total[-1], each, strict=True))))
    clock = iter(total[1:])
    late = LateSteps(lambda: next(clock))
    for number, interval_ms in enumerate(intervals):
        late.note(float(number), interval_ms, 256, 256, 0.7)
    return [json.loads(line) for line in late.take()], late


def test_a_late_step_says_who_ran_meanwhile_and_its_neighbours_say_nothing():
    calm = [13.0] * USUAL_STEPS
    rows, late = noted([*calm, 16.5, 13.1], [CALM] * USUAL_STEPS + [LATE, CALM])
    (row,) = rows
    assert (row["interval_ms"], row["usual_ms"], row["update_ms"]) == (16.5, 13.0, 0.7)
    assert (row["thread_ms"], row["process_ms"], row["waited_ms"], row["collector_ms"]) == (
        2.0,
        9.5,
        0.5,
        3.0,
    )
    assert row["switches_count"] == 2
    assert late.take() == []


def test_nothing_is_late_before_it_is_known_what_is_usual():
    rows, _ = noted([5.0, 50.0, 5.0], [CALM] * 3)
    assert rows == []


def test_the_clocks_see_the_collector():
    clocks = Clocks()
    before = clocks.now()
    gc.collect()
    after = clocks.now()
    gc.callbacks.remove(clocks._on_collector)
    assert after.collector > before.collector
    assert after.thread > before.thread


def test_a_result_has_the_latest_steps_of_full_batches_in_order(tmp_path):
    steps = tmp_path / "engine.steps"
    rows = [
        {"end_s": end_s, "requests": requests, "usual_ms": 13.0, "interval_ms": interval_ms}
        for end_s, requests, interval_ms in ((1.0, 4, 15.0), (2.0, 3, 90.0), (3.0, 4, 14.5), (4.0, 4, 20.0))
    ]
    steps.with_suffix(".late").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["end_s"] for row in late_steps(steps, 4, most=2)] == [1.0, 4.0]
    assert late_steps(tmp_path / "none.steps", 4) == []
