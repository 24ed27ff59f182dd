"""The keeper's socket: plain, one thread, no queue. A request is answered before the next one is read.

Nothing that a peer sends or leaves unread ends the process or stalls another peer: a peer that breaks the
framing, or does not read its answers, loses its connection. What is kept stays when connections end.
"""

import os
import select
import socket
from collections.abc import Callable
from pathlib import Path

from services.mempool.keeper.ledger import Floor, Ledger
from shared.errors import PeerProtocolError, ResourceError
from shared.transport import unix_socket
from shared.transport.unix_framing import Deframer, pack_message
from shared.wire import keeper as wire

MAX_CONNECTIONS = 8
READ_BYTES = 16 << 10
ACCEPT_PAUSE_MS = 100  # after accept() failed: descriptors ran out for a moment

Log = Callable[..., None]


class _Connection:
    """One peer. Descriptors that came are its own until a whole message claims them."""

    def __init__(self, number: int, sock: socket.socket, pid: int) -> None:
        self.number = number
        self.sock = sock
        self.pid = pid
        self.deframer = Deframer(max_message_bytes=wire.MAX_MESSAGE_BYTES, max_fds=wire.MAX_FDS)
        self.fds: list[int] = []
        self.seq = 0


class KeeperServer:
    """serve() until stop() is called, from a signal handler for instance.

    Args: log: called as log(event, level=..., **fields).
    Raises: SettingsError when the socket cannot be had.
    """

    def __init__(self, path: Path, max_fds: int, log: Log) -> None:
        self._path = path
        self._log = log
        self._uid = os.getuid()
        self._ledger = Ledger(max_fds)
        self._floor = Floor()
        self._connections: dict[int, _Connection] = {}  # by descriptor, oldest first
        self._next_number = 1
        self._listener = unix_socket.listen_privately(path, backlog=128)
        self._poll = select.poll()
        self._poll.register(self._listener, select.POLLIN)
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll.register(self._wake_read, select.POLLIN)
        self._accepting = True

    def stop(self) -> None:
        """End serve(). Safe in a signal handler."""
        os.write(self._wake_write, b"x")

    def serve(self) -> None:
        """Answer until stop(); then close everything, descriptors included."""
        try:
            while True:
                ready = self._poll.poll(None if self._accepting else ACCEPT_PAUSE_MS)
                if not self._accepting:
                    self._accepting = True
                    self._poll.register(self._listener, select.POLLIN)
                for fd, _ in ready:
                    if fd == self._wake_read:
                        return
                    if fd == self._listener.fileno():
                        self._accept()
                    elif (connection := self._connections.get(fd)) is not None:
                        self._read(connection)
        finally:
            self._close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            self._log("accept_failed", level="warning", error=str(error))
            self._poll.unregister(self._listener)
            self._accepting = False
            return
        peer = unix_socket.peer_credentials(sock)
        if peer.uid != self._uid:
            self._log("peer_refused", level="warning", uid=peer.uid, pid=peer.pid)
            sock.close()
            return
        if (
            len(self._connections) >= MAX_CONNECTIONS
        ):  # never the mempool that has the floor, never the newcomer
            others = (c for c in self._connections.values() if not self._floor.is_holder(c.number))
            self._end(next(others), "too many connections")
        sock.setblocking(False)
        self._connections[sock.fileno()] = _Connection(self._next_number, sock, peer.pid)
        self._next_number += 1
        self._poll.register(sock, select.POLLIN)

    def _read(self, connection: _Connection) -> None:
        try:
            data, fds = unix_socket.receive(connection.sock, max_fds=wire.MAX_FDS, read_bytes=READ_BYTES)
            connection.fds += fds
            if len(connection.fds) > wire.MAX_FDS:
                raise PeerProtocolError(f"{len(connection.fds)} descriptors without their message")
            for frames, num_fds in connection.deframer.feed(data):
                self._handle(connection, frames, num_fds)
        except BlockingIOError:
            return
        except (PeerProtocolError, OSError) as error:
            self._end(connection, str(error))
            return
        except Exception as error:  # noqa: BLE001  what is kept must outlive any bug of this file
            self._log("keeper_bug", level="error", error=repr(error))
            self._end(connection, "internal error")
            return
        if not data:
            self._end(connection, "")

    def _handle(self, connection: _Connection, frames: list[bytes], num_fds: int) -> None:
        """Raises: PeerProtocolError, OSError: the connection is of no use any more."""
        came, connection.fds = connection.fds[:num_fds], connection.fds[num_fds:]
        taken = False
        try:
            _, message, _ = wire.TO_KEEPER.unpack(frames)
            if len(came) < num_fds:
                reason = f"{num_fds} descriptors were sent, {len(came)} came: raise RLIMIT_NOFILE"
                self._reply(connection, self._refusal("keeper.full", reason))
                raise PeerProtocolError(reason)
            try:
                reply, fds = self._answer(connection, message, came)
                taken = isinstance(message, wire.Keep)
            except ResourceError as error:
                self._log("refused", level="warning", pid=connection.pid, code=error.code, reason=str(error))
                reply, fds = self._refusal(error.code, str(error)), ()
        finally:
            if not taken:
                unix_socket.close_fds(came)
        self._reply(connection, reply, fds)

    def _answer(
        self, connection: _Connection, message: wire.ToKeeper, fds: list[int]
    ) -> tuple[wire.FromKeeper, tuple[int, ...]]:
        """Raises: ResourceError: nothing has changed."""
        if isinstance(message, wire.ListSpaces):
            spaces = [wire.SpaceSummary(space=s, num_fds=kinds) for s, kinds in self._ledger.summary()]
            return wire.Spaces(spaces=spaces, highest_generation=self._floor.highest), ()
        if isinstance(message, wire.KeeperHello):
            previous = self._floor.take(connection.number, message.boot_generation)
            self._log("mempool_hello", generation=message.boot_generation, pid=connection.pid)
            ledger = self._ledger
            return wire.Welcome(
                previous_generation=previous, num_fds=ledger.num_fds, max_fds=ledger.max_fds
            ), ()
        self._floor.check(connection.number)
        space, kind = message.space, message.kind
        if isinstance(message, wire.Keep):
            closed = self._ledger.keep(space, kind, message.first_page, message.count, message.meta, fds)
            unix_socket.close_fds(closed)
            return wire.Done(num_closed=len(closed)), ()
        if isinstance(message, wire.Forget):
            closed = self._ledger.forget(space, kind, message.first_page, message.count)
            unix_socket.close_fds(closed)
            return wire.Done(num_closed=len(closed)), ()
        held = self._ledger.held(space, kind, message.after)
        if held is None:
            return wire.End(), ()
        first, count, meta, kept = held
        return wire.Held(first_page=first, count=count, meta=meta), tuple(kept)

    def _refusal(self, code: str, reason: str) -> wire.Refused:
        return wire.Refused(code=code, reason=reason, highest_generation=self._floor.highest)

    def _reply(self, connection: _Connection, reply: wire.FromKeeper, fds: tuple[int, ...] = ()) -> None:
        """Raises: OSError; PeerProtocolError when the peer did not read what it asked for."""
        frames = wire.FROM_KEEPER.pack(reply, seq=connection.seq)
        data = pack_message(frames, num_fds=len(fds), max_fds=wire.MAX_FDS)
        connection.seq += 1
        try:
            sent = unix_socket.transmit(connection.sock, memoryview(data), fds)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            raise PeerProtocolError("the peer does not read its answers")

    def _end(self, connection: _Connection, reason: str) -> None:
        if reason:
            self._log("connection_ended", level="warning", pid=connection.pid, reason=reason)
        del self._connections[connection.sock.fileno()]
        self._poll.unregister(connection.sock)
        unix_socket.close_fds(connection.fds)
        connection.sock.close()

    def _close(self) -> None:
        for connection in list(self._connections.values()):
            self._end(connection, "")
        self._listener.close()
        self._path.unlink(missing_ok=True)
        self._log("keeper_ended", num_fds=self._ledger.num_fds)
