"""Messages to the processes of this host, in order. A lease waits for a look at its pages, the rest behind it."""

import contextlib
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec

from services.mempool.checks import Checks
from services.mempool.core.actions import Send
from services.mempool.spaces import Spaces
from shared.errors import Overloaded, PeerGone, ResourceError
from shared.ids import Epoch, LeaseId
from shared.kv.words import u32_list, u64_list
from shared.observe.log import get_logger
from shared.observe.trace import Span, start_span
from shared.transport.unix_channel import UnixConnection
from shared.transport.unix_socket import OutOfDescriptors, close_fds
from shared.wire import mempool as wire
from shared.wire.mempool_callers import CallerAttached

log = get_logger("mempool")

Connection = UnixConnection[wire.FromMempool]
_PAGE, _EPOCH = 4, 8  # bytes of each in Acquired


class Outbox:
    """Of the connections of one mempool, which `connections` has by number. One loop.

    Args: max_spans: of traced calls that are being answered.
    """

    def __init__(self, spaces: Spaces, checks: Checks, max_spans: int) -> None:
        self.connections: dict[int, Connection] = {}
        self._spaces, self._checks, self._max_spans = spaces, checks, max_spans
        self._held: dict[int, deque[Callable[[], None]]] = {}  # behind a lease that is being looked at
        self._spans: dict[tuple[int, int], Span] = {}  # (connection, call_id) of traced Acquire calls

    def forget(self, number: int) -> None:
        """The connection ended."""
        self.connections.pop(number, None)
        for key in [key for key in self._spans if key[0] == number]:
            self._spans.pop(key).fail("the caller left")

    # -- sending ------------------------------------------------------------------------------------

    def send(self, action: Send) -> None:
        """See Send; dropped when the connection has ended."""
        if action.connection in self._held:
            self._held[action.connection].append(partial(self.send, action))
            return
        message = action.message
        if isinstance(message, wire.Acquired) and message.num_blocks:
            looks = self._checks.of_lease(action.space, u32_list(message.pages), u64_list(message.epochs))
            if looks and action.connection in self.connections:
                self._held[action.connection] = deque()
                self._checks.look(looks, partial(self._looked, action, message))
                return
        self._send(action, message)

    def _looked(self, action: Send, message: wire.Acquired, wrong: int | None) -> None:
        """From a page on that is wrong, the reader gets nothing; what it has not got is pinned until it releases."""
        if wrong == 0:
            self._checks.end_lease(action.space, message.lease_id)
            message = wire.Acquired(
                call_id=message.call_id, lease_id=LeaseId(""), fencing_token=Epoch(0), num_blocks=0
            )
        elif wrong is not None:
            message = msgspec.structs.replace(
                message, num_blocks=wrong, pages=message.pages[: wrong * _PAGE],
                epochs=message.epochs[: wrong * _EPOCH], blocks_peer=min(wrong, message.blocks_peer),
                blocks_dram=min(wrong, message.blocks_dram), blocks_remote=min(wrong, message.blocks_remote),
            )  # fmt: skip
        self._send(action, message)
        waiting = self._held.pop(action.connection)
        while waiting:
            waiting.popleft()()
            if action.connection in self._held:  # another lease: the rest waits behind it
                self._held[action.connection].extend(waiting)
                return

    def _send(self, action: Send, message: wire.FromMempool) -> None:
        connection = self.connections.get(action.connection)
        if connection is None:
            return
        try:
            fds = self._spaces.descriptors(action.space, action.reads_only) if action.with_memory else []
        except OutOfDescriptors as error:
            self._cannot(action.connection, message, error)
            return
        if self._spans and isinstance(message, wire.Acquired | wire.CallFailed):
            self._end_span(action.connection, message)
        self._hand_over(action.connection, message, fds)

    def give(self, number: int, make: Callable[[], tuple[wire.FromMempool, list[int]]]) -> None:
        """What send_fds() takes, made now. Who cannot have the descriptors loses its connection."""
        try:
            message, fds = make()
        except ResourceError as error:  # a limit, or a driver that exports nothing
            self._cannot(number, None, error)
            return
        self.send_fds(number, message, fds)

    def send_fds(self, number: int, message: wire.FromMempool, fds: list[int]) -> None:
        """With descriptors, which are closed here."""
        if number in self._held:
            self._held[number].append(partial(self._hand_over, number, message, fds))
        else:
            self._hand_over(number, message, fds)

    def _hand_over(self, number: int, message: wire.FromMempool, fds: list[int]) -> None:
        connection = self.connections.get(number)
        try:
            if connection is not None:
                connection.send(message, fds=fds)
        except (PeerGone, Overloaded) as error:
            log.warning("peer_unreachable", connection=number, code=error.code)
            self.connections[number].close()
        except OutOfDescriptors as error:
            self._cannot(number, message, error)
        finally:
            close_fds(fds)

    def _cannot(self, number: int, message: wire.FromMempool | None, error: ResourceError) -> None:
        """Without its descriptors a message is of no use: whoever waits for it comes again, if it is told in time."""
        connection = self.connections.get(number)
        log.error("descriptors_lacking", connection=number, code=error.code, reason=error.message)
        if connection is None:
            return
        if isinstance(message, wire.Attached | CallerAttached):
            with contextlib.suppress(PeerGone, Overloaded):
                connection.send(wire.AttachRefused(code=error.code, reason=error.message))
        connection.close()

    # -- traces -------------------------------------------------------------------------------------

    def trace(self, number: int, call: wire.Acquire) -> None:
        """A span until the call is answered."""
        attributes = {"blocks.asked": len(call.hashes) // 32, "handoff_id": call.handoff_id}
        span = start_span("mempool.acquire", parent=call.traceparent, attributes=attributes)
        if span.recording and len(self._spans) < self._max_spans:
            self._spans[number, call.call_id] = span

    def _end_span(self, number: int, message: wire.Acquired | wire.CallFailed) -> None:
        span = self._spans.pop((number, message.call_id), None)
        if span is None:
            return
        if isinstance(message, wire.Acquired):
            span.set("blocks.pinned", message.num_blocks)
        else:
            span.fail(message.reason)
        span.end()
