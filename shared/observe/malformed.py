"""Messages that are no messages: of a peer of another version, as a rule. Who sends them is said with the reason."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shared.errors import PeerProtocolError

if TYPE_CHECKING:
    from prometheus_client import Counter

SAID_AGAIN_S = 10.0
MAX_SENDERS = 64  # anybody may connect


class MalformedLog:
    """Of one end. Bounded: the last MAX_SENDERS.

    Args: log: of its component; counter: of such messages, where it is not counted elsewhere; clock: seconds.
    """

    def __init__(
        self, log: Any, counter: "Counter | None" = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._counter = counter
        self._clock = clock
        self._of: dict[str, tuple[float, int]] = {}  # sender: when it was said, messages since

    def note(self, sender: str, error: PeerProtocolError) -> None:
        """A warning, unless this sender's last one is SAID_AGAIN_S old at most: then the next one counts it."""
        if self._counter is not None:
            self._counter.inc()
        now_s = self._clock()
        said_s, num_unsaid = self._of.pop(sender, (-SAID_AGAIN_S, 0))
        if is_due := now_s - said_s >= SAID_AGAIN_S:
            self._log.warning(
                "malformed_message", sender=sender, error=error.message, num_since=num_unsaid + 1
            )
        self._of[sender] = (now_s, 0) if is_due else (said_s, num_unsaid + 1)
        if len(self._of) > MAX_SENDERS:
            del self._of[next(iter(self._of))]
