"""What one attachment of an engine can see: the pages, the page table, and a scratch page for lost ones.

Pages are asked for by number, and numbers mean something else in the next pool. So a mapping ends with proof
that nobody still looks at it: Python refuses to unmap memory that has views. A number that cannot mean a page
of this mapping gets the scratch page instead; until that page is used anew it does not read as valid.
"""

import mmap
import os

from shared.ids import Epoch
from shared.kv.page import SEALED_BYTE, PageState
from shared.kv.page_table import HEADER_WORDS, TableHeader, read_header, table_bytes

_LIVE_BYTES = frozenset((int(PageState.GRANTED), int(PageState.WRITING), SEALED_BYTE))


class Scratch:
    """One private page: what is written here is lost, what is read here is never valid."""

    def __init__(self, length_bytes: int) -> None:
        self.asked: set[int] = set()
        self._length_bytes = length_bytes
        self._memory = mmap.mmap(-1, max(1, length_bytes))

    def view(self, page: int) -> memoryview:
        """Writable."""
        self.asked.add(page)
        return memoryview(self._memory)[: self._length_bytes]

    def try_close(self) -> bool:
        """False while any view is left; then nothing has changed."""
        try:
            self._memory.close()
        except BufferError:
            return False
        return True


class PoolMapping:
    """A pool's memory. Takes over both fds and closes them.

    Raises: ValueError or OSError when the memory is not what Attached says.
    """

    def __init__(self, page_fd: int, table_fd: int, header: TableHeader, block_bytes: int) -> None:
        self.header = header
        self._block_bytes = block_bytes
        self._scratch = Scratch(block_bytes)
        self.poison: dict[int, int] = {}  # page -> largest epoch under which it does not read as valid
        try:
            if block_bytes > header.page_bytes:
                raise ValueError(f"a block of {block_bytes} bytes in pages of {header.page_bytes}")
            self._table = mmap.mmap(table_fd, table_bytes(header.num_pages), prot=mmap.PROT_READ)
            self._words = memoryview(self._table).cast("Q")
            if read_header(self._words) != header:
                raise ValueError(f"the page table says {read_header(self._words)}, Attached says {header}")
            self._pages = mmap.mmap(page_fd, header.num_pages * header.page_bytes)
        finally:
            os.close(page_fd)
            os.close(table_fd)
        # A forked child must not be able to write here once this process is proven dead.
        self._pages.madvise(mmap.MADV_DONTFORK)

    def spoil(self, page: int) -> None:
        """Whoever asked for this page now may have got a scratch page: nothing that it holds now is valid."""
        self.poison[page] = self.word(page) >> 8

    def scratch_view(self, page: int) -> memoryview:
        """For a page that the caller may not touch."""
        self.spoil(page)
        return self._scratch.view(page)

    def view(self, page: int) -> memoryview:
        """The block's bytes in its page, writable. Cost: about 1 us."""
        if not 0 <= page < self.header.num_pages:
            return self.scratch_view(page)
        start = page * self.header.page_bytes
        return memoryview(self._pages)[start : start + self._block_bytes]

    def word(self, page: int) -> int:
        """The page's word now; 0, which no page ever has, for a number outside the table."""
        return self._words[HEADER_WORDS + page] if 0 <= page < self.header.num_pages else 0

    def is_sealed(self, page: int, epoch: Epoch) -> bool:
        """Whether the page's bytes are the ones that were sealed under this epoch."""
        return self.word(page) == epoch << 8 | SEALED_BYTE and epoch > self.poison.get(page, 0)

    def is_live(self, page: int, epoch: Epoch) -> bool:
        """Whether the page still is, or still may become, what was promised under this epoch."""
        word = self.word(page)
        return word >> 8 == epoch and word & 0xFF in _LIVE_BYTES and epoch > self.poison.get(page, 0)

    def try_close(self) -> bool:
        """False while any view is left; then the memory is still there. Harmless when closed already."""
        try:
            self._pages.close()
        except BufferError:
            return False
        return self._scratch.try_close()
