"""What an earlier mempool left to this one: pages that nobody uses anew before its processes have reported. No I/O.

Of the earlier mempool's knowledge there is left what lies beside the table: state and epoch of every page, and
hash, parent and length of sealed ones. Whose pages they were is known to the engines, which report it when they
attach again (wire.Holding). Until every process that could touch a page has reported, or is dead, sealed
pages stay where they are and pages in doubt stay in quarantine (ARCHITECTURE.md, rule 7).

A rank has a step under way and says nothing of pages: its engine's word is its own too, whichever of them comes first.
With an engine that dies without a word, it is its ranks' death that counts.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from services.mempool.core import parse
from services.mempool.core.engines import Engine, Engines
from services.mempool.core.entry import Entry
from services.mempool.core.leases import Leases
from services.mempool.core.page_state import PageEvent
from services.mempool.core.page_table import PageTable
from services.mempool.core.radix import Index
from shared.errors import ResourceError
from shared.ids import BlockHash, InstanceId, PageId
from shared.kv.page import PageState
from shared.kv.page_table import ENTRY
from shared.wire.mempool import Holding, Sealed


class NotInherited(ResourceError):
    """An engine reports what the table does not confirm: it must begin anew."""

    code = "holding.unknown"


def pack_entry(entry: Entry, epoch: int) -> bytes:
    """As it is noted beside the table."""
    return ENTRY.pack(epoch, entry.valid_tokens, entry.block_hash, entry.parent)


class Inheritance:
    """From the adoption of a table until settled.

    Args:
        processes: numbers of those that may still touch pages.
        speakers: of these, engines, which say what they hold, and whose they are.
        bereft: instances whose engine has died without a word already.
    """

    def __init__(
        self,
        table: PageTable,
        engines: Engines,
        index: Index,
        leases: Leases,
        entries: bytes,
        processes: Iterable[int],
        speakers: Mapping[int, InstanceId],
        bereft: Collection[InstanceId] = (),
    ) -> None:
        self.awaiting = set(processes)
        self._silent, self._bereft = dict(speakers), set(bereft)
        self._table, self._engines = table, engines
        self._index = index
        self._leases = leases
        # quarantined
        self._in_doubt = {PageId(p) for p, state in enumerate(table.states) if state == PageState.QUARANTINED}
        sealed = [PageId(p) for p, state in enumerate(table.states) if state == PageState.SEALED]
        named = [entry for page in sealed if (entry := self._noted(page, entries)) is not None]
        indexed = index.insert_all(named)
        self._by_page: dict[PageId, Entry] = {
            entry.page: entry for entry, found in zip(named, indexed, strict=True) if found is entry
        }
        # sealed, but not as a block that is indexed
        self._nameless = {page for page in sealed if page not in self._by_page}
        self._pinned = list(self._by_page.values())
        index.pin(self._pinned)

    def _noted(self, page: PageId, entries: bytes) -> Entry | None:
        """What lies beside the table of a sealed page; None: nothing, or what an earlier epoch was."""
        start = page * ENTRY.size
        if start + ENTRY.size > len(entries):
            return None
        epoch, valid_tokens, block_hash, parent = ENTRY.unpack_from(entries, start)
        if epoch != self._table.epochs[page]:
            return None
        return Entry(BlockHash(block_hash), BlockHash(parent), page, valid_tokens)

    @property
    def num_sealed(self) -> int:
        """Pages that were found with their names."""
        return len(self._pinned)

    def claim(self, engine: Engine, holding: Holding, block_tokens: int, max_blocks: int) -> list[Entry]:
        """Give an engine what it reports. Raises: NotInherited; PeerProtocolError on broken lists.

        Returns: blocks that only the engine knew by name; the caller notes them.
        """
        held = parse.pages(holding.pages, holding.epochs, max_blocks)
        message = Sealed(
            pages=holding.sealed_pages,
            epochs=holding.sealed_epochs,
            hashes=holding.sealed_hashes,
            parents=holding.sealed_parents,
            valid_tokens=holding.sealed_valid_tokens,
        )
        sealed = parse.sealed(message, block_tokens, max_blocks)
        leases = [(x.lease_id, parse.pages(x.pages, x.epochs, max_blocks)) for x in holding.leases]
        self._confirm(held, sealed, [own for _, pages in leases for own in pages])
        for page, _ in held:
            self._in_doubt.discard(page)
            self._table.apply(page, PageEvent.CLAIMED)
            engine.held.add(page)
        engine.stock.update(page for page, _ in held[: max(0, holding.num_unwritten)])
        named = [entry for block in sealed if (entry := self._claim_sealed(engine, block)) is not None]
        for lease_id, pages in leases:
            entries = [self._by_page[page] for page, _ in pages]
            self._leases.restore(lease_id, engine.instance, entries, engine.process)
        return named

    def _claim_sealed(self, engine: Engine, block: parse.SealedBlock) -> Entry | None:
        """An entry that only the engine knew."""
        page = block.page
        if page in self._in_doubt:  # the earlier mempool had not read of its seal
            self._in_doubt.discard(page)
            self._table.apply(page, PageEvent.CLAIMED)
            self._table.apply(page, PageEvent.SEAL)
        if (known := self._by_page.get(page)) is not None:
            self._engines.keep(engine, known)
            return None
        self._nameless.discard(page)
        entry = Entry(block.block_hash, block.parent, page, block.valid_tokens)
        is_new = self._index.insert(entry)
        if is_new:
            self._by_page[page] = entry
        self._engines.keep(engine, entry)
        return entry if is_new else None

    def _confirm(
        self,
        held: Sequence[tuple[PageId, int]],
        sealed: Sequence[parse.SealedBlock],
        leased: Sequence[tuple[PageId, int]],
    ) -> None:
        """Nothing is changed. Raises: NotInherited."""
        free_to_claim = self._in_doubt | self._nameless | self._by_page.keys()
        named, fresh = set(self._by_page), set[BlockHash]()
        for page, epoch in held:
            self._check(page, epoch, page in self._in_doubt and page in free_to_claim)
            free_to_claim.discard(page)
        for block in sealed:
            self._check(block.page, block.epoch, block.page in free_to_claim)
            free_to_claim.discard(block.page)
            known = self._by_page.get(block.page)
            if known is not None and known.block_hash != block.block_hash:
                raise NotInherited(f"page {block.page} holds another block")
            if block.block_hash not in self._index and block.block_hash not in fresh:
                fresh.add(block.block_hash)
                named.add(block.page)
        for page, epoch in leased:
            self._check(page, epoch, page in named)

    def _check(self, page: PageId, epoch: int, is_expected: bool) -> None:
        if not 0 <= page < self._table.num_pages or self._table.epochs[page] != epoch or not is_expected:
            raise NotInherited(f"page {page} is not as it was under epoch {epoch}")

    def said(self, process: int) -> None:
        """An engine has attached: what it has not claimed neither it nor its ranks touch."""
        self._silent.pop(process, None)

    def may_report(self, process: int, instance: InstanceId) -> bool:
        """Of a rank that is attached: whether the word of its instance's engines is known, or there are none.

        One that is an engine too, perhaps another instance's, reports when that attaches.
        """
        if process in self._silent or instance in self._bereft:
            return False
        return instance not in self._silent.values()

    def reported(self, process: int) -> bool:
        """A process has attached and its engine's word is known, or it is dead.

        True when this settles the inheritance: drop it.
        """
        self.awaiting.discard(process)
        if self.awaiting:
            return False
        self._table.free_all(sorted(self._in_doubt), PageEvent.ACKNOWLEDGED)
        self._table.free_all(sorted(self._nameless), PageEvent.RETIRE)
        self._index.unpin(self._pinned)
        self._in_doubt, self._nameless, self._pinned = set(), set(), []
        return True
