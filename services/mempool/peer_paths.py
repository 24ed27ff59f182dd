"""One path to a mempool of another host: an agent of NIXL at each end, made for this path and destroyed with it.

An agent of its own makes the end of a path a proof: when it has been destroyed its connections are closed, and nothing
can arrive in the pages that it had registered (ARCHITECTURE.md, rules 5 and 6). A lost link needs no word of
the peer, whose host may be gone. Bytes come by the source's writes (served.py), into pages that are named by question:
over TCP that is ten times as fast as reading. CMA and shared memory are left out (config.py): they need no connection.

PathEnd runs in the background and on NIXL's thread; ReaderPath and its books on the event loop.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from services.mempool.core.actions import PullRemote
from services.mempool.mover_pieces import start_pull
from services.mempool.mover_regions import HostMapping, HostRegion, region_name, space_and_rank
from services.mempool.peer_cuts import HostSpace, RankPull, cut_anew, heard, mine_of, whole_pages
from shared.errors import ClusterError
from shared.observe.log import get_logger
from shared.transfer.describe import decode
from shared.transfer.errors import (
    PathUnavailable,
    PeerLost,
    TransferError,
    TransferFailed,
    TransferRefused,
    TransferTimeout,
)
from shared.transfer.interface import MAX_IN_FLIGHT, Channel, Moved, Peer, Region, RegionKind
from shared.transfer.nixl import NixlTransport
from shared.transfer.reslice import KvEnd
from shared.transfer.served_link import MaySend
from shared.wire.mempool_peer import SpaceCut

FAIL_WAIT_S = 1.0  # for pulls of a lost link to end, before the agent is destroyed

log = get_logger("mempool.peers")


class Mappings:
    """Host memory of spaces, mapped here once each; on the background's one thread, but for close()."""

    def __init__(self) -> None:
        self._mapped: dict[tuple[int, int], HostMapping] = {}

    def regions(self, spaces: Mapping[int, Sequence[HostRegion]]) -> list[Region]:
        """Every rank of these. Raises: PathUnavailable."""
        return [
            self._region(number, rank, where)
            for number, ranks in spaces.items()
            for rank, where in enumerate(ranks)
        ]

    def _region(self, space: int, rank: int, where: HostRegion) -> Region:
        mapping = self._mapped.get((space, rank))
        if mapping is None:
            mapping = self._mapped[space, rank] = HostMapping(where)
        name = region_name(space, rank)
        return Region(name, RegionKind.HOST, mapping.address, where.page_bytes, where.num_pages, name)

    def close(self) -> None:
        """Unmap; no path may be open any more."""
        for mapping in self._mapped.values():
            mapping.close()
        self._mapped = {}


class PathEnd:
    """This process's end. Made, connected and closed in the background: each takes 0.1 s, and the first one 1 s."""

    def __init__(
        self, name: str, regions: Sequence[Region], *, may_send: MaySend = lambda region, pages: True
    ) -> None:
        """Raises: PathUnavailable."""
        self._transport = NixlTransport(name, mode="write", may_send=may_send)
        self._link = None
        self._futures: set[Future[Moved]] = set()
        self.page_bytes: dict[str, int] = {}  # of the peer's regions, once connected
        try:
            for region in regions:
                self._transport.register(region)
            self.description = self._transport.describe()
        except ClusterError:
            self._transport.close()
            raise

    def connect(
        self, description: bytes, channel: Channel, on_settled: Callable[[str, tuple[int, ...]], None]
    ) -> None:
        """Raises: PathUnavailable, TransferError, PeerProtocolError."""
        self.page_bytes = {region.name: region.page_bytes for region in decode(description).regions}
        self._link = self._transport.connect(Peer(description, channel=channel, on_settled=on_settled))

    def on_message(self, data: bytes) -> None:
        """PathBytes of the peer; before connect() it is dropped. Raises: PeerProtocolError."""
        if self._link is not None:
            self._link.on_message(data)

    def pull(self, pull: RankPull, timeout_ms: int) -> Future[Moved]:
        """Raises: as Link.pull; PathUnavailable before connect()."""
        if self._link is None:
            raise PathUnavailable("the path is not connected")
        future = start_pull(self._link, pull.source, pull.target, pull.what, timeout_ms)
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def lost(self, reason: str) -> None:
        """Fail what is on its way; pages may still be written until close()."""
        if self._link is not None:
            self._link.peer_lost(reason)

    def close(self) -> bool:
        """Whether nothing can arrive any more. In the background."""
        self.lost("the path is closed")
        wait(list(self._futures), FAIL_WAIT_S)
        self._transport.close()
        self._link = None
        return self._transport.is_gone


@dataclass(slots=True, eq=False)
class Pulling:
    """One PullRemote, on its ranks."""

    action: PullRemote
    timer: asyncio.TimerHandle  # while it waits
    rounds: list[list[RankPull]] = field(default_factory=list)  # not begun
    num_places: int = 0  # transfers of its largest round: so many of the path's are its own until it ends
    deadline_s: float = 0.0
    num_running: int = 0
    error: str = ""


class ReaderPath:
    """Pulls of one peer into one space, from the moment in which the path is wanted. On the event loop.

    They wait until the path is there, and in order for room on it (MAX_IN_FLIGHT), each within its time.

    Args:
        into: the space.
        on_pulled: (number, failed, pages in doubt): the end of every pull, once.
        on_settled: (space, pages): nothing can write these any more.
        on_failed: the path is of no use any more, and wants to be closed.
    """

    def __init__(
        self,
        path_id: int,
        into: HostSpace,
        on_pulled: Callable[[int, bool, Sequence[int]], None],
        on_settled: Callable[[int, list[int]], None],
        on_failed: Callable[["ReaderPath"], None],
    ) -> None:
        self.path_id = path_id
        self.end: PathEnd | None = None
        self.ready = False
        self.failed = ""  # why it is of no use any more
        self._loop = asyncio.get_running_loop()
        self._into = into
        self._cuts: dict[int, KvEnd] = {}  # of the source's spaces that are not cut as `into` is
        self._on_pulled = on_pulled
        self._on_settled = on_settled
        self._on_failed = on_failed
        self._waiting: list[Pulling] = []
        self._running: set[Pulling] = set()
        self._settling: set[tuple[str, tuple[int, ...]]] = set()  # region, pages of each transfer in doubt
        self._doubt: dict[tuple[int, int], set[int]] = {}  # (space, page) -> ranks that may still be written
        self._reported: set[tuple[int, int]] = set()  # of these, the core knows

    @property
    def num_pulls(self) -> int:
        """Waiting and running."""
        return len(self._waiting) + len(self._running)

    @property
    def num_in_doubt(self) -> int:
        """Pages that a failed pull may still write."""
        return len(self._doubt)

    def pull(self, action: PullRemote) -> None:
        """Now, or when the path is there and has room. It has `timeout_ms` to begin, then as long for the bytes."""
        pulling = Pulling(action, self._loop.call_later(action.timeout_ms / 1000, self._late, action.number))
        self._waiting.append(pulling)
        self._begin()

    def _late(self, number: int) -> None:
        (pulling,) = (found for found in self._waiting if found.action.number == number)
        self._waiting.remove(pulling)
        self._end(pulling, "no room on the path in time" if self.ready else "the path was not there in time")

    def learn_cuts(self, cuts: Sequence[SpaceCut]) -> None:
        """Before opened(). Raises: PeerProtocolError on what are none."""
        self._cuts = heard(cuts)

    def opened(self, end: PathEnd) -> None:
        """Both ends are there: what waited begins."""
        self.end, self.ready = end, True
        self._begin()

    def lost(self, reason: str) -> None:
        """No pull ends well any more. close() of its end follows in the background, then closed()."""
        self.failed = self.failed or reason
        self.ready = False
        waiting, self._waiting = self._waiting, []
        for pulling in waiting:
            self._end(pulling, reason)
        if self.end is not None:
            self.end.lost(reason)

    def closed(self, *, is_gone: bool) -> None:
        """The agent has been destroyed: every page in doubt has settled. Otherwise they stay in doubt for good."""
        for pulling in list(self._running):  # a future that never ended
            self._hold(pulling.action.space, pulling.action.targets, range(len(self._into.ranks)))
            self._end(pulling, "the path was closed")
        if not is_gone:
            log.error("path_not_closed", path=self.path_id, pages=len(self._doubt))
            return
        self._settle(list(self._doubt))

    def _begin(self) -> None:
        """What waits, in order, as far as there is room."""
        while self._waiting and self.ready and not self.failed:
            pulling = self._waiting[0]
            try:
                pulling.rounds = pulling.rounds or self._rounds(pulling.action)
            except ClusterError as error:
                del self._waiting[0]
                self._one_failed(pulling, error)
                self._round_ended(pulling)
                continue
            pulling.num_places = max(map(len, pulling.rounds))
            taken = sum(running.num_places for running in self._running) + len(self._settling)
            if taken and taken + pulling.num_places > MAX_IN_FLIGHT:
                return
            del self._waiting[0]
            pulling.timer.cancel()
            self._running.add(pulling)
            pulling.deadline_s = time.monotonic() + pulling.action.timeout_ms / 1000
            self._next_round(pulling)

    def _rounds(self, action: PullRemote) -> list[list[RankPull]]:
        """Raises: TransferRefused where the ends do not fit each other."""
        assert self.end is not None
        cut = self._cuts.get(action.source_space)
        if cut is None:
            return whole_pages(
                action.source_space, len(self._into.ranks), action.sources, action.space, action.targets
            )
        if self._into.end is None:
            raise TransferRefused(f"blocks of space {action.space} are not cut anew")
        return cut_anew(
            (action.source_space, cut, action.sources),
            (action.space, self._into.end, action.targets),
            self.end.page_bytes,
            mine_of(self._into.ranks, action.space),
        )

    def _next_round(self, pulling: Pulling) -> None:
        assert self.end is not None
        pulls = pulling.rounds.pop(0)
        pulling.num_running = len(pulls)
        for pull in pulls:
            left_ms = int((pulling.deadline_s - time.monotonic()) * 1000)
            try:
                if left_ms <= 0:
                    raise TransferTimeout("the deadline passed before the next rank's part could start")
                future = self.end.pull(pull, left_ms)
            except ClusterError as error:
                failed: Future[Moved] = Future()
                failed.set_exception(error)
                future = failed
            future.add_done_callback(
                lambda future, pull=pull: self._tell(self._part_done, pulling, pull, future)
            )

    def _part_done(self, pulling: Pulling, pull: RankPull, future: "Future[Moved]") -> None:
        if pulling not in self._running:
            return  # closed() has reported it
        error = future.exception()
        if error is not None:
            self._one_failed(pulling, error)
            if isinstance(error, TransferError) and error.quarantined:
                # some of the blocks, where they are cut anew: a rank has several pulls; each settles its own
                self._hold(pulling.action.space, error.quarantined, [pull.target_rank])
                self._settling.add((pull.target, error.quarantined))
        pulling.num_running -= 1
        if pulling.num_running == 0:
            self._round_ended(pulling)

    def _one_failed(self, pulling: Pulling, error: BaseException) -> None:
        pulling.error = pulling.error or str(error) or type(error).__name__
        if isinstance(error, TransferFailed | PeerLost | TransferRefused):  # not for being slow, or busy
            self.failed = self.failed or pulling.error

    def _round_ended(self, pulling: Pulling) -> None:
        if pulling.rounds and not pulling.error:
            self._next_round(pulling)
            return
        self._end(pulling, pulling.error)
        if self.failed:
            self._on_failed(self)

    def _hold(self, space: int, pages: Sequence[int], ranks: Sequence[int]) -> None:
        for page in pages:
            self._doubt.setdefault((space, page), set()).update(ranks)

    def _end(self, pulling: Pulling, error: str) -> None:
        self._running.discard(pulling)
        pulling.timer.cancel()
        self._loop.call_soon(self._begin)
        action = pulling.action
        doubtful = [page for page in action.targets if (action.space, page) in self._doubt]
        self._reported.update((action.space, page) for page in doubtful)
        if error:
            log.warning("remote_pull_failed", source=action.address, pages=len(action.targets), reason=error)
        self._on_pulled(action.number, bool(error), doubtful)

    def settled(self, region: str, pages: tuple[int, ...]) -> None:
        """From NIXL's thread: nothing can write these any more."""
        self._tell(self._rank_settled, region, pages)

    def _rank_settled(self, region: str, pages: tuple[int, ...]) -> None:
        self._settling.discard((region, pages))
        space, rank = space_and_rank(region)
        over: list[tuple[int, int]] = []
        for page in pages:
            ranks = self._doubt.get((space, page))
            if ranks is not None:
                ranks.discard(rank)
                if not ranks:
                    over.append((space, page))
        self._settle(over)
        self._begin()

    def _settle(self, keys: list[tuple[int, int]]) -> None:
        told: dict[int, list[int]] = {}
        for key in keys:
            del self._doubt[key]
            if key in self._reported:
                self._reported.discard(key)
                told.setdefault(key[0], []).append(key[1])
        for space, pages in told.items():
            self._on_settled(space, pages)

    def _tell(self, function: Callable[..., None], *arguments: object) -> None:
        """From any thread; a loop that has ended needs to hear nothing."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            log.debug("loop_ended", path=self.path_id)
