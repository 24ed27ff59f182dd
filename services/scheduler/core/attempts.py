"""Attempts that were placed and have not ended. No I/O.

An end may never be told: its gateway was killed, or it was lost with a connection. So what was placed for a gateway
that is gone is forgotten, and so is what is older than any request becomes. An end that is told after that is of an
unknown attempt, and changes nothing.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

from msgspec import Struct

from services.scheduler.core.request import AttemptKey
from shared.ids import InstanceId

FORGET_AT_ONCE = 1_000  # in one tick: a few milliseconds


class OpenAttempt(Struct, frozen=True, gc=False):
    """Where, for whom and since when."""

    instances: Sequence[InstanceId]
    gateway: str  # "": not known
    placed_at_ms: int


@dataclass(slots=True)
class OpenAttempts:
    """Bounded: `most`. In order of placement, which is that of age.

    Args: forget_ms: older ones are overdue.
    """

    most: int
    forget_ms: int
    _open: dict[AttemptKey, OpenAttempt] = field(default_factory=dict)
    _orphans: deque[AttemptKey] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self._open)

    def add(self, key: AttemptKey, opened: OpenAttempt) -> AttemptKey | None:
        """A key that is not open. Returns the oldest one where there are too many now."""
        assert key not in self._open
        self._open[key] = opened
        return next(iter(self._open)) if len(self._open) > self.most else None

    def pop(self, key: AttemptKey) -> Sequence[InstanceId]:
        """It has ended: where it was. Empty for one that is not open."""
        found = self._open.pop(key, None)
        return found.instances if found is not None else ()

    def overdue(self, gone: Iterable[str], *, now_ms: int) -> list[AttemptKey]:
        """Keys to end now; some may have ended by themselves. `gone`: gateways that are, since the last call.

        Cost: O(those), at most FORGET_AT_ONCE; O(open) where a gateway is gone.
        """
        if names := frozenset(gone):
            self._orphans.extend(key for key, opened in self._open.items() if opened.gateway in names)
        old = takewhile(lambda item: item[1].placed_at_ms + self.forget_ms <= now_ms, self._open.items())
        keys = [key for key, _ in islice(old, FORGET_AT_ONCE)]
        while self._orphans and len(keys) < FORGET_AT_ONCE:
            keys.append(self._orphans.popleft())
        return keys
