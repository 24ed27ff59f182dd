"""Pages of this host's GPUs and memory that are mapped here, moved by the copy engine in merged runs (319 GB/s and up).

Importing happens at link-up, in the background, never in a transfer (ARCHITECTURE.md, rule 8): cuda_window.py
maps a peer's allocations, MappedPages says which pages are there by now. The others of a pull go by `staged`.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from shared.errors import ClusterError
from shared.transfer.describe import decode
from shared.transfer.errors import PathUnavailable, TransferError, TransferFailed, TransferRefused
from shared.transfer.interface import MAX_PIECES, Link, Moved, PageCheck, PathName, Peer
from shared.transfer.link import BaseLink
from shared.transfer.mapped import CopierFor, MappedLink, TicketAttempt
from shared.transfer.page_stream import PageStream
from shared.transfer.pieces import Pieces
from shared.transfer.provider import BaseTransport
from shared.transfer.quarantine import Quarantine
from shared.transfer.transfer_job import Attempt, DrivenFuture


class ImportedLink(MappedLink):
    """A peer whose pages are imported, all or some of them."""

    any_thread = True

    def __init__(
        self, *, staged: Link | None, page_stream: PageStream | None, callers_drive: bool, **common: Any
    ) -> None:
        super().__init__(PathName.IMPORTED, **common)
        self.callers_drive = callers_drive
        self._staged = staged
        self._page_stream = page_stream

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
        """See interface.Link. All pages mapped, between GPUs: straight to the page stream."""
        here, stream = self._mapped.get(source), self._page_stream
        mine = self._mine(target)
        if here is None or stream is None or here.device < 0 or mine.device < 0 or here.present is not None:
            return super().pull(
                source, source_pages, target, target_pages, timeout_ms=timeout_ms, check=check
            )
        theirs = self._theirs(source)
        size = self._same_page_bytes(theirs, mine)
        there, to = np.asarray(source_pages, np.int64), np.asarray(target_pages, np.int64)
        pages = frozenset(target_pages)
        if not 0 < to.size == there.size <= MAX_PIECES or len(pages) < to.size:
            raise TransferRefused(
                f"{there.size} source pages for {len(pages)} different target pages of {to.size}"
            )
        for pages_here, region in ((there, theirs), (to, mine)):
            if int(pages_here.view(np.uint64).max()) >= region.num_pages:  # a negative one is very large so
                raise TransferRefused(f"a page outside {region.name!r}, which has {region.num_pages}")
        self._quarantine.claim(target, pages)

        def begin(deadline_s: float) -> Attempt:
            try:
                return TicketAttempt(
                    stream.submit(
                        (there * size + here.address).view(np.uint64),
                        (to * size + mine.address).view(np.uint64),
                        size,
                    )
                )
            except ClusterError as error:
                raise TransferFailed(error.message) from error

        return self._start(begin, target, pages, to.size * size, timeout_ms, check)

    def pull_pieces(
        self, source: str, target: str, pieces: Pieces, *, timeout_ms: int, check: PageCheck | None = None
    ) -> "Future[Moved]":
        """See interface.Link. Pieces of pages that are not imported go by the staged link, at the same time."""
        here = self._mapped.get(source)
        theirs = self._theirs(source)
        if here is None or here.present is None or here.present >= pieces.source_pages(theirs.page_bytes):
            return super().pull_pieces(source, target, pieces, timeout_ms=timeout_ms, check=check)
        if self._staged is None:
            raise TransferRefused(
                f"pages of {source!r} are not imported, and there is no staged path to {self.peer}"
            )
        size = np.uint64(theirs.page_bytes)
        first = pieces.source_offsets // size
        last = (pieces.source_offsets + np.maximum(pieces.sizes, 1) - np.uint64(1)) // size
        mapped = np.fromiter(
            (
                here.present.issuperset(range(begin, end + 1))
                for begin, end in zip(first.tolist(), last.tolist(), strict=True)
            ),
            bool,
            len(pieces),
        )
        slow = self._staged.pull_pieces(source, target, pieces.take(~mapped), timeout_ms=timeout_ms)
        if not mapped.any():
            return joined([slow], check)
        try:
            fast = super().pull_pieces(source, target, pieces.take(mapped), timeout_ms=timeout_ms)
        except ClusterError as error:  # the slow part runs already: the future has to say it
            fast = _failed(error)
        return joined([fast, slow], check)


def joined(parts: "list[Future[Moved]]", check: PageCheck | None) -> "Future[Moved]":
    """One future for several: ends when the last of them has; the check comes last. Fails as the first that failed, or,
    where pages are quarantined, the first that can say so: with those of all."""
    whole: Future[Moved] = Future()
    whole.set_running_or_notify_cancel()
    lock = threading.Lock()
    waiting = len(parts)

    def one_ended(_: "Future[Moved]") -> None:
        nonlocal waiting
        with lock:
            waiting -= 1
            last = waiting == 0
        if last:
            _settle(whole, parts, check)

    for part in parts:
        part.add_done_callback(one_ended)
        if isinstance(part, DrivenFuture):
            part.hand_over()  # callers have the whole, which nobody can drive
    return whole


def _settle(whole: "Future[Moved]", parts: "list[Future[Moved]]", check: PageCheck | None) -> None:
    errors = [error for part in parts if (error := part.exception()) is not None]
    if errors:
        begun = [error for error in errors if isinstance(error, TransferError)]
        held = tuple(page for error in begun for page in error.quarantined)
        first = errors[0]
        if held:  # a refusal of the other part must not hide them
            first = begun[0]
            first.quarantined = held
        whole.set_exception(first)
        return
    moved = [part.result() for part in parts]
    try:
        stale = tuple(check()) if check is not None else ()
    except Exception as error:  # noqa: BLE001  the caller's check; its future must end all the same
        whole.set_exception(TransferFailed(f"the check of the source pages failed: {error!r}"))
        return
    whole.set_result(
        Moved(
            moved[0].path,
            sum(each.num_bytes for each in moved),
            max(each.elapsed_us for each in moved),
            stale,
        )
    )


def _failed(error: Exception) -> "Future[Moved]":
    future: Future[Moved] = Future()
    future.set_exception(error)
    return future


class ImportedTransport(BaseTransport):
    """See interface.Transport. Copiers, streams and mappings stay the owner's: they outlive the links."""

    path = PathName.IMPORTED

    def __init__(
        self,
        instance: str,
        copier_for: CopierFor,
        *,
        quarantine: Quarantine | None = None,
        staged: Link | None = None,
        page_stream: PageStream | None = None,
        callers_drive: bool = False,
    ) -> None:
        """`copier_for`: (source device, target device) to the copier and stream of the GPU that copies, which for
        a pull is the target's. `page_stream` of that GPU makes pulls of whole pages cheaper to start.
        `callers_drive`: see BaseLink."""
        super().__init__(instance, quarantine=quarantine)
        self._callers_drive = callers_drive
        self._page_stream = page_stream
        self._copier_for = copier_for
        self._staged = staged

    def _open(self, peer: Peer) -> BaseLink:
        end = decode(peer.description)
        if not peer.mapped:
            raise PathUnavailable(f"no region of {end.instance} is imported here")
        return ImportedLink(
            staged=self._staged,
            page_stream=self._page_stream,
            callers_drive=self._callers_drive,
            mapped=peer.mapped,
            copier_for=self._copier_for,
            thread=self._thread,
            regions=self.regions,
            peer=end,
            reason="pages of one host, mapped here",
            quarantine=self._quarantine,
            on_settled=peer.on_settled,
            on_lost=self._lost,
        )
