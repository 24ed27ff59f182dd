"""When a cluster learnt of a death, and of each request that it cost: by the logs of its own processes."""

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from deploy.local.config import paths_of

# what a service says when a peer's connection ended or its heartbeats stopped
LEARNT = {
    "worker_link_down", "scheduler_link_down", "scheduler_down", "mempool_lost", "instance_dead", "member_silent",
    "prompt_tree_given_up", "prompt_tree_beat_failed", "prompt_tree_publish_failed", "journal_failed",
}  # fmt: skip
LOST = {"retry", "attempt_failed"}  # the gateway about one request


class LogTail:
    """What the processes of one home write to their logs from begin() on."""

    def __init__(self) -> None:
        self._starts: dict[Path, int] = {}

    def begin(self, home: Path) -> None:
        """From now on."""
        self._starts = {path: path.stat().st_size for path in paths_of(home).logs.glob("*.log")}

    def learnt_s(self, victim: str) -> dict[str, float]:
        """Who learnt that somebody was gone, and when (seconds since 1970), the first time each."""
        found: dict[str, float] = {}
        for source, stamp_s, event in self._lines():
            if event.get("event") in LEARNT or event.get("exited") == victim:
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
