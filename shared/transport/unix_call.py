"""One request, one reply over a unix socket, descriptors both ways, with a deadline: no thread, no loop."""

import contextlib
import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, TypeVar

from shared.errors import PeerGone, PeerProtocolError, PeerTimeout
from shared.transport import unix_socket
from shared.transport.unix_framing import MAX_FDS, MAX_MESSAGE_BYTES, Deframer, pack_message
from shared.wire.codec import Channel

BACKLOG_PAUSE_S = 0.01

Out = TypeVar("Out")
In = TypeVar("In")


class UnixCaller(Generic[Out, In]):
    """A connected caller for one thread. After any error but PeerProtocolError on packing it is closed.

    Args: max_message_bytes, max_fds: bounds of the channel, both ways.
    Raises: PeerGone when nobody serves the path within timeout_ms.
    """

    def __init__(
        self,
        path: Path,
        *,
        out: Channel[Out],
        into: Channel[In],
        timeout_ms: int = 2_000,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        max_fds: int = MAX_FDS,
    ) -> None:
        self.path = path
        self._out = out
        self._into = into
        self._max_message_bytes = max_message_bytes
        self._max_fds = max_fds
        self._deframer = Deframer(max_message_bytes=max_message_bytes, max_fds=max_fds)
        self._seq = 0
        self._sock = unix_socket.make_socket(path)
        self._sock.settimeout(timeout_ms / 1000)
        deadline = time.monotonic() + timeout_ms / 1000
        try:
            while not self._connect():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"its queue was full for {timeout_ms} ms")
                time.sleep(BACKLOG_PAUSE_S)
        except OSError as error:
            self.close()
            raise PeerGone(f"cannot connect to {path}: {error}") from None

    @property
    def up(self) -> bool:
        """Not closed, as far as this end knows."""
        return self._sock.fileno() >= 0

    def fileno(self) -> int:
        """Readable between calls means: the peer is gone. -1 when closed."""
        return self._sock.fileno()

    def call(self, message: Out, fds: Sequence[int] = (), *, timeout_ms: int = 5_000) -> tuple[In, list[int]]:
        """The reply and its descriptors, now the caller's. `fds` stay the caller's.

        Raises: PeerGone, PeerTimeout, PeerProtocolError.
        """
        frames = self._out.pack(message, seq=self._seq)
        data = pack_message(
            frames, num_fds=len(fds), max_message_bytes=self._max_message_bytes, max_fds=self._max_fds
        )
        self._seq += 1
        deadline = time.monotonic() + timeout_ms / 1000
        try:
            self._send(memoryview(data), tuple(fds), deadline)
            return self._receive(deadline)
        except TimeoutError:
            self.close()
            raise PeerTimeout(f"{self.path} did not answer within {timeout_ms} ms") from None
        except OSError as error:
            self.close()
            raise PeerGone(f"{self.path}: {error}") from None
        except (PeerGone, PeerProtocolError):
            self.close()
            raise

    def close(self) -> None:
        """Harmless when closed already."""
        self._sock.close()

    def _connect(self) -> bool:
        """False: the listener's queue is full now; unlike TCP, the kernel does not wait for room then."""
        try:
            self._sock.connect(os.fspath(self.path))
        except BlockingIOError:
            return False
        return True

    def _send(self, data: memoryview, fds: tuple[int, ...], deadline: float) -> None:
        while data:
            self._sock.settimeout(max(0.001, deadline - time.monotonic()))
            data, fds = data[unix_socket.transmit(self._sock, data, fds) :], ()

    def _receive(self, deadline: float) -> tuple[In, list[int]]:
        came: list[int] = []
        with contextlib.ExitStack() as undo:
            undo.callback(lambda: unix_socket.close_fds(came))
            while True:
                self._sock.settimeout(max(0.001, deadline - time.monotonic()))
                data, fds = unix_socket.receive(self._sock, max_fds=self._max_fds)
                came += fds
                if not data:
                    raise PeerGone(f"{self.path} closed the connection")
                for frames, num_fds in self._deframer.feed(data):
                    if num_fds != len(came):
                        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
                        reason = f"{num_fds} fds announced, {len(came)} came; RLIMIT_NOFILE is {soft} here (ulimit -n)"
                        raise PeerProtocolError(reason)
                    _, reply, _ = self._into.unpack(frames)
                    undo.pop_all()
                    return reply, came
