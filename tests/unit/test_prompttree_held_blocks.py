"""HeldBlocks and Breaker: what is told to Redis, and when it is not asked."""

from shared.prompttree.breaker import Breaker
from shared.prompttree.held_blocks import HeldBlocks
from shared.prompttree.scripts import MAX_BATCH_BLOCKS


def block(i):
    return i.to_bytes(4, "big") * 8


def short(*numbers):
    return b"".join(block(i)[:16] for i in numbers)


def claimed(**more):
    held = HeldBlocks(**more)
    held.on_claimed()
    return held


def test_nothing_is_sent_before_a_claim_and_everything_after():
    held = HeldBlocks()
    held.stored([block(1), block(2)])
    held.removed([block(1)])
    assert held.next_batch() is None
    held.on_claimed()
    batch = held.next_batch()
    assert (batch.stored, batch.removed) == (short(2), b"")
    assert held.next_batch() is None


def test_changes_are_told_in_order_once_and_repeats_not_at_all():
    held = claimed()
    held.stored([block(1), block(2), block(1)])
    assert held.next_batch().stored == short(1, 2)
    held.stored([block(2), block(3)])
    held.removed([block(1), block(9)])
    batch = held.next_batch()
    assert (batch.stored, batch.removed) == (short(3), short(1))


def test_a_block_that_comes_and_goes_before_it_was_told_is_no_news():
    held = claimed()
    held.stored([block(1)])
    held.removed([block(1)])
    assert held.next_batch() is None
    held.stored([block(2)])
    held.next_batch()
    held.removed([block(2)])
    held.stored([block(2)])
    assert held.next_batch() is None
    assert held.agrees(1)


def test_cleared_and_lost_end_the_publication():
    held = claimed()
    held.stored([block(1)])
    held.lost()
    assert (held.claimed, held.next_batch(), len(held)) == (False, None, 1)
    held.on_claimed()
    assert held.next_batch().stored == short(1)
    held.cleared()
    assert (held.claimed, len(held)) == (False, 0)


def test_a_batch_is_bounded():
    held = claimed()
    held.stored([block(i) for i in range(MAX_BATCH_BLOCKS + 5)])
    assert [len(held.next_batch().stored) // 16 for _ in range(2)] == [MAX_BATCH_BLOCKS, 5]


def test_too_many_untold_changes_mean_a_new_publication():
    held = claimed(max_pending=10)
    held.stored([block(i) for i in range(50)])
    while held.next_batch():
        pass
    held.removed([block(i) for i in range(20)])
    assert held.claimed
    held.removed([block(i) for i in range(20, 40)])
    assert not held.claimed
    held.on_claimed()
    assert len(held.next_batch().stored) == 10 * 16


def test_blocks_beyond_the_bound_are_counted_not_kept():
    held = claimed(max_held=3)
    held.stored([block(i) for i in range(5)])
    assert (len(held), held.num_ignored) == (3, 2)


def test_agrees_compares_what_redis_was_told():
    held = claimed()
    held.stored([block(i) for i in range(4)])
    held.next_batch()
    held.removed([block(0)])
    held.stored([block(7)])
    assert held.agrees(4)
    assert not held.agrees(3)


def test_a_breaker_opens_after_three_failures_in_a_row_and_probes_ever_less_often():
    breaker = Breaker(max_failures=3, probe_interval_ms=100, max_interval_ms=400)
    assert not any(breaker.on_failure() for _ in range(2))
    breaker.on_success()
    assert not any(breaker.on_failure() for _ in range(2))
    assert not breaker.is_open
    assert breaker.on_failure()
    assert breaker.is_open
    assert not any(breaker.on_failure() for _ in range(20)), "calls that were under way"
    waits = [breaker.wait_ms]
    for _ in range(4):
        breaker.on_probe_failure()
        waits.append(breaker.wait_ms)
    assert waits == [100, 200, 400, 400, 400]
    breaker.on_success()
    assert (breaker.is_open, breaker.wait_ms) == (False, 0)
