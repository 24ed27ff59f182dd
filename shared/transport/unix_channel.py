"""The unix-socket channel of one host, on asyncio: UnixServer (the mempool) and UnixLink (its clients).

Both read and write the socket straight from the loop, without a task per connection or message. Engines that
have no loop use BlockingUnixLink (shared/transport/unix_blocking.py). Framing: unix_framing.py.
"""

import asyncio
import logging
import os
import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from shared.errors import Overloaded, PeerGone, PeerProtocolError
from shared.transport import unix_socket
from shared.transport.unix_framing import MAX_MESSAGE_BYTES, Deframer, pack_message
from shared.transport.unix_socket import PeerCredentials
from shared.wire.codec import Channel

MAX_QUEUED_BYTES = 2 * MAX_MESSAGE_BYTES  # of one connection, waiting for a peer that reads slowly
MAX_CONNECTIONS = 256
ACCEPT_PAUSE_S = 0.1  # after accept() failed: descriptors ran out for a moment

logger = logging.getLogger(__name__)

Out = TypeVar("Out")
In = TypeVar("In")


class _Stream:
    """A connected non-blocking socket on the running loop: whole messages in, queued bytes out.

    It ends once, with on_end(error or None), on end of stream, a socket error, a broken frame or close().
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        accept_fds: bool,
        on_frames: Callable[[list[bytes], list[int]], None],
        on_end: Callable[[Exception | None], None],
    ) -> None:
        self._sock = sock
        self._accept_fds = accept_fds
        self._on_frames = on_frames
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._deframer = Deframer()
        self._fds: list[int] = []  # received, not yet claimed by a message
        self._queue: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._queued_bytes = 0
        self.open = True
        self._loop.add_reader(sock.fileno(), self._read)
        self._hung_up = select.poll()
        self._hung_up.register(sock, select.POLLRDHUP)

    def peer_lives(self) -> bool:
        """Whether the other end was open now. Asks the kernel, which knows before this loop does. Cost: 1 us."""
        return self.open and not self._hung_up.poll(0)

    def write(self, data: bytes, fds: Sequence[int]) -> None:
        """Send or queue. Raises: PeerGone when ended; Overloaded when the peer does not read; OutOfDescriptors."""
        if not self.open:
            raise PeerGone("the unix connection has ended")
        if self._queued_bytes + len(data) > MAX_QUEUED_BYTES:
            raise Overloaded(f"{self._queued_bytes} bytes wait for a peer that does not read")
        # Queued messages may outlive the caller's descriptors: the queue holds copies until they are sent.
        own = tuple(unix_socket.duplicates(fds))
        self._queue.append((memoryview(data), own))
        self._queued_bytes += len(data)
        if len(self._queue) == 1:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._queue:
                data, fds = self._queue[0]
                sent = unix_socket.transmit(self._sock, data, fds)
                self._queued_bytes -= sent
                unix_socket.close_fds(fds)
                if sent == len(data):
                    self._queue.popleft()
                else:
                    self._queue[0] = (data[sent:], ())
        except BlockingIOError:
            self._loop.add_writer(self._sock.fileno(), self._flush)
            return
        except OSError as error:
            self.end(PeerGone(f"the unix connection broke: {error}"))
            return
        self._loop.remove_writer(self._sock.fileno())

    def _read(self) -> None:
        try:
            data, fds = unix_socket.receive(self._sock)
        except BlockingIOError:
            return
        except OSError as error:
            self.end(PeerGone(f"the unix connection broke: {error}"))
            return
        self._fds += fds
        try:
            if fds and not self._accept_fds:
                raise PeerProtocolError("descriptors are not accepted here")
            for frames, num_fds in self._deframer.feed(data):
                if num_fds > len(self._fds):
                    raise PeerProtocolError(f"{num_fds} fds announced, {len(self._fds)} came")
                taken, self._fds = self._fds[:num_fds], self._fds[num_fds:]
                self._on_frames(frames, taken)
                if not self.open:  # the callback closed us
                    return
        except PeerProtocolError as error:
            self.end(error)
            return
        if not data:
            self.end(None)

    def end(self, error: Exception | None) -> None:
        """Close now; harmless when closed already."""
        if not self.open:
            return
        self.open = False
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        for _, fds in self._queue:
            unix_socket.close_fds(fds)
        self._queue.clear()
        unix_socket.close_fds(self._fds)
        self._fds = []
        self._sock.close()
        self._on_end(error)


class UnixConnection(Generic[Out]):
    """One client of a UnixServer. `pidfd` names its process (-1: unknown)."""

    def __init__(self, server: "UnixServer[Any, Out]", sock: socket.socket, peer: PeerCredentials) -> None:
        self.peer = peer
        self.pidfd = unix_socket.open_peer_pidfd(sock, peer.pid)
        self.state: Any = None  # for the server's owner to hang its own record on
        self._owns_pidfd = True
        self._server = server
        self._seq = 0
        self._stream = _Stream(sock, accept_fds=False, on_frames=self._handle_frames, on_end=self._handle_end)

    @property
    def open(self) -> bool:
        return self._stream.open

    def send(self, message: Out, raw: Sequence[bytes] = (), fds: Sequence[int] = ()) -> int:
        """Queue one message; its sequence number. `fds` stay the caller's and may be closed on return.

        Raises: PeerGone when the connection ended; Overloaded when the client does not read; OutOfDescriptors
            when `fds` cannot be copied: nothing was sent.
        """
        seq = self._seq
        frames = self._server.out.pack(message, seq=seq, raw=raw)
        self._stream.write(pack_message(frames, num_fds=len(fds)), fds)
        self._seq = seq + 1
        return seq

    def take_pidfd(self) -> int:
        """The pidfd, from now on the caller's to close: it stays valid after the connection ended."""
        self._owns_pidfd = False
        return self.pidfd

    def close(self) -> None:
        """End the connection; the server's on_disconnect runs."""
        self._stream.end(None)

    def _handle_frames(self, frames: list[bytes], _fds: list[int]) -> None:
        self._server.handle_frames(self, frames)

    def _handle_end(self, error: Exception | None) -> None:
        self._server.handle_end(self, error)
        if self._owns_pidfd and self.pidfd >= 0:
            unix_socket.close_fds([self.pidfd])
            self.pidfd = -1


class UnixServer(Generic[In, Out]):
    """Listens on a 0600 unix socket and serves peers of the allowed users.

    Callbacks run on the loop and must not raise or wait: on_message(connection, seq, message, raw),
    on_connect(connection), on_disconnect(connection, error). A malformed message ends its connection.
    """

    def __init__(
        self,
        path: Path,
        *,
        into: Channel[In],
        out: Channel[Out],
        on_message: Callable[[UnixConnection[Out], int, In, list[bytes]], None],
        on_connect: Callable[[UnixConnection[Out]], None] | None = None,
        on_disconnect: Callable[[UnixConnection[Out], Exception | None], None] | None = None,
        allowed_uids: frozenset[int] | None = None,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self.path = path
        self.into = into
        self.out = out
        self.connections: set[UnixConnection[Out]] = set()
        self.num_refused = 0
        self.num_malformed = 0
        self._on_message = on_message
        self._on_connect = on_connect
        self._on_disconnect = on_disconnect
        self._allowed_uids = frozenset({os.getuid()}) if allowed_uids is None else allowed_uids
        self._max_connections = max_connections
        self._listener: socket.socket | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._paused = False  # since the last accept() that went well

    async def start(self) -> None:
        """Listen. Raises: SettingsError when the path cannot be used."""
        self._listener = unix_socket.listen_privately(self.path, backlog=128)
        self._listen()

    def _listen(self) -> None:
        assert self._listener is not None
        self._pause = None
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def _rest(self, error: OSError) -> None:
        """Whoever waits makes the listener readable still: the loop would do nothing else than fail to accept it."""
        assert self._listener is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener.fileno())
        self._pause = loop.call_later(ACCEPT_PAUSE_S, self._listen)
        if not self._paused:
            logger.warning("%s: clients wait: %s", self.path, error)
        self._paused = True

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # else the client left again
            if error.errno in unix_socket.NO_ROOM:
                self._rest(error)
            return
        self._paused = False
        sock.setblocking(False)
        peer = unix_socket.peer_credentials(sock)
        if peer.uid not in self._allowed_uids or len(self.connections) >= self._max_connections:
            self.num_refused += 1
            sock.close()
            return
        connection = UnixConnection(self, sock, peer)
        self.connections.add(connection)
        if self._on_connect is not None:
            self._on_connect(connection)

    def handle_frames(self, connection: UnixConnection[Out], frames: list[bytes]) -> None:
        """For UnixConnection only."""
        seq, message, raw = self.into.unpack(frames)
        self._on_message(connection, seq, message, raw)

    def handle_end(self, connection: UnixConnection[Out], error: Exception | None) -> None:
        """For UnixConnection only."""
        self.connections.discard(connection)
        if isinstance(error, PeerProtocolError):
            self.num_malformed += 1
        if self._on_disconnect is not None:
            self._on_disconnect(connection, error)

    def close(self) -> None:
        """Stop listening, end every connection, remove the socket file. Harmless when closed already."""
        if self._listener is None:
            return
        listener, self._listener = self._listener, None
        if self._pause is not None:
            self._pause.cancel()
        asyncio.get_running_loop().remove_reader(listener.fileno())
        listener.close()
        self.path.unlink(missing_ok=True)
        for connection in list(self.connections):
            connection.close()


class UnixLink(Generic[Out, In]):
    """A client's end. on_message(seq, message, raw, fds): the callback owns the fds. on_down(error) runs
    once per connection, also at close(). It does not reconnect by itself: call connect() again."""

    def __init__(
        self,
        path: Path,
        *,
        out: Channel[Out],
        into: Channel[In],
        on_message: Callable[[int, In, list[bytes], list[int]], None],
        on_down: Callable[[Exception | None], None] | None = None,
    ) -> None:
        self.path = path
        self._out = out
        self._into = into
        self._on_message = on_message
        self._on_down = on_down
        self._seq = 0
        self._stream: _Stream | None = None

    @property
    def up(self) -> bool:
        return self._stream is not None and self._stream.open

    def peer_lives(self) -> bool:
        """Whether the other end was open at the time of the call, whatever this loop has read of it."""
        return self._stream is not None and self._stream.peer_lives()

    async def connect(self, timeout_ms: int = 2_000) -> None:
        """Raises: PeerGone when nobody serves the path (within timeout_ms)."""
        if self.up:
            return
        sock = unix_socket.make_socket(self.path, socket.SOCK_NONBLOCK)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await asyncio.get_running_loop().sock_connect(sock, os.fspath(self.path))
        except OSError as error:  # TimeoutError is one
            sock.close()
            raise PeerGone(f"cannot connect to {self.path}: {error or 'timed out'}") from None
        except asyncio.CancelledError:
            sock.close()
            raise
        self._stream = _Stream(sock, accept_fds=True, on_frames=self._handle_frames, on_end=self._handle_end)

    def send(self, message: Out, raw: Sequence[bytes] = ()) -> int:
        """Queue one message; its sequence number.

        Raises: PeerGone when the link is down; Overloaded when the peer does not read.
        """
        if self._stream is None:
            raise PeerGone(f"{self.path} is not connected")
        seq = self._seq
        self._stream.write(pack_message(self._out.pack(message, seq=seq, raw=raw)), ())
        self._seq = seq + 1
        return seq

    def close(self) -> None:
        """Harmless when closed already."""
        if self._stream is not None:
            self._stream.end(None)

    def _handle_frames(self, frames: list[bytes], fds: list[int]) -> None:
        try:
            seq, message, raw = self._into.unpack(frames)
        except PeerProtocolError:
            unix_socket.close_fds(fds)
            raise
        self._on_message(seq, message, raw, fds)

    def _handle_end(self, error: Exception | None) -> None:
        if self._on_down is not None:
            self._on_down(error)
