"""For measurements only: what an engine core's thread, and who shares its processor, did in the steps that came late.

A step that is late and has no more of anything here than its neighbours was late on the device, or in its driver.
"""

import gc
import json
import resource
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

LATE_RATIO = 1.1  # of the usual step of the same kind
USUAL_STEPS = 32  # the last ones of a kind, whose median is usual
MOST_ROWS = 4_000  # in one file


class Spent(NamedTuple):
    """Until now, in ms: processor time of the thread and of the whole process, how long the thread was ready and did
    not run, and the collector's pauses; and how often the thread was put aside."""

    thread: float
    process: float
    waited: float
    collector: float
    switches: int


class Clocks:
    """Reads them for the thread that calls now(). One a process; the collector's pauses count from its making on."""

    def __init__(self) -> None:
        self._pause_ms = 0.0
        self._began_s = 0.0
        gc.callbacks.append(self._on_collector)

    def _on_collector(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._began_s = time.perf_counter()
        else:
            self._pause_ms += (time.perf_counter() - self._began_s) * 1e3

    def now(self) -> Spent:
        """Cost: 15 us."""
        switches = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
        return Spent(
            time.thread_time() * 1e3, time.process_time() * 1e3, _waited_ms(), self._pause_ms, switches
        )


def _waited_ms() -> float:
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e6
    except (OSError, ValueError, IndexError):
        return 0.0


class LateSteps:
    """Of one engine core. note() for every step, in order; take() what was late since the last time."""

    def __init__(self, now: Callable[[], Spent]) -> None:
        self._now = now
        self._last: Spent | None = None
        self._usual: dict[tuple[int, int], deque[float]] = {}
        self._rows: list[dict[str, Any]] = []
        self._num_rows = 0

    def note(self, end_s: float, interval_ms: float, requests: int, tokens: int, update_ms: float) -> None:
        """A step's output was taken in, which itself took update_ms."""
        last, now = self._last, self._now()
        self._last = now
        known = self._usual.setdefault((requests, tokens), deque(maxlen=USUAL_STEPS))
        usual_ms = sorted(known)[len(known) // 2] if known else 0.0
        known.append(interval_ms)
        if len(self._usual) > 2 * USUAL_STEPS:
            del self._usual[next(iter(self._usual))]
        if last is None or len(known) < USUAL_STEPS // 2 or interval_ms < LATE_RATIO * usual_ms:
            return
        if self._num_rows >= MOST_ROWS:
            return
        self._num_rows += 1
        took = {f"{name}_ms": getattr(now, name) - getattr(last, name) for name in Spent._fields[:-1]}
        times = {"interval_ms": interval_ms, "usual_ms": usual_ms, "update_ms": update_ms, **took}
        self._rows.append(
            {"end_s": round(end_s, 6), "requests": requests, "switches_count": now.switches - last.switches}
            | {name: round(value, 3) for name, value in times.items()}
        )

    def take(self) -> list[str]:
        """A line of JSON each."""
        rows, self._rows = self._rows, []
        return [json.dumps(row) + "\n" for row in rows]
