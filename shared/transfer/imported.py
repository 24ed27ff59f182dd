"""Pages of this host's GPUs and memory that are mapped here, moved by the copy engine in merged runs (319 GB/s and up).

Importing happens at link-up, in the background, never in a transfer (architecture.md section 4, rule 8): cuda_window.py
maps a peer's allocations, MappedPages says which pages are there by now. The others of a pull go by `staged`.
"""

import threading
from concurrent.futures import Future
from typing import Any

import numpy as np

from shared.errors import ClusterError
from shared.transfer.describe import decode
from shared.transfer.errors import PathUnavailable, TransferError, TransferFailed, TransferRefused
from shared.transfer.interface import Link, Moved, PageCheck, PathName, Peer
from shared.transfer.link import BaseLink
from shared.transfer.mapped import CopierFor, MappedLink
from shared.transfer.pieces import Pieces
from shared.transfer.provider import BaseTransport
from shared.transfer.quarantine import Quarantine


class ImportedLink(MappedLink):
    """A peer whose pages are imported, all or some of them."""

    def __init__(self, *, staged: Link | None, **common: Any) -> None:
        super().__init__(PathName.IMPORTED, **common)
        self._staged = staged

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
    """One future for several: ends when the last of them has; the check comes last. Fails as the first that failed,
    with the quarantined pages of all."""
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
    return whole


def _settle(whole: "Future[Moved]", parts: "list[Future[Moved]]", check: PageCheck | None) -> None:
    errors = [error for part in parts if (error := part.exception()) is not None]
    if errors:
        first = errors[0]
        if isinstance(first, TransferError):
            first.quarantined = tuple(
                page for error in errors if isinstance(error, TransferError) for page in error.quarantined
            )
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
    ) -> None:
        """`copier_for`: (source device, target device) to the copier and stream of the GPU that copies, which for
        a pull is the target's."""
        super().__init__(instance, quarantine=quarantine)
        self._copier_for = copier_for
        self._staged = staged

    def _open(self, peer: Peer) -> BaseLink:
        end = decode(peer.description)
        if not peer.mapped:
            raise PathUnavailable(f"no region of {end.instance} is imported here")
        return ImportedLink(
            staged=self._staged,
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
