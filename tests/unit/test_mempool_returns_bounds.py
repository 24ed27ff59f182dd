"""What comes back from another host's decode is bounded, and nothing that a peer says is taken as it is."""

import msgspec
import pytest

from services.mempool.core import returns
from services.mempool.core.pull import SPARE_WITHIN_MS
from services.mempool.core.remote_pull import entries_of
from shared.errors import PeerProtocolError
from shared.ids import HandoffId
from shared.wire import mempool as wire
from shared.wire import mempool_peer as peer
from tests.unit.mempool_harness import BLOCK_TOKENS, SEED, chain
from tests.unit.test_mempool_remote import A_HOST, B_HOST, DECODE, HANDOFF, LINK, PREFILL
from tests.unit.test_mempool_returns import MORE, BothWays, handed_over, told
from tests.unit.test_mempool_spaces import answers


@pytest.mark.parametrize(
    "fields",
    [{"handoff_id": HandoffId("unknown")}, {"address": ""}, {"address": A_HOST}],
)
def test_what_belongs_to_no_hand_off_of_here_or_lies_here_is_refused(fields):
    two = handed_over()
    two.a.run(two.a.core.on_peer_call(LINK, told(two, **fields), 0))
    assert not two.a.asked
    assert two.a.core.counters["push_backs_refused"] == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"hashes": b""},
        {"hashes": b"\x01" * 31},
        {"hashes": b"\x01" * 64},
        {"hashes": b"".join(chain(*range(returns.MAX_BLOCKS + 1)))},
        {"parent": b""},
        {"parent": b"\x01" * 64},
        {"parent": MORE[3]},
        {"address": "tcp://" + "a" * returns.MAX_ADDRESS},
        {"traceparent": "0" * (returns.MAX_TRACEPARENT + 1)},
    ],
)
def test_what_cannot_be_meant_ends_the_connection(fields):
    two = handed_over()
    with pytest.raises(PeerProtocolError):
        two.a.core.on_peer_call(LINK, told(two, **fields), 0)
    assert not two.a.core.returns._told


def test_blocks_whose_beginning_is_gone_do_not_come_for_nobody_could_use_them():
    two = handed_over()
    message = told(two)
    two.a.run(two.a.core.on_corrupt(0, MORE[2], 0))
    two.a.run(two.a.core.on_peer_call(LINK, message, 0))
    assert not two.a.asked
    assert two.a.core.counters["push_backs_dropped"] == 1


def test_a_quarter_of_the_spare_pages_is_taken_at_most_and_no_engines_while_there_are_others():
    two = handed_over(pages_there=9, decode_quota=8)
    pool = two.a.core.pools[0]
    assert pool.num_spare == 6
    two.a.run(two.a.core.on_peer_call(LINK, told(two), 0))
    assert [len(ask.message.hashes) // 32 for ask in two.a.asked] == [1]
    two.everything_arrives()
    assert two.bytes_there() == "abcd"
    assert not answers(two.a, PREFILL, wire.Shrink)
    two.assert_at_rest()


def test_the_quarter_is_of_all_that_is_on_its_way():
    two = handed_over(pages_there=19, decode_quota=8)
    assert two.a.core.pools[0].num_spare == 16
    for first in "xy":
        two.decode_seals(chain("a", "b", "c", first, 1, 2), 3, f"{first}12")
    two.gathered()
    two.deliver()
    assert [len(pull.targets) for pull in two.a.remote_pulls] == [3, 1]
    two.everything_arrives()
    two.assert_at_rest()


def test_with_too_few_pages_the_first_blocks_come_after_a_while():
    two = handed_over(pages_there=16, prefill_quota=12)
    assert two.a.core.pools[0].memory.table.num_free == 4
    two.a.run(two.a.core.on_peer_call(LINK, told(two), 0))
    claim = two.a.core.pools[0].claim(3, ask=False)  # another copy takes them first
    two.deliver()
    assert not two.a.remote_pulls
    two.a.advance(two.a.core.limits.pull_patience_ms)
    assert [len(pull.targets) for pull in two.a.remote_pulls] == [1]
    two.a.core.pools[0].cancel(claim)
    two.everything_arrives()
    assert two.bytes_there() == "abcd"
    two.assert_at_rest()


def test_blocks_of_two_hosts_or_hand_offs_are_not_pulled_as_one(monkeypatch):
    monkeypatch.setattr(returns, "MAX_PULLS", 0)  # all wait
    two = handed_over()
    message = told(two)
    parts = [
        {"hashes": MORE[3]},
        {"hashes": MORE[4], "parent": MORE[3]},
        {"hashes": chain("x")[0], "parent": MORE[4], "address": "tcp://10.0.0.3:1"},
    ]
    for part in parts:
        two.a.run(two.a.core.on_peer_call(LINK, msgspec.structs.replace(message, **part), 0))
    assert [len(run.hashes) for run in two.a.core.returns._told] == [2, 1]


def test_a_source_that_says_another_parent_than_before_is_malformed():
    two = BothWays()
    two.a.core.returns._handed[HANDOFF] = 0, SEED
    first = chain("x")
    message = peer.BlocksCompleted(handoff_id=HANDOFF, address=B_HOST, parent=SEED, hashes=first[0])
    two.a.run(two.a.core.on_peer_call(LINK, message, 0))
    two.b.fill(DECODE, 0, first, "x")
    two.say(two.a, two.b, B_HOST)
    assert two.a.remote_pulls
    (pull,) = two.a.core.remote.pulls.values()
    lease = msgspec.structs.replace(pull.lease, parents=MORE[0])
    with pytest.raises(PeerProtocolError):
        entries_of(pull, lease, BLOCK_TOKENS)


def test_pages_that_engines_have_in_stock_are_asked_for_and_without_them_it_gives_up_soon():
    two = handed_over(pages_there=8, prefill_quota=8)
    two.a.run(two.a.core.on_peer_call(LINK, told(two), 0))
    assert two.a.asked
    two.deliver()
    assert answers(two.a, PREFILL, wire.Shrink) == [wire.Shrink(count=1)]
    two.a.advance(SPARE_WITHIN_MS - 1)
    assert two.a.core.remote.pulls
    two.a.advance(1)
    two.deliver()
    assert two.bytes_there() == "abc"
    assert not two.a.core.remote.pulls
    assert not [lease for lease in two.b.core.pools[0].leases.leases.values() if lease.connection < 0]
    two.a.counts()


def test_no_more_than_a_few_pulls_are_on_their_way_and_all_come_in_turn():
    two = BothWays(pages_there=64, decode_quota=32, prefill_quota=8)
    chains = [chain(n, "x", "y") for n in range(6)]
    for n, names in enumerate(chains):
        handoff = HandoffId(f"h{n}")
        two.hand_off(names[:1], "p", handoff)
        two.acquire(names[:1], call_id=n + 1, handoff_id=handoff)
        two.everything_arrives()
        two.decode_seals(names, 1, "xy")
    two.gathered()
    two.deliver()
    assert len(two.a.remote_pulls) == returns.MAX_PULLS
    two.everything_arrives()
    two.everything_arrives()
    assert [two.bytes_there(names) for names in chains] == ["pxy"] * 6
    two.assert_at_rest()


def test_what_waits_to_go_back_is_bounded(monkeypatch):
    monkeypatch.setattr(returns, "MAX_WAITING", 2)
    two = handed_over(decode_quota=12)
    for n in range(4):
        two.decode_seals(chain("a", "b", "c", n), 3, "z")
    two.gathered()
    assert len(two.b.asked) == 2
    assert two.b.core.counters["push_backs_dropped"] == 2
