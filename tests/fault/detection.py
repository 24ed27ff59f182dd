"""When a cluster learnt of a death, and of each request that it cost: by the logs of its own processes."""

import json
import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from deploy.local.config import paths_of

# what a service says when a peer's connection ended, its heartbeats stopped or its answer was late, and of whom
WORKERS = {"prefill-0", "decode-0"}
LEARNT = {
    "worker_link_down": WORKERS, "instance_dead": WORKERS, "member_silent": WORKERS,
    "scheduler_link_down": {"scheduler"}, "scheduler_down": {"scheduler"},
    "mempool_lost": {"mempool"},
    "prompt_tree_given_up": {"redis"}, "prompt_tree_beat_failed": {"redis"}, "prompt_tree_publish_failed": {"redis"},
    "journal_failed": {"redis"},
}  # fmt: skip
LOST = {"retry", "attempt_failed"}  # the gateway about one request


class LogTail:
    """What the processes of one home write to their logs from begin() on."""

    def __init__(self) -> None:
        self._starts: dict[Path, int] = {}

    def begin(self, home: Path) -> None:
        """From now on."""
        self._starts = {path: path.stat().st_size for path in paths_of(home).logs.glob("*.log")}

    def learnt_s(self, victim: str, killed_s: float) -> dict[str, float]:
        """Who learnt that the victim was gone, and when (seconds since 1970), the first time each.

        What was said before the kill, or of another process, tells nothing of this death: on a busy machine a
        look-up in Redis is late, and given up, at any time.
        """
        from_s = math.floor(killed_s * 1000) / 1000  # logs cut their times to milliseconds
        found: dict[str, float] = {}
        for source, stamp_s, event in self._lines():
            tells = victim in LEARNT.get(event.get("event", ""), ()) or event.get("exited") == victim
            if tells and stamp_s >= from_s:
                found.setdefault(source, stamp_s)
        return found

    def losses_s(self) -> dict[str, list[float]]:
        """By request: when the gateway learnt that what it had under way was lost."""
        found: dict[str, list[float]] = {}
        for _, stamp_s, event in self._lines():
            if event.get("event") in LOST and "request" in event:
                found.setdefault(event["request"], []).append(stamp_s)
        return found

    def _lines(self) -> Iterator[tuple[str, float, dict[str, Any]]]:
        for path, start in self._starts.items():
            with path.open("rb") as log:
                log.seek(start if path.stat().st_size >= start else 0)
                for raw in log:
                    line = raw.decode(errors="replace")
                    try:
                        event = json.loads(line) if line.startswith("{") else notice(line)
                        yield path.stem, datetime.fromisoformat(event["time"]).timestamp(), event
                    except (ValueError, KeyError):
                        continue  # a library's line, or the half of one


def notice(line: str) -> dict[str, Any]:
    """A line of the supervisor, `TIME exited NAME: why`, as an event."""
    stamp, what, name = line.split(" ", 3)[:3]
    return {"time": stamp, what: name.rstrip(":")}
