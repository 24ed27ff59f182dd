"""Connections to mempools whose blocks are wanted here: made when the first is wanted, a bounded number, heartbeats.

    no connection -(ask)-> connecting -(up)-> up -(lost)-> down -(reconnected)-> up
                           connecting -(CONNECT_MS)-> down

While a link is down every call fails at once, so that readers do not wait for a host that is gone; the connection is
tried again by itself. A lost link fails all calls and closes all paths of it: the peer, which notices the same within
2 s, has dropped its pins and its ends of the paths.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from services.mempool.core.actions import AskPeer, PullRemote
from services.mempool.peer_background import Background
from services.mempool.peer_cuts import HostSpace
from services.mempool.peer_paths import PathEnd, ReaderPath
from shared.errors import ClusterError, PeerError, PeerProtocolError
from shared.observe.log import get_logger
from shared.observe.malformed import MalformedLog
from shared.observe.metrics import counter
from shared.transport.zmq_channel import DealerLink
from shared.wire import mempool_peer as wire

CONNECT_MS = 1_000  # for the first connection; then readers get their misses
MAX_QUEUED = 4_096  # messages, before the link is up or unread by the peer
RETRY_PATH_S = 1.0  # after a path failed

log = get_logger("mempool.peers")
_malformed = MalformedLog(
    log,
    counter(
        "quire_mempool_peer_malformed_total", "Messages between mempools of hosts that were no messages."
    ),
)


def note_malformed(address: str, error: PeerProtocolError) -> None:
    """Another host's mempool said what is no message."""
    _malformed.note(f"the mempool at {address}", error)


class Owner(Protocol):
    """What a link tells, and asks for."""

    def answered(self, address: str, message: wire.ToReader) -> None: ...
    def lost(self, address: str) -> None: ...
    def pulled(self, number: int, failed: bool, in_doubt: Sequence[int]) -> None: ...
    def settled(self, space: int, pages: list[int]) -> None: ...
    def host_space(self, space: int) -> HostSpace: ...


class ChannelToPeer:
    """interface.Channel over the link: NIXL's thread hands messages to the loop."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._send = send

    def send(self, message: bytes) -> None:
        """See interface.Channel. A link that is lost fails the path's transfers by itself."""
        try:
            self._loop.call_soon_threadsafe(self._send, message)
        except RuntimeError:
            log.debug("loop_ended")


@dataclass(slots=True)
class Slot:
    """The path into one space of ours, and when the next may be tried after it failed."""

    path: ReaderPath | None = None
    not_before_s: float = 0.0
    closing: set[ReaderPath] = field(default_factory=set)
    opened_id: int = 0  # of the last path that the peer said it opened


class PeerLink:
    """One peer, by its address. On the event loop."""

    def __init__(
        self, address: str, hello: wire.PeerHello, owner: Owner, background: Background, silent_ms: int
    ) -> None:
        """Raises: SettingsError on an address that cannot be."""
        self.address = address
        self.used_s = 0.0
        self._hello = hello
        self._owner = owner
        self._background = background
        self._loop = asyncio.get_running_loop()
        self._slots: dict[int, Slot] = {}
        self._next_path = 1
        self._takes_back = False  # it said so
        self._queue: list[wire.ToSource] = []
        self._link: DealerLink[wire.ToSource, wire.ToReader] = DealerLink(
            address,
            out=wire.TO_SOURCE,
            into=wire.TO_READER,
            on_message=self._on_message,
            on_malformed=partial(note_malformed, address),
            on_up=self._on_up,
            on_down=self._on_down,
            high_water=MAX_QUEUED,
            silent_ms=silent_ms,
        )
        self._link.open()
        self._connecting: asyncio.TimerHandle | None = self._loop.call_later(
            CONNECT_MS / 1000, self._not_reached
        )

    @property
    def state(self) -> str:
        """For /status."""
        return "up" if self._link.up else "down" if self._connecting is None else "connecting"

    @property
    def num_pulls(self) -> int:
        """On their way."""
        return sum(slot.path.num_pulls for slot in self._slots.values() if slot.path is not None)

    @property
    def num_in_doubt(self) -> int:
        """Pages that a failed pull may still write."""
        paths = [p for s in self._slots.values() for p in (s.path, *s.closing) if p is not None]
        return sum(path.num_in_doubt for path in paths)

    # -- out ----------------------------------------------------------------------------------------

    def ask(self, action: AskPeer) -> None:
        """See AskPeer."""
        if isinstance(action.message, wire.BlocksCompleted) and not (self._takes_back and self._link.up):
            return  # a hint; an earlier version of a peer would end the connection
        self.used_s = self._loop.time()
        if not self._say(action.message) and isinstance(
            action.message, wire.RemoteAcquire | wire.CheckEpochs | wire.PeerCall
        ):
            self._owner.lost(self.address)
            return
        if action.space >= 0 and isinstance(action.message, wire.RemoteAcquire) and action.message.hashes:
            self._path(action.space)  # made while the peer looks for the blocks

    def _say(self, message: wire.ToSource) -> bool:
        if self._link.up:
            try:
                self._link.send(message)
            except ClusterError as error:  # gone, or it does not read
                log.warning("peer_unreachable", peer=self.address, code=error.code)
                return False
            return True
        if self._connecting is None or len(self._queue) >= MAX_QUEUED:
            return False
        self._queue.append(message)
        return True

    def pull(self, action: PullRemote) -> None:
        """See PullRemote."""
        self.used_s = self._loop.time()
        path = self._path(action.space)
        if path is None:
            self._owner.pulled(action.number, True, [])
        else:
            path.pull(action)

    # -- in -----------------------------------------------------------------------------------------

    def _on_up(self) -> None:
        self._takes_back = False
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        queue, self._queue = self._queue, []
        if all(self._say(message) for message in (self._hello, *queue)):
            log.info("peer_connected", peer=self.address)
        else:  # what the peer was not asked, it does not answer
            self._lose("the link takes no message")

    def _not_reached(self) -> None:
        self._connecting = None
        self._queue = []
        log.warning("peer_not_reached", peer=self.address, after_ms=CONNECT_MS)
        self._lose("the peer was not reached")

    def _on_down(self) -> None:
        log.warning("peer_lost", peer=self.address)
        self._lose("the link is lost")

    def _lose(self, reason: str) -> None:
        for space in list(self._slots):
            self._retire(space, reason)
        self._owner.lost(self.address)

    def _on_message(self, _seq: int, message: wire.ToReader, _raw: list[bytes]) -> None:
        match message:
            case wire.PeerWelcome():
                self._takes_back = message.takes_back
                log.info("peer_welcomed", peer=self.address, peer_instance=message.instance)
            case wire.PeerRefused():
                log.error("peer_refused", peer=self.address, code=message.code, reason=message.reason)
                self._lose(message.reason)
            case wire.PathOpened():
                self._on_opened(message)
            case wire.PathFailed():
                self._by_id(message.path_id, lambda space: self._retire(space, message.reason))
            case wire.PathBytes():
                self._by_id(message.path_id, lambda space: self._on_bytes(space, message.data))
            case _:
                self._owner.answered(self.address, message)

    def _by_id(self, path_id: int, then: Callable[[int], None]) -> None:
        for space, slot in self._slots.items():
            if slot.path is not None and slot.path.path_id == path_id:
                then(space)
                return

    def _on_bytes(self, space: int, data: bytes) -> None:
        path = self._slots[space].path
        assert path is not None
        try:
            if path.end is not None:
                path.end.on_message(data)
        except PeerProtocolError as error:
            self._retire(space, error.message)

    # -- paths ----------------------------------------------------------------------------------------

    def _path(self, space: int) -> ReaderPath | None:
        """The path into this space, begun if there is none; None: not now."""
        slot = self._slots.setdefault(space, Slot())
        if slot.path is not None and slot.path.failed:
            self._retire(space, slot.path.failed)
        if slot.path is not None or self._loop.time() < slot.not_before_s:
            return slot.path
        if self.state == "down":
            return None
        try:
            into = self._owner.host_space(space)
        except ClusterError as error:
            log.warning("no_path", peer=self.address, space=space, reason=error.message)
            slot.not_before_s = self._loop.time() + RETRY_PATH_S
            return None
        path_id, self._next_path = self._next_path, self._next_path + 1
        path = slot.path = ReaderPath(
            path_id, into, self._owner.pulled, self._owner.settled,
            lambda path: self._retire_path(space, path, path.failed),
        )  # fmt: skip
        self._background.make(
            f"{self._hello.instance}-{path_id}", {space: into.ranks}, partial(self._made, space, path, into)
        )
        return path

    def _made(self, space: int, path: ReaderPath, into: HostSpace, end: PathEnd | None, reason: str) -> None:
        if end is None:
            path.failed = path.failed or reason
        else:
            path.end = end
        if path.failed:
            self._retire_path(space, path, path.failed)
            return
        assert end is not None
        opening = wire.OpenPath(
            path_id=path.path_id, content_key=into.content_key, description=end.description,
            family_key=into.family_key if into.end is not None else "",
        )  # fmt: skip
        if not self._say(opening):
            self._retire_path(space, path, "the link is lost")

    def _on_opened(self, message: wire.PathOpened) -> None:
        for space, slot in self._slots.items():
            path = slot.path
            if path is not None and path.path_id == message.path_id and path.end is not None:
                # connected twice, it would lose the answers to its pulls on the first link
                if slot.opened_id == path.path_id:
                    log.warning("path_opened_twice", peer=self.address, path=path.path_id)
                    return
                slot.opened_id = path.path_id
                try:
                    path.learn_cuts(message.cuts)
                except PeerProtocolError as error:
                    self._retire(space, error.message)
                    return
                channel = ChannelToPeer(partial(self._send_bytes, space, path))
                connect = partial(path.end.connect, message.description, channel, path.settled)
                self._background.run(connect, partial(self._connected, space, path))

    def _send_bytes(self, space: int, path: ReaderPath, data: bytes) -> None:
        if not path.failed and not self._say(wire.PathBytes(path_id=path.path_id, data=data)):
            self._retire_path(
                space, path, "the link takes no message"
            )  # whose answer its pulls would wait for

    def _connected(self, space: int, path: ReaderPath, _: object, error: Exception | None) -> None:
        if error is not None or path.failed or path.end is None:
            self._retire_path(space, path, path.failed or str(error))
            return
        path.opened(path.end)
        log.info("path_opened", peer=self.address, space=space, path=path.path_id)

    def _retire(self, space: int, reason: str) -> None:
        path = self._slots[space].path
        if path is not None:
            self._retire_path(space, path, reason)

    def _retire_path(self, space: int, path: ReaderPath, reason: str) -> None:
        """Fail its pulls, destroy its agent, settle its pages. A path that is still being made is retired then."""
        slot = self._slots[space]
        if slot.path is path:
            slot.path = None
            slot.not_before_s = self._loop.time() + RETRY_PATH_S
            log.warning("path_lost", peer=self.address, space=space, path=path.path_id, reason=reason)
        path.lost(reason)
        if path.end is None or path in slot.closing:
            return  # _made comes here again
        slot.closing.add(path)
        if self._link.up:
            self._say(wire.ClosePath(path_id=path.path_id))
        self._background.run(path.end.close, partial(self._closed, slot, path))

    def _closed(self, slot: Slot, path: ReaderPath, is_gone: object, error: Exception | None) -> None:
        slot.closing.discard(path)
        path.closed(is_gone=error is None and bool(is_gone))

    def close(self) -> None:
        """End the connection and all paths."""
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        self._queue = []
        try:
            self._link.close()
        except PeerError as error:
            log.info("peer_close", peer=self.address, error=error.message)
        for space in list(self._slots):
            self._retire(space, "closed")
