"""Which pages are in the sample: as many as the rate says, by their block's hash alone; and what of a page counts."""

import asyncio
import hashlib
import os
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from services.mempool.checks import JUST_MS, MAX_WAITING, Checks, Known
from services.mempool.core.actions import CopyPages, WriteEntries
from services.mempool.core.entry import Entry
from services.mempool.core.inheritance import pack_entry
from services.mempool.memory import PoolMemory
from services.mempool.page_sums import AGAIN_S, HostPages, PageSums, Piece
from shared.ids import BlockHash, Epoch, PageId
from shared.transport.clock import MonotonicClock

NUM_BLOCKS = 4000
HASHES = [BlockHash(hashlib.sha256(b"%d" % i).digest()) for i in range(NUM_BLOCKS)]


class Core:
    """Every page is as it is said to be."""

    def __init__(self) -> None:
        self.held: list[BlockHash] = []

    def hold(self, space, block_hash, page, epoch):
        self.held.append(block_hash)
        return object()


@pytest.fixture
def memory():
    found = PoolMemory(8, 4096, Epoch(1), 2)
    yield found
    found.close()


def checks_at(rate: float, memory: PoolMemory) -> tuple[Checks, Core]:
    core = Core()
    spaces = SimpleNamespace(
        memories={0: memory}, has_slabs=lambda space: False,
        description_of=lambda space: SimpleNamespace(block_bytes=4000),
    )  # fmt: skip
    made = Checks(rate, core, spaces, MonotonicClock(), lambda actions: None)
    made._sums.sums = lambda pieces, then, urgent=True: None
    return made, core


def sampled(checks: Checks, core: Core, epoch: int) -> set[BlockHash]:
    entries = [
        (i, pack_entry(Entry(h, HASHES[0], PageId(i), 4), Epoch(epoch + i))) for i, h in enumerate(HASHES)
    ]
    core.held.clear()
    checks.sealed(WriteEntries(entries, 0))
    checks.begin()
    return set(core.held)


@pytest.mark.parametrize("rate", [0.0, 0.25, 1.0])
def test_the_sample_has_the_rates_share_of_blocks_and_goes_by_hash_alone(memory, rate):
    checks, core = checks_at(rate, memory)
    found = sampled(checks, core, 1)
    assert abs(len(found) / NUM_BLOCKS - rate) < 0.04
    assert sampled(checks, core, 70_000) == found
    checks.close()


def test_another_mempool_has_another_sample(memory):
    samples = set()
    for _ in range(2):
        checks, core = checks_at(0.25, memory)
        samples.add(frozenset(sampled(checks, core, 1)))
        checks.close()
    assert len(samples) == 2


def test_what_is_sealed_beyond_the_bound_has_no_sum_and_is_counted(memory):
    checks, core = checks_at(1.0, memory)
    checks._sums.num_waiting = MAX_WAITING - 10
    assert len(sampled(checks, core, 1)) == 10
    assert checks.counters["checks_pages_skipped"] == NUM_BLOCKS - 10
    checks.close()


def test_the_sum_of_what_lay_in_a_lent_page_ends_when_something_else_is_copied_there(memory):
    checks, core = checks_at(1.0, memory)
    sampled(checks, core, 1)
    assert checks.of(0, 5, 6) is not None
    copy = CopyPages(1, 0, [PageId(5)], [(0, PageId(7))], 1000)
    checks.copying(copy)
    assert checks.of(0, 5, 6) is not None  # a page of the space's own gets a new epoch
    checks.copying(replace(copy, copy_id=2, raw=True))
    assert checks.of(0, 5, 6) is None
    assert checks.of(0, 6, 7) is not None
    checks.close()


@pytest.mark.parametrize("at", [0, 3999, 4000, 4095])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_byte_of_the_block_counts_on_every_rank_and_what_is_behind_it_does_not(memory, at, rank):
    pages = HostPages(memory)
    before = pages.sum(5, 4000)
    os.pwrite(memory.page_fd, b"\1", (rank * 8 + 5) * 4096 + at)
    assert (pages.sum(5, 4000) != before) == (at < 4000)
    assert pages.sum(4, 4000) == pages.sum(6, 4000)
    pages.close()


class Slow:
    """Pages whose sums the test lets through one by one."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.turn = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)

    def sum(self, page: int, num_bytes: int) -> int:
        self.begun.release()
        assert self.turn.acquire(timeout=30)
        self.order.append(page)
        return page + 1

    def close(self) -> None: ...


async def test_who_is_waited_for_comes_before_the_next_page_that_nobody_waits_for():
    pages, answers = Slow(), asyncio.Queue()
    sums = PageSums(lambda space: pages)
    sums.sums([Piece(0, page, 1) for page in (1, 2, 3)], answers.put_nowait, urgent=False)
    sums.sums([Piece(0, 4, 1)], answers.put_nowait, urgent=False)
    assert await asyncio.to_thread(pages.begun.acquire, timeout=30)
    sums.sums([Piece(0, 10, 1), Piece(0, 11, 1)], answers.put_nowait)
    sums.sums([Piece(0, 12, 1)], answers.put_nowait)
    assert sums.num_waiting == 7
    for _ in range(7):
        pages.turn.release()
    assert [await answers.get() for _ in range(4)] == [[11, 12], [13], [2, 3, 4], [5]]
    assert pages.order == [1, 10, 11, 12, 2, 3, 4]
    assert sums.num_waiting == 0
    sums.close()


async def test_a_close_waits_for_the_page_under_way_and_answers_nobody():
    pages, answers = Slow(), []
    sums = PageSums(lambda space: pages)
    sums.sums([Piece(0, 1, 1), Piece(0, 2, 1)], answers.append)
    assert await asyncio.to_thread(pages.begun.acquire, timeout=30)
    asyncio.get_running_loop().call_later(0.05, pages.turn.release)
    closing = asyncio.to_thread(sums.close)
    await closing
    await asyncio.sleep(0)
    assert (pages.order, answers) == ([1], [])


async def test_memory_that_cannot_be_mapped_is_not_summed_and_harms_nobody():
    calls = []

    def pages_of(space):
        calls.append(space)
        raise OSError(12, "no memory")

    sums, answer = PageSums(pages_of, lambda: 100.0), asyncio.get_running_loop().create_future()
    assert not sums.can_read(3)
    sums.sums([Piece(3, 0, 1)], answer.set_result)
    assert await answer == [0]
    assert calls == [3]
    sums.close()


def test_memory_that_could_not_be_mapped_for_a_moment_is_summed_afterwards(memory):
    """It was not for as long as the mempool lived, and only one line in its log said so."""
    now_s, calls, works = 100.0, [], False

    def pages_of(space):
        calls.append(space)
        if not works:
            raise OSError(24, "too many open files")
        return HostPages(memory)

    sums = PageSums(pages_of, lambda: now_s)
    with capture_logs() as lines:
        for _ in range(3):
            assert not sums.can_read(3)
        now_s += AGAIN_S
        assert not sums.can_read(3)
        assert (sums.failing, len(calls)) == ([3], 2)
        works = True
        now_s += AGAIN_S
        assert sums.can_read(3)
        assert (sums.failing, len(calls)) == ([], 3)
    assert [line["event"] for line in lines] == ["space_not_summed", "space_summed_again"]
    sums.close()


async def test_a_bug_while_summing_is_raised_into_the_loop_for_who_waits_for_a_sum_would_wait_for_ever():
    loop = asyncio.get_running_loop()
    raised = loop.create_future()
    loop.set_exception_handler(
        lambda _, context: raised.set_result(("handle" in context, context["exception"]))
    )
    broken = KeyError("our bug")

    class Broken(Slow):
        def sum(self, page, num_bytes):
            raise broken

    sums = PageSums(lambda space: Broken())
    sums.sums([Piece(0, 0, 1)], lambda values: None)
    assert await asyncio.wait_for(raised, 30) == (True, broken)
    sums.close()


def test_what_could_not_be_read_says_nothing_against_a_page():
    known = Known(Piece(0, 0, 1), 1, HASHES[0], 0)
    assert known.agrees(0)
    assert known.agrees(7)
    assert known.agrees(0)
    assert known.agrees(7)
    assert not known.agrees(8)
    assert known.value == 7


async def test_pages_of_a_space_that_has_ended_are_closed_behind_what_is_summed_and_read_no_more():
    is_closed = threading.Event()

    class Closing(Slow):
        def close(self) -> None:
            assert self.order == [1, 2]
            is_closed.set()

    asked, pages, answers = [], Closing(), asyncio.Queue()
    sums = PageSums(lambda space: asked.append(space) or (pages if len(asked) == 1 else None))
    sums.sums([Piece(3, page, 1) for page in (1, 2)], answers.put_nowait, urgent=False)
    sums.ended(3)
    assert not sums.can_read(3)
    pages.turn.release(2)
    assert await answers.get() == [2, 3]
    sums.ended(3)
    sums.ended(4)
    assert await asyncio.to_thread(is_closed.wait, 30)
    sums.close()
    assert asked == [3, 3]


class Answered:
    """PageSums whose values a test gives: by (space, page)."""

    def __init__(self, values: dict[tuple[int, int], int]) -> None:
        self.values, self.asked, self.num_waiting = values, [], 0

    def can_read(self, space: int) -> bool:
        return True

    def sums(self, pieces, then, *, urgent: bool = True) -> None:
        self.asked += [(piece.space, piece.page) for piece in pieces]
        then([self.values[piece.space, piece.page] for piece in pieces])

    def close(self) -> None: ...


SOURCE, TARGET = 0, 1
HASH = HASHES[0]


def one_copied(sums: Answered, right: list[bool], *, sealed_as: BlockHash | None = HASH) -> Checks:
    """A block of SOURCE's page 3 that has been copied into TARGET's page 5, where its word is of epoch 9. `sealed_as`:
    at the end of the copy; None: it is not."""
    clock = SimpleNamespace(ms=0, now_ms=lambda: clock.ms)
    tables = [SimpleNamespace(epochs=[7] * 8), SimpleNamespace(epochs=[9] * 8)]
    core = SimpleNamespace(
        pools={i: SimpleNamespace(memory=SimpleNamespace(table=table)) for i, table in enumerate(tables)},
        hold=lambda *_: SimpleNamespace(), let_go=lambda *_: [], on_corrupt=lambda *_: [],
    )  # fmt: skip
    content = SimpleNamespace(block_bytes=4000, num_ranks=1, content_key="c")
    spaces = SimpleNamespace(description_of=lambda space: content)
    checks = Checks(1.0, core, spaces, clock, lambda actions: None)
    checks._sums = sums
    sealed(checks, SOURCE, 3, 7)

    def over(failed: bool) -> None:
        right.append(not failed)
        if not failed and sealed_as is not None:
            sealed(checks, TARGET, 5, 9, sealed_as)

    checks.copying(CopyPages(1, TARGET, [PageId(5)], [(SOURCE, PageId(3))], 1000))
    assert checks.copied(1, False, over)
    assert checks._came == {}
    return checks


def sealed(checks: Checks, space: int, page: int, epoch: int, block_hash: BlockHash = HASH) -> None:
    packed = pack_entry(Entry(block_hash, HASHES[1], PageId(page), 4), Epoch(epoch))
    checks.sealed(WriteEntries([(page, packed)], space))
    checks.begin()


def test_a_copy_that_was_found_right_is_not_summed_again_for_its_first_reader_but_for_the_next():
    sums, right = Answered({(SOURCE, 3): 77, (TARGET, 5): 77}), []
    checks = one_copied(sums, right)
    assert right == [True]
    assert sums.asked == [(SOURCE, 3), (TARGET, 5)], "the sum of the copy is the one that was compared"
    assert checks.of_lease(TARGET, [5], [9]) == {}
    (known,) = checks.of_lease(TARGET, [5], [9]).values()
    assert (known.value, known.piece[:2]) == (77, (TARGET, 5))
    heard: list[int | None] = []
    sums.values[TARGET, 5] = 78
    checks.look({0: known}, heard.append)
    assert heard == [0]


def test_who_leases_it_later_has_it_summed_though_nobody_did_before():
    checks = one_copied(Answered({(SOURCE, 3): 77, (TARGET, 5): 77}), [])
    checks._clock.ms += JUST_MS
    assert list(checks.of_lease(TARGET, [5], [9])) == [0]


def test_a_copy_that_is_wrong_has_no_sum_of_its_source():
    right: list[bool] = []
    checks = one_copied(Answered({(SOURCE, 3): 77, (TARGET, 5): 78}), right)
    assert right == [False]
    sealed(checks, TARGET, 5, 9)
    assert next(iter(checks.of_lease(TARGET, [5], [9]).values())).value == 78, (
        "a later seal of it takes its own"
    )


@pytest.mark.parametrize("sealed_as", [None, HASHES[2]])
def test_a_page_whose_owner_writes_to_it_behind_the_copy_or_that_becomes_another_block_takes_its_own_sum(
    sealed_as,
):
    """As a caller's own page (MemPool.transfer): it keeps its epoch until it is inserted, with other bytes."""
    sums = Answered({(SOURCE, 3): 77, (TARGET, 5): 77})
    checks = one_copied(sums, [], sealed_as=None)
    sums.values[TARGET, 5] = 78
    sealed(checks, TARGET, 5, 9, sealed_as or HASH)
    assert checks.of(TARGET, 5, 9).value == 78
    assert list(checks.of_lease(TARGET, [5], [9])) == [0]


def test_what_is_indexed_under_another_name_at_the_end_of_the_copy_takes_its_own_sum():
    checks = one_copied(Answered({(SOURCE, 3): 77, (TARGET, 5): 77}), [], sealed_as=HASHES[2])
    assert (checks.of(TARGET, 5, 9).block_hash, checks.of(TARGET, 5, 9).came_ms) == (HASHES[2], None)
