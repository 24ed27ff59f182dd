"""ZeroMQ ends of the control plane, driven by the running asyncio loop: DealerLink and RouterServer.

The receive path is one reader on the socket's descriptor that drains it without waiting; no task is made per
message. Sends never wait either: a full or lost link is an exception that the caller turns into its
answer. A peer that dies closes its TCP connection (noticed at once); one that freezes misses heartbeats
(noticed within 2 s).
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import zmq
import zmq.backend
from zmq.utils.monitor import parse_monitor_message

from shared.errors import Overloaded, PeerGone, PeerProtocolError, PeerTimeout, SettingsError
from shared.wire.codec import MAX_BODY_BYTES, MAX_RAW_FRAMES, Channel

HIGH_WATER_MESSAGES = 10_000
HEARTBEAT_INTERVAL_MS = 500
HEARTBEAT_TIMEOUT_MS = 1_500
HANDSHAKE_TIMEOUT_MS = 2_000
RECONNECT_MIN_MS = 50
RECONNECT_MAX_MS = 500
DRAIN_BATCH_MESSAGES = 256  # then other callbacks of the loop get their turn
_MAX_FRAMES = 3 + MAX_RAW_FRAMES
_Compiled = zmq.backend.Socket
_NOBLOCK, _NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS, _RCVMORE, _POLLIN = int(zmq.EVENTS), int(zmq.RCVMORE), int(zmq.POLLIN)

Out = TypeVar("Out")
In = TypeVar("In")


def shared_context() -> zmq.Context[zmq.Socket[bytes]]:
    """The process's one ZeroMQ context; a forked child gets its own."""
    return zmq.Context.instance()


def _new_socket(kind: int, high_water: int) -> zmq.Socket[bytes]:
    socket = shared_context().socket(kind)
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.SNDHWM, high_water),
        (zmq.RCVHWM, high_water),
        (zmq.MAXMSGSIZE, MAX_BODY_BYTES),
        (zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS),
        (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
        (zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS),
        (zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS),
    ):
        socket.setsockopt(option, value)
    return socket


def _send(socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
    """Queue a message. Raises: zmq.Again when its queue is full."""
    try:
        _send_now(socket, frames)
    except zmq.Again:
        # A send looks for news from ZeroMQ's own thread (the peer has read, or has just connected) only once
        # a millisecond; asking for EVENTS always does.
        socket.getsockopt(zmq.EVENTS)
        _send_now(socket, frames)


def _send_now(socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
    # pyzmq's compiled methods with plain integers: send_multipart() spends 2 us on enum flags and checks.
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        _Compiled.send(socket, frame, _NOBLOCK if index == last else _NOBLOCK_MORE)


def _receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    """One whole message. Raises: zmq.Again when none is there. Frames past the codec's bound are dropped."""
    frames = [_Compiled.recv(socket, _NOBLOCK)]
    while _Compiled.get(socket, _RCVMORE):
        frame = _Compiled.recv(socket, _NOBLOCK)
        if len(frames) <= _MAX_FRAMES + 1:  # one more than can be right, so that the codec refuses it
            frames.append(frame)
    return frames


class _Drain:
    """Calls `handle(frames)` for every message that a socket receives, a bounded batch at a time."""

    def __init__(self, socket: zmq.Socket[bytes], handle: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._handle = handle
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._scheduled = False  # a run or a look is due in this loop's next turn, or is going on
        self._stopped = False
        self._loop.add_reader(self._fd, self.run)
        self.check()

    def check(self) -> None:
        """After a send: look again. ZeroMQ's descriptor is edge triggered, the send may have eaten it.

        Once per turn of the loop, however many messages were sent in it: a look is a system call.
        """
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._scheduled = False
        if not self._stopped and int(_Compiled.get(self._socket, _EVENTS)) & _POLLIN:
            self.run()

    def run(self) -> None:
        self._scheduled = True  # what handlers send needs no look of its own: this goes on until Again
        try:
            for _ in range(DRAIN_BATCH_MESSAGES):
                if self._stopped:  # a handler may close its own socket
                    return
                try:
                    frames = _receive(self._socket)
                except zmq.Again:
                    self._scheduled = False
                    return
                self._handle(frames)
        except BaseException:
            self._loop.call_soon(self.run)  # a handler's bug must not leave the other messages behind
            raise
        self._loop.call_soon(self.run)

    def stop(self) -> None:
        self._stopped = True
        self._loop.remove_reader(self._fd)


class DealerLink(Generic[Out, In]):
    """One DEALER connected to one endpoint; it reconnects by itself for as long as it is open.

    Callbacks run on the loop and must not raise or wait: on_message(seq, message, raw), on_up(), on_down().
    Every on_up is followed by one on_down, also at close(). What was sent before an on_down may or may
    not have arrived; nothing of it is sent again.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        out: Channel[Out],
        into: Channel[In],
        on_message: Callable[[int, In, list[bytes]], None],
        on_down: Callable[[], None] | None = None,
        on_up: Callable[[], None] | None = None,
        high_water: int = HIGH_WATER_MESSAGES,
    ) -> None:
        self.endpoint = endpoint
        self.up = False
        self.num_malformed = 0
        self._out = out
        self._into = into
        self._on_message = on_message
        self._on_down = on_down
        self._on_up = on_up
        self._high_water = high_water
        self._seq = 0
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._drains: list[_Drain] = []
        self._was_up = asyncio.Event()

    def open(self) -> None:
        """Start connecting without waiting. Raises: SettingsError on an endpoint that cannot be."""
        if self._socket is not None:
            return
        socket = _new_socket(zmq.DEALER, self._high_water)
        # Nothing is queued for a peer that is not there: a message belongs to the process it was sent to.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MIN_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._socket, self._monitor = socket, monitor
        self._drains = [_Drain(monitor, self._handle_event), _Drain(socket, self._handle_frames)]
        try:
            socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise SettingsError(f"cannot connect to {self.endpoint!r}: {error}") from error

    async def connect(self, timeout_ms: int = 5_000) -> None:
        """Open, and wait for the peer. After a PeerTimeout the link stays open and goes on trying."""
        self.open()
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self._was_up.wait()
        except TimeoutError:
            raise PeerTimeout(f"no answer from {self.endpoint} within {timeout_ms} ms") from None

    def send(self, message: Out, raw: Sequence[bytes] = ()) -> int:
        """Queue one message and return its sequence number. Never waits.

        Raises: PeerGone when the link is down; Overloaded when its queue is full.
        """
        if self._socket is None or not self.up:
            raise PeerGone(f"{self.endpoint} is not connected")
        seq = self._seq
        try:
            _send(self._socket, self._out.pack(message, seq=seq, raw=raw))
        except zmq.Again:
            raise Overloaded(f"the queue to {self.endpoint} is full", retry_after_ms=100) from None
        self._seq = seq + 1
        self._drains[1].check()
        return seq

    def _handle_frames(self, frames: list[bytes]) -> None:
        try:
            seq, message, raw = self._into.unpack(frames)
        except PeerProtocolError:
            self.num_malformed += 1
            return
        self._on_message(seq, message, raw)

    def _handle_event(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._set_down()  # a lost disconnect event must not hide that this is another connection
            self.up = True
            self._was_up.set()
            if self._on_up is not None:
                self._on_up()
        elif event == zmq.EVENT_DISCONNECTED:
            self._set_down()

    def _set_down(self) -> None:
        if self.up:
            self.up = False
            self._was_up.clear()
            if self._on_down is not None:
                self._on_down()

    def close(self) -> None:
        """Drop the connection and what is queued. Harmless when closed already."""
        for drain in self._drains:
            drain.stop()
        self._drains = []
        if self._socket is not None:
            socket, self._socket = self._socket, None
            socket.disable_monitor()
            socket.close(0)
        if self._monitor is not None:
            self._monitor.close(0)
            self._monitor = None
        self._set_down()


class RouterServer(Generic[In, Out]):
    """One ROUTER bound to an address. `identity` names a connection: a peer that reconnects gets another.

    on_message(identity, seq, message, raw) runs on the loop and must not raise or wait. Malformed messages
    are counted in `num_malformed` and dropped.
    """

    def __init__(
        self,
        address: str,
        *,
        into: Channel[In],
        out: Channel[Out],
        on_message: Callable[[bytes, int, In, list[bytes]], None],
        on_malformed: Callable[[bytes, PeerProtocolError], None] | None = None,
        high_water: int = HIGH_WATER_MESSAGES,
    ) -> None:
        self.address = address  # after start(): the real one, also when port 0 was asked for
        self.num_malformed = 0
        self._into = into
        self._out = out
        self._on_message = on_message
        self._on_malformed = on_malformed
        self._high_water = high_water
        self._seq = 0
        self._socket: zmq.Socket[bytes] | None = None
        self._drain: _Drain | None = None

    async def start(self) -> None:
        """Bind. Raises: SettingsError when the address is taken or wrong."""
        socket = _new_socket(zmq.ROUTER, self._high_water)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            socket.bind(self.address)
        except zmq.ZMQError as error:
            socket.close(0)
            raise SettingsError(f"cannot listen on {self.address!r}: {error}") from error
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._socket = socket
        self._drain = _Drain(socket, self._handle_frames)

    def send(self, identity: bytes, message: Out, raw: Sequence[bytes] = ()) -> int:
        """Queue one message for a connection and return its sequence number. Never waits.

        Raises: PeerGone when the connection ended; Overloaded when its queue is full.
        """
        if self._socket is None or self._drain is None:
            raise PeerGone(f"{self.address} is closed")
        seq = self._seq
        try:
            _send(self._socket, [identity, *self._out.pack(message, seq=seq, raw=raw)])
        except zmq.Again:
            raise Overloaded(f"a peer of {self.address} does not read", retry_after_ms=100) from None
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise PeerGone(f"a peer of {self.address} has gone") from None
            raise
        self._seq = seq + 1
        self._drain.check()
        return seq

    def _handle_frames(self, frames: list[bytes]) -> None:
        identity = frames[0]
        try:
            seq, message, raw = self._into.unpack(frames[1:])
        except PeerProtocolError as error:
            self.num_malformed += 1
            if self._on_malformed is not None:
                self._on_malformed(identity, error)
            return
        self._on_message(identity, seq, message, raw)

    def close(self) -> None:
        """Stop listening and drop what is queued. Harmless when closed already."""
        if self._drain is not None:
            self._drain.stop()
            self._drain = None
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None
