"""The memory itself: two memfds, pages and page table. Whoever holds an fd keeps the memory alive.

Neither can shrink or grow (a peer could otherwise kill its neighbours with SIGBUS). The table is sealed
against every later writable mapping, so that this process's own stays the only one that can write.
"""

import ctypes
import fcntl
import mmap
import os
from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise

from shared.ids import Epoch
from shared.kv.page_table import ENTRY, HEADER_WORDS, TableHeader, file_bytes, table_bytes, write_header
from shared.vmm.host_calls import libc

F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; the fcntl module does not name it yet
_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01


class PoolMemory:
    """Owns both memfds until close(). `table_fd` is read-only: it is the one to hand out.

    Every page has page_bytes for each of num_ranks ranks: the pages of rank r start at
    r * num_pages * page_bytes. With table_only the pages lie elsewhere, on GPUs.

    Raises: OSError when the kernel refuses (memory limits, no /proc).
    """

    def __init__(
        self,
        num_pages: int,
        page_bytes: int,
        boot_generation: Epoch,
        num_ranks: int = 1,
        *,
        table_only: bool = False,
    ) -> None:
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.num_ranks = num_ranks
        fixed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        self.page_fd = _memfd("quire-pages", 0 if table_only else num_ranks * num_pages * page_bytes)
        fcntl.fcntl(self.page_fd, fcntl.F_ADD_SEALS, fixed | fcntl.F_SEAL_SEAL)
        try:
            self._make_table(TableHeader(boot_generation, num_pages, page_bytes), ())
        except BaseException:
            os.close(self.page_fd)
            raise

    @classmethod
    def adopt(
        cls,
        page_fd: int,
        old: TableHeader,
        words: Sequence[int],
        boot_generation: Epoch,
        num_ranks: int = 1,
        entries: bytes = b"",
    ) -> "PoolMemory":
        """Go on with the pages of an earlier mempool (services/mempool/takeover.py). Takes over `page_fd`.

        Its table is sealed against new writers for good, so the words go on in a table of this process's own:
        an earlier mempool that was only asleep writes into one that nobody reads any more. Processes that map
        the old table must have reported, or be dead, before a page that is sealed there is used anew.

        Args:
            page_fd: -1 when the pages are on GPUs.
            words: of the old table, without its header.
            entries: what lay behind them.
        Raises: OSError.
        """
        assert len(words) == old.num_pages, (len(words), old)
        self = cls.__new__(cls)
        self.num_pages, self.page_bytes, self.num_ranks = old.num_pages, old.page_bytes, num_ranks
        self.page_fd = page_fd
        self._make_table(old._replace(boot_generation=boot_generation), words)
        self._mapping[self._entries_at : self._entries_at + len(entries)] = entries
        return self

    def _make_table(self, header: TableHeader, words: Sequence[int]) -> None:
        length = file_bytes(header.num_pages)
        writable = _memfd("quire-page-table", length)
        try:
            self._mapping = mmap.mmap(writable, length)
            self._entries_at = table_bytes(header.num_pages)
            self._words = memoryview(self._mapping)[: self._entries_at].cast("Q")
            self._words[HEADER_WORDS : HEADER_WORDS + len(words)] = array("Q", words)
            write_header(self._words, header)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(writable, fcntl.F_ADD_SEALS, seals)
            self.table_fd = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(writable)

    def write_words(self, words: Iterable[tuple[int, int]]) -> None:
        """Publish page words in order. Each is one aligned 64-bit store.

        Readers on other cores see them in this order on x86; elsewhere too, because a reader learns of a page
        only from a message that is sent, by a system call, after its word.
        """
        table = self._words
        for page, word in words:
            table[HEADER_WORDS + page] = word

    def write_entries(self, entries: Iterable[tuple[int, bytes]]) -> None:
        """Note what the index knows of pages (packed ENTRY), before the word that says they are sealed."""
        for page, packed in entries:
            start = self._entries_at + page * ENTRY.size
            self._mapping[start : start + ENTRY.size] = packed

    def punch(self, pages: Sequence[int]) -> int:
        """Give these pages' memory back; they read as zeros. Returns how many system calls it took.

        Raises: OSError.
        """
        found = [
            (rank * self.num_pages + first, count)
            for rank in range(self.num_ranks)
            for first, count in runs(sorted(pages))
        ]
        for first, count in found:
            start, length = first * self.page_bytes, count * self.page_bytes
            if libc.fallocate(self.page_fd, _PUNCH_HOLE_KEEP_SIZE, start, length) != 0:
                error = ctypes.get_errno()
                raise OSError(error, f"cannot punch {length} bytes at {start}: {os.strerror(error)}")
        return len(found)

    def resident_bytes(self) -> int:
        """Memory that the pages really use now."""
        return os.fstat(self.page_fd).st_blocks * 512 if self.page_fd >= 0 else 0

    def close(self) -> None:
        """Drop both memfds; peers that mapped them keep theirs."""
        self._words.release()
        self._mapping.close()
        os.close(self.table_fd)
        if self.page_fd >= 0:
            os.close(self.page_fd)


def _memfd(name: str, length: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, length)
    except OSError:
        os.close(fd)
        raise
    return fd


def runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    """(first, count) of consecutive numbers in a sorted list."""
    if not pages:
        return []
    starts = [pages[0], *(b for a, b in pairwise(pages) if b != a + 1)]
    ends = [*(a for a, b in pairwise(pages) if b != a + 1), pages[-1]]
    return [(start, end - start + 1) for start, end in zip(starts, ends, strict=True)]
