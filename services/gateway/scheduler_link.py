"""The gateway's line to the scheduler: placements at once, ends of attempts along with the next placement."""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable

from services.gateway import metrics
from shared.errors import Overloaded, PeerGone, PeerProtocolError
from shared.ids import RequestId
from shared.observe.log import get_logger
from shared.observe.malformed import MalformedLog
from shared.transport.zmq_channel import DealerLink
from shared.wire.placement import (
    FROM_SCHEDULER,
    TO_SCHEDULER,
    Ended,
    GatewayHello,
    GatewayToScheduler,
    Place,
    SchedulerToGateway,
)

ENDED_WAIT_MS = 5  # longest wait of an end for a placement that it can travel with
MAX_ENDED = 65_536  # ends that wait for a link; the scheduler forgets older ones by their age

_log = get_logger("gateway.scheduler")


class SchedulerLink:
    """An end needs no answer, so under load it does not wake the scheduler by itself.

    Ends that cannot be sent wait until they can: a scheduler that only stood still has forgotten nothing, and one that
    was started anew ignores them.

    Args: on_message: a placement's answer; on_down: placements without an answer are lost; request_deadline_ms: the
    gateway's, so that the scheduler does not forget what still runs.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        on_message: Callable[[int, SchedulerToGateway, list[bytes]], None],
        on_down: Callable[[], None],
        request_deadline_ms: int = 0,
    ) -> None:
        self._link: DealerLink[GatewayToScheduler, SchedulerToGateway] = DealerLink(
            endpoint,
            out=TO_SCHEDULER,
            into=FROM_SCHEDULER,
            on_message=on_message,
            on_malformed=self._malformed,
            on_down=on_down,
            on_up=self._up,
        )
        self._malformed_log = MalformedLog(_log, metrics.MALFORMED.labels("scheduler"))
        self._hello = GatewayHello(gateway=secrets.token_hex(8), request_deadline_ms=request_deadline_ms)
        self._ended: deque[Ended] = deque(maxlen=MAX_ENDED)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def up(self) -> bool:
        """The scheduler answers."""
        return self._link.up

    def _malformed(self, error: PeerProtocolError) -> None:
        self._malformed_log.note(f"the scheduler at {self._link.endpoint}", error)

    def open(self) -> None:
        """Start connecting. Raises: SettingsError on an endpoint that cannot be."""
        self._link.open()

    def place(self, message: Place) -> None:
        """Ask for a placement, after the ends that wait. Raises: PeerGone, Overloaded."""
        if self._ended:
            self._send_ended(more=True)
        self._link.send(message)

    def ended(self, request_id: RequestId, attempt: int) -> None:
        """The attempt has left its instances."""
        self._ended.append(Ended(request_id=request_id, attempt=attempt))
        self._send_soon()

    def close(self) -> None:
        """Send what waits, drop the connection. Harmless when closed already."""
        self._send_ended()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._link.close()

    def _up(self) -> None:
        self._link.send(self._hello)  # a connection's first message finds room
        self._send_ended()

    def _send_soon(self) -> None:
        if (
            self._timer is None and self._link.up
        ):  # it may find nothing left to do: cheaper than one for each end
            self._timer = asyncio.get_running_loop().call_later(ENDED_WAIT_MS / 1000, self._waited)

    def _waited(self) -> None:
        self._timer = None
        self._send_ended()

    def _send_ended(self, *, more: bool = False) -> None:
        """What the link takes; the rest goes when it is up again, or when its queue is shorter."""
        try:
            while self._ended:
                self._link.send(self._ended[0], more=more)
                self._ended.popleft()
        except PeerGone:
            return
        except Overloaded:
            self._send_soon()
