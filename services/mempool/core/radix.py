"""Sealed pages of one space by block hash: a radix tree with compressed paths. No I/O.

                    seed                    A *branch* is a stretch of blocks that follow each other and part nowhere;
                     |                      branches divide where prompts part, where a prefix hit ends, and where a
           [s0 s1 s2 ... s31]               block leaves the middle. LRU, eviction and swap-out work on branches, so
             |            |                 that a prompt of 4,096 tokens costs a few steps, not one per block.
    [a32 ... a255]   [b32 ... b90]

A block's hash covers its whole prefix, so the blocks of a prompt are found by look-ups in one dictionary; the tree
says which of them form a path, and what must go first (MemServe 4.2; the tree is SGLang's, with hashes for tokens).
A pin protects a page, so every space (HBM, DRAM, a leased peer) has a tree of its own, and locations.py joins
them: the same block may have a page in several. A block may come before its parent: it is a root until then.

Using a block is using all blocks before it: a parent is never older than its children.
"""

from collections.abc import Iterable, Sequence, Set
from typing import Any

from services.mempool.core.condemned import Watch
from services.mempool.core.entry import Branch, Entry, runs_of
from services.mempool.core.leaf_queue import LeafQueue
from services.mempool.core.leaving import Leaving
from services.mempool.core.twins import Twins
from shared.errors import InvalidRequest, InvariantBroken
from shared.ids import BlockHash, PageId

FIRST_LOOKUP = 16  # hashes looked up at once, then more: a long list whose first block is unknown stays cheap


class Index(Leaving):
    """Hash -> entry. Names sealed pages only; the pool keeps the page table in step."""

    def __init__(self) -> None:
        self._entries: dict[BlockHash, Entry] = {}
        self._branches: set[Branch] = set()
        # branches whose predecessor is not indexed, by its hash
        self._roots: dict[BlockHash, set[Branch]] = {}
        self._leaves = LeafQueue(self._branches)
        self._tick = self.num_pinned = 0
        self.twins = Twins()
        # by the name that they had: condemned blocks that somebody still has, and some that nobody has any more
        self.condemned: dict[BlockHash, list[Entry]] = {}
        self.watch: Watch | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._entries

    @property
    def num_branches(self) -> int:
        """Nodes of the tree."""
        return len(self._branches)

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
        if self.watch is not None:
            self.watch.stored([entry])
        return True

    def insert_all(self, entries: Sequence[Entry]) -> list[Entry]:
        """As insert() of each. Returns: what is indexed under each hash now. Cost: a third, for runs of new blocks."""
        out: list[Entry] = []
        for run in runs_of(entries):
            is_new = self._insert_run(run)
            out += run if is_new else [e if self.insert(e) else self._entries[e.block_hash] for e in run]
        return out

    def _insert_run(self, new: Sequence[Entry]) -> bool:
        """Consecutive blocks, each named once, of which none is indexed and none is waited for; else nothing."""
        hashes = [entry.block_hash for entry in new]
        if not new or [e.parent for e in new[1:]] != hashes[:-1] or len(set(hashes)) != len(hashes):
            return False
        if not (self._entries.keys().isdisjoint(hashes) and self._roots.keys().isdisjoint(hashes)):
            return False
        assert not any(entry.pins for entry in new)
        self._tick += 1
        above = self._entries.get(new[0].parent)
        self._entries.update(zip(hashes, new, strict=True))
        self._hang(above, new[0].parent, list(new))
        if self.watch is not None:
            self.watch.stored(list(new))
        return True

    def insert_path(
        self,
        parent: BlockHash,
        hashes: Sequence[BlockHash],
        pages: Sequence[PageId],
        block_tokens: int,
        *,
        last_tokens: int = 0,
    ) -> list[Entry]:
        """Index consecutive blocks at once.

        Args:
            parent: the hash before the first one.
            last_tokens: valid tokens of the last block; 0: a full block.
        Returns: an entry for every hash. One whose page is not the page given here was indexed before, and the
            page given here was not taken.
        Raises: InvalidRequest when a hash is named twice.
        Cost: one step per new block and per branch.
        """
        if len(set(hashes)) != len(hashes):
            raise InvalidRequest("a block is named twice in one path")
        out = self.prefix(hashes)
        known = len(out)
        if known == len(hashes):
            return out
        named = zip(hashes[known:], [parent, *hashes[:-1]][known:], pages[known:], strict=True)
        new = [Entry(h, p, page, block_tokens) for h, p, page in named]
        if last_tokens:
            new[-1].valid_tokens = last_tokens
        if self._insert_run(new):
            return out + new
        out += [entry if self.insert(entry) else self._entries[entry.block_hash] for entry in new]
        self.prefix(hashes)  # blocks that had waited for these are used too
        return out

    def _hang(self, above: Entry | None, parent: BlockHash, new: list[Entry]) -> None:
        """Put consecutive new entries where they belong. `above`: the entry of `parent`, if there is one."""
        branch = above.branch if above is not None else None
        if branch is None:
            branch = self._new_branch(new, 0, None)
            self._roots.setdefault(parent, set()).add(branch)
        else:
            assert above is not None
            at = above.position - branch.start + 1
            if at < len(branch.entries):
                self._split(branch, at)
            if branch.below or branch.leaving:
                over = branch
                branch = self._new_branch(new, 0, over)
                over.below.add(branch)
            else:
                self._append(branch, new)
        branch.last_used = self._tick
        orphans = self._roots.get(new[-1].block_hash)
        if orphans is not None and self._root_of(branch) not in orphans:  # else a chain that bites its tail
            del self._roots[new[-1].block_hash]
            branch.below = orphans
            for orphan in orphans:
                orphan.above = branch
        self._leaves.offer(branch)

    def _new_branch(self, entries: list[Entry], start: int, above: Branch | None) -> Branch:
        branch = Branch(entries, start, above, self._tick)
        for position, entry in enumerate(entries, start):
            entry.branch = branch
            entry.position = position
        self._branches.add(branch)
        return branch

    def _append(self, branch: Branch, new: list[Entry]) -> None:
        for position, entry in enumerate(new, branch.start + len(branch.entries)):
            entry.branch = branch
            entry.position = position
        branch.entries += new

    # -- looking up -------------------------------------------------------------------------------

    def prefix(self, hashes: Sequence[BlockHash]) -> list[Entry]:
        """Entries of the longest indexed path that begins with hashes[0], marked as just used.

        Cost: one look-up per block, one step per branch.
        """
        found: list[Any] = []
        chunk = FIRST_LOOKUP
        while len(found) < len(hashes):
            begin = len(found)
            found += map(self._entries.get, hashes[begin : begin + chunk])
            if None in found:
                del found[found.index(None, begin) :]
                break
            chunk *= 8
        self._use(found)
        return found

    def _use(self, path: list[Entry]) -> None:
        """Mark the blocks of a path as used, and cut the list where it leaves the tree."""
        self._tick += 1
        done, over = 0, None
        while done < len(path):
            branch = path[done].branch
            assert branch is not None
            offset = path[done].position - branch.start
            if over is not None and (branch.above is not over or offset):
                del path[done:]
                break
            here = branch.entries[offset : offset + len(path) - done]
            if path[done : done + len(here)] != here:
                same = next(i for i, entry in enumerate(here) if path[done + i] is not entry)
                del here[same:]
                del path[done + same :]
            if offset + len(here) < len(branch.entries):
                self._split(branch, offset + len(here))
            branch.last_used = self._tick
            branch.leaving = False
            done += len(here)
            over = self._joined(over, branch)

    def _joined(self, over: Branch | None, branch: Branch) -> Branch:
        """Make one branch of two that no longer part, both just used. The branch that is left."""
        if over is None or len(over.below) > 1:
            return branch
        self._append(over, branch.entries)
        over.below = branch.below
        for below in over.below:
            below.above = over
        branch.entries = []
        self._branches.discard(branch)
        self._leaves.offer(over)
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
                if entry.block_hash in self.twins.pages:
                    self.twins.loose.append(entry)
                if (branch := entry.branch) is not None and not branch.queued and branch.entries[-1] is entry:
                    self._leaves.offer(branch)

    # -- leaving ----------------------------------------------------------------------------------

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
        branch = entry.branch
        assert branch is not None
        at = entry.position - branch.start
        if at + 1 < len(branch.entries):
            self._split(branch, at + 1)
        self._cut_off(branch, at)

    def _cut_off(self, branch: Branch, at: int) -> None:
        """Its blocks from entries[at] on are not indexed any more."""
        gone = branch.entries[at:]
        del branch.entries[at:]
        self._forget(gone[::-1])
        for entry in gone:
            entry.branch = None
        if branch.below:  # successors wait for this block to come again
            for below in branch.below:
                below.above = None
            self._roots.setdefault(gone[-1].block_hash, set()).update(branch.below)
            branch.below = set()
        if branch.entries:
            self._leaves.offer(branch)
            return
        self._branches.discard(branch)
        over = branch.above
        if over is not None:
            over.below.discard(branch)
            over.last_used = max(over.last_used, branch.last_used)
            self._leaves.offer(over)
            return
        siblings = self._roots[gone[0].parent]
        siblings.discard(branch)
        if not siblings:
            del self._roots[gone[0].parent]

    # -- the tree ---------------------------------------------------------------------------------

    def _split(self, branch: Branch, at: int) -> Branch:
        """Divide a branch before entries[at]; the new branch below it."""
        tail = Branch(branch.entries[at:], branch.start + at, branch, branch.last_used)
        for entry in tail.entries:
            entry.branch = tail
        del branch.entries[at:]
        tail.below, branch.below = branch.below, {tail}
        for below in tail.below:
            below.above = tail
        tail.leaving = branch.leaving
        self._branches.add(tail)
        self._leaves.offer(tail)
        return tail

    def _root_of(self, branch: Branch) -> Branch:
        while branch.above is not None:
            branch = branch.above
        return branch
