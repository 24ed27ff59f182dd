"""What engines are asked to give back adds up to no more than is lacking: for the mempool, or for each other."""

import pytest

from services.mempool.core.claims import SPARE_PART, Claim
from services.mempool.core.pull import ASK_AGAIN_MS
from shared.wire import mempool as wire
from tests.unit.mempool_harness import Harness, InstanceId, chain, page_lists
from tests.unit.test_mempool_pins import unpin, worker
from tests.unit.test_mempool_remote import DECODE, TwoMempools


def asked(pool: Harness, connection: int) -> list[int]:
    return [m.count for m in pool.sent[connection] if isinstance(m, wire.Shrink)]


def test_of_engines_that_attach_one_after_the_other_the_first_is_asked_once_for_what_is_beyond_its_part():
    pool = Harness(num_pages=12, kept_share=1.0)
    for connection in (1, 2, 3):
        worker(pool, connection, quota=12)
    assert asked(pool, 1) == [6, 2]


def ask_again(pool: Harness, claim: Claim) -> None:
    pool.pool.ask_again(claim)
    pool.run(pool.pool.flush())


def test_an_engine_in_a_long_step_is_asked_once_for_what_claims_lack_whoever_asks_again_or_is_over():
    pool = Harness(num_pages=100)
    worker(pool, 1, quota=99)
    pool.save(1, chain(*range(60)))
    claim = pool.pool.claim(50)
    for _ in range(5):
        ask_again(pool, claim)
    assert asked(pool, 1) == [49]
    pool.pool.cancel(claim)
    again, other = pool.pool.claim(40), pool.pool.claim(20)
    ask_again(pool, again)
    ask_again(pool, other)
    assert sum(asked(pool, 1)) == 59, "the others' 60, with the one that was free"
    pool.give_back(1, pool.take(1, 39))
    assert (again.lacking, other.lacking) == (0, 20)
    pool.give_back(1, [], answers=20)
    ask_again(pool, other)
    assert asked(pool, 1)[-1] == 20, "what it had not then it may have by now"


def test_an_engine_that_says_of_no_request_that_it_is_answered_is_asked_every_time():
    pool = Harness(num_pages=100)
    worker(pool, 1, quota=99, says_answers=False)
    claim = pool.pool.claim(50)
    ask_again(pool, claim)
    assert asked(pool, 1) == [49, 49]


def test_where_one_engine_stands_still_another_is_asked_for_the_pages_and_neither_twice():
    pool = Harness(num_pages=100)
    worker(pool, 1, quota=49)
    worker(pool, 2, quota=49)
    claim = pool.pool.claim(20)
    pool.run(pool.pool.flush())
    assert (asked(pool, 1), asked(pool, 2)) == ([18], [])
    for _ in range(3):
        ask_again(pool, claim)
    assert (asked(pool, 1), asked(pool, 2)) == ([18], [18])
    pool.give_back(2, pool.take(2, 18))
    assert not claim.lacking


def test_an_engine_that_is_started_again_is_asked_anew():
    pool = Harness(num_pages=100)
    worker(pool, 1, quota=99)
    claim = pool.pool.claim(50)
    pool.run(pool.pool.flush())
    assert asked(pool, 1) == [49]
    pool.closed(1)
    worker(pool, 2, quota=99, process=1, instance=InstanceId("i1"), lets_go=True)
    assert not claim.lacking
    pool.run(pool.pool.flush())
    again = pool.pool.claim(50)
    pool.run(pool.pool.flush())
    assert asked(pool, 2) == [50]
    assert again.lacking == 50


def test_for_what_nobody_waits_for_an_engine_is_asked_for_a_quarter_of_its_stock_and_others_go_first():
    pool = Harness(num_pages=100)
    worker(pool, 1, quota=99)
    pages = pool.save(1, chain(*range(60)))
    unpin(pool, 1, pages[:40])
    pool.write(1, pool.take(1, 20))
    assert (pool.pool.num_at_hand, len(pool.granted[1])) == (40, 20), "and none of these 40 can be evicted"
    back = pool.pool.claim(40, keeps=True, is_last=True)
    another = pool.pool.claim(40, keeps=True, is_last=True)
    pool.run(pool.pool.flush())
    assert asked(pool, 1) == [20 // SPARE_PART]
    reader = pool.pool.claim(4)
    pool.give_back(1, pool.take(1, 5))
    assert [len(claim.pages) for claim in (back, another, reader)] == [1, 0, 4]
    assert asked(pool, 1) == [5], "and these were for the reader"


@pytest.mark.parametrize("stands_still", [False, True])
def test_a_reader_of_another_hosts_blocks_gets_pages_that_an_engine_can_spare_before_blocks_are_evicted(
    stands_still,
):
    two, other = TwoMempools(num_pages=20, stock_share=0.25), 5
    two.b.worker(other, "cpu", quota=10)
    two.b.say(other, wire.Unpin(**page_lists(two.b.save(other, chain(*range(6))))))
    pool = two.b.core.pools[0]
    assert (pool.num_free, pool.num_at_hand, len(two.b.granted[other])) == (0, 6, 10)
    two.hand_off()
    two.acquire()
    two.deliver()
    assert (asked(two.b, other), asked(two.b, DECODE)) == ([3], [])
    two.b.advance(ASK_AGAIN_MS) if stands_still else two.b.give_back(other, two.b.take(other, 3))
    assert (len(two.b.remote_pulls), pool.counters["pages_evicted"]) == (1, 3 if stands_still else 0)
    two.copy()
    two.deliver()
    assert two.got()[0].num_blocks == 3
    two.assert_at_rest()


def test_engines_that_could_not_give_pages_for_another_hosts_blocks_are_asked_again():
    two, other = TwoMempools(), 5
    two.b.worker(other, "cpu")
    two.hand_off()
    two.acquire()
    two.deliver()
    two.b.give_back(DECODE, [], answers=3)
    two.b.advance(ASK_AGAIN_MS)
    assert asked(two.b, DECODE) == [3, 3]
