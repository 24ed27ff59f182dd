"""The radix index against a dictionary of parent links: same prefixes, only unpinned leaves go, counts are right.

The model marks a block and all before it as used at once; the tree does so lazily. Both must evict by the same
times, except after a block was taken out of the middle of a path.
"""

import hashlib
from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.mempool.core.radix import Entry, Index
from shared.ids import BlockHash, PageId
from tests.support.examples import examples

SEED = BlockHash(b"\0" * 32)


def chain(names: str) -> list[BlockHash]:
    out, link = [], SEED
    for name in names:
        link = BlockHash(hashlib.sha256(link + name.encode()).digest())
        out.append(link)
    return out


paths = st.text("ab", min_size=1, max_size=9).map(chain)
picks = st.integers(0, 60)


@dataclass
class Known:
    parent: BlockHash
    page: int
    pins: int = 0
    used: int = 0


def check_tree(index: Index) -> None:
    """Everything that the tree's methods rely on."""
    assert sum(len(branch.entries) for branch in index._branches) == len(index)
    assert index.num_pinned == sum(entry.pins > 0 for entry in index.entries())
    for branch in index._branches:
        assert branch.entries
        for i, entry in enumerate(branch.entries):
            assert entry.branch is branch
            assert entry.position == branch.start + i
            assert index.get(entry.block_hash) is entry
            assert i == 0 or entry.parent == branch.entries[i - 1].block_hash
        first = branch.entries[0]
        if branch.above is None:
            assert branch in index._roots[first.parent]
        else:
            assert branch in branch.above.below
            assert branch.above.entries[-1].block_hash == first.parent
        for below in branch.below:
            assert below.above is branch
            assert below in index._branches
        if branch.may_lose():
            assert branch.queued
            assert index._leaves.oldest_item(branch) <= branch.last_used
    assert all(branches and branches <= index._branches for branches in index._roots.values())


class RadixModel(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.index = Index()
        self.known: dict[BlockHash, Known] = {}
        self.tick = 0
        self.next_page = 0
        self.most_branches = 0
        self.times_are_exact = True
        self.moving: list[Entry] = []

    def page(self) -> PageId:
        self.next_page += 1
        return PageId(self.next_page)

    def use(self, block_hash: BlockHash) -> None:
        while (known := self.known.get(block_hash)) is not None:
            known.used = self.tick
            block_hash = known.parent

    def children(self, block_hash: BlockHash) -> list[BlockHash]:
        return [h for h, known in self.known.items() if known.parent == block_hash]

    @rule(path=paths, at=picks)
    def insert_one(self, path, at):
        at %= len(path)
        parent = path[at - 1] if at else SEED
        entry = Entry(path[at], parent, self.page(), 16)
        is_new = path[at] not in self.known
        assert self.index.insert(entry) == is_new
        if is_new:
            self.tick += 1
            self.known[path[at]] = Known(parent, entry.page)
            self.use(path[at])

    @rule(path=paths, first=picks)
    def insert_many(self, path, first):
        first %= len(path)
        parent = path[first - 1] if first else SEED
        part = path[first:]
        pages = [self.page() for _ in part]
        entries = self.index.insert_path(parent, part, pages, 16, last_tokens=3)
        self.tick += 1
        assert [entry.block_hash for entry in entries] == part
        for i, (entry, page) in enumerate(zip(entries, pages, strict=True)):
            if entry.block_hash not in self.known:
                assert entry.page == page
                assert entry.valid_tokens == (3 if i == len(part) - 1 else 16)
                self.known[entry.block_hash] = Known(path[first + i - 1] if first + i else SEED, page)
                self.use(entry.block_hash)
            elif all(h in self.known for h in part[: i + 1]):
                self.use(entry.block_hash)
            assert entry.page == self.known[entry.block_hash].page

    @rule(path=paths, first=picks, gap=picks)
    def insert_all(self, path, first, gap):
        """What a pull brought: a stretch of a path, sometimes with a block left out."""
        first %= len(path)
        lines = list(zip(path, [SEED, *path], strict=False))[first:]
        if gap % 3 == 0:
            del lines[gap % len(lines)]
        entries = [Entry(block_hash, parent, self.page(), 16) for block_hash, parent in lines]
        found = self.index.insert_all(entries)
        for entry, here in zip(entries, found, strict=True):
            if entry.block_hash in self.known:
                assert here is self.index.get(entry.block_hash)
                assert here.page == self.known[entry.block_hash].page != entry.page
            else:
                assert here is entry
                self.tick += 1
                self.known[entry.block_hash] = Known(entry.parent, entry.page)
                self.use(entry.block_hash)

    @rule(path=paths, first=picks)
    def match(self, path, first):
        path = path[first % len(path) :]
        found = self.index.prefix(path)
        count = next((i for i, h in enumerate(path) if h not in self.known), len(path))
        assert [entry.block_hash for entry in found] == path[:count]
        assert [entry.page for entry in found] == [self.known[h].page for h in path[:count]]
        self.tick += 1
        for block_hash in path[:count]:
            self.use(block_hash)

    @rule(path=paths)
    def pin(self, path):
        found = self.index.prefix(path)
        self.index.pin(found)
        self.tick += 1
        for entry in found:
            self.known[entry.block_hash].pins += 1
            self.use(entry.block_hash)

    @rule(path=paths)
    def unpin(self, path):
        mine = [h for h in path if h in self.known and self.known[h].pins > self.being_moved(h)]
        self.index.unpin([self.index.get(h) for h in mine])
        for block_hash in mine:
            self.known[block_hash].pins -= 1

    def being_moved(self, block_hash: BlockHash) -> int:
        return sum(entry.block_hash == block_hash for entry in self.moving)

    def leaves(self) -> list[BlockHash]:
        parents = {known.parent for known in self.known.values()}
        return [h for h, known in self.known.items() if h not in parents and not known.pins]

    @rule(count=st.integers(1, 4))
    def evict(self, count):
        for _ in range(count):
            leaves = self.leaves()
            entry = self.index.evict()
            if entry is None:
                assert not leaves
                return
            assert entry.branch is None
            if not self.moving:
                assert entry.block_hash in leaves
                if self.times_are_exact:
                    oldest = min(self.known[h].used for h in leaves)
                    assert self.known[entry.block_hash].used == oldest
            assert not self.known.pop(entry.block_hash).pins

    @rule(path=paths, chosen=st.sets(picks, max_size=3))
    def delete(self, path, chosen):
        named = [path[i % len(path)] for i in chosen]
        named = list(dict.fromkeys(named))
        expected = {h for h in named if h in self.known and not self.known[h].pins}
        assert {entry.block_hash for entry in self.index.delete(named)} == expected
        for block_hash in expected:
            self.times_are_exact &= not self.children(block_hash)
            del self.known[block_hash]

    @rule(count=st.integers(1, 6))
    def begin_to_move(self, count):
        """Leaves go first, and pinned ones never."""
        if self.moving:
            return
        self.moving = self.index.take_coldest(count)
        gone: set[BlockHash] = set()
        for entry in self.moving:
            assert not self.known[entry.block_hash].pins
            assert set(self.children(entry.block_hash)) <= gone
            gone.add(entry.block_hash)
            self.known[entry.block_hash].pins += 1
        assert len(self.moving) == count or not self.known.keys() - gone - self.kept()
        self.times_are_exact &= not self.moving

    def kept(self) -> set[BlockHash]:
        """Pinned blocks and all before them."""
        out = set()
        for block_hash, known in self.known.items():
            if known.pins > self.being_moved(block_hash):
                while block_hash in self.known:
                    out.add(block_hash)
                    block_hash = self.known[block_hash].parent
        return out

    @rule(succeeds=st.booleans())
    def end_to_move(self, succeeds):
        moving, self.moving = self.moving, []
        removed = self.index.left(moving) if succeeds else []
        if not succeeds:
            self.index.stayed(moving)
        for entry in moving:
            self.known[entry.block_hash].pins -= 1
        for entry in removed:
            assert not self.known.pop(entry.block_hash).pins

    @rule()
    def age_everything(self):
        self.index.age(list(self.index.entries()))
        self.times_are_exact = False

    @invariant()
    def counts_are_right(self):
        assert len(self.index) == len(self.known)
        for block_hash, known in self.known.items():
            entry = self.index.get(block_hash)
            assert (entry.page, entry.pins, entry.parent) == (known.page, known.pins, known.parent)
        check_tree(self.index)
        # the heap is cut when something is pushed, so it may be as long as most branches so far allowed
        self.most_branches = max(self.most_branches, self.index.num_branches)
        assert len(self.index._leaves) <= 2 * self.most_branches + 65


RadixModel.TestCase.settings = settings(max_examples=examples(120), stateful_step_count=40, deadline=None)
TestRadixModel = RadixModel.TestCase
