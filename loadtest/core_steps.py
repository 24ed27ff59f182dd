"""Steps that shared/engine/measured.py wrote: which of them count, and what the driver was asked for meanwhile."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Step(NamedTuple):
    """A step between two moments in which all requests, and nothing else, decoded; calls are those made in it."""

    interval_ms: float
    inline_calls: int
    background_calls: int


def decode_steps(path: Path, begin_s: float, end_s: float, num_requests: int) -> list[float]:
    """Intervals in ms of such steps."""
    return [step.interval_ms for step in _decode(path, begin_s, end_s, num_requests)]


def driver_calls(path: Path, begin_s: float, end_s: float, num_requests: int) -> dict[str, int]:
    """Calls of CUDA's virtual memory in such steps, by who waits for them; `before`: until then."""
    found = list(_decode(path, begin_s, end_s, num_requests))
    before = [line.split() for line in _lines(path) if float(line.split()[0]) <= begin_s]
    return {
        "steps": len(found),
        "inline": sum(step.inline_calls for step in found),
        "background": sum(step.background_calls for step in found),
        "before": int(before[-1][4]) if before else 0,
    }


def late_steps(path: Path, num_requests: int, most: int = 24) -> list[dict[str, Any]]:
    """Rows of shared/engine/measured_late_steps.py of steps with so many requests, the latest ones, in order."""
    rows = [json.loads(line) for line in _lines(path.with_suffix(".late"))]
    mine = [row for row in rows if row["requests"] == num_requests]
    worst = sorted(mine, key=lambda row: row["usual_ms"] - row["interval_ms"])[:most]
    return sorted(worst, key=lambda row: row["end_s"])


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _decode(path: Path, begin_s: float, end_s: float, num_requests: int) -> Iterator[Step]:
    was_decode = False
    last = (0, 0)
    for line in _lines(path):
        end, interval_ms, requests, tokens, inline, background = line.split()
        is_decode = int(requests) == int(tokens) == num_requests
        now = (int(inline), int(background))
        if is_decode and was_decode and begin_s < float(end) < end_s:
            yield Step(float(interval_ms), now[0] - last[0], now[1] - last[1])
        was_decode, last = is_decode, now
