"""Which branch of the radix tree loses its last block first: a heap that is put right lazily. No I/O."""

import heapq
from collections.abc import Set

from services.mempool.core.entry import Branch


class LeafQueue:
    """Of every queued branch there is an item at least that is as old as the branch, or older.

    Args: branches: all that live, a view; it bounds the heap.
    """

    def __init__(self, branches: Set[Branch]) -> None:
        self._branches = branches
        self._heap: list[tuple[int, int, Branch]] = []  # (last_used, number, branch)
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._heap)

    def offer(self, branch: Branch) -> None:
        """Its last block may have become one that can go."""
        if not branch.queued and branch.may_lose():
            branch.queued = True
            self._push(branch)

    def reoffer(self, branch: Branch) -> None:
        """Its time went back. An item that is too young is dropped when it comes up."""
        if branch.queued:
            self._push(branch)
        self.offer(branch)

    def coldest(self) -> Branch | None:
        """The branch whose last block goes first; it stays queued. None: every leaf is pinned or leaving.

        Cost: O(1) for the same branch again, O(log n) for each item that was put right.
        """
        while self._heap:
            last_used, _, branch = self._heap[0]
            if not branch.may_lose():
                heapq.heappop(self._heap)
                branch.queued = False
            elif last_used == branch.last_used:
                return branch
            else:
                heapq.heappop(self._heap)
                if last_used < branch.last_used:
                    self._push(branch)
        return None

    def oldest_item(self, branch: Branch) -> int | None:
        """Time of the oldest item of a branch, for tests. Cost: O(n)."""
        return min((item[0] for item in self._heap if item[2] is branch), default=None)

    def _push(self, branch: Branch) -> None:
        self._num_pushed += 1
        heapq.heappush(self._heap, (branch.last_used, self._num_pushed, branch))
        if len(self._heap) > 2 * len(self._branches) + 64:
            self._heap = [(b.last_used, number, b) for number, b in enumerate(self._branches) if b.queued]
            heapq.heapify(self._heap)
