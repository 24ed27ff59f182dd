"""Blocks of an index that leave their space: at once, or when they have been copied away. No I/O."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter

from services.mempool.core.condemned import Condemned
from services.mempool.core.entry import Branch, Entry
from services.mempool.core.leaf_queue import LeafQueue
from services.mempool.core.twins import Twins

_BRANCH = attrgetter("branch")


class Leaving(Condemned):
    """See Index, which has these."""

    _leaves: LeafQueue
    num_pinned: int
    twins: Twins

    @abstractmethod
    def pin(self, entries: Iterable[Entry]) -> None:
        """See Index."""

    @abstractmethod
    def unpin(self, entries: Iterable[Entry]) -> None:
        """See Index."""

    @abstractmethod
    def _remove(self, entry: Entry) -> None: ...

    @abstractmethod
    def _cut_off(self, branch: Branch, at: int) -> None: ...

    @abstractmethod
    def _split(self, branch: Branch, at: int) -> Branch: ...

    @property
    def can_evict(self) -> bool:
        """Whether evict() would find one. Cost: as evict()'s."""
        return self._leaves.coldest() is not None

    def evict(self) -> Entry | None:
        """Remove and return the least recently used leaf without a pin; None when every leaf is pinned.

        Cost: O(1) within a branch, O(log n) for the next one.
        """
        branch = self._leaves.coldest()
        if branch is None:
            return None
        entry = branch.entries[-1]
        self._remove(entry)
        return entry

    def take_coldest(self, count: int) -> list[Entry]:
        """Up to `count` blocks in the order of eviction, pinned, to be copied away and then given to left().

        They stay indexed meanwhile. One that is used before left() stays for good.
        """
        out: list[Entry] = []
        while len(out) < count and (branch := self._leaves.coldest()) is not None:
            at = len(branch.entries)
            lowest = max(0, at - (count - len(out)))
            while at > lowest and not branch.entries[at - 1].pins:
                at -= 1
            tail = self._split(branch, at) if at else branch
            tail.leaving = True
            out += reversed(tail.entries)
            self.pin(tail.entries)
            if tail.above is not None:
                tail.above.last_used = max(tail.above.last_used, tail.last_used)
                self._leaves.offer(tail.above)
        return out

    def left(self, entries: Sequence[Entry]) -> list[Entry]:
        """Entries of take_coldest() are copied: unpin them; remove and return those that nobody used since.

        Cost: an eighth where whole branches leave, as take_coldest() returned them.
        """
        removed: list[Entry] = []
        at, mixed = 0, None  # a branch that does not leave as one
        while at < len(entries):
            branch = entries[at].branch
            if branch is not None and branch.leaving and branch is not mixed:
                run = entries[at : at + len(branch.entries)]
                if self._is_only(run, branch):
                    for entry in run:
                        entry.pins = 0
                    self.num_pinned -= len(run)
                    self._cut_off(branch, 0)
                    removed += run
                    at += len(run)
                    continue
                mixed = branch
            self._left_one(entries[at], removed)
            at += 1
        return removed

    def _left_one(self, entry: Entry, removed: list[Entry]) -> None:
        branch = entry.branch
        self.unpin([entry])
        if branch is None or not branch.leaving:
            return
        if entry.pins:
            branch.leaving = False  # somebody works with it: it stays, and what is before it
        else:
            self._remove(entry)
            removed.append(entry)

    def _is_only(self, run: Sequence[Entry], branch: Branch) -> bool:
        """Whether these are the branch from its end, and nobody else pins or has a page of any of them."""
        if list(run) != branch.entries[::-1] or any(entry.pins != 1 for entry in run):
            return False
        return not self.twins.pages or self.twins.pages.keys().isdisjoint(e.block_hash for e in run)

    def stayed(self, entries: Iterable[Entry]) -> None:
        """Entries of take_coldest() could not be copied: unpin them, they stay."""
        for entry in entries:
            if entry.branch is not None:
                entry.branch.leaving = False
            self.unpin([entry])

    def age(self, entries: Iterable[Entry]) -> None:
        """Make these the first to go, once they are leaves and unpinned: there are copies elsewhere."""
        for branch, count in reversed(Counter(map(_BRANCH, entries)).items()):
            # a branch that goes on behind these blocks has to lose the others first
            if (
                branch is not None
                and branch.last_used
                and count == len(branch.entries)
                and not any(x.last_used for x in branch.below)
            ):
                branch.last_used = 0
                self._leaves.reoffer(branch)
