"""Whom the scheduler refuses, for /status: on an instance that is refused nothing is placed. No I/O."""

from dataclasses import dataclass, field
from typing import Any

from shared.ids import Epoch, InstanceId

MAX_NAMES = 64  # anybody may say any
SHOWN_MS = 5_000  # who is refused comes again within 2 s
SAID_AGAIN_MS = 10_000


@dataclass(slots=True)
class _Refusal:
    at_ms: int
    said_ms: int
    epoch: Epoch
    reason: str


@dataclass(slots=True)
class Refusals:
    """The last one of each instance. Bounded: MAX_NAMES, the newest."""

    _of: dict[InstanceId, _Refusal] = field(default_factory=dict)

    def note(self, instance: InstanceId, epoch: Epoch, reason: str, *, now_ms: int) -> bool:
        """Whether it is worth a line in the log: not at every return of who is refused."""
        before = self._of.pop(instance, None)
        is_news = before is None or now_ms - before.said_ms >= SAID_AGAIN_MS
        said_ms = now_ms if before is None or is_news else before.said_ms
        self._of[instance] = _Refusal(now_ms, said_ms, epoch, reason)
        if len(self._of) > MAX_NAMES:
            del self._of[next(iter(self._of))]
        return is_news

    def lately(self, *, now_ms: int) -> list[dict[str, Any]]:
        """Those of the last SHOWN_MS."""
        return [
            {"instance": name, "epoch": one.epoch, "reason": one.reason, "ago_ms": now_ms - one.at_ms}
            for name, one in self._of.items()
            if now_ms - one.at_ms < SHOWN_MS
        ]
