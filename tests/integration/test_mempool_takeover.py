"""A mempool dies and the next one goes on with its bytes, and with nothing that is not proven sound."""

import contextlib
import fcntl
import mmap
import os
import signal
import struct
import threading
import time

import msgspec
import pytest

from services.mempool import takeover
from services.mempool.memory import F_SEAL_FUTURE_WRITE, PoolMemory
from services.mempool.takeover import MAX_EPOCH_LEAD, SpaceMeta, take_over
from shared.ids import Epoch
from shared.kv.page import PageState, pack_word, unpack_word
from shared.kv.page_table import read_header, table_bytes
from shared.mempool.keeper_client import KeeperClient
from shared.transport.unix_socket import close_fds
from tests.integration.keeper_rig import META, NUM_PAGES, PAGE_BYTES, Creator, KeeperProcess, pattern
from tests.integration.mempool_rig import until

OLD, NEW = 1_000, 2_000
SPACE = "demo@cpu"


@pytest.fixture
def keeper(tmp_path):
    process = KeeperProcess(tmp_path)
    yield process
    process.stop()


@pytest.fixture
def creator(keeper):
    made = Creator(keeper, OLD)
    yield made
    made.kill()


@pytest.fixture
def client(keeper):
    made = KeeperClient(keeper.socket, Epoch(0), timeout_ms=30_000)
    yield made
    made.close()


def drop(found: takeover.Takeover) -> None:
    for one in found.adopted:
        close_fds([fd for fd in (one.page_fd, *one.slab_fds) if fd >= 0])
    close_fds([one.pidfd for one in found.processes])


@contextlib.contextmanager
def memory_of(generation: int):
    memory = PoolMemory(NUM_PAGES, PAGE_BYTES, Epoch(generation))
    memory.write_words((p, pack_word(Epoch(generation), PageState.FREE)) for p in range(NUM_PAGES))
    yield memory
    memory.close()


def test_a_killed_mempools_pages_are_read_byte_for_byte_by_the_next(creator, client):
    creator.kill()
    found = take_over(client, Epoch(NEW))
    (one,) = found.adopted
    assert (found.boot_generation, one.space, one.meta) == (NEW, SPACE, META)
    assert one.header.boot_generation == OLD
    for page, word in enumerate(one.words):
        epoch, state = unpack_word(word)
        states = [PageState.SEALED, PageState.WRITING, PageState.FREE, PageState.GRANTED]
        assert (epoch, state) == (OLD + page, states[page % 4])
        assert os.pread(one.page_fd, PAGE_BYTES, page * PAGE_BYTES) == pattern(page)
    drop(found)


def test_the_engines_of_the_dead_mempool_are_known_by_their_pidfds(creator, client):
    creator.kill()
    found = take_over(client, Epoch(NEW))
    (engine,) = found.processes
    assert (engine.meta.kind, engine.meta.instance) == ("engine", "prefill-0")
    assert not engine.dead  # it is this very process
    drop(found)


def test_a_mempool_that_still_lives_is_killed_before_its_pages_are_used(creator, client):
    creator.signal(signal.SIGSTOP)
    began = time.monotonic()
    found = take_over(client, Epoch(NEW), wait_ms=200)
    assert creator.process.wait(30) == -signal.SIGKILL
    assert 0.2 <= time.monotonic() - began < 10
    assert len(found.adopted) == 1
    assert [one.meta.kind for one in found.processes] == ["engine"]
    drop(found)


def test_an_earlier_mempool_that_wakes_up_is_refused_and_writes_into_a_table_that_nobody_reads(
    creator, client, keeper
):
    creator.signal(signal.SIGSTOP)
    client.connect(Epoch(NEW))  # fenced, and for this test left alive
    one = takeover.adopt(client, SPACE)
    memory = one.memory(Epoch(NEW))
    creator.signal(signal.SIGCONT)
    assert creator.write_on() == "KeeperStale"
    assert takeover.read_table(memory.table_fd)[1] == one.words
    memory.close()


def test_a_clock_that_was_set_back_does_not_shut_the_next_mempool_out(creator, client):
    creator.kill()
    found = take_over(client, Epoch(7))
    assert found.boot_generation > OLD + NUM_PAGES - 1  # above the fence and above every epoch in the table
    assert len(found.adopted) == 1
    client.keep("other", "process", 1, [0])
    drop(found)


def test_nothing_is_found_without_a_keeper_or_with_an_empty_or_unreachable_one(keeper, client, tmp_path):
    for one in (KeeperClient("", Epoch(0)), KeeperClient(tmp_path / "none.sock", Epoch(0)), client):
        found = take_over(one, Epoch(NEW))
        assert (found.boot_generation, found.adopted, found.processes) == (NEW, [], [])


@pytest.mark.parametrize("is_patient", [True, False])
def test_a_keeper_that_stands_still_is_waited_for_as_long_as_told(creator, keeper, is_patient):
    creator.kill()
    impatient = KeeperClient(keeper.socket, Epoch(0), timeout_ms=300)
    os.kill(keeper.process.pid, signal.SIGSTOP)
    goes_on = threading.Timer(1.0, lambda: os.kill(keeper.process.pid, signal.SIGCONT))
    if is_patient:
        goes_on.start()
    with contextlib.closing(impatient):
        found = take_over(impatient, Epoch(NEW), patience_ms=60_000 if is_patient else 0)
        assert len(found.adopted) == is_patient
        drop(found)
    if is_patient:
        goes_on.join()
    else:
        os.kill(keeper.process.pid, signal.SIGCONT)


def test_an_adopted_memory_goes_on_under_its_own_table(creator, client):
    creator.kill()
    found = take_over(client, Epoch(NEW))
    memory = found.adopted[0].memory(found.boot_generation)
    memory.write_words([(0, pack_word(Epoch(NEW), PageState.GRANTED))])
    header, words, _ = takeover.read_table(memory.table_fd)
    assert header == (NEW, NUM_PAGES, PAGE_BYTES)
    assert words == [pack_word(Epoch(NEW), PageState.GRANTED), *found.adopted[0].words[1:]]
    takeover.keep_myself(client, "mempool-0")
    takeover.keep_space(client, SPACE, memory, META)
    again = take_over_same_process(client)
    assert again.words == words
    close_fds([again.page_fd, *(one.pidfd for one in found.processes)])
    memory.close()


def take_over_same_process(client: KeeperClient) -> takeover.Adopted:
    client.connect(Epoch(NEW + 1))
    return takeover.adopt(client, SPACE)


def test_no_process_can_open_an_adopted_table_for_writing(creator, client):
    creator.kill()
    found = take_over(client, Epoch(NEW))
    with contextlib.closing(found.adopted[0].memory(Epoch(NEW))) as memory:
        length = table_bytes(NUM_PAGES)
        reopened = None
        with contextlib.suppress(PermissionError):  # root's reopening succeeds, and helps it nothing
            reopened = os.open(f"/proc/self/fd/{memory.table_fd}", os.O_RDWR)
        for fd in filter(None, (memory.table_fd, reopened)):
            with pytest.raises(PermissionError):
                mmap.mmap(fd, length)
            with pytest.raises(OSError, match=r"not permitted|Bad file descriptor"):
                os.pwrite(fd, b"x", 64)
        if reopened is not None:
            os.close(reopened)
    close_fds([one.pidfd for one in found.processes])


def test_without_the_seal_a_read_only_descriptor_could_be_made_writable_which_is_why_tables_are_copied():
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    os.fchmod(fd, 0o400)
    read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    os.fchmod(read_only, 0o600)  # the owner's right, and every worker is the owner
    writable = os.open(f"/proc/self/fd/{read_only}", os.O_RDWR)
    with mmap.mmap(writable, 4096) as mapping:
        mapping[0] = 1
    assert os.pread(fd, 1, 0) == b"\1"
    close_fds([fd, read_only, writable])


# -- what is not sound --------------------------------------------------------------------------------


def keep_damaged(
    client: KeeperClient, memory: PoolMemory, meta: SpaceMeta | bytes = META, **fds: int
) -> None:
    raw = meta if isinstance(meta, bytes) else msgspec.msgpack.encode(meta)
    client.keep(SPACE, "pages", 0, [fds.get("pages", memory.page_fd)], count=NUM_PAGES)
    client.keep(SPACE, "table", 0, [fds.get("table", memory.table_fd)], count=NUM_PAGES, meta=raw)


@pytest.mark.parametrize(
    "meta",
    [
        msgspec.structs.replace(META, num_pages=NUM_PAGES + 1),
        msgspec.structs.replace(META, page_bytes=4096),
        msgspec.structs.replace(META, num_ranks=2),
        msgspec.structs.replace(META, pages_per_slab=4, devices=["cuda:0"]),
        b"",
        b"\xc1 not msgpack",
    ],
)
def test_a_space_whose_parts_disagree_is_forgotten(keeper, client, meta):
    client.connect(Epoch(OLD))
    with memory_of(OLD) as memory:
        keep_damaged(client, memory, meta)
    before = len(os.listdir("/proc/self/fd"))
    assert take_over(client, Epoch(NEW)).adopted == []
    assert client.list_spaces() == []
    until(lambda: len(os.listdir("/proc/self/fd")) == before, "nothing leaks")


@pytest.mark.parametrize(
    "word",
    [
        0,
        pack_word(Epoch(0), PageState.FREE),
        OLD << 8 | 0x77,
        pack_word(Epoch(OLD + MAX_EPOCH_LEAD), PageState.FREE),
    ],
)
def test_a_table_with_an_impossible_word_is_forgotten(keeper, client, word):
    client.connect(Epoch(OLD))
    with memory_of(OLD) as memory:
        memory.write_words([(3, word)])
        keep_damaged(client, memory)
        assert take_over(client, Epoch(NEW)).adopted == []
    assert client.list_spaces() == []


def test_a_table_that_somebody_could_still_write_is_not_believed(keeper, client):
    client.connect(Epoch(OLD))
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    with memory_of(OLD) as memory:
        os.pwrite(fd, os.pread(memory.table_fd, table_bytes(NUM_PAGES), 0), 0)
        keep_damaged(client, memory, table=fd)
        assert take_over(client, Epoch(NEW)).adopted == []
    os.close(fd)


@pytest.mark.parametrize("offset", [0, 8, 24, 32])
def test_a_header_that_is_not_ours_is_not_believed(keeper, client, offset):
    client.connect(Epoch(OLD))
    length = table_bytes(NUM_PAGES)
    fd = os.memfd_create("foreign", os.MFD_ALLOW_SEALING)
    with memory_of(OLD) as memory:
        os.pwrite(fd, os.pread(memory.table_fd, length, 0), 0)
        os.pwrite(fd, struct.pack("<Q", 0xDEAD), offset)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        keep_damaged(client, memory, table=fd)
        assert take_over(client, Epoch(NEW)).adopted == []
    os.close(fd)


def test_slabs_of_a_gpu_pool_come_back_in_order_and_a_gap_is_not_believed(keeper, client):
    client.connect(Epoch(OLD))
    meta = msgspec.structs.replace(META, pages_per_slab=4, num_ranks=2, devices=["cuda:0", "cuda:1"])
    slabs = [os.memfd_create(f"slab{n}") for n in range(2 * NUM_PAGES // 4)]
    for number, fd in enumerate(slabs):
        os.pwrite(fd, bytes([number]), 0)
    memory = PoolMemory(NUM_PAGES, PAGE_BYTES, Epoch(OLD), 2, table_only=True)
    memory.write_words((p, pack_word(Epoch(OLD), PageState.SEALED)) for p in range(NUM_PAGES))
    takeover.keep_space(client, "gpu", memory, meta)
    takeover.keep_slabs(client, "gpu", 0, slabs)
    found = take_over(client, Epoch(NEW))
    (one,) = found.adopted
    assert [os.pread(fd, 1, 0)[0] for fd in one.slab_fds] == list(range(len(slabs)))
    assert one.page_fd == -1
    drop(found)
    client.forget("gpu", "cuda-page", 3, 1)
    assert take_over(client, Epoch(NEW + 1)).adopted == []
    close_fds(slabs)
    memory.close()


def test_a_mapped_table_says_the_new_generation(creator, client):
    creator.kill()
    found = take_over(client, Epoch(NEW))
    with contextlib.closing(found.adopted[0].memory(found.boot_generation)) as memory:
        table = mmap.mmap(memory.table_fd, table_bytes(NUM_PAGES), prot=mmap.PROT_READ)
        with memoryview(table) as raw, raw.cast("Q") as words:
            assert read_header(words).boot_generation == NEW
        table.close()
    close_fds([one.pidfd for one in found.processes])
