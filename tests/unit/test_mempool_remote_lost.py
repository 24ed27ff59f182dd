"""A source that is not reached: whoever waits for blocks of it hears so at once, and others are asked for theirs."""

from shared.ids import HandoffId
from shared.wire import mempool_peer as peer
from tests.unit.test_mempool_remote import A_HOST, TwoMempools

OTHER_HOST = "tcp://10.0.0.9:1"


def asked_for_blocks(two: TwoMempools) -> list[str]:
    """Addresses, of everything that was asked since the last call."""
    asked, two.b.asked = two.b.asked, []
    return [
        ask.address for ask in asked if isinstance(ask.message, peer.RemoteAcquire) and ask.message.hashes
    ]


def lose(two: TwoMempools) -> None:
    two.b.run(two.b.core.on_peer_lost(A_HOST, two.b.now_ms))


def test_readers_of_many_hand_offs_are_all_answered_in_the_moment_in_which_their_source_is_lost():
    two = TwoMempools()
    for number in range(6):
        two.acquire(call_id=number + 1, handoff_id=HandoffId(f"h{number}"))
    assert asked_for_blocks(two) == [A_HOST]
    lose(two)
    assert [got.num_blocks for got in two.got()] == [0] * 6
    assert asked_for_blocks(two) == []
    assert two.b.core.counters["remote_pulls_lost"] == 1
    two.assert_at_rest()


def test_a_reader_of_another_source_that_waited_with_them_is_wanted_from_its_own():
    two = TwoMempools()
    two.acquire(call_id=1)
    two.acquire(call_id=2, handoff_id=HandoffId("other"), source_mempool=OTHER_HOST)
    two.acquire(call_id=3, handoff_id=HandoffId("third"))
    two.b.asked.clear()
    lose(two)
    assert [got.call_id for got in two.got()] == [1, 3]
    assert asked_for_blocks(two) == [OTHER_HOST]
