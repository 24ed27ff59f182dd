"""What mempools of two versions say to each other about pages."""

import msgspec
import pytest

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
