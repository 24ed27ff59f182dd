"""A pull that takes longer than its reader waits: what the mempool says of it, so that the link is known to be slow."""

import pytest

from shared.ids import HandoffId
from shared.kv.words import u32_list
from shared.wire import mempool as wire
from tests.unit.test_mempool_remote import A_HOST, ABC, DECODE, PREFILL, TwoMempools
from tests.unit.test_mempool_spaces import answers

OTHER = 4


@pytest.fixture
def two() -> TwoMempools:
    return TwoMempools()


def late(got: wire.Acquired) -> tuple[int, int]:
    return got.blocks_late, got.late_us


def ask(two: TwoMempools, call_id: int = 1, wait_ms: int = 1_000) -> None:
    two.acquire(call_id=call_id, handoff_id=HandoffId(""), wait_ms=wait_ms)


def test_a_reader_whose_time_is_over_hears_what_is_still_on_its_way_and_for_how_long(two):
    two.a.fill(PREFILL, 0, ABC, "abc")
    ask(two)
    two.b.advance(200)  # of asking
    two.deliver()
    two.b.advance(799)
    assert not two.got()
    two.b.advance(1)
    (got,) = two.got()
    assert got.num_blocks == 0
    assert late(got) == (3, 800_000)
    two.copy()
    two.deliver()
    ask(two, call_id=2)
    assert len(u32_list(two.got()[1].pages)) == 3
    assert late(two.got()[1]) == (0, 0)


def test_of_a_pull_one_reader_hears_that_it_is_late(two):
    """Ten requests with one prefix are one measurement."""
    two.b.client(OTHER, f"i{DECODE}")
    two.a.fill(PREFILL, 0, ABC, "abc")
    ask(two)
    two.deliver()
    two.b.say(OTHER, wire.Acquire(call_id=9, hashes=b"".join(ABC), wait_ms=1_000, source_mempool=A_HOST))
    two.b.advance(1_000)
    assert late(two.got()[0]) == (3, 1_000_000)
    assert [late(got) for got in answers(two.b, OTHER, wire.Acquired)] == [(0, 0)]


def test_who_joined_and_waited_less_does_not_make_a_pull_late_for_whom_it_was_begun(two):
    two.b.client(OTHER, f"i{DECODE}")
    two.a.fill(PREFILL, 0, ABC, "abc")
    ask(two)
    two.deliver()
    two.b.say(OTHER, wire.Acquire(call_id=9, hashes=b"".join(ABC), wait_ms=200, source_mempool=A_HOST))
    two.b.advance(200)
    assert [late(got) for got in answers(two.b, OTHER, wire.Acquired)] == [(0, 0)]
    two.copy()
    two.deliver()
    assert (two.got()[0].num_blocks, late(two.got()[0])) == (3, (0, 0))


def test_blocks_that_are_here_already_are_leased_beside_those_that_are_late(two):
    two.a.fill(PREFILL, 0, ABC, "abc")
    two.b.fill(DECODE, 0, ABC[:1], "a")
    ask(two)
    two.deliver()
    two.b.advance(1_000)
    (got,) = two.got()
    assert got.num_blocks == 1
    assert late(got) == (2, 1_000_000)


def test_nothing_is_late_where_the_holder_lacks_the_blocks_or_says_nothing(two):
    ask(two)
    two.deliver()
    assert late(two.got()[0]) == (0, 0), "a miss, at once"
    ask(two, call_id=2)
    two.b.advance(1_000)  # the source is frozen
    assert late(two.got()[1]) == (0, 0)


def test_nothing_is_late_where_the_prompt_is_not_done_or_pages_are_short_here():
    two = TwoMempools()
    two.acquire()
    two.deliver()
    two.b.advance(1_000)
    assert late(two.got()[0]) == (0, 0), "the source waits for the handoff"
    full = TwoMempools(num_pages=4)
    full.a.fill(PREFILL, 0, ABC, "abc")
    ask(full)
    full.deliver()
    assert not full.b.remote_pulls
    full.b.advance(1_000)
    assert late(full.got()[0]) == (0, 0)


def test_nothing_is_late_where_the_bytes_came_and_the_last_word_did_not(two):
    two.a.fill(PREFILL, 0, ABC, "abc")
    ask(two)
    two.deliver()
    two.copy()
    two.b.advance(1_000)
    assert late(two.got()[0]) == (0, 0)


@pytest.mark.parametrize(("after_ms", "says"), [(10, (0, 0)), (5_000, (0, 0)), (20_000, (3, 20_000_000))])
def test_a_pull_that_fails_is_late_where_it_was_its_time_that_ended_it(two, after_ms, says):
    """Its time is as long as the reader waits."""
    two.a.fill(PREFILL, 0, ABC, "abc")
    ask(two, wait_ms=20_000)
    two.deliver()
    two.b.advance(after_ms)
    (pull,) = two.b.remote_pulls
    two.b.run(two.b.core.on_remote_pulled(pull.number, two.b.now_ms, failed=True, in_doubt=[]))
    assert late(two.got()[0]) == says
