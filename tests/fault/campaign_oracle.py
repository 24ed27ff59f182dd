"""What must be true of the pool's memory after every step, read from the memory itself and from its status."""

import contextlib
import mmap
import os
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from shared.errors import ClusterError
from shared.ids import Epoch, InstanceId
from shared.kv.page import PageState, sealed_word, unpack_word
from shared.kv.page_table import ENTRY, HEADER_WORDS, file_bytes, table_bytes
from shared.transport.unix_call import UnixCaller
from shared.transport.unix_socket import close_fds
from shared.wire import mempool as wire
from tests.fault.campaign_actors import BLOCK_BYTES, NUM_RANKS, Owned, pattern
from tests.fault.campaign_rig import NUM_PAGES, PAGE_BYTES, Service
from tests.support.open_files import open_files

HELD = (PageState.GRANTED, PageState.WRITING, PageState.QUARANTINED)
STATUS_MS = 30_000


class View:
    """A space's table and pages, opened through /proc: mapped here as long as this object lives, read-only.

    Args: tables, pages: by inode, at most one each.

    Raises: OSError, ValueError when the mempool is still making its memory, or closing what it took over.
    """

    def __init__(self, tables: dict[int, Path], pages: dict[int, Path], num_pages: int = NUM_PAGES) -> None:
        assert len(tables) <= 1 >= len(pages), f"more than one pool: {tables} {pages}"
        self.num_pages = num_pages
        self.memory = next(iter(pages), 0)  # another memory has another number
        self._table = _mapped(tables, file_bytes(num_pages))
        self._pages = _mapped(pages, num_pages * PAGE_BYTES * NUM_RANKS)

    @property
    def exists(self) -> bool:
        """Whether the mempool had memory already."""
        return self._table is not None and self._pages is not None

    def words(self) -> list[int]:
        """Of all pages, now."""
        assert self._table is not None
        with memoryview(self._table) as raw, raw[: table_bytes(self.num_pages)].cast("Q") as words:
            return words[HEADER_WORDS:].tolist()

    def word(self, page: int) -> int:
        assert self._table is not None
        with memoryview(self._table) as raw, raw[: table_bytes(self.num_pages)].cast("Q") as words:
            return words[HEADER_WORDS + page]

    def named(self, page: int) -> bytes | None:
        """Hash of the block that is noted for the page, if it is noted under the page's present epoch."""
        assert self._table is not None
        start = table_bytes(self.num_pages) + page * ENTRY.size
        epoch, _, block_hash, _ = ENTRY.unpack(self._table[start : start + ENTRY.size])
        return block_hash if epoch == self.word(page) >> 8 else None

    def holds(self, page: int, epoch: int, block_hash: bytes, num_ranks: int) -> bool:
        """Whether the page's bytes are this block's, on so many ranks."""
        assert self._pages is not None
        starts = [(rank * self.num_pages + page) * PAGE_BYTES for rank in range(num_ranks)]
        return all(
            self._pages[start : start + BLOCK_BYTES] == pattern(block_hash, epoch, rank)
            for rank, start in enumerate(starts)
        )


def memfds(pid: int) -> tuple[dict[int, Path], dict[int, Path]]:
    """Page tables and pages that a mempool has descriptors of, by inode."""
    tables: dict[int, Path] = {}
    pages: dict[int, Path] = {}
    for number, name in open_files(pid).items():
        link = Path(f"/proc/{pid}/fd/{number}")
        for found, prefix in ((tables, "/memfd:quire-page-table"), (pages, "/memfd:quire-pages")):
            if not name.startswith(prefix):
                continue
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile: it was no memory
                inode = os.stat(link).st_ino
                if os.readlink(link) == name:  # else its number became another file's between the two
                    found[inode] = link
    return tables, pages


def opened(link: Path, inode: int) -> int:
    """Descriptor of what another process's descriptor was found to be, read-only.

    Raises: OSError when that process has closed it since, and its number is free, or another file's.
    """
    fd = os.open(link, os.O_RDONLY)
    if os.fstat(fd).st_ino != inode:
        os.close(fd)
        raise FileNotFoundError(f"{link} is another file now")
    return fd


def _mapped(links: dict[int, Path], length: int) -> mmap.mmap | None:
    for inode, link in links.items():
        fd = opened(link, inode)
        try:
            return mmap.mmap(fd, length, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
    return None


class Oracle:
    """Checks; every method raises AssertionError on what must never be."""

    def __init__(self, mempool: Service) -> None:
        self.view: View | None = None
        self.num_ranks_of: dict[bytes, int] = {}  # block hash -> ranks that hold it
        self.num_checks = 0
        self.num_pages_read = 0
        self._mempool = mempool
        self._caller: UnixCaller[wire.ToMempool, wire.FromMempool] | None = None
        self._calls = 0
        self._memory = 0
        self._epochs: list[int] = []

    # -- asking -----------------------------------------------------------------------------------

    def look(self) -> bool:
        """Open the memory of the mempool that runs now. True when it is other memory than before."""
        self.close()
        assert self._mempool.process is not None
        for _ in range(50):
            try:
                self.view = View(*memfds(self._mempool.process.pid))
                break
            except (OSError, ValueError):  # memory is being made just now, or taken over
                time.sleep(0.01)
        else:
            raise AssertionError("the pool's memory cannot be opened")
        if self.view.memory == self._memory:
            return False
        self._memory, self._epochs = self.view.memory, []
        return True

    @property
    def has_memory(self) -> bool:
        """Whether there is memory to look at."""
        return self.view is not None and self.view.exists

    def status(self) -> wire.PoolStatus | None:
        """None when the mempool does not answer."""
        self._calls += 1
        try:
            if self._caller is None:
                self._caller = UnixCaller(self._mempool.socket, out=wire.TO_MEMPOOL, into=wire.FROM_MEMPOOL)
                self._call(wire.Attach(kind="client", instance=InstanceId("conductor")))
            reply = self._call(wire.StatusCall(call_id=self._calls))
        except ClusterError:
            self.close()
            return None
        assert isinstance(reply, wire.PoolStatus), reply
        return reply

    def _call(self, message: wire.ToMempool) -> wire.FromMempool:
        assert self._caller is not None
        reply, fds = self._caller.call(message, timeout_ms=STATUS_MS)
        close_fds(fds)
        return reply

    def settled(self) -> wire.PoolStatus | None:
        """The status after the mempool read everything that had been sent to it."""
        return self.status() and self.status()

    def delete_unpinned(self) -> None:
        """Empty the index of whatever nobody pins, if the mempool answers."""
        if self.settled() is None:
            return
        self._calls += 1
        assert isinstance(self._call(wire.Delete(call_id=self._calls)), wire.Deleted)

    def close(self) -> None:
        if self._caller is not None:
            self._caller.close()
            self._caller = None

    # -- checking ---------------------------------------------------------------------------------

    def check_counts(self) -> wire.PoolStatus | None:
        """All states sum to the total, in the status and in the table, and both say the same."""
        for _ in range(20):
            before = self.view.words() if self.view is not None and self.view.exists else None
            status = self.settled()
            if status is None or not status.pages_by_state:
                return status
            assert sum(status.pages_by_state.values()) == status.num_pages == NUM_PAGES, status
            if before is None:
                self.look()
            elif self.view is not None and self.view.words() == before:
                found = Counter(unpack_word(word)[1].name.lower() for word in before)
                said = {name: count for name, count in status.pages_by_state.items() if count}
                assert found == said, f"the table says {found}, the status {said}"
                return status
        raise AssertionError("the pool never rests")

    def check_table(self, pinned: Iterable[Owned], held: Iterable[Owned], damaged: bool) -> None:
        """Epochs only grow; what is pinned is sealed under its epoch; what is held is nobody else's.

        Args: damaged: a mempool that died before it read of a seal learns of it when its successor is told.
        """
        view = self.view
        if view is None or not view.exists:
            return
        self.num_checks += 1
        words = view.words()
        epochs = [word >> 8 for word in words]
        for page, (epoch, earlier) in enumerate(zip(epochs, self._epochs, strict=False)):
            assert epoch >= earlier, f"page {page} went from epoch {earlier} back to {epoch}"
        self._epochs = epochs
        for page, epoch in pinned:
            found, state = unpack_word(words[page])
            is_kept = found == epoch and damaged and state in HELD
            assert is_kept or words[page] == sealed_word(Epoch(epoch)), (
                f"page {page}, pinned under {epoch}: {found} {state}"
            )
        for page, epoch in held:
            found, state = unpack_word(words[page])
            assert (found, state in HELD) == (epoch, True), (
                f"page {page}, held under {epoch}: {found} {state}"
            )

    def check_bytes(self) -> None:
        """Every sealed page with a name holds that block, under its own epoch, on every rank."""
        view = self.view
        if view is None or not view.exists:
            return
        for page, word in enumerate(view.words()):
            epoch, state = unpack_word(word)
            block_hash = view.named(page)
            if state is not PageState.SEALED or block_hash is None:
                continue
            num_ranks = self.num_ranks_of[block_hash]
            is_right = view.holds(page, epoch, block_hash, num_ranks)
            self.num_pages_read += 1
            what = f"page {page} under {epoch} does not hold {block_hash.hex()[:8]} on {num_ranks} ranks"
            assert is_right or view.word(page) != word, what
