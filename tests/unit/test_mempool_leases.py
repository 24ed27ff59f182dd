"""Who keeps sealed pages: leases, handoffs, and calls that wait for them."""

import pytest

from services.mempool.core.actions import PoolLimits
from services.mempool.core.leases import MAX_CLOSED_HANDOFFS, Fence, Leases, keep_handoff
from services.mempool.core.radix import Index
from shared.ids import HandoffId
from shared.wire import mempool as wire
from tests.unit.mempool_harness import BOOT, Harness, chain

PROMPT = chain("a", "b", "tail")


@pytest.fixture
def pool() -> Harness:
    """An engine of instance i1 that has sealed PROMPT, and a decode side's client."""
    pool = Harness(num_pages=8)
    pool.engine(1, quota=4)
    pool.client(2, "decode")
    pool.save(1, PROMPT)
    return pool


def pinned(pool: Harness) -> int:
    return pool.pool.status().num_pinned


def test_handoff_passes_to_its_acquirer_once_and_is_never_unpinned_in_between(pool):
    pool.ready(1, "h", PROMPT)
    assert (pinned(pool), pool.pool.status().num_handoffs) == (3, 1)
    lease = pool.acquire(2, PROMPT, handoff="h", wait_ms=500)
    assert lease.num_blocks == 3
    assert (pinned(pool), pool.pool.status().num_handoffs) == (3, 0)
    pool.release(2, lease.lease_id)
    assert pinned(pool) == 0


def test_acquire_waits_for_its_handoff_and_is_answered_when_it_comes(pool):
    later = [*PROMPT, *chain("a", "b", "tail", "more")[3:]]
    assert pool.acquire(2, later, handoff="h", wait_ms=500) is None
    pool.seal(1, pool.take(1, 1), later, first=3)
    assert pool.answer(2) is None
    pool.ready(1, "h", later)
    assert pool.answer(2).num_blocks == 4
    assert pool.pool.status().num_handoffs == 0


def test_acquire_that_waited_in_vain_gets_what_there_is(pool):
    later = [*PROMPT, *chain("z")]
    pool.acquire(2, later, handoff="h", wait_ms=500)
    assert pool.pool.next_deadline_ms() == 500
    pool.advance(499)
    assert pool.answer(2) is None
    pool.advance(1)
    assert pool.answer(2).num_blocks == 3
    pool.ready(1, "h", PROMPT)
    assert pool.pool.status().num_handoffs == 0, "nobody will come for it"


def test_acquire_does_not_wait_when_all_its_blocks_are_there(pool):
    assert pool.acquire(2, PROMPT, handoff="h", wait_ms=500).num_blocks == 3
    pool.ready(1, "h", PROMPT)
    assert pool.pool.status().num_handoffs == 0


def test_acquire_of_a_handoff_that_has_passed_does_not_wait(pool):
    pool.ready(1, "h", PROMPT)
    pool.acquire(2, PROMPT, handoff="h", wait_ms=500)
    assert pool.acquire(2, [*PROMPT, *chain("z")], handoff="h", wait_ms=500).num_blocks == 3


def test_a_look_without_waiting_leaves_the_handoff_to_its_acquirer(pool):
    assert pool.acquire(2, [*PROMPT, *chain("z")], handoff="h", wait_ms=0).num_blocks == 3
    pool.ready(1, "h", PROMPT)
    assert pool.pool.status().num_handoffs == 1


@pytest.mark.parametrize("has_come", [True, False])
def test_acquiring_nothing_of_a_handoff_ends_it_come_or_still_to_come(pool, has_come):
    """What a worker does when the client has left between prefill and decode."""
    if has_come:
        pool.ready(1, "h", PROMPT)
        assert pinned(pool) == 3
    nothing = pool.acquire(2, [], handoff="h")
    assert nothing is not None
    assert (nothing.num_blocks, nothing.lease_id) == (0, "")
    if not has_come:
        pool.ready(1, "h", PROMPT)
    assert pinned(pool) == 0
    assert pool.pool.status().num_handoffs == 0


def test_handoff_nobody_acquires_ends_with_its_ttl(pool):
    pool.ready(1, "h", PROMPT, ttl_ms=300)
    pool.advance(299)
    assert pinned(pool) == 3
    pool.advance(1)
    assert pinned(pool) == 0
    assert pool.pool.counters["handoffs_expired"] == 1


def test_handoff_said_twice_counts_once_with_the_later_word(pool):
    pool.ready(1, "h", PROMPT, ttl_ms=100)
    pool.ready(1, "h", PROMPT[:2], ttl_ms=900)
    assert pinned(pool) == 2
    pool.advance(500)
    assert pinned(pool) == 2
    pool.advance(500)
    assert pinned(pool) == 0


def test_handoff_survives_the_engine_that_made_it(pool):
    pool.ready(1, "h", PROMPT)
    pool.dead(1)
    assert pool.acquire(2, PROMPT, handoff="h", wait_ms=500).num_blocks == 3


def test_leases_end_with_their_ttl_which_is_bounded(pool):
    pool.acquire(2, PROMPT, ttl_ms=10**12)
    assert pool.pool.next_deadline_ms() == pool.pool.limits.max_ttl_ms
    pool.acquire(2, PROMPT, ttl_ms=-5)
    pool.advance(1)
    assert pool.pool.status().num_leases == 1
    pool.advance(pool.pool.limits.max_ttl_ms)
    assert pinned(pool) == 0
    assert pool.pool.counters["leases_expired"] == 2


def test_releasing_twice_or_for_another_instance_is_harmless(pool):
    pool.client(3, "somebody else")
    lease = pool.acquire(2, PROMPT)
    pool.release(3, lease.lease_id)
    assert pinned(pool) == 3
    pool.release(2, lease.lease_id)
    pool.release(2, lease.lease_id)
    assert pinned(pool) == 0
    assert pool.pool.counters["releases_unknown"] == 2


def test_client_that_left_without_an_engine_loses_its_leases_at_once(pool):
    pool.acquire(2, PROMPT)
    pool.closed(2)
    assert pinned(pool) == 0


def test_client_that_left_keeps_its_leases_while_its_engine_may_copy(pool):
    pool.engine(3, quota=0, instance="decode", process=33)
    pool.acquire(2, PROMPT, ttl_ms=1000)
    pool.acquire(2, PROMPT[:1], ttl_ms=5000)
    pool.closed(2)
    assert pinned(pool) == 3
    pool.advance(1000)
    assert pinned(pool) == 1
    pool.dead(33)
    assert pinned(pool) == 0


def test_client_that_came_back_can_release_what_it_held(pool):
    pool.engine(3, quota=0, instance="decode")
    lease = pool.acquire(2, PROMPT)
    pool.closed(2)
    pool.client(4, "decode")
    pool.release(4, lease.lease_id)
    assert pinned(pool) == 0


def test_calls_of_a_client_that_left_are_forgotten(pool):
    pool.acquire(2, [*PROMPT, *chain("z")], handoff="h", wait_ms=500)
    pool.closed(2)
    pool.ready(1, "h", PROMPT)
    assert pool.answer(2) is None
    assert pool.pool.status().num_handoffs == 1
    pool.advance(500)
    assert pool.answer(2) is None


def test_fencing_tokens_only_grow():
    index = Index()
    first, second = Leases(index, Fence(BOOT)), Leases(index, Fence(BOOT))
    tokens = [first.grant(1, "i", [], 1).fencing_token for _ in range(3)]
    assert tokens == sorted(set(tokens))
    later_boot = Leases(index, Fence(second.grant(1, "i", [], 1).fencing_token))
    assert later_boot.grant(1, "i", [], 1).fencing_token > tokens[0]


def test_everything_a_peer_can_make_grow_is_bounded():
    pool = Harness(num_pages=4, max_leases=2, max_handoffs=1, max_waiting=1)
    pool.engine(1, quota=2)
    pool.client(2)
    hashes = chain("a")
    pool.save(1, hashes)
    for _ in range(2):
        assert pool.acquire(2, hashes).num_blocks == 1
    assert pool.acquire(2, hashes) is None
    assert isinstance(pool.sent[2][-1], wire.CallFailed)
    missing = chain("never")
    assert pool.acquire(2, missing, handoff="h1", wait_ms=10) is None
    pool.acquire(2, missing, handoff="h2", wait_ms=10)
    assert pool.sent[2][-1].code == "overloaded"
    pool.ready(1, "x", hashes)
    pool.ready(1, "y", hashes)
    assert pool.pool.status().num_handoffs == 1


def test_memory_of_past_handoffs_and_deadlines_is_bounded():
    leases = Leases(Index(), Fence(BOOT))
    for i in range(MAX_CLOSED_HANDOFFS + 100):
        leases.close_handoff(HandoffId(str(i)))
        leases.release(leases.grant(1, "i", [], 10**9 + i).lease_id, "i")
    assert not leases.is_closed(HandoffId("0"))
    assert leases.is_closed(HandoffId(str(MAX_CLOSED_HANDOFFS)))
    assert len(leases._deadlines) <= 256 + 4


def test_a_handoff_whose_reader_waits_for_room_is_held_for_longer_and_only_while_it_says_so(pool):
    pool.ready(1, "h", PROMPT, ttl_ms=1_000)
    leases = pool.pool.leases
    pool.advance(900)
    limits = PoolLimits(capacity_bytes=1, max_ttl_ms=2_000)
    for ttl_ms in (1_000, 10, 60_000):  # a shorter word takes nothing away, and none counts beyond the limit
        keep_handoff([Leases(Index(), Fence(BOOT)), leases], kept("h", ttl_ms), limits, pool.now_ms)
        keep_handoff([leases], kept("unknown", ttl_ms), limits, pool.now_ms)
    pool.advance(1_999)
    assert (pinned(pool), pool.pool.status().num_handoffs) == (3, 1)
    pool.advance(1)
    assert (pinned(pool), pool.pool.status().num_handoffs) == (0, 0)
    keep_handoff([leases], kept("h", 1_000), limits, pool.now_ms)
    assert pinned(pool) == 0, "what has passed does not come back"


def kept(handoff_id: str, ttl_ms: int) -> wire.KeepHandoff:
    return wire.KeepHandoff(handoff_id=HandoffId(handoff_id), ttl_ms=ttl_ms)
