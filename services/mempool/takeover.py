"""A new mempool goes on where a dead one stopped: what is kept, by whom it may still be touched, is it sound?

Order, each step before the next: take the keeper's floor (from here on an earlier mempool can keep and forget
nothing); see that every earlier mempool is dead; fetch each space and check it. What the pool then owes: pages
that were granted or being written are quarantined, and nothing that a process of `processes` may still touch is
used anew before that process reported or is dead (architecture, section "Restart").

The table's words are *copied* into a table of the new mempool's own (PoolMemory.adopt): a table is sealed against
every later writer, and an unsealed one could be opened for writing by any process of the same user through
/proc. Decision 0006 has the alternatives.
"""

import fcntl
import mmap
import os
import select
import signal
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from services.mempool.memory import F_SEAL_FUTURE_WRITE, PoolMemory
from shared.errors import ClusterError, PeerError, PeerTimeout, ResourceError
from shared.ids import Epoch
from shared.kv.layout import EngineDescription, num_slabs
from shared.kv.page import WORD_BYTES, PageState, unpack_word
from shared.kv.page_table import HEADER_WORDS, TableHeader, file_bytes, read_header, table_bytes
from shared.mempool.keeper_client import KeeperClient, KeeperStale, KeptRun
from shared.observe.log import get_logger
from shared.transport.unix_socket import close_fds, opened
from shared.wire import keeper as wire
from shared.wire.codec import MALFORMED

PROCESSES = "processes"  # the space of pidfds
KEEPER_PATIENCE_MS = 15_000  # for one that stands still: what it keeps is every page that there is
MAX_EPOCH_LEAD = (
    366 * 24 * 3600 * 1_000_000
)  # of a page's epoch before its table's generation: a year of reuses
_ABSENT = (PageState.WITHDRAWN, PageState.RELEASED)
_STATES = bytes(PageState)
_STATE_BYTE = 0 if sys.byteorder == "little" else WORD_BYTES - 1  # of a word
_FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

log = get_logger("mempool.takeover")


class TakeoverFailed(ResourceError):
    """An earlier mempool lives and cannot be ended: its memory must not be used."""

    code = "mempool.takeover"


ProcessKind = Literal["mempool", "engine", "rank", "caller"]


class SpaceMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What a new mempool must know of a space; kept beside its table."""

    description: EngineDescription
    num_pages: int
    page_bytes: int
    num_ranks: int = 1
    pages_per_slab: int = 0  # 0: host memory. Else slab s of rank r is kept as number r * slabs_per_rank + s
    devices: list[str] = []  # of each rank; empty for host memory
    memory_id: Epoch = Epoch(0)  # generation of the mempool that made the memory, plus the space's number
    number: int = 0  # of the space
    label: str = ""  # of host memory that is apart from other host memory
    is_owed: bool = False  # whether newcomers are owed what it lacks


class ProcessMeta(msgspec.Struct, frozen=True, kw_only=True):
    """Whose pidfd it is."""

    kind: ProcessKind
    instance: str = ""
    spaces: list[int] = []  # whose pages it may touch; empty: of all
    maps: bool = True  # whether it maps pages; engines of which other processes do not
    called: list[int] = []  # spaces that it maps as a caller of the nine calls; a "caller" has nothing else


@dataclass(frozen=True, slots=True)
class KeptProcess:
    """A process that may still touch pages. `pidfd` is the receiver's to close."""

    number: int  # under which it is kept: its pid, unless that was not visible
    pidfd: int
    meta: ProcessMeta

    @property
    def dead(self) -> bool:
        """Proven by its pidfd."""
        return _is_dead(self.pidfd, 0)


@dataclass(frozen=True, slots=True)
class Adopted:
    """One sound space; the descriptors are the receiver's. Hand `memory()` what it needs, close the rest."""

    space: str
    meta: SpaceMeta
    header: TableHeader  # of the dead mempool's table
    words: list[int]  # of its pages, in order
    entries: bytes  # what its index knew of them (shared/kv/page_table.py, ENTRY)
    page_fd: int  # -1 for GPU memory
    slab_fds: list[int]  # of every rank's slabs in order; -1 for those without memory

    def memory(self, boot_generation: Epoch) -> PoolMemory:
        """The pages under a table of this process's own. Takes over page_fd. Raises: OSError."""
        return PoolMemory.adopt(
            self.page_fd, self.header, self.words, boot_generation, self.meta.num_ranks, self.entries
        )


@dataclass(frozen=True, slots=True)
class Takeover:
    """What was found. Use `boot_generation` instead of the one asked for: it is above every epoch and fence.

    `is_given_up`: the keeper did not answer, or this process may not open as many files as it keeps. Nobody can go on
    with what it keeps then; processes that map such memory hold it until they begin anew.
    """

    boot_generation: Epoch
    adopted: list[Adopted] = field(default_factory=list)
    processes: list[KeptProcess] = field(default_factory=list)
    is_given_up: bool = False


def take_over(
    client: KeeperClient, generation: Epoch, *, wait_ms: int = 2_000, patience_ms: int = KEEPER_PATIENCE_MS
) -> Takeover:
    """At start, before anything is created. Without a keeper, or when it cannot be reached, nothing is found.

    What is kept and not sound is forgotten, with a warning.

    Args:
        wait_ms: for an earlier mempool to end, before it is killed and after.
        patience_ms: for a keeper that is there and does not answer. It is asked again; one that is not there is not.
    Raises: TakeoverFailed; KeeperStale when a still newer mempool took the keeper meanwhile.
    """
    until_s = time.monotonic() + patience_ms / 1000
    while True:
        try:
            return _found(client, generation, wait_ms)
        except PeerError as error:
            if not isinstance(error, PeerTimeout) or time.monotonic() >= until_s:
                log.warning("keeper_unreachable", reason=error.message)
                client.close()
                return Takeover(client.generation, is_given_up=True)
            log.warning("keeper_awaited", reason=error.message)


def _found(client: KeeperClient, generation: Epoch, wait_ms: int) -> Takeover:
    """See take_over(). Asked again after a PeerTimeout it begins anew. Raises: PeerError, too."""
    processes: list[KeptProcess] = []
    adopted: list[Adopted] = []
    try:
        if not _take_floor(client, generation):
            return Takeover(generation)
        processes += kept_processes(client)
        processes = _end_mempools(client, processes, wait_ms)
        names = [summary.space for summary in client.list_spaces() if summary.space != PROCESSES]
        adopted.extend(found for name in names if (found := adopt(client, name)) is not None)
        highest = max((max(one.words) >> 8 for one in adopted if one.words), default=0)
        if highest >= client.generation:
            client.connect(Epoch(highest + 1))
    except PeerError:
        close_fds([one.pidfd for one in processes])
        close_fds([fd for one in adopted for fd in (one.page_fd, *one.slab_fds) if fd >= 0])
        raise
    return Takeover(client.generation, adopted, processes)


def adopt(client: KeeperClient, space: str) -> Adopted | None:
    """One space, checked. None: nothing usable is kept under this name, and nothing is from now on.

    Raises: KeeperStale, PeerError.
    """
    fds: list[int] = []
    runs: dict[wire.Kind, list[KeptRun]] = {}
    try:
        for kind in ("table", "pages", "cuda-page"):
            runs[kind] = client.fetch_space(space, kind)
            fds += [fd for run in runs[kind] for fd in run.fds]
        found = _checked(space, runs["table"], runs["pages"], runs["cuda-page"])
        _forget_released(client, found)
    except (ValueError, OSError, msgspec.MsgspecError) as error:
        close_fds(fds)
        log.warning("kept_space_unusable", space=space, reason=str(error))
        client.forget_space(space)
        return None
    except ClusterError:
        close_fds(fds)
        raise
    close_fds(runs["table"][0].fds)
    log.info("space_adopted", space=space, num_pages=len(found.words), boot=found.header.boot_generation)
    return found


def read_table(table_fd: int) -> tuple[TableHeader, list[int], bytes]:
    """Header, words, entries. Raises: ValueError when it is none, or somebody could still write or cut it; OSError."""
    seals = fcntl.fcntl(table_fd, fcntl.F_GET_SEALS)
    wanted = _FIXED | F_SEAL_FUTURE_WRITE
    if seals & wanted != wanted:
        raise ValueError(f"the table's seals are {seals:#x}: it could change")
    length = os.fstat(table_fd).st_size
    if length < table_bytes(0):
        raise ValueError(f"a page table of {length} bytes")
    with mmap.mmap(table_fd, length, prot=mmap.PROT_READ) as mapping:
        with memoryview(mapping) as raw, raw[: length - length % 8] as whole, whole.cast("Q") as words:
            header = read_header(words)
            found = words[HEADER_WORDS : HEADER_WORDS + header.num_pages].tolist()
        entries = mapping[table_bytes(header.num_pages) :]
    if length != file_bytes(header.num_pages):
        raise ValueError(f"a page table of {length} bytes for {header.num_pages} pages")
    return header, found, entries


def check_words(header: TableHeader, words: Sequence[int]) -> None:
    """Raises: ValueError when a word cannot be one: unknown state, or an epoch that no page can have."""
    limit = header.boot_generation + MAX_EPOCH_LEAD
    states = array("Q", words).tobytes()[_STATE_BYTE::WORD_BYTES]
    if words and min(words) >> 8 > 0 and max(words) >> 8 < limit and not states.translate(None, _STATES):
        return  # by passes of C over all of them: there may be millions
    for page, word in enumerate(words):
        epoch, _ = unpack_word(word)
        if not 0 < epoch < limit:
            raise ValueError(
                f"page {page} has epoch {epoch} in a table of generation {header.boot_generation}"
            )


# -- what a mempool hands over ------------------------------------------------------------------------


def keep_space(client: KeeperClient, space: str, memory: PoolMemory, meta: SpaceMeta) -> None:
    """Keep table and, for host memory, pages; before the first page is granted. Raises: as KeeperClient.keep."""
    if not meta.pages_per_slab:
        client.keep(space, "pages", 0, [memory.page_fd], count=meta.num_pages)
    raw = msgspec.msgpack.encode(meta)
    client.keep(space, "table", 0, [memory.table_fd], count=meta.num_pages, meta=raw)


def keep_slabs(client: KeeperClient, space: str, first: int, fds: Sequence[int]) -> None:
    """Keep exported slabs `first`, ... (numbers: SpaceMeta). Raises: as KeeperClient.keep."""
    client.keep(space, "cuda-page", first, fds)


def keep_process(client: KeeperClient, number: int, pidfd: int, meta: ProcessMeta) -> None:
    """Keep the proof of a process's death, before it gets memory. Raises: as KeeperClient.keep.

    Args: number: unique among living processes and across mempools: its pid, where that is visible.
    """
    client.keep(PROCESSES, "process", number, [pidfd], meta=msgspec.msgpack.encode(meta))


def keep_myself(client: KeeperClient, instance: str) -> None:
    """So that the next mempool can see that this one is dead. Raises: as KeeperClient.keep; OutOfDescriptors."""
    (pidfd,) = opened(os.pidfd_open, [os.getpid()])
    try:
        keep_process(client, os.getpid(), pidfd, ProcessMeta(kind="mempool", instance=instance))
    finally:
        os.close(pidfd)


def forget_process(client: KeeperClient, number: int) -> None:
    """It is dead, and this mempool knows. Raises: as KeeperClient.forget."""
    client.forget(PROCESSES, "process", number, 1)


def kept_processes(client: KeeperClient) -> list[KeptProcess]:
    """All of them, dead ones too. One that cannot be read counts as an engine: it may touch everything.

    Raises: as KeeperClient.fetch_space.
    """
    out: list[KeptProcess] = []
    for run in client.fetch_space(PROCESSES, "process"):
        try:
            meta = msgspec.msgpack.decode(run.meta, type=ProcessMeta)
        except MALFORMED:
            meta = ProcessMeta(kind="engine")
        out += [KeptProcess(run.first_page + i, fd, meta) for i, fd in enumerate(run.fds)]
    return out


# -- parts --------------------------------------------------------------------------------------------


def _take_floor(client: KeeperClient, generation: Epoch) -> bool:
    try:
        return client.connect(generation)
    except KeeperStale as error:  # this machine's clock was set back: the fence counts, not the clock
        log.warning("boot_generation_raised", asked=generation, highest=error.highest_generation)
        return client.connect(Epoch(error.highest_generation + 1))


def _end_mempools(client: KeeperClient, processes: Sequence[KeptProcess], wait_ms: int) -> list[KeptProcess]:
    """Wait for earlier mempools, then kill them: two of them must never own the same pages. Returns the others.

    SIGKILL through a pidfd meets the very process that kept it, never a later owner of its number.
    """
    others: list[KeptProcess] = []
    for one in processes:
        if one.meta.kind != "mempool":
            others.append(one)
            continue
        if not _is_dead(one.pidfd, wait_ms):
            log.warning("earlier_mempool_killed", number=one.number, waited_ms=wait_ms)
            try:
                signal.pidfd_send_signal(one.pidfd, signal.SIGKILL)
            except OSError as error:
                raise TakeoverFailed(f"mempool {one.number} lives and cannot be killed: {error}") from error
            if not _is_dead(one.pidfd, wait_ms):
                raise TakeoverFailed(f"mempool {one.number} still lives {wait_ms} ms after SIGKILL")
        forget_process(client, one.number)
        os.close(one.pidfd)
    return others


def _checked(
    space: str, tables: Sequence[KeptRun], pages: Sequence[KeptRun], slabs: Sequence[KeptRun]
) -> Adopted:
    """Raises: ValueError, OSError, msgspec.MsgspecError."""
    if len(tables) != 1:
        raise ValueError(f"{len(tables)} page tables")
    meta = msgspec.msgpack.decode(tables[0].meta, type=SpaceMeta)
    header, words, entries = read_table(tables[0].fds[0])
    _check_shape(meta, header)
    check_words(header, words)
    page_fds = [fd for run in pages for fd in run.fds]
    if meta.pages_per_slab:
        slab_fds = _check_slabs(meta, slabs, words)
        if page_fds:
            raise ValueError("host pages beside slabs")
    else:
        _check_pages(meta, page_fds)
        if slabs:
            raise ValueError("slabs beside host pages")
        slab_fds = []
    return Adopted(space, meta, header, words, entries, page_fds[0] if page_fds else -1, slab_fds)


def _is_dead(pidfd: int, wait_ms: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(wait_ms))


def _check_shape(meta: SpaceMeta, header: TableHeader) -> None:
    if (meta.num_pages, meta.page_bytes) != (header.num_pages, header.page_bytes):
        raise ValueError(f"the table is of {header}, kept were {meta.num_pages} pages of {meta.page_bytes}")
    if header.num_pages < 1 or header.page_bytes < 1 or meta.num_ranks < 1:
        raise ValueError(f"impossible sizes: {header}, {meta.num_ranks} ranks")


def _check_pages(meta: SpaceMeta, page_fds: Sequence[int]) -> None:
    if len(page_fds) != 1:
        raise ValueError(f"{len(page_fds)} page memfds")
    length = os.fstat(page_fds[0]).st_size
    if length != meta.num_ranks * meta.num_pages * meta.page_bytes:
        raise ValueError(f"a page memfd of {length} bytes for {meta.num_ranks} x {meta.num_pages} pages")
    if fcntl.fcntl(page_fds[0], fcntl.F_GET_SEALS) & _FIXED != _FIXED:
        raise ValueError("the page memfd could be cut")


def _check_slabs(meta: SpaceMeta, runs: Sequence[KeptRun], words: Sequence[int]) -> list[int]:
    """A descriptor of each slab; -1 for those whose pages are without memory, or were losing it."""
    per_rank = num_slabs(meta.description, meta.num_pages, meta.pages_per_slab)
    found = [-1] * (meta.num_ranks * per_rank)
    for run in runs:
        if run.first_page + run.num_pages > len(found):
            raise ValueError(f"slabs {run.first_page} and {run.num_pages} more of {len(found)}")
        found[run.first_page : run.first_page + run.num_pages] = run.fds
    missing = {slab % per_rank for slab, fd in enumerate(found) if fd < 0}
    for slab in missing:
        pages = words[slab * meta.pages_per_slab : (slab + 1) * meta.pages_per_slab]
        if per_rank * meta.pages_per_slab != meta.num_pages or not all(w & 0xFF in _ABSENT for w in pages):
            raise ValueError(f"{len(missing)} slabs of {per_rank} are missing")
    if len(meta.devices) != meta.num_ranks:
        raise ValueError(f"{len(meta.devices)} devices for {meta.num_ranks} ranks")
    return found


def _forget_released(client: KeeperClient, found: Adopted) -> None:
    """Memory that was made for released pages, and that nobody was told of."""
    per_slab = found.meta.pages_per_slab
    for slab, fd in enumerate(found.slab_fds):
        page = slab * per_slab % found.meta.num_pages
        if fd >= 0 and found.words[page] & 0xFF == PageState.RELEASED:
            client.forget(found.space, "cuda-page", slab, 1)
            os.close(fd)
            found.slab_fds[slab] = -1
