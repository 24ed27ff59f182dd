"""A reader of another host whose blocks are cut over other ranks: a miss, and the source knows which kind."""

import msgspec
import pytest

from services.mempool.core.actions import TellPeer
from shared.wire import mempool_peer as peer
from tests.unit.mempool_harness import DESCRIPTION, chain
from tests.unit.test_mempool_remote import ABC, HANDOFF, LINK, TwoMempools

HALF = msgspec.structs.replace(DESCRIPTION, tp_size=2)


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
