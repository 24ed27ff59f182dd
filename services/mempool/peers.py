"""Other hosts' mempools: calls of theirs to the core, the core's calls to them, and the paths for the bytes.

One ROUTER at `peer_listen` for those that read from here (the source's side, below), one PeerLink for each that is read
from (peer_links.py). Everything here is on the event loop; agents are made and destroyed in the background.
"""

import asyncio
import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from services.mempool.checks import Checks
from services.mempool.copy_spans import ReturnSpans
from services.mempool.core.actions import Action, AskPeer, PullRemote, TellPeer
from services.mempool.core.mempool import Mempool
from services.mempool.kv_ends import kv_end
from services.mempool.mover_regions import HostRegion, space_and_rank
from services.mempool.peer_background import Background
from services.mempool.peer_cuts import HostSpace, told
from services.mempool.peer_links import ChannelToPeer, PeerLink, note_malformed
from services.mempool.peer_paths import PathEnd
from services.mempool.peer_readers import Reader, ServedPath
from services.mempool.remote_checks import RemoteChecks
from services.mempool.spaces import Spaces
from shared.errors import ClusterError, PeerProtocolError, SettingsError
from shared.ids import PageId
from shared.observe.log import get_logger
from shared.transfer.errors import PathUnavailable
from shared.transport.clock import Clock
from shared.transport.zmq_channel import RouterServer
from shared.wire import mempool_peer as wire

MAX_QUEUED = 4_096  # messages that one peer has not read
MAX_PATHS = 64  # of one peer, until their ends here have been destroyed
HELLO_MS = 2_000  # from a connection's handshake to its PeerHello

log = get_logger("mempool.peers")


class Peers:
    """start() once, close() once.

    Args:
        perform: hands actions of the core to the shell.
        checks: of this mempool's pages.
        pins_memory: transports may page-lock what is registered (RDMA): such memory is never punched.
    """

    def __init__(
        self,
        listen: str,
        instance: str,
        core: Mempool,
        spaces: Spaces,
        clock: Clock,
        perform: Callable[[list[Action]], None],
        checks: Checks,
        *,
        max_peers: int,
        pins_memory: bool,
        silent_ms: int,
    ) -> None:
        self._hello = wire.PeerHello(instance=instance, boot_generation=core.boot_generation)
        self._core = core
        self._spaces = spaces
        self._clock = clock
        self._perform = perform
        self._checks = RemoteChecks(checks, core)
        self._max_peers = max_peers
        self._pins_memory = pins_memory
        self._silent_ms = silent_ms
        self._background = Background()
        self._spans = ReturnSpans()
        self._links: dict[str, PeerLink] = {}
        self._readers: dict[bytes, Reader] = {}
        self._by_number: dict[int, Reader] = {}
        self._refused: set[bytes] = set()  # identities of connections
        self._next_reader = 1
        self._registered: set[int] = set()
        self._server: RouterServer[wire.ToSource, wire.ToReader] = RouterServer(
            listen,
            into=wire.TO_SOURCE,
            out=wire.TO_READER,
            on_message=self._on_call,
            on_malformed=lambda reader, error: note_malformed(self._server.remote(reader), error),
            on_lost=self._on_reader_lost,
            high_water=MAX_QUEUED,
            silent_ms=silent_ms,
            hello_ms=HELLO_MS,
            max_peers=2 * max_peers + 64,
        )

    async def start(self) -> None:
        """Listen. Raises: SettingsError when the address cannot be had, or the library is missing."""
        if importlib.util.find_spec("nixl_cu13") is None:
            raise SettingsError(
                "setting mempool.peer_listen: needs NIXL; install nixl-cu13==1.5.1, or set it to ''"
            )
        await self._server.start()
        self._core.peer_address = self._server.address
        self._core.endings.is_kept = self._registered.__contains__
        self._background.run(lambda: PathEnd("warm", []).close(), lambda _, error: None)  # the library loads
        log.info("peers_listening", address=self._server.address)

    def close(self) -> None:
        """End every link; wait until every path is closed."""
        self._server.close()
        for link in self._links.values():
            link.close()
        self._background.close()

    def may_punch(self, space: int) -> bool:
        """Whether memory of free pages may go back: not what a network card has the addresses of."""
        return not (self._pins_memory and space in self._registered)

    def status(self) -> dict[str, Any]:
        """For /status."""
        return {
            "address": self._server.address,
            "readers": sorted(reader.instance for reader in self._readers.values()),
            "paths_served": sum(len(reader.paths) for reader in self._readers.values()),
            "malformed": self._server.num_malformed,
            "sources": {
                address: {"state": link.state, "pulls": link.num_pulls, "in_doubt": link.num_in_doubt}
                for address, link in self._links.items()
            },
        }

    # -- actions ------------------------------------------------------------------------------------

    def ask(self, action: AskPeer) -> None:
        """See AskPeer."""
        if isinstance(action.message, wire.BlocksCompleted):
            link = self._links.get(action.address)  # none is made for a hint
        else:
            link = self._link(action.address)
        if link is not None:
            link.ask(action)
        elif isinstance(action.message, wire.RemoteAcquire | wire.CheckEpochs | wire.PeerCall):
            self.lost(action.address)

    def pull(self, action: PullRemote) -> None:
        """See PullRemote."""
        self._spans.begin(action)
        link = self._link(action.address)
        if link is None:
            self.pulled(action.number, True, [])
        else:
            link.pull(action)

    def tell(self, action: TellPeer) -> None:
        """See TellPeer."""
        reader, message = self._by_number.get(action.link), action.message
        if reader is None:
            return
        if action.other_cut and not reader.missed_other_cut:
            reader.missed_other_cut = True
            hint = "their pages differ in more than their ranks"
            log.warning("blocks_in_another_cut", peer=reader.instance, hint=hint)
        if not (
            isinstance(message, wire.EpochsChecked)
            and self._checks.answering(action.link, message, partial(self._tell, reader))
        ):
            self._tell(reader, message)

    def _link(self, address: str) -> PeerLink | None:
        link = self._links.get(address)
        if link is not None:
            return link
        if len(self._links) >= self._max_peers:
            asked = {pull.address for pull in self._core.remote.pulls.values()}
            kept = asked.union(self._core.api.peers.addresses)  # callers may hold pages by these
            links = (x for x in self._links.values() if x.address not in kept)
            idle = [x for x in links if not x.num_pulls and not x.num_in_doubt]
            if not idle:
                log.warning("too_many_peers", address=address, max_peers=self._max_peers)
                return None
            oldest = min(idle, key=lambda x: x.used_s)
            del self._links[oldest.address]
            oldest.close()
            self.lost(oldest.address)
        try:
            link = self._links[address] = PeerLink(
                address, self._hello, self, self._background, self._silent_ms
            )
        except ClusterError as error:  # no address at all
            log.warning("peer_address_wrong", address=address, reason=error.message)
            return None
        return link

    # -- what links tell (Owner) ----------------------------------------------------------------------

    def answered(self, address: str, message: wire.ToReader) -> None:
        """A source's answer."""
        if not (
            isinstance(message, wire.EpochsChecked)
            and self._checks.arrived(address, message, partial(self._answered, address))
        ):
            self._answered(address, message)

    def _answered(self, address: str, message: wire.ToReader) -> None:
        self._perform(self._core.on_peer_answer(address, message, self._clock.now_ms()))

    def lost(self, address: str) -> None:
        """A source is not reached."""
        self._perform(self._core.on_peer_lost(address, self._clock.now_ms()))

    def pulled(self, number: int, failed: bool, in_doubt: Sequence[int]) -> None:
        """The end of a PullRemote; later, because the core may be asking just now."""
        self._spans.end(number, failed=failed)
        asyncio.get_running_loop().call_soon(self._pulled, number, failed, in_doubt)

    def _pulled(self, number: int, failed: bool, in_doubt: Sequence[int]) -> None:
        now_ms = self._clock.now_ms()
        self._perform(self._core.on_remote_pulled(number, now_ms, failed=failed, in_doubt=in_doubt))

    def settled(self, space: int, pages: list[int]) -> None:
        """Pages in doubt are free."""
        asyncio.get_running_loop().call_soon(self._settled, space, pages)

    def _settled(self, space: int, pages: list[int]) -> None:
        log.info("pages_settled", space=space, num_pages=len(pages))
        self._perform(self._core.on_settled(space, [PageId(page) for page in pages], self._clock.now_ms()))

    def host_space(self, space: int) -> HostSpace:
        """One space of ours. Raises: PathUnavailable."""
        found = self._host_space(space)
        self._registered.add(space)
        return found

    def _host_space(self, space: int) -> HostSpace:
        regions, description = self._spaces.host_regions(space), self._spaces.description_of(space)
        return HostSpace(description.content_key, description.family_key, kv_end(description), regions)

    # -- the source's side ----------------------------------------------------------------------------

    def _on_call(self, identity: bytes, _seq: int, message: wire.ToSource, _raw: list[bytes]) -> None:
        reader = self._readers.get(identity)
        try:
            if reader is None:
                self._welcome(identity, message)
            elif isinstance(message, wire.OpenPath):
                self._open(reader, message)
            elif isinstance(message, wire.ClosePath):
                self._close(reader, message.path_id)
            elif isinstance(message, wire.PathBytes):
                path = reader.paths.get(message.path_id)
                if path is not None and path.end is not None:
                    path.end.on_message(message.data)
            else:
                if isinstance(message, wire.CheckEpochs):
                    self._checks.asked(reader.number, message)
                self._perform(self._core.on_peer_call(reader.number, message, self._clock.now_ms()))
        except PeerProtocolError as error:
            log.warning("peer_protocol_error", peer=reader.instance if reader else "", reason=error.message)
            self._server.disconnect(identity)

    def _welcome(self, identity: bytes, hello: wire.ToSource) -> None:
        if identity in self._refused or not isinstance(hello, wire.PeerHello):
            raise PeerProtocolError(f"{type(hello).__name__} before PeerHello, or after it was refused")
        if hello.version != wire.VERSION:
            reason = f"this mempool speaks version {wire.VERSION}, not {hello.version}"
            self._refuse(identity, wire.PeerRefused(code="peer.version", reason=reason))
            return
        if len(self._readers) >= self._max_peers:
            reason = f"{self._max_peers} mempools read here already"
            self._refuse(identity, wire.PeerRefused(code="peer.too_many", reason=reason))
            return
        reader = Reader(identity, self._next_reader, hello.instance)
        self._next_reader += 1
        self._readers[identity] = self._by_number[reader.number] = reader
        self._server.accept(identity)
        log.info("reader_connected", peer=hello.instance, link=reader.number)
        mine = self._hello
        welcome = wire.PeerWelcome(
            instance=mine.instance, boot_generation=mine.boot_generation, takes_back=self._core.returns.is_on
        )
        self._tell(reader, welcome)

    def _refuse(self, identity: bytes, refusal: wire.PeerRefused) -> None:
        """Once. What it says next ends the connection; now its link would make another one, 20 times a second."""
        log.warning("reader_refused", code=refusal.code, reason=refusal.reason)
        self._refused.add(identity)
        self._send(identity, refusal)

    def _on_reader_lost(self, identity: bytes) -> None:
        self._refused.discard(identity)
        reader = self._readers.pop(identity, None)
        if reader is None:
            return
        del self._by_number[reader.number]
        log.info("reader_lost", peer=reader.instance, link=reader.number)
        for path_id in list(reader.paths):
            self._close(reader, path_id)
        self._checks.forget(reader.number)
        self._perform(self._core.on_peer_gone(reader.number, self._clock.now_ms()))

    def _open(self, reader: Reader, call: wire.OpenPath) -> None:
        if call.path_id in reader.paths:
            raise PeerProtocolError(f"path {call.path_id} is open already")
        if reader.num_ends >= MAX_PATHS:
            self._failed(reader, call.path_id, f"{reader.num_ends} paths are there, or not destroyed yet")
            return
        spaces: dict[int, Sequence[HostRegion]] = {}
        cuts: list[wire.SpaceCut] = []
        reason = "nothing of this content is here"
        for number in list(self._spaces.memories):
            described = self._spaces.description_of(number)
            is_alike = described.content_key == call.content_key
            if not is_alike and (not call.family_key or described.family_key != call.family_key):
                continue
            try:
                space = self._host_space(number)
            except PathUnavailable as error:
                reason = error.message
                continue
            if not is_alike:
                if space.end is None:
                    continue
                cuts.append(told(number, space.end))
            spaces[number] = space.ranks
        if not spaces:
            failed = wire.PathFailed(path_id=call.path_id, code=PathUnavailable.code, reason=reason)
            self._tell(reader, failed)
            return
        self._registered.update(spaces)
        path = reader.paths[call.path_id] = ServedPath(cuts)
        reader.num_ends += 1

        def may_send(region: str, pages: frozenset[int]) -> bool:
            space, core = space_and_rank(region)[0], self._core
            return core.serve.may_read(reader.number, space, pages) or core.api.peers.may_read(space, pages)

        name = f"{self._hello.instance}-to-{reader.number}-{call.path_id}"
        self._background.make(
            name, spaces, partial(self._made, reader, path, call),
            may_send=may_send, is_wanted=lambda: not path.closed, owner=reader.number,
        )  # fmt: skip

    def _made(
        self, reader: Reader, path: ServedPath, call: wire.OpenPath, end: PathEnd | None, reason: str
    ) -> None:
        if end is None:
            reader.num_ends -= 1
            if not path.closed:  # else there may be another one of this number
                self._failed(reader, call.path_id, reason)
            return
        path.end = end
        if path.closed:
            self._destroy(reader, end)
            return
        channel = ChannelToPeer(partial(self._send_bytes, reader, path, call.path_id))
        connect = partial(end.connect, call.description, channel, lambda region, pages: None)
        self._background.run(connect, partial(self._connected, reader, path, call.path_id), reader.number)

    def _connected(
        self, reader: Reader, path: ServedPath, path_id: int, _: object, error: Exception | None
    ) -> None:
        if path.closed or path.end is None:
            return
        if error is not None:
            self._close(reader, path_id)
            self._failed(reader, path_id, str(error))
            return
        opened = wire.PathOpened(path_id=path_id, description=path.end.description, cuts=path.cuts)
        self._tell(reader, opened)

    def _failed(self, reader: Reader, path_id: int, reason: str) -> None:
        reader.paths.pop(path_id, None)
        self._tell(reader, wire.PathFailed(path_id=path_id, code="transfer.failed", reason=reason))

    def _send_bytes(self, reader: Reader, path: ServedPath, path_id: int, data: bytes) -> None:
        if not path.closed:
            self._tell(reader, wire.PathBytes(path_id=path_id, data=data))

    def _close(self, reader: Reader, path_id: int) -> None:
        """Its agent goes, and with it what it still sends."""
        path = reader.paths.pop(path_id, None)
        if path is not None and not path.closed:
            path.closed = True
            if path.end is not None:
                path.end.lost("the reader is gone")
                self._destroy(reader, path.end)

    def _destroy(self, reader: Reader, end: PathEnd) -> None:
        def destroyed(_: object, error: Exception | None) -> None:
            reader.num_ends -= 1

        self._background.run(end.close, destroyed, reader.number)

    def _tell(self, reader: Reader, message: wire.ToReader) -> None:
        self._send(reader.identity, message, reader.instance)

    def _send(self, identity: bytes, message: wire.ToReader, peer: str = "") -> None:
        try:
            self._server.send(identity, message)
        except ClusterError as error:  # gone, or it does not read: then it is as good as gone
            log.warning("reader_unreachable", peer=peer, code=error.code)
            self._server.disconnect(identity)
