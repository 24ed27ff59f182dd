"""A reader of another host whose blocks are cut over other ranks: they come, and it is told that they are cut anew.

Where nothing is known of how blocks are cut, or pages differ in more, it is a miss, and the source knows which kind.
"""

import msgspec
import pytest

from services.mempool.core.actions import TellPeer
from shared.wire import mempool_peer as peer
from tests.unit.mempool_harness import DESCRIPTION, chain
from tests.unit.test_mempool_remote import (
    A_HOST,
    ABC,
    B_HOST,
    DECODE,
    FRONT,
    HANDOFF,
    LINK,
    PREFILL,
    Host,
    TwoMempools,
)

HALF = msgspec.structs.replace(DESCRIPTION, tp_size=2)  # of unknown heads
WHOLE_CUT = msgspec.structs.replace(
    DESCRIPTION, num_layers=1, num_kv_heads=2, total_kv_heads=2, order="HND", head_dim=4, block_bytes=1024
)
HALF_CUT = msgspec.structs.replace(WHOLE_CUT, tp_size=2, num_kv_heads=1, block_bytes=512)


class CutAnew(TwoMempools):
    """The source's engines have one rank, the reader's two."""

    def __init__(self) -> None:
        self.a, self.b = Host(A_HOST, num_pages=16), Host(B_HOST, num_pages=16)
        self.a.worker(PREFILL, "cpu", description=WHOLE_CUT)
        self.b.worker(DECODE, "cpu", description=HALF_CUT)
        self.b.client(FRONT, f"i{DECODE}")


def ask(two: TwoMempools, description, hashes, **fields) -> list[TellPeer]:
    """What the source answers to a reader with such blocks."""
    call = peer.RemoteAcquire(
        call_id=1, content_key=description.content_key, hashes=b"".join(hashes), **fields
    )
    two.a.run(two.a.core.on_peer_call(LINK, call, two.a.now_ms))
    told, two.a.told = two.a.told, []
    return told


def counted(two: TwoMempools) -> tuple[int, int]:
    counters = two.a.core.counters
    return counters["peer_misses"], counters["peer_misses_other_cut"]


@pytest.mark.parametrize(
    ("description", "hashes", "num_blocks", "other_cut"),
    [
        (HALF, ABC, 0, True), (HALF, chain("x"), 0, False), (DESCRIPTION, chain("x"), 0, False),
        (DESCRIPTION, ABC, 3, False),
    ],
)  # fmt: skip
def test_only_a_miss_of_blocks_that_are_here_in_another_cut_is_told_apart(
    description, hashes, num_blocks, other_cut
):
    two = TwoMempools()
    two.hand_off()
    (told,) = ask(two, description, hashes)
    assert (told.message.num_blocks, told.other_cut) == (num_blocks, other_cut)
    assert counted(two) == (num_blocks == 0, other_cut)


def test_a_reader_that_waited_for_a_hand_off_in_another_cut_is_told_so_when_it_comes():
    two = TwoMempools()
    assert ask(two, HALF, ABC, handoff_id=HANDOFF, wait_ms=1_000) == []
    two.hand_off()
    (told,) = two.a.told
    assert (told.message.num_blocks, told.other_cut) == (0, True)
    assert counted(two) == (1, 1)


def test_blocks_in_another_cut_of_one_family_come_and_are_told_to_be_cut_anew():
    two = CutAnew()
    two.hand_off()
    two.acquire()
    said = two.deliver()
    (granted,) = [each for each in said if isinstance(each, peer.RemoteAcquired)]
    assert (granted.num_blocks, granted.is_recut) == (3, True)
    two.copy()
    two.deliver()
    (got,) = two.got()
    assert (got.num_blocks, two.bytes_of(got)) == (3, ["a", "b", "c"])
    assert two.b.core.counters["remote_blocks_recut"] == two.b.core.counters["remote_blocks"] == 3
    assert not two.a.core.counters["peer_misses_other_cut"]
    two.assert_at_rest()


def test_sums_of_the_sources_pages_are_not_compared_with_pages_that_were_cut_anew():
    """Its own sums it compares itself, before it says that nothing has changed."""
    for two, num_compared in ((CutAnew(), 0), (TwoMempools(), 3)):
        two.hand_off()
        two.acquire()
        two.deliver()
        (number,) = two.b.core.remote.pulls
        assert two.b.core.remote.arriving(number, A_HOST) == (0, ()), "no bytes yet"
        two.copy()
        assert len(two.b.core.remote.arriving(number, A_HOST)[1]) == num_compared


def test_a_page_that_changed_while_it_was_cut_anew_is_a_miss():
    two = CutAnew()
    pages = two.hand_off()
    two.acquire()
    two.deliver()
    two.copy()
    (check,), two.b.asked = two.b.asked, []
    stale = peer.EpochsChecked(call_id=check.message.call_id, stale=(1).to_bytes(4, "little"))
    two.b.run(two.b.core.on_peer_answer(A_HOST, stale, two.b.now_ms))
    (got,) = two.got()
    assert (got.num_blocks, len(pages)) == (1, 3)
    two.deliver()
    two.assert_at_rest()


@pytest.mark.parametrize(("family", "num_blocks"), [(True, 3), (False, 0)])
def test_an_earlier_version_that_says_no_family_gets_none_of_another_cut(family, num_blocks):
    two = CutAnew()
    two.hand_off()
    fields = {"family_key": HALF_CUT.family_key} if family else {}
    (told,) = ask(two, HALF_CUT, ABC, **fields)
    assert (told.message.num_blocks, told.other_cut) == (num_blocks, not family)


def test_pages_cut_alike_go_before_pages_that_must_be_cut_anew():
    two = CutAnew()
    two.hand_off()
    two.a.worker(9, "cpu:beside", description=HALF_CUT)
    number = next(
        n for n, pool in two.a.core.pools.items() if pool.memory.content_key == HALF_CUT.content_key
    )
    two.a.fill(9, number, ABC[:2], "ab")
    more = {"family_key": HALF_CUT.family_key}
    (told,) = ask(two, HALF_CUT, ABC[:2], **more)
    assert (told.message.space, told.message.is_recut) == (number, False)
    (told,) = ask(two, HALF_CUT, ABC, **more)
    assert (told.message.num_blocks, told.message.is_recut) == (3, True), "more blocks count more"
