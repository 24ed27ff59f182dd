"""What was left over: readers that waited by another one's patience, pins and places that nobody ended."""

import errno
import mmap
import os
import threading
import time
from types import SimpleNamespace

import pytest

from services.mempool.core.actions import PoolLimits
from services.mempool.shell import MempoolShell
from shared.ids import Epoch, InstanceId
from shared.transport.clock import MonotonicClock
from shared.vmm.errors import VmmError
from shared.vmm.interface import OP_PAUSE, Op
from shared.vmm.mapper import NativeMapper
from shared.wire import mempool as wire
from shared.wire.mempool_far import NO_PLACE, FarOut
from shared.wire.mempool_swap import SwapDrop, SwapOut
from tests.unit.mempool_harness import DESCRIPTION, PAGE_BYTES, chain
from tests.unit.test_mempool_dram import ABCD, WXYZ, fill, number_of_dram, spaces, unpin
from tests.unit.test_mempool_far import RANK, FarMarket
from tests.unit.test_mempool_spaces import DECODE, FRONT, PREFILL, Spaces, acquire, answers

ABC = chain("a", "b", "c")
PATIENCE_S = 20.0

# -- readers that join a pull -------------------------------------------------------------------------


def full_space(**limits: object) -> tuple[Spaces, list]:
    """PREFILL has the blocks; every page of DECODE's space is its engine's, so that a pull waits for pages."""
    rig = Spaces(4, pull_patience_ms=100, max_wait_ms=60_000, **limits)
    rig.worker(PREFILL, "cpu:0")
    rig.worker(DECODE, "cpu:1")
    rig.client(FRONT, f"i{DECODE}")
    rig.fill(PREFILL, 0, ABC, "abc")
    return rig, rig.take(DECODE, 4)


def counts(rig: Spaces) -> dict[int, int]:
    """call -> blocks of its answer"""
    return {one.call_id: one.num_blocks for one in answers(rig, FRONT, wire.Acquired)}


def test_a_reader_that_joins_a_pull_is_answered_at_its_own_time_and_not_at_the_first_ones():
    rig, held = full_space()
    acquire(rig, ABC, 1, wait_ms=30_000)
    acquire(rig, ABC, 2)  # 100 ms
    assert rig.core.next_deadline_ms() is not None
    rig.advance(99)
    assert counts(rig) == {}
    assert rig.core.next_deadline_ms() == rig.now_ms + 1
    rig.advance(1)
    assert counts(rig) == {2: 0}
    rig.give_back(DECODE, held[:3])
    rig.copied()
    assert counts(rig) == {2: 0, 1: 3}, "the first one had more time"


def test_a_reader_that_joins_a_pull_has_its_own_time_when_that_of_the_first_is_over():
    rig, held = full_space()
    acquire(rig, ABC, 1)
    acquire(rig, ABC, 2, wait_ms=30_000)
    acquire(rig, ABC, 3, wait_ms=20_000)
    rig.advance(100)
    assert counts(rig) == {1: 0}
    rig.advance(5_000)
    rig.give_back(DECODE, held[:3])
    rig.copied()
    assert counts(rig) == {1: 0, 2: 3, 3: 3}
    assert not rig.core.pulls.pulls
    for lease in answers(rig, FRONT, wire.Acquired):
        if lease.num_blocks:
            rig.say(FRONT, wire.Release(lease_id=lease.lease_id))
    assert (
        rig.core.pools[0].index.get(ABC[0]).pins == rig.core.pools[0].index.get(ABC[2]).pins == 1
    )  # PREFILL's


def test_readers_that_joined_end_one_by_one_and_nothing_stays_pinned():
    rig, _ = full_space()
    acquire(rig, ABC, 1, wait_ms=1_000)
    for call in range(2, 6):
        acquire(rig, ABC, call, wait_ms=call * 1_000)
    for second in range(1, 8):
        rig.advance(1_000)
        assert len(counts(rig)) == min(second, 5)
    assert not rig.core.pulls.pulls
    assert not rig.core.pulls._arriving
    assert {entry.pins for entry in map(rig.core.pools[0].index.get, ABC)} == {1}


def test_a_copy_that_fails_is_not_begun_again_and_again_for_who_joined():
    rig, held = full_space()
    acquire(rig, ABC, 1)
    for call in range(2, 5):
        acquire(rig, ABC, call, wait_ms=30_000)
    rig.give_back(DECODE, held[:3])
    num_copies = 0
    while rig.copies:
        num_copies += len(rig.copies)
        rig.copied(failed=True, in_doubt=())
        assert num_copies < 10
    assert counts(rig) == dict.fromkeys(range(1, 5), 0)


def test_readers_that_join_a_pull_count_among_those_that_wait():
    rig, _ = full_space(max_waiting=3)
    for call in range(1, 6):
        acquire(rig, ABC, call, wait_ms=30_000)
    assert counts(rig) == {4: 0, 5: 0}, "who is one too many is answered with what is there"
    rig.closed(FRONT)
    rig.client(FRONT + 1, f"i{DECODE}")
    rig.say(FRONT + 1, wire.Acquire(call_id=9, hashes=b"".join(ABC), wait_ms=30_000))
    assert not answers(rig, FRONT + 1, wire.Acquired), "the others are gone"


# -- the same hash twice ------------------------------------------------------------------------------


@pytest.mark.parametrize("is_known", [False, True])
def test_a_swap_that_names_a_block_twice_pins_it_once(is_known):
    rig = spaces(8, 8)
    pages = fill(rig, ABCD, "abcd")
    if is_known:
        rig.say(PREFILL, SwapOut(swap=9, hashes=b"".join(ABCD)))
        rig.copied()
        rig.say(PREFILL, SwapDrop(swap=9))
    rig.say(PREFILL, SwapOut(swap=1, hashes=b"".join([*ABCD, *ABCD[:2], ABCD[0]])))
    rig.copied()
    (out,) = [one for one in rig.sent[PREFILL] if getattr(one, "swap", 0) == 1]
    assert out.kept == bytes([1] * 7), "an answer for each that was named"
    assert out.blocks_copied == (0 if is_known else 4)
    rig.say(PREFILL, SwapDrop(swap=1))
    unpin(rig, pages)
    dram = rig.core.pools[number_of_dram(rig)]
    assert all(dram.index.get(block).pins == 0 for block in ABCD)
    while dram.evict():
        pass
    assert dram.memory.table.num_free == dram.memory.table.num_pages


# -- an engine that lost a rank -----------------------------------------------------------------------


def test_an_engine_that_lost_a_rank_takes_no_far_place_and_pins_nothing():
    rig = FarMarket(places=8, dram_pages=8)
    rig.out(1, ABCD, "abcd")
    before, pins = rig.num_placed, rig.core.status().num_pinned
    rig.closed(RANK)
    for number in range(2, 5):
        rig.say(PREFILL, FarOut(number=number, hashes=b"".join(ABCD)))
        assert rig.placed(number) == [NO_PLACE] * 4
    assert (rig.num_placed, rig.core.status().num_pinned) == (before, pins), (
        "what its processes may still read"
    )


def test_what_arrives_after_a_rank_was_lost_is_a_cached_block_as_others():
    rig = FarMarket(places=8, dram_pages=8)
    rig.fill(PREFILL, 0, WXYZ, "wxyz")
    rig.say(PREFILL, FarOut(number=1, hashes=b"".join(WXYZ)))
    rig.closed(RANK)
    rig.copied()
    assert rig.placed(1) == [NO_PLACE] * 4
    assert rig.num_placed == 0, "no process was asked to map it"
    rig.closed(PREFILL)
    rig.dead(PREFILL)
    assert rig.core.status().num_pinned == 0


# -- memory that cannot be made -----------------------------------------------------------------------


def no_memory(*_args, **_how):
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


class Connection(SimpleNamespace):
    """What the shell needs of one."""

    def __init__(self, number: int) -> None:
        super().__init__(state=number, peer=SimpleNamespace(pid=number), sent=[], is_closed=False)

    def send(self, message, fds=()):
        self.sent.append(message)

    def close(self):
        self.is_closed = True


@pytest.fixture
async def shell(tmp_path, monkeypatch):
    limits = PoolLimits(capacity_bytes=8 * PAGE_BYTES, dram_bytes=8 * PAGE_BYTES, dram_for_host=True)
    made = MempoolShell(tmp_path / "m", limits, Epoch(1), MonotonicClock())
    monkeypatch.setattr(made._processes, "number_of", lambda connection: connection.state)
    yield made
    made.close()


def attach(shell: MempoolShell, number: int, device: str, kind: str = "engine") -> Connection:
    connection = Connection(number)
    shell._connections[number] = connection
    message = wire.Attach(
        kind=kind, instance=InstanceId(f"e{number}"), description=DESCRIPTION, quota_pages=4, device=device
    )
    shell._on_message(connection, 0, message, [])
    return connection


@pytest.mark.parametrize("kind", ["engine", "rank"])
@pytest.mark.parametrize("num_made", [0, 1])
async def test_who_attaches_where_memory_cannot_be_made_is_refused_and_nothing_was_decided(
    shell, monkeypatch, kind, num_made
):
    """Of two, the pages and the host memory behind them, `num_made` could be."""
    real, left = mmap.mmap, [num_made]

    def few(*args, **how):
        left[0] -= 1
        return real(*args, **how) if left[0] >= 0 else no_memory()

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(mmap, "mmap", few)
    refused = attach(shell, 1, "cpu:0", kind)
    assert [one.code for one in refused.sent] == ["pages.exhausted"]
    assert "Cannot allocate memory" in refused.sent[0].reason
    assert refused.is_closed
    assert len(os.listdir("/proc/self/fd")) == before
    assert [pool.memory for pool in shell.pool.pools.values()] == [None]
    monkeypatch.undo()
    monkeypatch.setattr(shell._processes, "number_of", lambda connection: connection.state)
    assert isinstance(attach(shell, 2, "cpu:0", kind).sent[0], wire.Attached)
    assert len(shell.spaces.memories) == 2


async def test_all_memory_that_an_attachment_takes_was_made_before_it_was_decided(shell, monkeypatch):
    made = []
    real = shell.spaces.ready._make
    monkeypatch.setattr(shell.spaces.ready, "_make", lambda *key: (made.append(key), real(*key)))
    take = shell.spaces.ready.take

    def taken(action):
        num = len(made)
        memory = take(action)
        assert len(made) == num, "made only now"
        return memory

    monkeypatch.setattr(shell.spaces.ready, "take", taken)
    for number, device, num_made in ((1, "cpu:0", 2), (2, "cpu:0", 2), (3, "cpu:1", 4), (4, "cpu:1", 4)):
        assert isinstance(attach(shell, number, device).sent[0], wire.Attached)
        assert len(made) == num_made
        assert not shell.spaces.ready._ready, "none is kept in vain"
    assert len(shell.spaces.memories) == 3  # the second space's blocks are of the first one's content


# -- the mapper in machine code -----------------------------------------------------------------------


class Window:
    """Its thread fails once somebody waits. Its calls need no address but that of a pause."""

    def __init__(self) -> None:
        self.applied, self.begins = 0, threading.Event()

    def entry_points(self):
        return {OP_PAUSE - 1: 1}

    def prepare_thread(self):
        self.begins.wait()
        raise VmmError("cuCtxSetCurrent: CUDA_ERROR_INVALID_CONTEXT")

    def apply(self, ops):
        self.applied += len(ops)


def test_who_waits_for_a_native_mapper_whose_thread_has_not_begun_hears_so_at_once():
    window = Window()
    mapper = NativeMapper(window)
    pause = Op(OP_PAUSE, 1, 0, 0, 0)
    threading.Timer(0.05, window.begins.set).start()
    start_s = time.monotonic()
    with pytest.raises(VmmError, match="has not begun: cuCtxSetCurrent"):
        mapper.wait(mapper.submit([pause]), PATIENCE_S)
    assert time.monotonic() - start_s < PATIENCE_S / 2
    with pytest.raises(VmmError, match="has not begun"):
        mapper.run([pause])
    assert window.applied == 0
    mapper.close()
