"""ZeroMQ ends of the control plane on the running asyncio loop: DealerLink and RouterServer.

They speak ZeroMQ's protocol themselves (zmtp.py, zmtp_peer.py): a message is one write by its sender's loop and
one read by its receiver's, without libzmq's threads between. libzmq's own sockets may stand at the other end. Sends
never wait: a full or lost link is an exception that the caller turns into its answer. A peer that dies closes its
connection (noticed at once); one that freezes misses heartbeats (noticed within silent_ms and half a second).
"""

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from shared.background_task import begin_task
from shared.errors import Overloaded, PeerGone, PeerProtocolError, PeerTimeout, SettingsError
from shared.loop_timeout import loop_timeout
from shared.transport.zmtp_peer import HEARTBEAT_TIMEOUT_MS, ZmtpPeer
from shared.wire.codec import Channel

HIGH_WATER_MESSAGES = 10_000
CONNECT_TIMEOUT_MS = 2_000
RECONNECT_MIN_MS = 50
RECONNECT_MAX_MS = 500
MAX_PEERS = 4_096  # connections of one server
BACKLOG = 1_024

Out = TypeVar("Out")
In = TypeVar("In")


def parse_endpoint(endpoint: str) -> str | tuple[str, int]:
    """Path of ipc://PATH, or host and port of tcp://HOST:PORT. Raises: ValueError."""
    scheme, sep, rest = endpoint.partition("://")
    if scheme == "ipc" and sep and rest:
        if len(os.fsencode(rest)) > 107:
            raise ValueError(f"the path has {len(os.fsencode(rest))} bytes, at most 107 fit")
        return "\0" + rest[1:] if rest.startswith("@") else rest
    host, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not colon or not host:
        raise ValueError("want tcp://HOST:PORT or ipc://PATH")
    number = 0 if port == "*" else int(port)
    if not 0 <= number < 65_536:
        raise ValueError(f"port {number}")
    return ("" if host == "*" else host.strip("[]")), number  # "": every interface, as ZeroMQ's *


class DealerLink(Generic[Out, In]):
    """One DEALER connected to one endpoint; it reconnects by itself for as long as it is open.

    Callbacks run on the loop and must not raise or wait: on_message(seq, message, raw), on_malformed(error) for what
    is no message (it is dropped, and counted in num_malformed), on_up(), on_down().
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
        on_malformed: Callable[[PeerProtocolError], None] | None = None,
        on_down: Callable[[], None] | None = None,
        on_up: Callable[[], None] | None = None,
        high_water: int = HIGH_WATER_MESSAGES,
        silent_ms: int = HEARTBEAT_TIMEOUT_MS,
    ) -> None:
        self.endpoint = endpoint
        self.up = False
        self.num_malformed = 0
        self._out = out
        self._into = into
        self._on_message = on_message
        self._on_malformed = on_malformed
        self._on_down = on_down
        self._on_up = on_up
        self._high_water = high_water
        self._silent_ms = silent_ms
        self._seq = 0
        self._peer: ZmtpPeer | None = None
        self._dialled: ZmtpPeer | None = None  # the same before its handshake, too
        self._task: asyncio.Task[None] | None = None
        self._was_up = asyncio.Event()
        self._lost = asyncio.Event()
        self._dial_now = asyncio.Event()

    def open(self) -> None:
        """Start connecting without waiting. Raises: SettingsError on an endpoint that cannot be."""
        if self._task is not None:
            return
        try:
            where = parse_endpoint(self.endpoint)
        except ValueError as error:
            raise SettingsError(f"cannot connect to {self.endpoint!r}: {error}") from error
        self._task = begin_task(self._keep(where), "zmq-link")

    def dial_now(self) -> None:
        """Somebody says that the peer is back: a pause between two attempts ends here."""
        self._dial_now.set()

    async def connect(self, timeout_ms: int = 5_000) -> None:
        """Open, and wait for the peer. After a PeerTimeout the link stays open and goes on trying."""
        self.open()
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self._was_up.wait()
        except TimeoutError:
            raise PeerTimeout(f"no answer from {self.endpoint} within {timeout_ms} ms") from None

    async def _keep(self, where: str | tuple[str, int]) -> None:
        """Connect, wait for the end of the connection, and again."""
        wait_ms = RECONNECT_MIN_MS
        while True:
            self._lost.clear()
            try:
                with suppress(OSError, TimeoutError, ValueError):  # ValueError: a name that no host can have
                    async with loop_timeout(CONNECT_TIMEOUT_MS / 1000):
                        await self._dial(where)
                    await self._lost.wait()
            finally:  # a dial that is given up may have connected, and uvloop tells its peer nothing of the end
                if self._dialled is not None:
                    self._dialled.close()
            wait_ms = RECONNECT_MIN_MS if self._was_up.is_set() else min(RECONNECT_MAX_MS, 2 * wait_ms)
            self._was_up.clear()
            self._dial_now.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_ms / 1000):
                    await self._dial_now.wait()

    async def _dial(self, where: str | tuple[str, int]) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(where, str):
            await loop.create_unix_connection(self._make_peer, where)
        else:
            await loop.create_connection(self._make_peer, *where)

    def _make_peer(self) -> ZmtpPeer:
        self._dialled = ZmtpPeer(
            b"DEALER",
            high_water=self._high_water,
            on_up=self._handle_up,
            on_frames=self._handle_frames,
            on_lost=self._handle_lost,
            silent_ms=self._silent_ms,
        )
        return self._dialled

    def send(self, message: Out, raw: Sequence[bytes] = (), *, more: bool = False) -> int:
        """Queue one message and return its sequence number. Never waits. `more`: another follows at once.

        Raises: PeerGone when the link is down; Overloaded when its queue is full.
        """
        if self._peer is None:
            raise PeerGone(f"{self.endpoint} is not connected")
        seq = self._seq
        if not self._peer.send(self._out.pack(message, seq=seq, raw=raw), more=more):
            raise Overloaded(f"the queue to {self.endpoint} is full", retry_after_ms=100)
        self._seq = seq + 1
        return seq

    def _handle_frames(self, peer: ZmtpPeer, frames: list[bytes]) -> None:
        try:
            seq, message, raw = self._into.unpack(frames)
        except PeerProtocolError as error:
            self.num_malformed += 1
            if self._on_malformed is not None:
                self._on_malformed(error)
            return
        self._on_message(seq, message, raw)

    def _handle_up(self, peer: ZmtpPeer) -> None:
        self._peer = peer
        self.up = True
        self._was_up.set()
        if self._on_up is not None:
            self._on_up()

    def _handle_lost(self, peer: ZmtpPeer) -> None:
        self._lost.set()
        if peer is self._dialled:
            self._dialled = None
        if peer is self._peer:
            self._peer = None
            self.up = False
            if self._on_down is not None:
                self._on_down()

    def close(self) -> None:
        """Drop the connection and what the peer has not read. Harmless when closed already."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        if self._dialled is not None:
            self._dialled.finish()


class RouterServer(Generic[In, Out]):
    """One ROUTER bound to an address. `identity` names a connection: a peer that reconnects gets another.

    on_message(identity, seq, message, raw) runs on the loop and must not raise or wait. Malformed messages
    are counted in `num_malformed` and dropped. on_lost(identity): the connection has ended, also at close().

    Args:
        hello_ms: a connection that is not accept()ed by then ends; 0: it may stay as long as there is room.
        max_peers: connections; at most so many, and the oldest that is not accept()ed makes room for a new one.
    """

    def __init__(
        self,
        address: str,
        *,
        into: Channel[In],
        out: Channel[Out],
        on_message: Callable[[bytes, int, In, list[bytes]], None],
        on_malformed: Callable[[bytes, PeerProtocolError], None] | None = None,
        on_lost: Callable[[bytes], None] | None = None,
        high_water: int = HIGH_WATER_MESSAGES,
        silent_ms: int = HEARTBEAT_TIMEOUT_MS,
        hello_ms: int = 0,
        max_peers: int = MAX_PEERS,
    ) -> None:
        self.address = address  # after start(): the real one, also when port 0 was asked for
        self.num_malformed = 0
        self._into = into
        self._out = out
        self._on_message = on_message
        self._on_malformed = on_malformed
        self._on_lost = on_lost
        self._high_water = high_water
        self._silent_ms = silent_ms
        self._seq = 0
        self._server: asyncio.AbstractServer | None = None
        self._file: tuple[str, int] | None = None  # path and inode of a unix socket
        self._num_met = 0
        self._peers: dict[bytes, ZmtpPeer] = {}
        self._strangers: set[ZmtpPeer] = set()  # before their handshake
        self._hello_ms = hello_ms
        self._max_peers = max_peers
        self._unaccepted: dict[bytes, asyncio.TimerHandle | None] = {}  # oldest first

    async def start(self) -> None:
        """Bind. Raises: SettingsError when the address is taken or wrong."""
        try:
            where = parse_endpoint(self.address)
            await self._listen(where)
        except (OSError, ValueError) as error:
            raise SettingsError(f"cannot listen on {self.address!r}: {error}") from error

    async def _listen(self, where: str | tuple[str, int]) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(where, str):
            server = await loop.create_unix_server(self._make_peer, where, backlog=BACKLOG)
            if not where.startswith("\0"):
                self._file = (where, os.stat(where).st_ino)
        else:
            family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
            server = await loop.create_server(self._make_peer, *where, family=family, backlog=BACKLOG)
            host, port = server.sockets[0].getsockname()[:2]
            self.address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        self._server = server

    def _make_peer(self) -> ZmtpPeer:
        peer = ZmtpPeer(
            b"ROUTER",
            high_water=self._high_water,
            on_up=self._handle_up,
            on_frames=self._handle_frames,
            on_lost=self._handle_lost,
            silent_ms=self._silent_ms,
        )
        self._strangers.add(peer)
        return peer

    def send(self, identity: bytes, message: Out, raw: Sequence[bytes] = (), *, more: bool = False) -> int:
        """Queue one message for a connection and return its sequence number. Never waits.

        `more`: another one for this connection follows at once, and both may leave in one write.

        Raises: PeerGone when the connection ended; Overloaded when its queue is full.
        """
        peer = self._peers.get(identity)
        if peer is None:
            raise PeerGone(
                f"{self.address} is closed" if self._server is None else f"a peer of {self.address} has gone"
            )
        seq = self._seq
        if not peer.send(self._out.pack(message, seq=seq, raw=raw), more=more):
            raise Overloaded(f"a peer of {self.address} does not read", retry_after_ms=100)
        self._seq = seq + 1
        return seq

    def _handle_up(self, peer: ZmtpPeer) -> None:
        self._strangers.discard(peer)
        if len(self._peers) >= self._max_peers and self._unaccepted:
            self.disconnect(next(iter(self._unaccepted)))
        if len(self._peers) >= self._max_peers:
            peer.close()
            return
        self._num_met += 1
        peer.identity = identity = b"\0" + self._num_met.to_bytes(8, "big")
        self._peers[identity] = peer
        self._unaccepted[identity] = None
        if self._hello_ms:
            loop = asyncio.get_running_loop()
            self._unaccepted[identity] = loop.call_later(self._hello_ms / 1000, self.disconnect, identity)

    def accept(self, identity: bytes) -> None:
        """It has said what only a peer says: it may stay. Harmless when it has gone, or was accepted before."""
        timer = self._unaccepted.pop(identity, None)
        if timer is not None:
            timer.cancel()

    def remote(self, identity: bytes) -> str:
        """HOST:PORT that a connection comes from; "": it has ended, or comes over a unix socket."""
        peer = self._peers.get(identity)
        return peer.remote if peer is not None else ""

    def _handle_frames(self, peer: ZmtpPeer, frames: list[bytes]) -> None:
        try:
            seq, message, raw = self._into.unpack(frames)
        except PeerProtocolError as error:
            self.num_malformed += 1
            if self._on_malformed is not None:
                self._on_malformed(peer.identity, error)
            return
        self._on_message(peer.identity, seq, message, raw)

    def _handle_lost(self, peer: ZmtpPeer) -> None:
        self._strangers.discard(peer)
        self.accept(peer.identity)
        if self._peers.pop(peer.identity, None) is not None and self._on_lost is not None:
            self._on_lost(peer.identity)

    def disconnect(self, identity: bytes) -> None:
        """End one connection; on_lost follows. Harmless when it has gone already."""
        peer = self._peers.get(identity)
        if peer is not None:
            peer.finish()

    def close(self) -> None:
        """Stop listening and drop what peers have not read. Harmless when closed already."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for peer in [*self._peers.values(), *self._strangers]:
            peer.finish()
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                if os.stat(file[0]).st_ino == file[1]:
                    os.unlink(file[0])
