"""A client's end of the unix channel without an event loop: plain socket, one reader thread.

An engine's process uses it: it attaches (request, reply, descriptors) in its own thread, then sends from any
thread while the reader thread delivers what comes.
"""

import logging
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from shared.errors import PeerGone, PeerProtocolError, PeerTimeout
from shared.transport import unix_socket
from shared.transport.unix_framing import Deframer, pack_message
from shared.wire.codec import Channel

logger = logging.getLogger(__name__)
Out = TypeVar("Out")
In = TypeVar("In")


class BlockingUnixLink(Generic[Out, In]):
    """connect(), then call() as often as needed, then start(): from there on messages go to the callback.

    Callbacks run on the reader thread: on_message(seq, message, raw, fds), which owns the fds, and
    on_down(error), once. They must not raise, and must not wait for another message of this link: one that on_message
    raised on is a bug, and the link's end. A link that went down stays down: make a new one.
    """

    def __init__(
        self,
        path: Path,
        *,
        out: Channel[Out],
        into: Channel[In],
        on_message: Callable[[int, In, list[bytes], list[int]], None],
        on_down: Callable[[Exception | None], None] | None = None,
        send_timeout_ms: int = 5_000,
    ) -> None:
        self.path = path
        self._out = out
        self._into = into
        self._on_message = on_message
        self._on_down = on_down
        self._send_timeout_ms = send_timeout_ms
        self._sock: socket.socket | None = None
        self._deframer = Deframer()
        self._fds: list[int] = []
        self._arrived: deque[tuple[int, In, list[bytes], list[int]]] = deque()
        self._send_lock = threading.Lock()
        self._seq = 0
        self._thread: threading.Thread | None = None
        self._closing = False

    @property
    def up(self) -> bool:
        return self._sock is not None and not self._closing

    def connect(self, timeout_ms: int = 2_000) -> None:
        """Raises: PeerGone when nobody serves the path within timeout_ms."""
        sock = unix_socket.make_socket(self.path)
        sock.settimeout(timeout_ms / 1000)
        try:
            sock.connect(os.fspath(self.path))
        except OSError as error:
            sock.close()
            raise PeerGone(f"cannot connect to {self.path}: {error}") from None
        sock.settimeout(None)
        # The kernel's own send deadline leaves the reader, which shares the socket, blocking without one.
        wait = struct.pack("ll", self._send_timeout_ms // 1000, self._send_timeout_ms % 1000 * 1000)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
        self._sock = sock

    def send(self, message: Out, raw: Sequence[bytes] = ()) -> int:
        """Write one message from any thread; its sequence number. Waits at most send_timeout_ms.

        Raises: PeerGone when the link is down; PeerTimeout when the peer does not read: then the link is
        closed, because half a message may be on its way.
        """
        with self._send_lock:
            if self._sock is None or self._closing:
                raise PeerGone(f"{self.path} is not connected")
            seq = self._seq
            data = pack_message(self._out.pack(message, seq=seq, raw=raw))
            try:
                self._sock.sendall(data)
            except BlockingIOError:
                self._shut()
                raise PeerTimeout(f"{self.path} did not read for {self._send_timeout_ms} ms") from None
            except OSError as error:
                self._shut()
                raise PeerGone(f"{self.path}: {error}") from None
            self._seq = seq + 1
            return seq

    def call(
        self, message: Out, raw: Sequence[bytes] = (), *, timeout_ms: int = 10_000
    ) -> tuple[In, list[bytes], list[int]]:
        """Send, and return the next message with its raw frames and fds (the caller's). Only before start().

        Raises: PeerGone, PeerTimeout, PeerProtocolError.
        """
        assert self._thread is None, "after start() messages go to the callback"
        self.send(message, raw)
        assert self._sock is not None
        deadline = time.monotonic() + timeout_ms / 1000
        try:
            while not self._arrived:
                self._sock.settimeout(max(0.001, deadline - time.monotonic()))
                self._receive()
        except TimeoutError:
            raise PeerTimeout(f"{self.path} did not answer within {timeout_ms} ms") from None
        finally:
            self._sock.settimeout(None)
        _, reply, reply_raw, fds = self._arrived.popleft()
        return reply, reply_raw, fds

    def start(self) -> None:
        """Deliver from now on by callback, on a daemon thread."""
        assert self._sock is not None, "connect() first"
        assert self._thread is None, "started already"
        self._thread = threading.Thread(target=self._run, name="quire-unix-link", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the connection and wait for the reader thread. Harmless when closed already."""
        self._shut()
        if self._thread is not None:
            if self._thread is not threading.current_thread():
                self._thread.join(timeout=5.0)
        else:
            self._release()

    def _run(self) -> None:
        error: Exception | None = None
        try:
            while True:
                while self._arrived:
                    self._on_message(*self._arrived.popleft())
                self._receive()
        except (PeerGone, PeerProtocolError) as failure:
            error = None if self._closing else failure
        except Exception as failure:  # else the link would look up, and nobody would read it
            logger.exception("%s: a message could not be handled", self.path)
            error = failure
        self._shut()
        self._release()
        if self._on_down is not None:
            self._on_down(error)

    def _receive(self) -> None:
        """Wait for bytes and put whole messages into `_arrived`."""
        assert self._sock is not None
        try:
            data, fds = unix_socket.receive(self._sock)
        except TimeoutError:
            raise
        except OSError as error:
            raise PeerGone(f"{self.path}: {error}") from None
        self._fds += fds
        if not data:
            raise PeerGone(f"{self.path} closed the connection")
        for frames, num_fds in self._deframer.feed(data):
            if num_fds > len(self._fds):
                raise PeerProtocolError(f"{num_fds} fds announced, {len(self._fds)} came")
            taken, self._fds = self._fds[:num_fds], self._fds[num_fds:]
            self._arrived.append((*self._into.unpack(frames), taken))

    def _shut(self) -> None:
        """Wake the reader, which then closes the socket: here its number could pass to someone else."""
        self._closing = True
        if self._sock is not None:
            try:
                self._sock.shutdown(socket.SHUT_RDWR)
            except OSError:  # gone already
                return

    def _release(self) -> None:
        with self._send_lock:
            for *_, fds in self._arrived:
                unix_socket.close_fds(fds)
            self._arrived.clear()
            unix_socket.close_fds(self._fds)
            self._fds = []
            if self._sock is not None:
                self._sock.close()
                self._sock = None
