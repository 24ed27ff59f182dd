"""One ZeroMQ link per worker endpoint, with the calls that depend on it."""

import asyncio
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from services.gateway import metrics
from shared.errors import Overloaded, PeerGone, PeerProtocolError, SettingsError
from shared.ids import Epoch
from shared.observe.log import get_logger
from shared.observe.malformed import MalformedLog
from shared.transport.zmq_channel import DealerLink
from shared.wire.requests import TO_GATEWAY, TO_WORKER, GatewayToWorker, WorkerToGateway

FIRST_CONNECT_MS = 1_000  # how long messages wait for a process that this link never reached
MAX_PENDING = 1_024

_log = get_logger("gateway.links")
C = TypeVar("C", bound=Hashable)


class WorkerLink(Generic[C]):
    """Sends to one worker; knows which calls are lost when it goes.

    Args:
        silent_ms: a worker that answers no heartbeat for so long is lost.
        on_down: gets the endpoint and the calls that were registered; runs on the loop.
        on_malformed: the same: the worker said something that is no message, of any of them.
    """

    def __init__(
        self,
        endpoint: str,
        silent_ms: int,
        *,
        on_message: Callable[[int, WorkerToGateway, list[bytes]], None],
        on_down: Callable[[str, list[C]], None],
        on_malformed: Callable[[str, list[C]], None],
    ) -> None:
        self.endpoint = endpoint
        self.calls: set[C] = set()
        self._on_down = on_down
        self._on_malformed = on_malformed
        self._malformed_log = MalformedLog(_log, metrics.MALFORMED.labels("worker"))
        self._pending: list[tuple[GatewayToWorker, tuple[bytes, ...]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._epoch = Epoch(-1)  # the largest that was named to this link
        self.reached = False  # the process of that epoch, as far as is known
        self._link: DealerLink[GatewayToWorker, WorkerToGateway] = DealerLink(
            endpoint,
            out=TO_WORKER,
            into=TO_GATEWAY,
            on_message=on_message,
            on_malformed=self._malformed,
            on_up=self._up,
            on_down=self._down,
            silent_ms=silent_ms,
        )
        try:
            self._link.open()
        except SettingsError as error:  # of who named it: a worker that cannot be reached, and nobody's end
            _log.error("worker_endpoint_wrong", endpoint=endpoint, error=error.message)

    @property
    def up(self) -> bool:
        """The worker answered the handshake and has not been lost since."""
        return self._link.up

    def expect(self, epoch: Epoch) -> None:
        """The worker serves under this epoch. A new one listens already: a link that was down is made again."""
        if epoch > self._epoch:
            self._epoch = epoch
            if not self._link.up:
                self.reached = False
                self._link.dial_now()

    def send(self, message: GatewayToWorker, raw: tuple[bytes, ...] = ()) -> None:
        """Queue a message; a link that is still connecting keeps it for FIRST_CONNECT_MS.

        Raises: PeerGone when the worker is gone; Overloaded when the queue is full.
        """
        if self._link.up or self.reached:
            self._link.send(message, raw)
            return
        if len(self._pending) >= MAX_PENDING:
            raise Overloaded(f"the queue to {self.endpoint} is full")
        self._pending.append((message, raw))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FIRST_CONNECT_MS / 1000, self._not_up)

    def close(self) -> None:
        """Drop the connection; registered calls learn that it is down."""
        self._link.close()
        if not self.reached:
            self._not_up()

    def _up(self) -> None:
        self.reached = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        pending, self._pending = self._pending, []
        for message, raw in pending:
            try:
                self._link.send(message, raw)
            except (PeerGone, Overloaded):
                self._lose()
                return

    def _malformed(self, error: PeerProtocolError) -> None:
        self._malformed_log.note(f"the worker at {self.endpoint}", error)
        self._on_malformed(self.endpoint, list(self.calls))

    def _down(self) -> None:
        _log.warning("worker_link_down", endpoint=self.endpoint, calls=len(self.calls))
        self._lose()

    def _not_up(self) -> None:
        self._timer = None
        if self._pending or self.calls:
            _log.warning("worker_not_reachable", endpoint=self.endpoint, calls=len(self.calls))
        self._pending = []
        self._lose()

    def _lose(self) -> None:
        lost = list(self.calls)
        if lost:
            self._on_down(self.endpoint, lost)
