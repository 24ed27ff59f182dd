"""What all paths have in common: validation, bounds, deadlines, epoch checks, quarantine. A path adds `_begin`."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from shared.errors import PeerProtocolError
from shared.transfer.describe import EndDescription, RegionDescription
from shared.transfer.errors import (
    PeerLost,
    TransferError,
    TransferFailed,
    TransferQueueFull,
    TransferRefused,
)
from shared.transfer.interface import (
    MAX_IN_FLIGHT,
    MAX_PIECES,
    Grant,
    Moved,
    OnPeerLost,
    OnSettled,
    PageCheck,
    PathName,
    Region,
)
from shared.transfer.pieces import Pieces
from shared.transfer.quarantine import Quarantine
from shared.transfer.transfer_job import Attempt, DrivenFuture, Transfer
from shared.transfer.transfer_thread import TransferThread


class BaseLink:
    """See interface.Link. Subclasses implement `_begin` (on the thread) and may extend `_disconnect`.

    `any_thread`: `_begin` and the attempt's poll() may run on the caller's thread, so a pull starts in the call.
    `callers_drive`: of such a link: the thread is not woken; callers drive every DrivenFuture until it is over, or
    hand it over.
    """

    path: PathName
    any_thread = False
    callers_drive = False

    def __init__(
        self,
        *,
        thread: TransferThread,
        regions: Mapping[str, Region],
        peer: EndDescription,
        reason: str,
        quarantine: Quarantine,
        on_settled: OnSettled | None,
        on_lost: OnPeerLost,
        unmap: Callable[[], None] | None = None,
    ) -> None:
        """`unmap` gives the peer's memory back; it runs once, after the last copy that could touch it."""
        self.peer = peer.instance
        self.reason = reason
        self.lost_reason: str | None = None
        self.is_dead = False
        self._thread = thread
        self._regions = regions
        self._peer_end = peer
        self._quarantine = quarantine
        self._on_settled = on_settled
        self._on_lost = on_lost
        self._unmap = unmap
        self._is_cut = False
        self._lock = threading.Lock()
        self._num_in_flight = 0

    # ---- what callers use

    def pull(
        self,
        source: str,
        source_pages: Sequence[int],
        target: str,
        target_pages: Sequence[int],
        *,
        timeout_ms: int,
        check: PageCheck | None = None,
    ) -> "Future[Moved]":
        """See interface.Link."""
        page_bytes = self._same_page_bytes(self._theirs(source), self._mine(target))
        pieces = Pieces.of_pages(source_pages, target_pages, page_bytes)
        return self.pull_pieces(source, target, pieces, timeout_ms=timeout_ms, check=check)

    def pull_pieces(
        self, source: str, target: str, pieces: Pieces, *, timeout_ms: int, check: PageCheck | None = None
    ) -> "Future[Moved]":
        """See interface.Link."""
        theirs, mine = self._theirs(source), self._mine(target)
        self._check_size(pieces)
        pieces.check(theirs.num_bytes, mine.num_bytes)
        pages = pieces.target_pages(mine.page_bytes)
        self._quarantine.claim(target, pages)
        return self._start(
            lambda until_s: self._begin(theirs, mine, pieces, until_s),
            target,
            pages,
            pieces.num_bytes,
            timeout_ms,
            check,
        )

    def push(
        self,
        source: str,
        source_pages: Sequence[int],
        grant: Grant,
        target_pages: Sequence[int],
        *,
        timeout_ms: int,
    ) -> "Future[Moved]":
        """See interface.Link."""
        mine, theirs = self._mine(source), self._theirs(grant.region)
        if not grant.pages.issuperset(target_pages):
            raise TransferRefused(f"grant {grant.grant_id} does not cover every target page")
        pieces = Pieces.of_pages(source_pages, target_pages, self._same_page_bytes(theirs, mine))
        self._check_size(pieces)
        pieces.check(mine.num_bytes, theirs.num_bytes)
        name = f"{self.peer}:{grant.region}"  # their pages, in the same book
        pages = pieces.target_pages(theirs.page_bytes)
        self._quarantine.claim(name, pages)
        return self._start(
            lambda until_s: self._begin_push(mine, theirs, pieces, until_s),
            name,
            pages,
            pieces.num_bytes,
            timeout_ms,
            None,
        )

    def on_message(self, message: bytes) -> None:
        """See interface.Link. Paths that need no messages refuse all."""
        raise PeerProtocolError(f"path {self.path} takes no messages; {len(message)} bytes came")

    def quarantined(self) -> Mapping[str, frozenset[int]]:
        """See interface.Link."""
        return self._quarantine.held()

    def peer_lost(self, reason: str) -> None:
        """See interface.Link."""
        with self._lock:
            if self.lost_reason is not None:
                return
            self.lost_reason = reason
        self._thread.post(lambda: self._on_lost(self.peer, reason))

    def peer_dead(self) -> None:
        """See interface.Link."""
        self.peer_lost("proven dead")
        self._thread.post(self._bury)

    def close(self) -> None:
        """See interface.Link."""
        with self._lock:
            if self.lost_reason is None:
                self.lost_reason = "the link was closed"
        self._thread.post(self._cut)

    # ---- what paths implement

    def _begin(self, source: RegionDescription, target: Region, pieces: Pieces, deadline_s: float) -> Attempt:
        """Start a pull. On the thread. Raises: TransferError."""
        raise TransferFailed(f"path {self.path} cannot pull")

    def _begin_push(
        self, source: Region, target: RegionDescription, pieces: Pieces, deadline_s: float
    ) -> Attempt:
        """Start a push. On the thread. Raises: TransferError."""
        raise TransferFailed(f"path {self.path} cannot push")

    def _disconnect(self) -> None:
        """Cut the path, so that the peer cannot write here any more. On the thread, once."""

    def _serves(self) -> bool:
        """Whether copies for the peer are under way."""
        return False

    # ---- the life of a transfer, on the thread

    def _bury(self) -> None:
        self._cut()
        self.is_dead = True

    def _cut(self) -> None:
        if not self._is_cut:
            self._is_cut = True
            self._disconnect()
            self.unmap_if_unused()

    @property
    def is_cut(self) -> bool:
        """Whether the path to the peer has been cut."""
        return self._is_cut

    def unmap_if_unused(self) -> None:
        """After the cut, when the last copy has ended. On the thread."""
        if self._is_cut and self._unmap is not None and self._num_in_flight == 0 and not self._serves():
            unmap, self._unmap = self._unmap, None
            unmap()

    def transfer_over(self, transfer: Transfer, target: str, pages: frozenset[int]) -> None:
        """Done, or failed with nothing left that writes."""
        self._quarantine.release(target, pages)
        self._leave()

    def transfer_held(self, target: str, pages: frozenset[int]) -> None:
        """Failed, and something may still write."""
        self._quarantine.quarantine(target, pages)

    def transfer_settled(self, transfer: Transfer, target: str, pages: frozenset[int]) -> None:
        """What was left has ended."""
        settled = self._quarantine.settle(target, pages)
        self._leave()
        if settled and self._on_settled is not None:
            self._on_settled(target, settled)

    def _leave(self) -> None:
        with self._lock:
            self._num_in_flight -= 1
        if self._is_cut:
            self._thread.post(self.unmap_if_unused)

    def _start(
        self,
        begin: Callable[[float], Attempt],
        target: str,
        pages: frozenset[int],
        num_bytes: int,
        timeout_ms: int,
        check: PageCheck | None,
    ) -> "Future[Moved]":
        refusal = self._enter()
        if refusal is not None:
            self._quarantine.release(target, pages)
            raise refusal
        future: Future[Moved] = DrivenFuture() if self.any_thread else Future()
        future.set_running_or_notify_cancel()
        begun_s = time.monotonic()
        deadline_s = begun_s + timeout_ms / 1000

        def run() -> None:
            try:
                attempt = begin(deadline_s)
            except Exception as error:  # noqa: BLE001  as in Transfer.step
                wrapped = (
                    error if isinstance(error, TransferError) else TransferFailed(f"{self.path}: {error!r}")
                )
                if getattr(
                    error.__cause__, "running", False
                ):  # CopyFailed: part of it runs, and nobody can say when
                    wrapped.quarantined = tuple(sorted(pages))  # it ends; such pages never come back
                    self._quarantine.quarantine(target, pages)
                else:
                    self._quarantine.release(target, pages)
                    self._leave()
                future.set_exception(wrapped)
                return
            transfer = Transfer(
                self,
                attempt,
                target=target,
                pages=pages,
                num_bytes=num_bytes,
                deadline_s=deadline_s,
                begun_s=begun_s,
                check=check,
                future=future,
            )
            if isinstance(future, DrivenFuture):
                future.drive = transfer.step
                future.rest = lambda: self._thread.post(lambda: self._thread.add(transfer), calm=True)
                if not self.callers_drive:
                    future.hand_over()
            elif not transfer.step(time.monotonic()):
                self._thread.add(transfer)

        if self.any_thread:
            run()
        else:
            self._thread.post(run)
        return future

    def _enter(self) -> Exception | None:
        with self._lock:
            if self.lost_reason is not None:
                return PeerLost(f"{self.peer}: {self.lost_reason}")
            if self._num_in_flight >= MAX_IN_FLIGHT:
                return TransferQueueFull(f"{MAX_IN_FLIGHT} transfers with {self.peer} are in flight")
            self._num_in_flight += 1
            return None

    def _theirs(self, name: str) -> RegionDescription:
        region = self._peer_end.region(name)
        if region is None:
            raise TransferRefused(f"{self.peer} has no region {name!r}")
        return region

    def _mine(self, name: str) -> Region:
        if name not in self._regions:
            raise TransferRefused(f"no region {name!r} is registered here")
        return self._regions[name]

    @staticmethod
    def _same_page_bytes(theirs: RegionDescription, mine: Region) -> int:
        if theirs.page_bytes != mine.page_bytes:
            raise TransferRefused(f"pages of {theirs.page_bytes} and {mine.page_bytes} bytes: reslice first")
        return mine.page_bytes

    @staticmethod
    def _check_size(pieces: Pieces) -> None:
        if len(pieces) > MAX_PIECES:
            raise TransferRefused(f"{len(pieces)} pieces in one transfer; at most {MAX_PIECES}")
