"""Room for new connections: near the limit of open files those that wait for nothing are closed, the oldest first.

Who holds connections and asks nothing, which needs no key, would else take every descriptor: no probe was answered any
more, and who started the gateway would kill it with all its streams. What is under way is never cut for it.
"""

import asyncio
import resource
from collections.abc import Iterable

from services.gateway import metrics
from services.gateway.http_protocol import GatewayProtocol
from services.gateway.push import Limits

RESERVED_FDS = 256  # for workers, Redis, logs, and what comes between two looks
MOST = 16_384  # each is memory, too
LOOK_S = 0.02  # looking through all of them takes up to some milliseconds
AT_ONCE = 16  # this part of the limit, so that not every new one looks


def num_connections(max_files: int) -> int:
    """How many are kept, where a process may open so many files; resource.RLIM_INFINITY: any number."""
    if max_files == resource.RLIM_INFINITY:
        return MOST
    return min(MOST, max(max_files - RESERVED_FDS, max_files // 2))


class Connection(GatewayProtocol):
    """One that knows whether it can be spared."""

    looked_s = 0.0  # of the process, by its loop's clock

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._began_s = 0.0  # it, or its last request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """It is the newest, so the last to be closed."""
        super().connection_made(transport)
        self._began_s = now_s = self.loop.time()
        if len(self.connections) > Limits.connections and now_s - Connection.looked_s >= LOOK_S:
            Connection.looked_s = now_s
            make_room(each for each in self.connections if isinstance(each, Connection))

    def on_message_begin(self) -> None:
        """Parser callback."""
        self._began_s = self.loop.time()
        super().on_message_begin()

    @property
    def is_spare(self) -> bool:
        """No request has come but for a part of its head, and all answers have left."""
        return not (
            self.is_answering
            or self.pipeline
            or (self._in_body and not self._is_answered)
            or self.transport.get_write_buffer_size()
        )

    @property
    def quiet_since_s(self) -> float:
        """Since its last answer; before the first one since it began."""
        return self._idle_since_s or self._began_s


def make_room(connections: Iterable[Connection]) -> None:
    """Close some that can be spared where there are too many; those that are closing count no more."""
    living = [each for each in connections if not each.transport.is_closing()]
    too_many = len(living) - Limits.connections
    if too_many <= 0:
        return
    spare = sorted((each for each in living if each.is_spare), key=lambda each: each.quiet_since_s)
    for each in spare[: too_many + Limits.connections // AT_ONCE]:
        metrics.SPARED.inc()
        each.transport.close()
