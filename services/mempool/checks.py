"""Checksums of a sample of the sealed pages: taken when a page is sealed, compared when it is used.

    sealed      its sum is taken, once its word says so; the page is pinned meanwhile
    leased      it is summed again before its reader hears of it: from a block that is wrong on, the reader gets nothing
                (not for the first one within a second of a copy that was compared)
    copied      the copy is summed before anybody hears of it; where its bytes cannot be read here, the source is
    to a host   the source sums again and says what it has in EpochsChecked, the reader compares what has come

Bytes of a sealed page never change. Where they did, somebody wrote who must not have, or the memory failed: the block
and what is behind it leave the index (core/condemned.py) and are computed again. A copy that is wrong counts as failed.

Which blocks are in the sample is decided by their hash and a number of this process. Pages on GPUs are read through the
mover's windows (gpu_page_sums.py), which a mempool of one space does not have. A page that changes before its sum is
taken, some 0.1 ms after it was sealed, is not noticed. Source: docs/mempool.md, "Checksums".
"""

import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat

from services.mempool.core.actions import Action, CopyPages, WriteEntries
from services.mempool.core.entry import Entry
from services.mempool.core.mempool import Mempool
from services.mempool.page_sums import UNKNOWN, HostPages, Pages, PageSums, Piece
from services.mempool.spaces import Spaces
from shared.ids import BlockHash, LeaseId
from shared.kv.page import PageState
from shared.kv.page_table import ENTRY
from shared.observe.log import get_logger
from shared.transport.clock import Clock

MAX_WAITING = 4_096  # pages that are to be summed; what is sealed beyond has no sum
JUST_MS = 1_000  # a copy that was compared longer ago is summed again for its first lease, too
_ALL = 1 << 32
_HASH_AT = slice(16, 20)  # in ENTRY: as much of the block's hash as decides whether it is in the sample

log = get_logger("mempool.checks")


@dataclass(slots=True, eq=False)
class Known:
    """The sum of a page under an epoch. `origin`: the space whose block it is; another one where it lies on loan."""

    piece: Piece
    epoch: int
    block_hash: BlockHash
    origin: int
    value: int = UNKNOWN  # until it is taken
    came_ms: int | None = None  # when its copy was found right, if nobody has leased it since

    def agrees(self, value: int) -> bool:
        """Whether its bytes may be what they were; the first value is taken for right."""
        if UNKNOWN in (self.value, value):
            self.value = self.value or value
            return True
        return value == self.value


class Checks:
    """Of one mempool, on its loop. With a rate of 0 nothing is ever looked at.

    Args:
        rate: of the blocks, how many are in the sample.
        perform: hands actions of the core to the shell.
    """

    def __init__(
        self,
        rate: float,
        core: Mempool,
        spaces: Spaces,
        clock: Clock,
        perform: Callable[[list[Action]], None],
    ) -> None:
        self._below = round(rate * _ALL)
        self._salt = secrets.randbits(32)
        self._core, self._spaces, self._clock, self._perform = core, spaces, clock, perform
        self._sums = PageSums(self._pages_of)
        self._known: dict[tuple[int, int], Known] = {}  # by space and page
        self._corrupt_epochs: dict[tuple[int, int], int] = {}  # of pages that were found wrong
        self._sealed: list[Known] = []  # since begin()
        # of copies that were found right and are being indexed: epoch, block and sum, by space and page
        self._came: dict[tuple[int, int], tuple[int, BlockHash, int]] = {}
        self._copies: dict[int, CopyPages] = {}
        self.counters: Counter[str] = Counter(
            checks_pages_summed=0, checks_pages_checked=0, checks_pages_skipped=0, checks_pages_corrupt=0,
            checks_copies_wrong=0,
        )  # fmt: skip

    def close(self) -> None:
        """Waits for what is being summed; nothing is heard of it."""
        self._below = 0
        self._sums.close()

    def _pages_of(self, space: int) -> Pages | None:
        """How they are read here: those on GPUs once the mover has mapped them."""
        memory = self._spaces.memories.get(space)
        if memory is None:
            return None
        if not self._spaces.has_slabs(space):
            return HostPages(memory)
        windows = self._spaces.windows(space)
        if len(windows) < memory.num_ranks:
            return None
        from services.mempool.gpu_page_sums import GpuPages

        return GpuPages(windows, memory.page_bytes)

    @property
    def is_on(self) -> bool:
        """Whether any page is looked at."""
        return self._below > 0

    @property
    def num_waiting(self) -> int:
        """Pages whose sums are being taken or compared."""
        return self._sums.num_waiting

    @property
    def failing(self) -> list[int]:
        """Spaces in which no page is looked at, for they could not be mapped; this is tried again."""
        return self._sums.failing

    def block_bytes_of(self, space: int) -> int:
        """Of a block's part on one rank."""
        return self._spaces.description_of(space).block_bytes

    def ended(self, space: int) -> None:
        """The space is over. Cost: a look at all that is known."""
        self._sums.ended(space)
        for known in (self._known, self._corrupt_epochs):
            for key in [key for key in known if key[0] == space]:
                del known[key]

    # -- sealed ---------------------------------------------------------------------------------------

    def sealed(self, action: WriteEntries) -> None:
        """The words of these pages are about to say that they are sealed; begin() follows when they do."""
        if not self._below or not self._sums.can_read(action.space):
            return
        num_bytes = self.block_bytes_of(action.space)
        for page, packed in action.entries:
            if (int.from_bytes(packed[_HASH_AT], "little") + self._salt) % _ALL >= self._below:
                continue
            epoch, _, block_hash, _ = ENTRY.unpack(packed)
            if (
                self._corrupt_epochs.get((action.space, page)) != epoch
            ):  # else condemned: another name is noted
                known = Known(
                    Piece(action.space, page, num_bytes), epoch, BlockHash(block_hash), action.space
                )
                came_epoch, came_hash, value = self._came.get((action.space, page), (0, b"", UNKNOWN))
                if (came_epoch, came_hash) == (epoch, block_hash):  # its sum is that of its source
                    known.value, known.came_ms = value, self._clock.now_ms()
                    self._known[action.space, page] = known
                else:
                    self._sealed.append(known)

    def adopted(self, space: int, words: Sequence[int], entries: bytes) -> None:
        """Pages of an earlier mempool, whose sums ended with it: as sealed() of those that are, with begin()."""
        if not self._below:
            return
        found = [page for page, word in enumerate(words) if word & 0xFF == PageState.SEALED]
        size = ENTRY.size
        packed = [(page, entries[page * size : (page + 1) * size]) for page in found]
        self.sealed(WriteEntries([each for each in packed if len(each[1]) == size], space))
        self.begin()

    def begin(self) -> None:
        """Take the sums of what was sealed."""
        if not self._sealed:
            return
        sealed, self._sealed = self._sealed, []
        held: list[tuple[Known, Entry]] = []
        for known in sealed:
            space, page, _ = known.piece
            if len(held) + self.num_waiting >= MAX_WAITING:
                self.counters["checks_pages_skipped"] += 1
            elif (entry := self._core.hold(space, known.block_hash, page, known.epoch)) is not None:
                held.append((known, entry))
                self._known[space, page] = known
        if held:
            pieces = [known.piece for known, _ in held]
            self._sums.sums(pieces, lambda values: self._taken(held, values), urgent=False)

    def _taken(self, held: Sequence[tuple[Known, Entry]], values: Sequence[int]) -> None:
        self.counters["checks_pages_summed"] += len(held)
        entries: dict[int, list[Entry]] = {}
        for (known, entry), value in zip(held, values, strict=True):
            entries.setdefault(known.piece.space, []).append(entry)
            if not known.agrees(value):  # somebody looked at it earlier
                self._corrupt(known)
        for space, mine in entries.items():
            self._perform(self._core.let_go(space, mine, self._clock.now_ms()))

    def of(self, space: int, page: int, epoch: int) -> Known | None:
        """What is known, or soon will be, of a page under this epoch."""
        known = self._known.get((space, page))
        return known if known is not None and known.epoch == epoch else None

    # -- leased ---------------------------------------------------------------------------------------

    def of_lease(self, space: int, pages: Sequence[int], epochs: Sequence[int]) -> dict[int, Known]:
        """By position, what is to be looked at before the reader hears of these pages. Not what was sealed just now,
        nor a copy that was found right just now, for its first reader: of a page of 8 MiB a look takes 2 ms, and it
        would come behind a copy of a thousand of them."""
        known, now_ms = self.of_pages(space, pages, epochs), self._clock.now_ms()
        return {
            i: each for i, each in known.items() if not _has_just_come(each, now_ms) and each.value != UNKNOWN
        }

    def of_pages(self, space: int, pages: Sequence[int], epochs: Sequence[int]) -> dict[int, Known]:
        """By position, those of the sample."""
        if self._known.keys().isdisjoint(zip(repeat(space), pages)):
            return {}
        pairs = enumerate(zip(pages, epochs, strict=True))
        found = ((i, self.of(space, page, epoch)) for i, (page, epoch) in pairs)
        return {i: known for i, known in found if known is not None}

    def look(self, looks: dict[int, Known], then: Callable[[int | None], None]) -> None:
        """Sum these again, which are pinned. `then`: the first position whose page is wrong, or None."""

        def compare(values: list[int]) -> None:
            self.counters["checks_pages_checked"] += len(looks)
            pairs = zip(looks.items(), values, strict=True)
            wrong = [i for (i, known), value in pairs if not known.agrees(value)]
            for i in wrong:
                if self._is_current(looks[i]):  # else its lease ended, and something else lies there
                    self._corrupt(looks[i])
            then(min(wrong, default=None))

        self._sums.sums([known.piece for known in looks.values()], compare)

    def end_lease(self, space: int, lease_id: LeaseId) -> None:
        """Its first page is wrong: the reader gets nothing."""
        self._perform(self._core.end_lease(space, lease_id, self._clock.now_ms()))

    def _is_current(self, known: Known) -> bool:
        space, page, _ = known.piece
        pool = self._core.pools.get(space)
        return pool is not None and pool.memory is not None and pool.memory.table.epochs[page] == known.epoch

    def _corrupt(self, known: Known) -> None:
        """Its sum stays known: leases that were granted meanwhile, and copies under way, fail by it too."""
        space, page, _ = known.piece
        if self._corrupt_epochs.get((space, page)) == known.epoch:
            return
        self._corrupt_epochs[space, page] = known.epoch
        self.counters["checks_pages_corrupt"] += 1
        log.error(
            "page_corrupt", space=space, page=page, epoch=known.epoch, block=known.block_hash.hex()[:16],
            reason="its bytes changed while it was sealed",
        )  # fmt: skip
        self._perform(self._core.on_corrupt(known.origin, known.block_hash, self._clock.now_ms()))

    # -- copied ---------------------------------------------------------------------------------------

    def copying(self, action: CopyPages) -> None:
        """This copy begins. What lies in its targets is nobody's any more."""
        if not self._known:
            return
        if action.raw:  # lent pages, whose epoch stays
            for page in action.targets:
                self._known.pop((action.space, page), None)
        if not self._known.keys().isdisjoint(action.sources):
            self._copies[action.copy_id] = action

    def copied(self, copy_id: int, failed: bool, then: Callable[[bool], None]) -> bool:
        """Whether `then` says later whether the copy failed, after a look at it; False: it is as it is."""
        action = self._copies.pop(copy_id, None)
        if action is None or failed:
            return False
        asked: list[tuple[Known, Piece]] = []
        for (space, page), target in zip(action.sources, action.targets, strict=True):
            known = self._known.get((space, page))
            if known is None or not self._is_current(known):
                continue
            is_target = self._same_bytes(space, action) and self._sums.can_read(action.space)
            if not is_target or known.value == UNKNOWN:
                asked.append((known, known.piece))
            if is_target:
                asked.append((known, Piece(action.space, target, known.piece.num_bytes)))
        if asked:
            pieces = [piece for _, piece in asked]
            self._sums.sums(pieces, lambda values: self._compare(action, asked, values, then))
        return bool(asked)

    def sums(self, pieces: Sequence[Piece], then: Callable[[list[int]], None]) -> None:
        """See PageSums."""
        self._sums.sums(pieces, then)

    def _same_bytes(self, source: int, action: CopyPages) -> bool:
        """Whether a copy has its source's bytes, in the source's order."""
        here, there = self._spaces.description_of(source), self._spaces.description_of(action.space)
        return here.num_ranks == there.num_ranks if action.raw else here.content_key == there.content_key

    def _compare(
        self,
        action: CopyPages,
        asked: Sequence[tuple[Known, Piece]],
        values: Sequence[int],
        then: Callable[[bool], None],
    ) -> None:
        """Each source whose sum was not known comes before its target."""
        wrong: dict[int, Known] = {}
        right: dict[tuple[int, int], tuple[int, BlockHash, int]] = {}
        for i, ((known, piece), value) in enumerate(zip(asked, values, strict=True)):
            is_target = piece is not known.piece
            if is_target and known.value == UNKNOWN:
                continue
            self.counters["checks_pages_checked"] += 1
            if not known.agrees(value):
                wrong[i] = known
            elif is_target and value != UNKNOWN:
                if action.raw:
                    self._lies_on_loan(known, piece)
                else:
                    right[piece[:2]] = self._epoch_of(piece), known.block_hash, value
        if not wrong:
            self._came = right  # no longer than this: what is not sealed now, its owner may write to
            then(False)
            self._came = {}
            return
        self.counters["checks_copies_wrong"] += 1
        log.error("copy_wrong", copy_id=action.copy_id, space=action.space, num_pages=len(wrong))
        self.look(wrong, lambda _: then(True))  # the sources are pinned until this copy's end is heard of

    def _lies_on_loan(self, known: Known, piece: Piece) -> None:
        epoch = self._epoch_of(piece)
        self._known[piece[:2]] = Known(piece, epoch, known.block_hash, known.origin, known.value)

    def _epoch_of(self, piece: Piece) -> int:
        memory = self._core.pools[piece.space].memory
        assert memory is not None
        return memory.table.epochs[piece.page]


def _has_just_come(known: Known, now_ms: int) -> bool:
    """Whether it was found right when it was copied, and this is its first lease since."""
    came_ms, known.came_ms = known.came_ms, None
    return came_ms is not None and now_ms - came_ms < JUST_MS
