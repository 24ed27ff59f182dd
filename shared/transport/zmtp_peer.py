"""One ZeroMQ connection on the event loop: handshake, heartbeats, messages in order, a bounded queue out.

libzmq does this on a thread of its own, so that every message wakes two threads more, on either side. Here
bytes go from the loop's callback to the socket and back: at 1,000 requests/s that was a fourth of the cluster's CPU
and half of the stations that wait for a core.
"""

import asyncio
from collections.abc import Callable
from typing import cast

from shared.errors import PeerGone, PeerProtocolError
from shared.transport import zmtp
from shared.wire.codec import MAX_BODY_BYTES, MAX_MESSAGE_BYTES, MAX_RAW_FRAMES

HEARTBEAT_INTERVAL_MS = 500
HEARTBEAT_TIMEOUT_MS = 1_500
HANDSHAKE_TIMEOUT_MS = 2_000
BATCH_MESSAGES = 256  # handled in one go, then other callbacks of the loop get their turn
WRITE_BUFFER_BYTES = 256 << 10  # in the transport; beyond, messages wait here and are counted
MAX_QUEUED_BYTES = 256 << 20
_MAX_FRAMES = 3 + MAX_RAW_FRAMES + 1  # one more than can be right, so that the codec refuses it
_PARTNERS = {b"DEALER": (b"ROUTER", b"DEALER"), b"ROUTER": (b"DEALER", b"ROUTER", b"REQ")}


class ZmtpPeer(asyncio.Protocol):
    """Callbacks run on the loop: on_up(peer) after the handshake, on_frames(peer, frames), on_lost(peer) once,
    also when the handshake failed. An exception of on_frames goes to the loop; the next messages follow. A peer that
    says nothing for silent_ms, not even the answer to a heartbeat, is lost.
    """

    def __init__(
        self,
        socket_type: bytes,
        *,
        high_water: int,
        on_up: Callable[["ZmtpPeer"], None],
        on_frames: Callable[["ZmtpPeer", list[bytes]], None],
        on_lost: Callable[["ZmtpPeer"], None],
        silent_ms: int = HEARTBEAT_TIMEOUT_MS,
    ) -> None:
        self.up = False
        self.identity = b""  # given by a router
        self._socket_type = socket_type
        self._high_water = high_water
        self._on_up = on_up
        self._on_frames = on_frames
        self._on_lost = on_lost
        self._silent_ms = silent_ms
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._greeting: bytes | None = b""  # None: it was right
        self._reader = zmtp.Reader(
            max_frame_bytes=MAX_BODY_BYTES, max_message_bytes=MAX_MESSAGE_BYTES, max_frames=_MAX_FRAMES
        )
        self._timer: asyncio.TimerHandle | None = None
        self._heard_s = 0.0
        self._beat_s = 0.0
        self._resuming = False  # a full batch was handled, reading pauses until the rest is
        self._closed = False
        self._out: list[bytes] = []
        self._num_out = 0  # messages in it
        self._out_bytes = 0
        self._turning = False  # the end of this turn is awaited
        self._wrote = False  # in this turn
        self._paused = False  # the transport's buffer is full

    @property
    def remote(self) -> str:
        """HOST:PORT of the other end; "": of a unix socket, or there is none yet."""
        name = self._transport.get_extra_info("peername") if self._transport is not None else None
        return f"{name[0]}:{name[1]}" if isinstance(name, tuple) and len(name) >= 2 else ""

    # -- out ----------------------------------------------------------------------------------------

    def send(self, frames: list[bytes], *, more: bool = False) -> bool:
        """Queue a message. False: the queue is full.

        The first of a turn of the loop is written at once, others of that turn in one write at its end. With
        `more`, another one follows in this turn that it may leave with.

        Raises: PeerGone when the connection has ended; on_lost may follow in the next turn only.
        """
        if self._is_gone():
            raise PeerGone("the connection has ended")
        if self._num_out >= self._high_water or self._out_bytes > MAX_QUEUED_BYTES:
            return False
        pieces = zmtp.encode(frames)
        self._out += pieces
        self._num_out += 1
        if self._paused:
            self._out_bytes += sum(map(len, pieces))
            return True
        if not self._wrote and not more:
            self._write()
            self._wrote = True
        if not self._turning:
            self._turning = True
            self._loop.call_soon(self._end_turn)
        return True

    def _end_turn(self) -> None:
        self._turning = self._wrote = False
        self._write()

    def _write(self) -> None:
        if self._out and not self._paused and self._transport is not None and not self._closed:
            data = b"".join(self._out)
            self._out = []
            self._num_out = self._out_bytes = 0
            self._put(data)

    def _put(self, data: bytes) -> None:
        """Write, unless nothing can be written any more: uvloop's transports raise RuntimeError then."""
        assert self._transport is not None
        if not self._is_gone():
            self._transport.write(data)

    def _is_gone(self) -> bool:
        """The transport is closing. Whoever closed it may have told nobody, as uvloop does where a dial is given up:
        the connection is then lost in the next turn, for a sender expects no on_lost inside its send().
        """
        if self._closed or self._transport is None or not self._transport.is_closing():
            return self._closed
        self._loop.call_soon(self.close)
        return True

    def pause_writing(self) -> None:
        """The peer does not read as fast as this side writes."""
        self._paused = True

    def resume_writing(self) -> None:
        """It has caught up."""
        self._paused = False
        self._write()

    # -- in -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        if self._closed:  # whoever dialled has given it up
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._put(zmtp.GREETING)
        self._timer = self._loop.call_later(HANDSHAKE_TIMEOUT_MS / 1000, self.close)

    def data_received(self, data: bytes) -> None:
        """Messages, or a part of one."""
        self._heard_s = self._loop.time()
        if self._greeting is not None:
            data = self._greet(self._greeting + data)
            if not data:
                return
        self._reader.feed(data)
        if not self._resuming:
            self._drain(BATCH_MESSAGES)

    def _greet(self, data: bytes) -> bytes:
        """What follows a greeting that is whole and right."""
        try:
            zmtp.check_greeting(data[: zmtp.GREETING_BYTES])
        except PeerProtocolError:
            self.close()
            return b""
        if len(data) < zmtp.GREETING_BYTES:
            self._greeting = data
            return b""
        self._greeting = None
        self._put(zmtp.ready(self._socket_type))
        return data[zmtp.GREETING_BYTES :]

    def _drain(self, most: int) -> None:
        """Handle what has come; after `most` messages the rest in the loop's next turn."""
        self._resuming = False
        read, handle = self._reader.next, self._on_frames
        for _ in range(most):
            if self._closed:  # a handler may close its own connection
                return
            try:
                found = read()
                if type(found) is not list:
                    if found is None:
                        return
                    self._command(cast(bytes, found))
                    continue
            except PeerProtocolError:
                self.close()
                return
            if not self.up:  # a message before READY
                self.close()
                return
            try:
                handle(self, found)
            except Exception as error:  # noqa: BLE001 - raised again where it does not break the connection
                self._loop.call_soon(_raise, error)
        self._resuming = True
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.pause_reading()
        self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        if self._resuming and not self._closed and self._transport is not None:
            self._drain(BATCH_MESSAGES)
            if not self._resuming and not self._is_gone():
                self._transport.resume_reading()

    def _command(self, command: bytes) -> None:
        if not self.up:
            if zmtp.socket_type_of(command) not in _PARTNERS[self._socket_type]:
                raise PeerProtocolError("a socket of the wrong kind")
            if self._is_gone():
                return
            self.up = True
            self._disarm()
            self._beat_s = self._loop.time()
            self._timer = self._loop.call_later(HEARTBEAT_INTERVAL_MS / 1000, self._beat)
            self._on_up(self)
        elif (pong := zmtp.pong_for(command)) is not None:
            self._send_command(pong)

    # -- life ---------------------------------------------------------------------------------------

    def _beat(self) -> None:
        now_s = self._loop.time()
        if now_s - self._beat_s > 2 * HEARTBEAT_INTERVAL_MS / 1000:
            self._heard_s = now_s  # this loop stood still: what the peer sent meanwhile is not read yet
        self._beat_s = now_s
        if now_s - self._heard_s >= self._silent_ms / 1000:
            self.close()
            return
        self._timer = self._loop.call_later(HEARTBEAT_INTERVAL_MS / 1000, self._beat)
        self._send_command(zmtp.ping(self._silent_ms))

    def _send_command(self, command: bytes) -> None:
        """Messages are only ever written whole, so a command may stand before those that wait."""
        if not self._paused and not self._closed:
            self._put(command)

    def connection_lost(self, exc: Exception | None) -> None:
        """The last whole messages still count."""
        if not self._closed:
            while self._resuming and not self._closed:
                self._drain(BATCH_MESSAGES)
            self.close()

    def finish(self) -> None:
        """Write what was sent in this turn of the loop, then close."""
        self._write()
        self.close()

    def close(self) -> None:
        """Drop the connection and what is queued. Harmless when closed already."""
        if self._closed:
            return
        self._closed = True
        self._disarm()
        if self._transport is not None:
            self._transport.abort()
        self._on_lost(self)
        self.up = False

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _raise(error: Exception) -> None:
    raise error
