"""When a request's slot, or its pages, became another's: noted on vLLM's request, told with its last output."""

import time
from typing import Any

MAX_TIMES = 64  # of one request; later ones are counted elsewhere (times_parked, num_preempted) and not shown


def note_preempted(request: Any) -> None:
    """Now."""
    times = request.__dict__.setdefault("quire_preempted", [])
    if len(times) < MAX_TIMES:
        times.append(time.time_ns())


def preempted_ns(request: Any) -> list[int]:
    """Since the epoch, in order."""
    return list(request.__dict__.get("quire_preempted", ()))
