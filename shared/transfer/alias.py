"""The same memory at both ends: a transfer changes who uses the page, and no byte travels.

The pin that keeps the page is the mempool's (ARCHITECTURE.md, rule 4: alias = pin); here it is only made
sure that source and target really are the same page, and that it still is what was promised.
"""

from collections.abc import Sequence
from concurrent.futures import Future

from shared.transfer.describe import decode
from shared.transfer.errors import PathUnavailable, TransferError, TransferFailed, TransferRefused
from shared.transfer.interface import Grant, Moved, PageCheck, PathName, Peer
from shared.transfer.link import BaseLink
from shared.transfer.pieces import Pieces
from shared.transfer.provider import BaseTransport


class AliasLink(BaseLink):
    """Answers at once, on the caller's thread."""

    path = PathName.ALIAS

    def pull_pieces(
        self, source: str, target: str, pieces: Pieces, *, timeout_ms: int, check: PageCheck | None = None
    ) -> "Future[Moved]":
        """Only positions where source and target are the same bytes. Raises: TransferRefused for others."""
        theirs, mine = self._theirs(source), self._mine(target)
        if theirs.memory_key != mine.memory_key:
            raise TransferRefused(f"{source!r} and {target!r} are different memory: an alias moves nothing")
        if bool((pieces.source_offsets != pieces.target_offsets).any()):
            raise TransferRefused("an alias moves nothing: source and target must be the same page")
        self._check_size(pieces)
        pieces.check(theirs.num_bytes, mine.num_bytes)
        refusal = self._enter()
        if refusal is not None:
            raise refusal
        future: Future[Moved] = Future()
        try:
            stale = tuple(check()) if check is not None else ()
        except Exception as error:  # noqa: BLE001  as on other paths, a waiter hears of it
            known = isinstance(error, TransferError)
            future.set_exception(error if known else TransferFailed(f"{self.path}: {error!r}"))
        else:
            future.set_result(Moved(self.path, 0, 0, stale))
        finally:
            self._leave()
        return future

    def push(
        self,
        source: str,
        source_pages: Sequence[int],
        grant: Grant,
        target_pages: Sequence[int],
        *,
        timeout_ms: int,
    ) -> "Future[Moved]":
        """As pull_pieces, with the grant's pages."""
        if not grant.pages.issuperset(target_pages):
            raise TransferRefused(f"grant {grant.grant_id} does not cover every target page")
        page_bytes = self._same_page_bytes(self._theirs(grant.region), self._mine(source))
        pieces = Pieces.of_pages(source_pages, target_pages, page_bytes)
        return self.pull_pieces(grant.region, source, pieces, timeout_ms=timeout_ms)


class AliasTransport(BaseTransport):
    """See interface.Transport."""

    path = PathName.ALIAS

    def _open(self, peer: Peer) -> BaseLink:
        end = decode(peer.description)
        keys = {region.memory_key for region in self.regions.values()}
        if not any(region.memory_key in keys for region in end.regions):
            raise PathUnavailable(f"no memory in common with {end.instance}")
        return AliasLink(
            thread=self._thread,
            regions=self.regions,
            peer=end,
            reason="the same memory",
            quarantine=self._quarantine,
            on_settled=peer.on_settled,
            on_lost=self._lost,
        )
