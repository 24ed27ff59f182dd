"""Sealed pages of one space by block hash: a radix tree with compressed paths. No I/O.

                    seed                    A *run* is a stretch of blocks that follow each other and part nowhere;
                     |                      runs divide where prompts part, where a prefix hit ends, and where a
           [s0 s1 s2 ... s31]               block leaves the middle. LRU, eviction and swap-out work on runs, so
             |            |                 that a prompt of 4,096 tokens costs a few steps, not one per block.
    [a32 ... a255]   [b32 ... b90]

A block's hash covers its whole prefix, so the blocks of a prompt are found by look-ups in one dictionary; the tree
says which of them form a path, and what must go first (MemServe 4.2; the tree is SGLang's, with hashes for tokens).
A pin protects a page, so every space (HBM, DRAM, a leased peer) has a tree of its own, and locations.py joins
them: the same block may have a page in several. A block may come before its parent: it is a root until then.

Using a block is using all blocks before it: a parent is never older than its children.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from typing import Any

from services.mempool.core.entry import Entry, Run
from shared.errors import InvalidRequest, InvariantBroken
from shared.ids import BlockHash, PageId

LOOKUP_CHUNK = 512  # hashes looked up at once: a long list whose first block is unknown stays cheap


class Index:
    """Hash -> entry. Names sealed pages only; the pool keeps the page table in step."""

    def __init__(self) -> None:
        self._entries: dict[BlockHash, Entry] = {}
        self._runs: set[Run] = set()
        # runs whose predecessor is not indexed, by its hash
        self._roots: dict[BlockHash, set[Run]] = {}
        # (last_used, number, run): of every queued run one item at least that is as old as the run, or older
        self._heap: list[tuple[int, int, Run]] = []
        self._num_pushed = 0
        self._tick = 0
        self.num_pinned = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._entries

    @property
    def num_runs(self) -> int:
        """Nodes of the tree."""
        return len(self._runs)

    def entries(self) -> Iterable[Entry]:
        """All of them, in no particular order."""
        return self._entries.values()

    @property
    def hashes(self) -> Set[BlockHash]:
        """All of them, a view."""
        return self._entries.keys()

    def get(self, block_hash: BlockHash) -> Entry | None:
        """One block, not marked as used."""
        return self._entries.get(block_hash)

    # -- inserting --------------------------------------------------------------------------------

    def insert(self, entry: Entry) -> bool:
        """False, and nothing changed, when the hash is indexed already."""
        if entry.block_hash in self._entries:
            return False
        assert entry.pins == 0
        self._tick += 1
        above = self._entries.get(entry.parent)
        self._entries[entry.block_hash] = entry
        self._hang(above, entry.parent, [entry])
        return True

    def insert_path(
        self,
        parent: BlockHash,
        hashes: Sequence[BlockHash],
        pages: Sequence[PageId],
        block_tokens: int,
        *,
        last_tokens: int = 0,
        checksums: Sequence[int] = (),
    ) -> list[Entry]:
        """Index consecutive blocks at once.

        Args:
            parent: the hash before the first one.
            last_tokens: valid tokens of the last block; 0: a full block.
            checksums: one a block, or none.
        Returns: an entry for every hash. One whose page is not the page given here was indexed before, and the
            page given here was not taken.
        Raises: InvalidRequest when a hash is named twice.
        Cost: one step per new block and per run.
        """
        if len(set(hashes)) != len(hashes):
            raise InvalidRequest("a block is named twice in one path")
        out = self.prefix(hashes)
        known = len(out)
        if known == len(hashes):
            return out
        sums = checksums or [0] * len(hashes)
        fresh, before = list(hashes[known:]), [parent, *hashes[:-1]][known:]
        new = [
            Entry(h, p, page, block_tokens, checksum)
            for h, p, page, checksum in zip(fresh, before, pages[known:], sums[known:], strict=True)
        ]
        if last_tokens:
            new[-1].valid_tokens = last_tokens
        if self._entries.keys().isdisjoint(fresh) and self._roots.keys().isdisjoint(fresh):
            self._tick += 1
            above = self._entries.get(before[0])
            self._entries.update(zip(fresh, new, strict=True))
            self._hang(above, before[0], new)
            return out + new
        out += [entry if self.insert(entry) else self._entries[entry.block_hash] for entry in new]
        self.prefix(hashes)  # blocks that had waited for these are used too
        return out

    def _hang(self, above: Entry | None, parent: BlockHash, new: list[Entry]) -> None:
        """Put consecutive new entries where they belong. `above`: the entry of `parent`, if there is one."""
        run = above.run if above is not None else None
        if run is None:
            run = self._new_run(new, 0, None)
            self._roots.setdefault(parent, set()).add(run)
        else:
            assert above is not None
            at = above.position - run.start + 1
            if at < len(run.entries):
                self._split(run, at)
            if run.below or run.leaving:
                over = run
                run = self._new_run(new, 0, over)
                over.below.add(run)
            else:
                self._append(run, new)
        run.last_used = self._tick
        orphans = self._roots.get(new[-1].block_hash)
        if orphans is not None and self._root_of(run) not in orphans:  # a chain of hashes that bites its tail
            del self._roots[new[-1].block_hash]
            run.below = orphans
            for orphan in orphans:
                orphan.above = run
        self._offer(run)

    def _new_run(self, entries: list[Entry], start: int, above: Run | None) -> Run:
        run = Run(entries, start, above, self._tick)
        for position, entry in enumerate(entries, start):
            entry.run = run
            entry.position = position
        self._runs.add(run)
        return run

    def _append(self, run: Run, new: list[Entry]) -> None:
        for position, entry in enumerate(new, run.start + len(run.entries)):
            entry.run = run
            entry.position = position
        run.entries += new

    # -- looking up -------------------------------------------------------------------------------

    def prefix(self, hashes: Sequence[BlockHash]) -> list[Entry]:
        """Entries of the longest indexed path that begins with hashes[0], marked as just used.

        Cost: one look-up per block, one step per run.
        """
        found: list[Any] = []
        for begin in range(0, len(hashes), LOOKUP_CHUNK):
            found += map(self._entries.get, hashes[begin : begin + LOOKUP_CHUNK])
            if None in found:
                del found[found.index(None) :]
                break
        self._use(found)
        return found

    def _use(self, path: list[Entry]) -> None:
        """Mark the blocks of a path as used, and cut the list where it leaves the tree."""
        self._tick += 1
        done, over = 0, None
        while done < len(path):
            run = path[done].run
            assert run is not None
            offset = path[done].position - run.start
            if over is not None and (run.above is not over or offset):
                del path[done:]
                break
            here = run.entries[offset : offset + len(path) - done]
            if path[done : done + len(here)] != here:
                same = next(i for i, entry in enumerate(here) if path[done + i] is not entry)
                del here[same:]
                del path[done + same :]
            if offset + len(here) < len(run.entries):
                self._split(run, offset + len(here))
            run.last_used = self._tick
            run.leaving = False
            done += len(here)
            over = self._joined(over, run)

    def _joined(self, over: Run | None, run: Run) -> Run:
        """Make one run of two that no longer part, both just used. The run that is left."""
        if over is None or len(over.below) > 1:
            return run
        self._append(over, run.entries)
        over.below = run.below
        for below in over.below:
            below.above = over
        run.entries = []
        self._runs.discard(run)
        self._offer(over)
        return over

    # -- pins -------------------------------------------------------------------------------------

    def pin(self, entries: Iterable[Entry]) -> None:
        """Keep them until the same number of unpin() calls."""
        for entry in entries:
            if not entry.pins:
                self.num_pinned += 1
            entry.pins += 1

    def unpin(self, entries: Iterable[Entry]) -> None:
        """Raises: InvariantBroken on an entry without a pin."""
        for entry in entries:
            if entry.pins <= 0:
                raise InvariantBroken(f"page {entry.page} was unpinned more often than pinned")
            entry.pins -= 1
            if not entry.pins:
                self.num_pinned -= 1
                run = entry.run
                if run is not None and not run.queued and run.entries[-1] is entry:
                    self._offer(run)

    # -- leaving ----------------------------------------------------------------------------------

    def evict(self) -> Entry | None:
        """Remove and return the least recently used leaf without a pin; None when every leaf is pinned.

        Cost: O(1) within a run, O(log n) for the next one.
        """
        run = self._coldest()
        if run is None:
            return None
        entry = run.entries[-1]
        self._remove(entry)
        return entry

    def take_coldest(self, count: int) -> list[Entry]:
        """Up to `count` blocks in the order of eviction, pinned, to be copied away and then given to left().

        They stay indexed meanwhile. One that is used before left() stays for good.
        """
        out: list[Entry] = []
        while len(out) < count and (run := self._coldest()) is not None:
            at = len(run.entries)
            lowest = max(0, at - (count - len(out)))
            while at > lowest and not run.entries[at - 1].pins:
                at -= 1
            tail = self._split(run, at) if at else run
            tail.leaving = True
            out += reversed(tail.entries)
            self.pin(tail.entries)
            if tail.above is not None:
                tail.above.last_used = max(tail.above.last_used, tail.last_used)
                self._offer(tail.above)
        return out

    def left(self, entries: Iterable[Entry]) -> list[Entry]:
        """Entries of take_coldest() are copied: unpin them; remove and return those that nobody used since."""
        removed: list[Entry] = []
        for entry in entries:
            run = entry.run
            self.unpin([entry])
            if run is None or not run.leaving:
                continue
            if entry.pins:
                run.leaving = False  # somebody works with it: it stays, and what is before it
            else:
                self._remove(entry)
                removed.append(entry)
        return removed

    def stayed(self, entries: Iterable[Entry]) -> None:
        """Entries of take_coldest() could not be copied: unpin them, they stay."""
        for entry in entries:
            if entry.run is not None:
                entry.run.leaving = False
            self.unpin([entry])

    def age(self, entries: Iterable[Entry]) -> None:
        """Make these the first to go, once they are leaves and unpinned: there are copies elsewhere."""
        for run, count in reversed(Counter(entry.run for entry in entries).items()):
            # a run that goes on behind these blocks has to lose the others first
            if run is not None and count == len(run.entries) and not any(x.last_used for x in run.below):
                run.last_used = 0
                if run.queued:
                    self._push(run)  # its item in the heap is too young; that one is dropped when it comes up
                self._offer(run)

    def delete(self, hashes: Sequence[BlockHash]) -> list[Entry]:
        """Remove and return the named blocks that have no pin; their successors stay until they age."""
        removed: list[Entry] = []
        for block_hash in reversed(hashes):  # from the leaves: nothing has to be split
            entry = self._entries.get(block_hash)
            if entry is not None and not entry.pins:
                self._remove(entry)
                removed.append(entry)
        return removed[::-1]

    def delete_unpinned(self) -> list[Entry]:
        """Remove everything that has no pin."""
        return self.delete([h for h, entry in self._entries.items() if not entry.pins])

    def _remove(self, entry: Entry) -> None:
        assert not entry.pins
        run = entry.run
        assert run is not None
        at = entry.position - run.start + 1
        if at < len(run.entries):
            self._split(run, at)
        del self._entries[entry.block_hash]
        entry.run = None
        run.entries.pop()
        if run.below:  # successors wait for this block to come again
            for below in run.below:
                below.above = None
            self._roots.setdefault(entry.block_hash, set()).update(run.below)
            run.below = set()
        if run.entries:
            self._offer(run)
            return
        self._runs.discard(run)
        over = run.above
        if over is not None:
            over.below.discard(run)
            over.last_used = max(over.last_used, run.last_used)
            self._offer(over)
            return
        siblings = self._roots[entry.parent]
        siblings.discard(run)
        if not siblings:
            del self._roots[entry.parent]

    # -- the tree ---------------------------------------------------------------------------------

    def _split(self, run: Run, at: int) -> Run:
        """Divide a run before entries[at]; the new run below it."""
        tail = Run(run.entries[at:], run.start + at, run, run.last_used)
        for entry in tail.entries:
            entry.run = tail
        del run.entries[at:]
        tail.below, run.below = run.below, {tail}
        for below in tail.below:
            below.above = tail
        tail.leaving = run.leaving
        self._runs.add(tail)
        self._offer(tail)
        return tail

    def _root_of(self, run: Run) -> Run:
        while run.above is not None:
            run = run.above
        return run

    def _may_go(self, run: Run) -> bool:
        if not run.entries or run.leaving or run.entries[-1].pins:
            return False
        return all(below.leaving for below in run.below)

    def _offer(self, run: Run) -> None:
        """The run's last block may have become one that can go."""
        if not run.queued and self._may_go(run):
            run.queued = True
            self._push(run)

    def _push(self, run: Run) -> None:
        self._num_pushed += 1
        heapq.heappush(self._heap, (run.last_used, self._num_pushed, run))
        if len(self._heap) > 2 * len(self._runs) + 64:
            self._heap = [(run.last_used, number, run) for number, run in enumerate(self._runs) if run.queued]
            heapq.heapify(self._heap)

    def _coldest(self) -> Run | None:
        """The run whose last block goes first; it stays in the heap."""
        while self._heap:
            last_used, _, run = self._heap[0]
            if self._may_go(run):
                if last_used == run.last_used:
                    return run
                heapq.heappop(self._heap)
                if last_used < run.last_used:
                    self._push(run)
                continue
            heapq.heappop(self._heap)
            run.queued = False
        return None
