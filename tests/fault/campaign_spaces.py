"""What must be true of the memory of a mempool with several spaces: engines' own ones, and host memory behind them.

A space is known by its number of pages, unlike any other's of its host: that is in its page table and in the length
of its memory, also after a takeover.
"""

import os
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from shared.kv.page import PageState, unpack_word
from shared.kv.page_table import HEADER_BYTES
from shared.wire import mempool as wire
from tests.fault.campaign_actors import BLOCK_BYTES, NUM_RANKS, Owned
from tests.fault.campaign_host_actors import block_bytes
from tests.fault.campaign_oracle import Oracle, View, memfds, opened
from tests.fault.campaign_rig import PAGE_BYTES, Service

LOAN_DEVICE = "cpu:loan"  # lent pages: a space without memory of its own
CALM_S = 20.0  # copies go on by themselves, and end


class SpaceView(View):
    """One space's table and pages."""

    def __init__(self, tables: dict[int, Path], pages: dict[int, Path], num_pages: int) -> None:
        super().__init__(tables, pages, num_pages)
        self._page_fd = opened(pages[self.memory], self.memory)

    def holds(self, page: int, epoch: int, block_hash: bytes, num_ranks: int) -> bool:
        """Whether the page's bytes are this block's, wherever and whenever they were written."""
        return all(self.rank_bytes(page, rank) == block_bytes(block_hash, rank) for rank in range(num_ranks))

    def rank_bytes(self, page: int, rank: int) -> bytes:
        assert self._pages is not None
        start = (rank * self.num_pages + page) * PAGE_BYTES
        return self._pages[start : start + BLOCK_BYTES]

    def in_state(self, *states: PageState) -> list[int]:
        """Pages that are in one of them now."""
        return [page for page, word in enumerate(self.words()) if unpack_word(word)[1] in states]

    def has_memory(self, page: int) -> bool:
        """Whether the system keeps bytes of the page, of any rank."""
        for rank in range(NUM_RANKS):
            start = (rank * self.num_pages + page) * PAGE_BYTES
            try:
                if os.lseek(self._page_fd, start, os.SEEK_DATA) < start + PAGE_BYTES:
                    return True
            except OSError:  # no data from here on
                continue
        return False

    def close(self) -> None:
        os.close(self._page_fd)


def open_views(pid: int) -> dict[int, SpaceView]:
    """Of all spaces that a mempool has memory of, by number of pages."""
    tables, pages = memfds(pid)
    by_size: dict[int, tuple[dict[int, Path], dict[int, Path]]] = {}
    for inode, link in tables.items():
        with open(opened(link, inode), "rb") as file:
            num_pages = int.from_bytes(file.read(HEADER_BYTES)[24:32], "little")
        by_size.setdefault(num_pages, ({}, {}))[0][inode] = link
    for inode, link in pages.items():
        num_pages = os.stat(link).st_size // (PAGE_BYTES * NUM_RANKS)
        by_size.setdefault(num_pages, ({}, {}))[1][inode] = link
    return {
        num_pages: SpaceView(*found, num_pages) for num_pages, found in by_size.items() if all(found)
    }  # one of both alone is being made, or closed


class SpacesOracle(Oracle):
    """As Oracle, of each space."""

    def __init__(self, mempool: Service) -> None:
        super().__init__(mempool)
        self.views: dict[int, SpaceView] = {}
        self.inodes: dict[int, int] = {}
        self.space_epochs: dict[int, list[int]] = {}  # by the inode of the pages

    def look(self) -> bool:
        """Open the memory of the mempool that runs now. True when that of any space is other memory than before."""
        self.close()
        assert self._mempool.process is not None
        for view in self.views.values():
            view.close()
        for _ in range(50):
            try:
                self.views = open_views(self._mempool.process.pid)
                break
            except (AssertionError, OSError, ValueError):  # in the middle of a change
                time.sleep(0.01)
        else:
            raise AssertionError("two spaces of one size, or memory that cannot be opened")
        inodes = {num_pages: view.memory for num_pages, view in self.views.items()}
        is_new = any(inodes.get(num_pages) != inode for num_pages, inode in self.inodes.items())
        self.inodes = inodes
        return is_new

    @property
    def has_memory(self) -> bool:
        return bool(self.views)

    def check_counts(self) -> wire.PoolStatus | None:
        """All states sum to the total, of each space and of all, and each table says the same."""
        until_s = time.monotonic() + CALM_S
        while time.monotonic() < until_s:
            before = {num_pages: view.words() for num_pages, view in self.views.items()}
            status = self.settled()
            if status is None:
                return status
            parts = [space for space in status.spaces if LOAN_DEVICE not in space.devices]
            for space in status.spaces:
                assert sum(space.pages_by_state.values()) == space.num_pages, space
            assert sum(status.pages_by_state.values()) == status.num_pages, status
            assert status.num_pages == sum(space.num_pages for space in parts), status
            if {space.num_pages for space in parts} != set(before):
                self.look()
                continue
            if any(view.words() != before[num_pages] for num_pages, view in self.views.items()):
                continue
            for space in parts:
                found = Counter(unpack_word(word)[1].name.lower() for word in before[space.num_pages])
                said = {name: count for name, count in space.pages_by_state.items() if count}
                assert found == said, f"the table says {found}, the status {said}"
            return status
        raise AssertionError("the pools never rest")

    def check_space(
        self, num_pages: int, pinned: Iterable[Owned], held: Iterable[Owned], damaged: bool
    ) -> None:
        """As check_table(), of one space."""
        self.view = self.views.get(num_pages)
        if self.view is None:
            return
        self._epochs = self.space_epochs.get(self.view.memory, [])
        self.check_table(pinned, held, damaged)
        self.space_epochs[self.view.memory] = self._epochs

    def check_bytes(self) -> None:
        """Every sealed page with a name holds that block; what is released has no memory."""
        for view in self.views.values():
            self.view = view
            super().check_bytes()
            for page in view.in_state(PageState.RELEASED):
                is_gone = not view.has_memory(page)
                assert is_gone or unpack_word(view.word(page))[1] is not PageState.RELEASED, (
                    f"page {page} is released and has memory"
                )

    def number_of(self, num_pages: int) -> int:
        """The mempool's number of a space; -1 when it does not answer."""
        status = self.settled()
        for space in status.spaces if status is not None else ():
            if space.num_pages == num_pages and LOAN_DEVICE not in space.devices:
                return space.number
        return -1
