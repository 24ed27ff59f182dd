"""What the pool decides about engines that work in its pages: pins end with a word or with proof of death."""

import msgspec
import pytest

from services.mempool.core.entry import Entry
from services.mempool.core.page_table import PageTable
from shared.kv.page import STOCK_PART, PageState
from shared.kv.words import u32_bytes
from shared.wire import mempool as wire
from tests.unit.mempool_harness import (
    BLOCK_TOKENS,
    DESCRIPTION,
    SEED,
    Harness,
    InstanceId,
    Owned,
    chain,
    page_lists,
)


def worker(pool: Harness, connection: int, **fields: object) -> None:
    """An engine that works in the pages."""
    pool.engine(connection, works_in_pages=True, **fields)


def unpin(pool: Harness, connection: int, pages: list[Owned]) -> None:
    pool.say(connection, wire.Unpin(**page_lists(pages)))


def keep(pool: Harness, connection: int, hashes: list[bytes]) -> wire.Acquired:
    """A lease that an engine works in."""
    pool.calls += 1
    call = wire.Acquire(call_id=pool.calls, hashes=b"".join(hashes), ttl_ms=1, until_release=True)
    pool.say(connection, call)
    answer = pool.answer(connection)
    assert answer is not None
    return answer


def test_a_sealed_page_in_use_is_not_evicted_until_its_engine_unpins_it():
    pool = Harness(num_pages=2)
    worker(pool, 1, quota=1)
    pages = pool.save(1, chain("a"))
    worker(pool, 2, quota=1)
    pool.client(3)
    assert pool.counts() == {"granted": 1, "sealed": 1}
    worker(pool, 4, quota=1)
    assert pool.granted[4] == [], "the first page is in use, the second granted"
    unpin(pool, 1, pages)
    assert pool.counts() == {"granted": 2}
    assert pool.acquire(3, chain("a")).num_blocks == 0


def test_pages_in_use_count_against_the_quota():
    pool = Harness(num_pages=8)
    worker(pool, 1, quota=2)
    pages = pool.save(1, chain("a", "b"))
    pool.need(1, 2)
    assert pool.granted[1] == []
    unpin(pool, 1, pages[:1])
    assert len(pool.granted[1]) == 1


def test_a_share_is_filled_up_without_asking():
    pool = Harness(num_pages=8)
    worker(pool, 1, quota=3)
    pages = pool.save(1, chain("a", "b"))
    unpin(pool, 1, pages)
    assert len(pool.granted[1]) == 3
    pool.give_back(1, pool.take(1, 2))
    assert len(pool.granted[1]) == 3


def test_a_second_seal_of_a_hash_keeps_the_page_for_its_engine_alone():
    pool = Harness(num_pages=4)
    worker(pool, 1)
    worker(pool, 2, quota=1)
    first, second = pool.save(1, chain("a")), pool.save(2, chain("a"))
    assert pool.state(second[0][0]) is PageState.SEALED
    assert pool.acquire(1, chain("a")).pages == u32_bytes([first[0][0]])
    unpin(pool, 2, second)
    assert pool.state(second[0][0]) is not PageState.SEALED
    assert pool.words[second[0][0]] >> 8 == second[0][1] + 1, "nobody can take it for what it was"


def test_a_block_computed_again_takes_the_place_of_a_page_that_nobody_pins():
    pool = Harness(num_pages=8)
    worker(pool, 1)
    worker(pool, 2, quota=3)
    path = chain("a", "b", "c")
    first = pool.save(1, path[:2])
    unpin(pool, 1, first)
    again = pool.save(2, path)
    assert pool.counts() == {"sealed": 3, "granted": 2, "free": 3}
    assert pool.acquire(1, path).pages == u32_bytes(page for page, _ in again)
    assert [pool.words[page] >> 8 for page, _ in first] == [epoch + 1 for _, epoch in first]


def test_a_page_under_which_others_are_pinned_goes_when_its_last_pin_ends_and_the_block_has_another_page():
    """It could not be evicted before what follows it: two engines with a prompt each had a pool for themselves, and
    waited for each other.
    """
    pool = Harness(num_pages=8)
    worker(pool, 1)
    worker(pool, 2, quota=3)
    path = chain("a", "b", "c")
    first, again = pool.save(1, path[:2]), pool.save(2, path)
    assert pool.counts()["sealed"] == 5
    unpin(pool, 1, first)
    assert pool.counts() == {"sealed": 3, "granted": 2, "free": 3}
    assert pool.pool.counters["twins_merged"] == 2
    assert pool.acquire(1, path).pages == u32_bytes(page for page, _ in again)
    assert pool.pool.index.num_pinned == 3
    unpin(pool, 2, again)
    pool.need(1, 2)
    assert pool.pool.index.twins.pages == {}


def test_of_three_pages_with_one_block_one_is_left_when_one_engine_uses_it():
    pool = Harness(num_pages=6)
    pages = []
    for connection in (1, 2, 3):
        worker(pool, connection, quota=1)
        pages += pool.save(connection, chain("a"))
    unpin(pool, 1, pages[:1])
    assert pool.counts()["sealed"] == 2
    pool.closed(2)
    pool.dead(2)
    assert pool.counts()["sealed"] == 1
    assert pool.acquire(3, chain("a")).pages == u32_bytes([pages[2][0]])
    assert pool.pool.index.twins.pages == {}


def test_unpins_that_are_stale_or_of_others_change_nothing():
    pool = Harness(num_pages=4)
    worker(pool, 1)
    worker(pool, 2)
    pages = pool.save(1, chain("a"))
    unpin(pool, 2, pages)
    unpin(pool, 1, [(pages[0][0], pages[0][1] - 1)])
    assert pool.pool.index.num_pinned == 1
    assert pool.pool.counters["messages_stale"] == 2


def test_pins_of_a_lost_engine_stay_until_all_of_its_processes_are_dead():
    pool = Harness(num_pages=4)
    rank = wire.Attach(kind="rank", instance=InstanceId("i1"), description=DESCRIPTION)
    pool.run(pool.pool.on_attach(7, 70, rank, 0))
    worker(pool, 1, process=10)
    pool.client(3, "i1")
    pool.save(1, chain("a"))
    lease = keep(pool, 3, chain("a"))
    assert lease.num_blocks == 1
    pool.closed(1)
    pool.closed(3)
    pool.dead(10)
    assert pool.pool.index.num_pinned == 1, "the rank may still read"
    assert len(pool.pool.leases.leases) == 1
    pool.dead(70)
    assert pool.pool.index.num_pinned == 0
    assert not pool.pool.leases.leases
    assert pool.counts() == {"free": 3, "sealed": 1}, "what was sealed outlives its engine"


def test_a_lease_that_an_engine_works_in_has_no_expiry_and_ends_with_its_release():
    pool = Harness(num_pages=4)
    worker(pool, 1)
    pool.client(3, "i1")
    pages = pool.save(1, chain("a"))
    lease = keep(pool, 3, chain("a"))
    unpin(pool, 1, pages)
    pool.advance(1_000_000)
    assert pool.pool.index.num_pinned == 1
    pool.release(1, lease.lease_id)  # by the engine, over its own connection
    assert pool.pool.index.num_pinned == 0


def test_the_front_of_a_living_engine_may_leave_without_ending_what_the_engine_works_in():
    pool = Harness(num_pages=4)
    worker(pool, 1)
    pool.client(3, "i1")
    pool.save(1, chain("a"))
    lease = keep(pool, 3, chain("a"))
    pool.closed(3)
    assert list(pool.pool.leases.leases) == [lease.lease_id]


def test_an_engine_over_its_share_is_asked_to_shrink_when_another_attaches():
    pool = Harness(num_pages=8, kept_share=1.0)
    worker(pool, 1, quota=8)
    worker(pool, 2, quota=8)
    assert [m.count for m in pool.sent[1] if isinstance(m, wire.Shrink)] == [4]
    assert pool.granted[2] == []
    pool.give_back(1, pool.take(1, 4))
    assert len(pool.granted[2]) == 4


def test_a_restarted_engine_begins_with_a_stock_and_leaves_the_other_blocks_that_are_there():
    pool = Harness(num_pages=100)
    worker(pool, 1, quota=100, process=5)
    pool.client(3)
    names = [str(number) for number in range(90)]
    pool.save(1, chain(*names))
    pool.closed(1)
    pool.dead(5)
    worker(pool, 2, quota=100, process=6)
    assert len(pool.granted[2]) == 100 // STOCK_PART + 1, (
        "and one for its longest request, which has no length here"
    )
    assert pool.acquire(3, chain(*names)).num_blocks == 100 - len(pool.granted[2]), (
        "the first blocks: the last went"
    )


def test_what_an_engine_uses_of_its_stock_is_replaced_by_the_coldest_blocks_until_it_has_its_share():
    pool = Harness(num_pages=100)
    worker(pool, 1, quota=100, process=5)
    pool.save(1, chain(*range(90)))
    pool.closed(1)
    pool.dead(5)
    worker(pool, 2, quota=100, process=6)
    stock = len(pool.granted[2])
    for part in range(10):
        pool.save(2, chain(*(f"{part}-{i}" for i in range(10))))
        assert len(pool.granted[2]) == min(stock, 99 - 10 * (part + 1)), "as long as there are any"
        if len(pool.granted[2]) < 10:
            break
    assert pool.counts()["granted"] + pool.counts()["sealed"] == 100


def test_pages_that_an_engine_lets_go_of_are_replaced_whatever_its_stock():
    pool = Harness(num_pages=100)
    worker(pool, 1, quota=100)
    pages = pool.save(1, chain(*range(30)))
    assert len(pool.granted[1]) == 69
    unpin(pool, 1, pages[20:])
    assert len(pool.granted[1]) == 79, "nine by the coldest blocks, one that was free"


def test_what_an_engine_gave_of_a_large_stock_is_not_taken_back_from_the_blocks_there():
    pool = Harness(num_pages=100)
    worker(pool, 1, quota=99)
    claim = pool.pool.claim(20)
    pool.give_back(1, pool.take(1, 19))
    pool.pool.begin_writing(claim)
    names = chain(*(f"c{i}" for i in range(20)))
    pool.pool.take_in(
        [
            Entry(h, p, page, BLOCK_TOKENS)
            for h, p, page in zip(names, [SEED, *names], claim.pages, strict=False)
        ]
    )
    pool.run(pool.pool.flush())
    assert pool.counts() == {"granted": 80, "sealed": 20}
    pool.save(1, chain(*range(60)))
    assert pool.counts() == {"granted": 100 // STOCK_PART + 1, "sealed": 74}, (
        "as much as any engine has to begin with"
    )


def test_pages_that_an_engine_can_spare_are_counted_on_once():
    pool = Harness(num_pages=100)
    worker(pool, 1, quota=99)
    claims = [pool.pool.claim(count, keeps=True) for count in (60, 14, 1)]
    assert [claim.evicts for claim in claims] == [False, False, True], "73 of 99 and a free one"


@pytest.mark.parametrize(("keeps", "asked"), [(True, [2]), (False, [1])])
def test_who_has_most_to_spare_gives_first_and_who_has_most_where_blocks_may_go(keeps, asked):
    pool = Harness(num_pages=100)
    worker(pool, 1, quota=49)
    pool.save(1, chain(*range(40)))
    worker(pool, 2, quota=44)
    pool.pool.claim(20, keeps=keeps)
    pool.run(pool.pool.flush())
    assert [c for c in (1, 2) if any(isinstance(message, wire.Shrink) for message in pool.sent[c])] == asked


def test_ranks_get_room_for_every_page():
    pool = Harness(num_pages=8)
    two = wire.Attach(
        kind="rank", instance=InstanceId("i"), description=msgspec.structs.replace(DESCRIPTION, tp_size=2)
    )
    pool.run(pool.pool.on_attach(7, 70, two, 0))
    assert pool.created is not None
    assert (pool.created.num_pages, pool.created.num_ranks) == (4, 2)
    assert isinstance(pool.sent[7][0], wire.Attached)


def test_the_table_keeps_its_sum_through_pins():
    pool = Harness(num_pages=4)
    worker(pool, 1, quota=4, process=5)
    pages = pool.save(1, chain("a", "b"))
    unpin(pool, 1, pages[:1])
    pool.closed(1)
    pool.dead(5)
    assert pool.pool.memory is not None
    table: PageTable = pool.pool.memory.table
    assert sum(table.counts) == 4
    assert pool.counts() == {"free": 2, "sealed": 2}


def succeeded(**epochs: int) -> tuple[Harness, wire.Acquired]:
    """An engine, process 101, works in a lease; another of its instance, process 102, attaches."""
    pool, instance = Harness(num_pages=8), InstanceId("i")
    worker(pool, 1, instance=instance, process=101, instance_epoch=epochs.get("first", 0))
    pool.client(11, "i")
    pool.save(1, chain("a", "b"))
    lease = keep(pool, 11, chain("a", "b"))
    worker(pool, 2, instance=instance, process=102, instance_epoch=epochs.get("second", 0))
    return pool, lease


@pytest.mark.parametrize("epochs", [{}, {"first": 1, "second": 2}])
def test_what_an_engine_worked_in_ends_with_its_death_though_its_successor_is_there_already(epochs):
    pool, _ = succeeded(**epochs)
    pool.closed(1)
    pool.closed(11)
    pool.client(12, "i")
    mine = keep(pool, 12, chain("a"))
    pool.dead(101)
    assert set(pool.pool.leases.leases) == {mine.lease_id}, "what was leased for the successor stays"
    pool.dead(102)
    assert pool.pool.status().num_pinned == 0


def test_a_lease_that_is_of_one_of_two_engines_stays_until_both_are_dead():
    pool, lease = succeeded()
    either = keep(pool, 11, chain("a"))
    pool.dead(101)
    assert set(pool.pool.leases.leases) == {either.lease_id}
    pool.dead(102)
    assert pool.pool.status().num_leases == 0
    pool, lease = succeeded()
    pool.dead(102)
    assert set(pool.pool.leases.leases) == {lease.lease_id}
    worker(pool, 3, instance=InstanceId("i"), process=101, lets_go=True)
    assert pool.pool.status().num_leases == 0
