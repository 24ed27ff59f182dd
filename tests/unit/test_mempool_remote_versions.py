"""What mempools of two versions say to each other about pages."""

import msgspec
import pytest

from services.mempool.core.actions import AskPeer
from shared.ids import Epoch, HandoffId
from shared.wire import mempool_peer as peer
from tests.unit.test_mempool_peers_out_of_room import Waiting, link_of
from tests.unit.test_mempool_remote import A_HOST, LINK, TwoMempools


@pytest.mark.parametrize("theirs", [b"", b"\xff" * 12, b"\xff"])
def test_versions_with_and_without_checksums_read_each_others_pages(theirs):
    """An earlier one refuses an answer without as many of them as pages; this one takes any."""
    two = TwoMempools()
    two.hand_off()
    two.acquire()
    (ask,), two.b.asked = two.b.asked, []
    two.a.run(two.a.core.on_peer_call(LINK, ask.message, 0))
    (tell,), two.a.told = two.a.told, []
    assert tell.message.checksums == bytes(4 * 3)
    two.b.run(two.b.core.on_peer_answer(A_HOST, msgspec.structs.replace(tell.message, checksums=theirs), 0))
    two.copy()
    two.deliver()
    assert [got.num_blocks for got in two.got()] == [3]
    two.assert_at_rest()


async def test_only_a_peer_that_takes_blocks_back_is_told_of_them_and_none_is_lost_for_it():
    """An earlier version would end the connection, which hand-offs need."""
    lost, said = [], []
    link = link_of(Waiting(), lost.append)
    hint = peer.BlocksCompleted(handoff_id=HandoffId("h"), address="a", parent=b"", hashes=b"")

    def is_told() -> bool:
        link.ask(AskPeer(A_HOST, hint))
        return said[-1:] == [hint]

    assert not is_told()
    assert not link._queue, "before it is connected"
    link._link.up, link._link.send = True, said.append
    link._on_up()
    for takes_back in (False, True):
        welcome = peer.PeerWelcome(instance="a", boot_generation=Epoch(1), takes_back=takes_back)
        link._on_message(0, welcome, [])
        assert is_told() == takes_back
    said.clear()
    link._on_up()  # it came back, perhaps as another version
    assert not is_told()
    assert not lost
    link.close()
