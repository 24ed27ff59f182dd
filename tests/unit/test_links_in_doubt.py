"""What a failed or refused copy leaves behind: pages in doubt, slots, books of served pulls, descriptors."""

import asyncio
import mmap
import os
import time
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

from services.mempool.core.actions import PullRemote
from services.mempool.mover_pieces import start_pull
from services.mempool.mover_regions import HostRegion
from services.mempool.peer_cuts import HostSpace, told
from services.mempool.peer_paths import ReaderPath
from shared.errors import ClusterError
from shared.ids import InstanceId, SpaceId
from shared.kernels.copy_pages.copies import CopyFailed, CopyQueueFull
from shared.kernels.copy_pages.cpu_copier import CpuCopier
from shared.kv.page_table import TableHeader, table_bytes, write_header
from shared.mempool.caller_memory import CallerMemory
from shared.mempool.direct_cuda import GpuWindow
from shared.transfer.describe import EndDescription, RegionDescription
from shared.transfer.errors import TransferError, TransferQueueFull, TransferRefused, TransferTimeout
from shared.transfer.imported import joined
from shared.transfer.interface import MappedPages, PathName, Region, RegionKind
from shared.transfer.pieces import Pieces
from shared.transfer.quarantine import Quarantine
from shared.transfer.reslice import KvEnd, Order
from shared.transfer.served import Answer, Ask, ask_for, pack, unpack
from shared.transfer.served_link import ServedLink
from shared.transfer.staged import StagedLink
from shared.transfer.transfer_thread import TransferThread
from shared.wire import mempool as wire
from shared.wire.mempool_callers import AttachCaller, CallerAttached, Detached
from tests.support.fake_vmm_driver import GRANULARITY_BYTES, FakeVmmDriver
from tests.unit.test_transfer_link import FakeLink

PAGE = 4096
PATIENCE_S = 30.0


@pytest.fixture
def thread():
    made = TransferThread("test")
    yield made
    made.close()


def await_on(thread: TransferThread) -> None:
    """Until everything that was posted has run."""
    thread.call(lambda: None).result(PATIENCE_S)


def until(holds) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


async def until_async(holds) -> None:
    await asyncio.to_thread(until, holds)


def common(thread, **regions) -> dict[str, object]:
    """What links of one region at the peer are made of."""
    theirs = RegionDescription(
        name="theirs", kind=RegionKind.HOST, page_bytes=PAGE, num_pages=64, memory_key="t"
    )
    return {
        "thread": thread,
        "regions": regions,
        "peer": EndDescription(instance="peer", boot_id="b", regions=(theirs,)),
        "reason": "",
        "quarantine": Quarantine(),
        "on_settled": None,
        "on_lost": lambda *_: None,
    }


# -- pages of a remote pull ---------------------------------------------------------------------------


THEIRS = KvEnd(32, 8, 32, 16, tp_size=2, order=Order.NHD)  # 1,024 pieces a block: 128 blocks a pull
MINE = KvEnd(32, 8, 32, 16, tp_size=1, order=Order.NHD)
NUM = 200  # blocks


class FirstArrives(FakeLink):
    """Its first pull, that is, of 128 blocks; others are late."""

    def _begin(self, *what):
        self.finish_at_once = not self.attempts
        return super()._begin(*what)


async def test_blocks_of_several_pulls_are_in_doubt_only_where_their_own_pull_was_late(thread):
    theirs = tuple(
        RegionDescription(
            name=f"5.{rank}", kind=RegionKind.HOST, page_bytes=THEIRS.block_bytes(rank), num_pages=NUM,
            memory_key="t",
        )
        for rank in (0, 1)
    )  # fmt: skip
    page = MINE.block_bytes(0)
    pulled, settled = [], []
    path = ReaderPath(
        1, HostSpace("c", "f", MINE, [HostRegion(-1, 0, page, NUM)]), lambda *end: pulled.append(end),
        lambda _space, pages: settled.extend(pages), lambda _: None,
    )  # fmt: skip
    mine = Region("3.0", RegionKind.HOST, 1 << 30, page, NUM, "m")
    made = common(thread) | {
        "regions": {"3.0": mine},
        "peer": EndDescription(instance="peer", boot_id="b", regions=theirs),
        "on_settled": path.settled,
    }
    link = FirstArrives(**made)
    link.still_writes = True
    path.learn_cuts([told(5, THEIRS)])
    path.opened(
        SimpleNamespace(
            page_bytes={region.name: region.page_bytes for region in theirs},
            pull=lambda pull, ms: start_pull(link, pull.source, pull.target, pull.what, ms),
        )
    )
    path.pull(
        PullRemote(
            number=1, address="a", space=3, targets=list(range(NUM)), source_space=5,
            sources=list(range(NUM)), timeout_ms=500,
        )
    )  # fmt: skip
    await until_async(lambda: pulled)
    assert len(link.attempts) == 2
    assert pulled == [(1, True, list(range(128, NUM)))]
    for attempt in link.attempts:
        attempt.still_writes = False  # the source has answered the Cancel
    await until_async(lambda: len(settled) == NUM - 128)
    assert path.num_in_doubt == 0, "pages of a pull that ended well waited for an end of its own"
    assert not link.quarantined()


@pytest.mark.parametrize(
    "refusal", [TransferQueueFull("256 are in flight"), TransferRefused("in a transfer")]
)
def test_a_refused_part_does_not_hide_pages_that_the_other_part_may_still_write(refusal):
    fast, slow = Future(), Future()
    whole = joined([fast, slow], None)
    fast.set_exception(refusal)
    slow.set_exception(TransferTimeout("late", quarantined=(4, 5)))
    assert isinstance(whole.exception(), TransferError)
    assert whole.exception().quarantined == (4, 5)
    whole = joined([fast], None)
    assert whole.exception() is refusal


# -- pulls that are served ------------------------------------------------------------------------------


class Sending:
    over = False
    sent = False

    def poll(self) -> bool:
        return self.sent


class SlowLink(ServedLink):
    path = PathName.NIXL

    def __init__(self, **more) -> None:
        super().__init__(**more)
        self.sendings: list[Sending] = []

    def _send_pieces(self, number, mine, theirs, pieces):
        self.sendings.append(Sending())
        return self.sendings[-1]


def test_a_question_asked_twice_leaves_the_running_one_in_the_books(thread):
    answers, unmapped = [], []
    link = SlowLink(
        channel=SimpleNamespace(send=lambda raw: answers.append(unpack(raw))),
        may_send=lambda *_: True,
        unmap=lambda: unmapped.append(True),
        **common(thread, mine=Region("mine", RegionKind.HOST, 4096, PAGE, 64, "m")),
    )
    ask = pack(ask_for(1, "mine", "theirs", Pieces.of_pages([1], [1], PAGE), 1000))
    for _ in range(5):
        link.on_message(ask)
    await_on(thread)
    assert len(link.sendings) == 1, "the bound on served pulls was none"
    assert [answer.outcome for answer in answers] == ["refused"] * 4
    link.close()
    await_on(thread)
    assert not unmapped, "a copy still reads the memory"
    link.sendings[0].sent = True
    until(lambda: unmapped)


# -- staged pulls -----------------------------------------------------------------------------------------


class Copier:
    """Copies, unless it is to refuse."""

    def __init__(self) -> None:
        self.refuses: Exception | None = None
        self._copier = CpuCopier(threads=1)

    def submit(self, *arguments, **more):
        if self.refuses is not None:
            raise self.refuses
        return self._copier.submit(*arguments, **more)


@pytest.fixture
def staged(thread):
    """A puller of 8 slots whose owner sends at once."""
    memory, slots = np.zeros(64 * PAGE, np.uint8), np.zeros(8 * PAGE, np.uint8)
    mine = Region("mine", RegionKind.HOST, int(memory.ctypes.data), PAGE, 64, "m")
    staging = Region("staging", RegionKind.HOST, int(slots.ctypes.data), PAGE, 8, "s")

    def owner(raw: bytes) -> None:
        if isinstance(message := unpack(raw), Ask):
            link.on_message(pack(Answer(transfer=message.transfer, outcome="sent")))

    copier = Copier()
    link = StagedLink(
        staging=staging,
        theirs={"staging": MappedPages(0)},
        copier_for=lambda *_: (copier, 0),
        channel=SimpleNamespace(send=owner),
        may_send=lambda *_: True,
        **common(thread, mine=mine, staging=staging),
    )
    return SimpleNamespace(link=link, copier=copier, memory=(memory, slots))


def pull(link: StagedLink):
    return link.pull("theirs", list(range(8)), "mine", list(range(8)), timeout_ms=30_000).exception(
        PATIENCE_S
    )


def test_slots_come_back_when_the_copy_out_of_them_is_refused(staged):
    staged.copier.refuses = CopyQueueFull("too many sets")
    for _ in range(3):
        assert "too many sets" in str(pull(staged.link))
        assert not staged.link.quarantined()
    staged.copier.refuses = None
    assert pull(staged.link) is None


def test_slots_and_targets_of_a_copy_that_was_refused_halfway_do_not_come_back(staged):
    staged.copier.refuses = CopyFailed("cuMemcpyBatchAsync", "CUDA_ERROR_UNKNOWN", running=True)
    assert pull(staged.link).quarantined == tuple(range(8))
    assert staged.link.quarantined() == {"mine": frozenset(range(8))}
    assert not staged.link.take_slots(8), "a copy may still read them"


# -- a caller's own mapping -------------------------------------------------------------------------------


SLABS, PAGES_PER_SLAB = 40, 4
HEADER = TableHeader(1, SLABS * PAGES_PER_SLAB, GRANULARITY_BYTES // PAGES_PER_SLAB)


class Mempool:
    """The mempool's end of a caller's connection; `sent`: descriptors that the caller got."""

    up = True

    def __init__(self) -> None:
        self.sent: list[int] = []

    def connect(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _new_fd(self, name: str, size: int) -> int:
        self.sent.append(os.memfd_create(name))
        os.ftruncate(self.sent[-1], size)
        return self.sent[-1]

    def call(self, message, *, timeout_ms):
        if isinstance(message, AttachCaller):
            size = table_bytes(HEADER.num_pages)
            fd = self._new_fd("table", size)
            with mmap.mmap(fd, size) as table, memoryview(table) as raw, raw.cast("Q") as words:
                write_header(words, HEADER)
            attached = CallerAttached(
                boot_generation=1, memory_id=1, content_key="c", num_pages=HEADER.num_pages,
                page_bytes=HEADER.page_bytes, pages_per_slab=PAGES_PER_SLAB, device="cuda:00",
            )  # fmt: skip
            return attached, [], [fd]
        if isinstance(message, wire.SlabsCall):
            fds = [self._new_fd("slab", GRANULARITY_BYTES) for _ in range(message.count)]
            return wire.Slabs(call_id=message.call_id, first=message.first, count=message.count), [], fds
        return Detached(), [], []


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_a_driver_that_refuses_a_slab_leaves_no_descriptor_open(tmp_path, monkeypatch):
    """A caller tries again and again: each time up to 128 stayed open."""
    mempool = Mempool()
    monkeypatch.setattr(CallerMemory, "_new_link", lambda _: mempool)
    driver = FakeVmmDriver(refuse_map_number=1)
    with pytest.raises(ClusterError):
        CallerMemory(
            tmp_path / "no.sock", InstanceId("p"), InstanceId("d"), SpaceId(0), writes=True,
            make_window=lambda _device, num, size: GpuWindow(driver, num, size, writes=True),
            quiet=lambda: None, on_down=lambda: None,
        )  # fmt: skip
    assert len(mempool.sent) == 1 + SLABS
    assert not [fd for fd in mempool.sent if is_open(fd)]
