"""What a new mempool decides about the pages of the one that died."""

import struct

import msgspec
import pytest

from services.mempool.core.actions import CreateMemory, WriteEntries, WriteWords
from services.mempool.core.space import Plan
from shared.ids import Epoch
from shared.kv.page import PageState
from shared.kv.page_table import ENTRY
from shared.kv.words import u32_bytes
from shared.wire import mempool as wire
from tests.unit.mempool_harness import (
    BLOCK_TOKENS,
    BOOT,
    DESCRIPTION,
    PAGE_BYTES,
    SEED,
    Harness,
    InstanceId,
    LeaseId,
    Owned,
    chain,
    page_lists,
)

NEXT_BOOT = Epoch(BOOT + 1_000_000)
NUM_PAGES = 6


class Recorded(Harness):
    """A harness that keeps what lies beside the words, as the memory does."""

    def __init__(self, **fields: object) -> None:
        self.entries = bytearray(NUM_PAGES * ENTRY.size)
        super().__init__(num_pages=NUM_PAGES, **fields)

    def run(self, actions):
        for action in actions:
            if isinstance(action, WriteEntries):
                for page, packed in action.entries:
                    self.entries[page * ENTRY.size : (page + 1) * ENTRY.size] = packed
        super().run(actions)


def worker(pool: Harness, connection: int, process: int, **fields: object) -> None:
    pool.engine(connection, process=process, works_in_pages=True, **fields)


def holding(held: list[Owned], sealed: list[Owned], hashes, leases=(), num_unwritten=0) -> wire.Holding:
    lists = page_lists(sealed)
    return wire.Holding(
        **page_lists(held),
        num_unwritten=num_unwritten,
        sealed_pages=lists["pages"],
        sealed_epochs=lists["epochs"],
        sealed_hashes=b"".join(hashes),
        sealed_parents=b"".join([SEED, *hashes][: len(hashes)]),
        sealed_valid_tokens=u32_bytes([BLOCK_TOKENS] * len(sealed)),
        leases=list(leases),
    )


@pytest.fixture
def before() -> Recorded:
    """An engine (process 10) with a, b sealed and one page in hand; c is sealed and nobody's."""
    pool = Recorded()
    worker(pool, 1, 10, quota=4)
    hashes = chain("a", "b")
    pool.sealed = pool.save(1, hashes)
    other = pool.save(1, chain("c"))
    pool.say(1, wire.Unpin(**page_lists(other)))
    pool.held = pool.take(1, 1)
    pool.write(1, pool.held)
    return pool


def successor(before: Recorded, processes=(10,), engines=None, **fields: object) -> Recorded:
    after = Recorded(boot=NEXT_BOOT)
    after.entries[:] = before.entries
    words = [before.words[p] for p in range(NUM_PAGES)]
    after.words = dict(before.words)
    plan = Plan(NUM_PAGES, PAGE_BYTES, 1)
    after.run(
        after.pool.adopt(
            DESCRIPTION,
            plan,
            words,
            bytes(before.entries),
            memory_id=BOOT,
            processes=processes,
            engines=processes if engines is None else engines,
            instances=[InstanceId("i1")] * len(processes),
            **fields,
        )
    )
    return after


def test_sealed_pages_are_found_by_hash_before_anybody_has_reported(before):
    after = successor(before)
    after.client(5)
    assert after.acquire(5, chain("a", "b")).num_blocks == 2
    assert after.acquire(5, chain("c")).num_blocks == 1
    assert not any(isinstance(a, CreateMemory) for a in [after.created])


def test_nothing_is_used_anew_but_what_was_free_until_the_engine_has_reported(before):
    after = successor(before)
    worker(after, 7, 99, instance=InstanceId("other"), quota=6, memory_id=BOOT)
    granted = {page for page, _ in after.granted[7]}
    was_free = {p for p in range(NUM_PAGES) if before.state(p) is PageState.FREE}
    assert granted <= was_free
    after.dead(10)
    assert len(after.granted[7]) > len(was_free), "with its death proven the rest is free"


def test_an_engine_gets_back_what_it_reports_and_the_rest_is_free(before):
    after = successor(before)
    worker(
        after, 1, 10, quota=4, memory_id=BOOT, holding=holding(before.held, before.sealed, chain("a", "b")),
    )  # fmt: skip
    assert isinstance(after.sent[1][0], wire.Attached)
    assert after.sent[1][0].memory_id == BOOT
    assert after.pool.inheritance is None
    counts = after.counts()
    assert counts["sealed"] == 3
    assert counts["writing"] == 1
    assert after.pool.index.num_pinned == 2, "what nobody uses may be evicted again"
    after.seal(1, before.held, chain("a", "b", "d"), first=2)
    after.client(5)
    assert after.acquire(5, chain("a", "b", "d")).num_blocks == 3


def test_what_an_engine_reports_as_its_stock_is_its_stock_and_no_block_is_evicted_for_another():
    """It counted as being written: with every restart of the mempool a part of the blocks went for pages anew."""
    before = Recorded()
    worker(before, 7, 70, quota=3)
    before.save(7, chain("a", "b", "c"))
    before.closed(7)
    before.dead(70)
    worker(before, 1, 10, quota=NUM_PAGES)
    stock = before.take(1, 3)
    after = successor(before)
    worker(after, 1, 10, quota=NUM_PAGES, memory_id=BOOT, holding=holding(stock, [], [], num_unwritten=3))
    assert after.counts() == {"sealed": 3, "writing": 3}
    (engine,) = after.pool.memory.engines.attached.values()
    assert (len(engine.stock), after.pool.num_spare) == (3, 6)
    after.write(1, stock[:1])
    assert (len(engine.stock), after.pool.counters["messages_stale"]) == (2, 0)
    after.seal(1, stock[:2], chain("d", "e"))
    after.give_back(1, stock[2:])
    assert stock[2] not in after.granted[1]
    assert (stock[2][0], stock[2][1] + 1) in after.granted[1], "under the next epoch"


def test_a_page_beside_the_indexed_one_takes_its_place_after_the_mempool_too():
    before = Recorded()
    worker(before, 1, 10, quota=1)
    first = before.save(1, chain("a"))
    worker(before, 2, 20, quota=1)
    again = before.save(2, chain("a"))
    after = successor(before, (10, 20))
    worker(after, 1, 10, quota=1, memory_id=BOOT, holding=holding([], first, chain("a")))
    worker(after, 2, 20, quota=1, memory_id=BOOT, holding=holding([], again, chain("a")))
    assert after.counts()["sealed"] == 2
    after.say(1, wire.Unpin(**page_lists(first)))
    assert after.counts()["sealed"] == 1
    after.client(5)
    assert after.acquire(5, chain("a")).pages == u32_bytes([again[0][0]])
    third = Recorded(boot=Epoch(NEXT_BOOT + 1_000_000))
    third.entries[:] = after.entries
    assert [ENTRY.unpack_from(third.entries, again[0][0] * ENTRY.size)[0]] == [again[0][1]]


def test_a_seal_that_was_lost_with_the_mempool_is_made_up_for(before):
    after = successor(before)
    hashes = chain("a", "b", "d")
    report = holding([], [*before.sealed, *before.held], hashes)
    worker(after, 1, 10, quota=4, memory_id=BOOT, holding=report)
    after.client(5)
    assert after.acquire(5, hashes).num_blocks == 3
    worker(after, 2, 11, quota=1)
    third = successor(after, processes=())
    third.client(5)
    assert third.acquire(5, hashes).num_blocks == 3, "its name is noted for the mempool after this one too"


def test_leases_that_an_engine_works_in_go_on(before):
    after = successor(before)
    lease = wire.HeldLease(lease_id=LeaseId("old-1"), **page_lists(before.sealed))
    worker(after, 1, 10, quota=4, memory_id=BOOT, holding=holding([], [], [], [lease]))
    assert after.pool.index.num_pinned == 2
    after.release(1, LeaseId("old-1"))
    assert after.pool.index.num_pinned == 0


def test_a_lease_that_an_engine_has_kept_ends_with_that_engine_and_not_with_its_successor(before):
    after = successor(before)
    lease = wire.HeldLease(lease_id=LeaseId("old-1"), **page_lists(before.sealed))
    for connection, process, held in ((1, 10, holding([], [], [], [lease])), (2, 20, None)):
        worker(after, connection, process, instance=InstanceId("i1"), memory_id=BOOT, holding=held)
    after.dead(10)
    assert after.pool.index.num_pinned == 0


@pytest.mark.parametrize("case", ["epoch", "free", "range", "hash"])
def test_a_report_that_the_table_does_not_confirm_is_refused(before, case):
    after = successor(before)
    (page, epoch) = before.held[0]
    free = next(p for p in range(NUM_PAGES) if before.state(p) is PageState.FREE)
    held = {"epoch": [(page, epoch + 1)], "free": [(free, epoch)], "range": [(NUM_PAGES, epoch)], "hash": []}[
        case
    ]
    sealed, hashes = (before.sealed[:1], chain("z")) if case == "hash" else ([], [])
    worker(after, 1, 10, quota=4, memory_id=BOOT, holding=holding(held, sealed, hashes))
    assert isinstance(after.sent[1][0], wire.AttachRefused)
    assert after.pool.inheritance is not None


def test_a_report_of_which_a_part_is_wrong_changes_nothing(before):
    after = successor(before)
    leases = [wire.HeldLease(lease_id=LeaseId("old-1"), **page_lists([(before.sealed[0][0], 7)]))]
    report = holding(before.held, before.sealed, chain("a", "b"), leases)
    counts, num_pinned = after.counts(), after.pool.index.num_pinned
    worker(after, 1, 10, quota=4, memory_id=BOOT, holding=report)
    assert isinstance(after.sent[1][0], wire.AttachRefused)
    assert (after.counts(), after.pool.index.num_pinned) == (counts, num_pinned)
    after.dead(10)
    assert after.counts()["free"] == NUM_PAGES - 3, (
        "what it held is free with its death, what is sealed stays"
    )
    assert after.pool.index.num_pinned == 0


def test_a_lease_that_the_new_mempool_made_is_not_pinned_twice_when_its_engine_reports_it(before):
    """A front may be connected, and lease, before its engine reports."""
    after = successor(before)
    after.client(5, instance="i1")
    lease = after.acquire(5, chain("a"))
    held = wire.HeldLease(lease_id=lease.lease_id, **page_lists(before.sealed[:1]))
    worker(after, 1, 10, quota=4, memory_id=BOOT, holding=holding([], [], [], [held]))
    after.release(1, lease.lease_id)
    assert after.pool.index.num_pinned == 0


@pytest.mark.parametrize("twice", ["held", "sealed"])
def test_a_page_that_is_reported_twice_is_refused(before, twice):
    after = successor(before)
    held, sealed, hashes = before.held, before.sealed, chain("a", "b")
    if twice == "held":
        held = before.held * 2
    else:
        sealed, hashes = [sealed[0], sealed[0]], [hashes[0], hashes[0]]
    lists = holding(held, sealed, hashes)
    lists = msgspec.structs.replace(lists, sealed_parents=SEED * len(sealed))
    worker(after, 1, 10, quota=4, memory_id=BOOT, holding=lists)
    assert isinstance(after.sent[1][0], wire.AttachRefused)


def test_what_an_engine_reported_waits_for_its_rank_that_has_not_attached_again(before):
    """The rank may be in the middle of a step when the core dies."""
    after = successor(before, processes=(10, 11), engines=(10,))
    report = holding(before.held, before.sealed, chain("a", "b"))
    worker(after, 1, 10, quota=4, memory_id=BOOT, holding=report)
    ((page, _),) = before.held
    after.closed(1)
    after.dead(10)
    assert after.state(page) is PageState.QUARANTINED
    after.dead(11)
    assert after.state(page) is PageState.FREE


def test_an_engine_of_other_memory_is_refused(before):
    after = successor(before)
    worker(after, 1, 10, quota=4, memory_id=Epoch(7))
    assert after.sent[1][0].code == "memory.replaced"
    fresh = Recorded(boot=NEXT_BOOT)
    worker(fresh, 1, 10, quota=4, memory_id=BOOT)
    assert fresh.sent[1][0].code == "memory.replaced"
    assert fresh.created is None


def test_a_note_that_an_earlier_version_made_is_read_whatever_it_says_of_a_checksum(before):
    earlier = struct.Struct("=QII32s32s")  # epoch, valid tokens, checksum, hash, hash of the block before
    assert earlier.size == ENTRY.size
    for page in range(NUM_PAGES):
        at = page * ENTRY.size
        epoch, valid_tokens, block_hash, parent = ENTRY.unpack_from(before.entries, at)
        before.entries[at : at + ENTRY.size] = earlier.pack(
            epoch, valid_tokens, 0xFFFFFFFF, block_hash, parent
        )
    test_sealed_pages_are_found_by_hash_before_anybody_has_reported(before)


def test_entries_are_written_before_the_words_that_make_them_count():
    pool = Recorded()
    worker(pool, 1, 10, quota=1)
    (page,) = pool.take(1, 1)
    pool.write(1, [page])
    message = wire.Sealed(
        **page_lists([page]), hashes=chain("a")[0], parents=SEED, valid_tokens=u32_bytes([BLOCK_TOKENS])
    )
    kinds = [type(action) for action in pool.pool.on_message(1, message, 0)]
    assert kinds.index(WriteEntries) < kinds.index(WriteWords)


def test_the_note_of_a_block_that_left_at_once_does_not_name_what_its_page_holds_next():
    """Seal, eviction and the next grant can be one event: then the page's next block would have that name."""
    pool = Recorded()
    pool.engine(1, process=10, quota=NUM_PAGES)
    pool.need(1, 1)
    (old, *_) = pool.save(1, chain("a"))
    assert pool.granted[1][-1] == (old[0], old[1] + 1), "the page was granted again at once"
    epoch, *_ = ENTRY.unpack(pool.entries[old[0] * ENTRY.size : (old[0] + 1) * ENTRY.size])
    assert epoch == old[1]


def test_a_twin_that_was_condemned_is_nobodys_block_for_a_successor_either():
    pool, hashes = Recorded(), chain("a")
    for process in (10, 20):
        worker(pool, process, process, instance=InstanceId("i1"))
        twin = pool.save(process, hashes)
    assert pool.pool.condemn(hashes[0]) == 2
    pool.run(pool.pool.flush())
    after = successor(pool, (10, 20))
    worker(
        after, 20, 20, instance=InstanceId("i1"), memory_id=BOOT, holding=holding([], twin, hashes)
    )  # fmt: skip
    assert after.disconnected == {20: "holding.unknown"}
    assert hashes[0] not in after.pool.index


def rank(pool: Harness, connection: int, process: int, **fields: object) -> None:
    message = wire.Attach(kind="rank", instance=InstanceId("i1"), description=DESCRIPTION, **fields)
    pool.run(pool.pool.on_attach(connection, process, message, pool.now_ms))


def written_by_a_rank() -> tuple[Recorded, list[Owned]]:
    """An engine, process 10, has its pages written by process 101."""
    pool = Recorded()
    rank(pool, 11, 101)
    worker(pool, 1, 10, quota=4, instance=InstanceId("i1"))
    pages = pool.take(1, 4)
    pool.write(1, pages)
    return pool, pages


def test_what_ranks_may_write_waits_for_their_death_when_their_engine_dies_without_a_word():
    """Whether it was to come back after them, or was dead when the mempool came."""
    pool, pages = written_by_a_rank()
    for engines, bereft in ((10,), ()), ((), (InstanceId("i1"),)):
        after = successor(pool, (*engines, 101), engines=engines, bereft=bereft)
        rank(after, 11, 101, memory_id=BOOT)  # its step still runs
        after.dead(10)
        worker(after, 7, 99, instance=InstanceId("other"), quota=6, memory_id=BOOT)
        worker(
            after, 8, 98, instance=InstanceId("i1"), quota=6, memory_id=BOOT
        )  # which starts ranks of its own
        assert after.counts()["quarantined"] == len(pages)
        after.dead(101)
        assert "quarantined" not in after.counts()
        assert after.pool.inheritance is None


@pytest.mark.parametrize("rank_is_first", [True, False])
def test_an_engines_word_is_its_ranks_too_whichever_of_them_comes_first(rank_is_first):
    pool, pages = written_by_a_rank()
    after = successor(pool, (10, 101), engines=(10,))
    steps = [
        lambda: rank(after, 11, 101, memory_id=BOOT),
        lambda: worker(
            after, 1, 10, quota=1, instance=InstanceId("i1"), memory_id=BOOT, holding=holding(pages[:1], [], [])
        ),
    ]  # fmt: skip
    for step in steps if rank_is_first else steps[::-1]:
        assert after.counts()["quarantined"] >= len(pages) - 1
        step()
    assert "quarantined" not in after.counts()
    assert after.state(pages[0][0]) is PageState.WRITING


def test_a_report_to_a_pool_without_memory_is_refused_and_plans_none():
    """Nobody would have made it: the next engine of the space was welcomed to memory that is not there."""
    pool = Recorded()
    worker(pool, 1, 10, holding=holding([], [], []))
    assert pool.disconnected == {1: "holding.unknown"}
    assert pool.pool.memory is None
    worker(pool, 2, 20, quota=1)
    assert pool.created is not None
