"""Pages that a copying engine has in hand when it loses the mempool, and that the next one grants it again."""

from contextlib import closing

import pytest

from shared.ids import InstanceId
from shared.mempool.engine_attachment import EngineAttachment, SealEntry
from tests.integration.mempool_rig import (
    BLOCK_BYTES,
    DESCRIPTION,
    SEED,
    MempoolProcess,
    chain,
    content,
    until,
)

NUM_PAGES, QUOTA = 4, 2


@pytest.fixture
def mempool(tmp_path):
    process = MempoolProcess(
        tmp_path, **{"capacity-bytes": NUM_PAGES * 8192, "granted-share": QUOTA / NUM_PAGES}
    )
    yield process
    process.stop()


def test_a_page_in_hand_from_an_earlier_attachment_is_not_taken_anew_before_it_is_let_go(mempool):
    """Its views are scratch pages until then: what is written for the new owner would be lost, and sealed."""
    instance = InstanceId("prefill-0")
    with closing(EngineAttachment(mempool.socket, instance, DESCRIPTION, QUOTA)) as attachment:
        old: list = []

        def all_taken(into: list) -> bool:
            into += attachment.take_pages(QUOTA - len(into))
            return len(into) == QUOTA

        until(lambda: all_taken(old), "pages are granted")
        mempool.kill()
        until(lambda: not attachment.connected, "the loss is seen")
        mempool.start()
        until(lambda: attachment.connected and mempool.counts().get("granted") == QUOTA, "granted again")
        assert attachment.take_pages(QUOTA) == []
        attachment.page_view(old[0][0])[:] = b"\xff" * BLOCK_BYTES  # a request of before goes on
        attachment.give_back(old)
        new: list = []
        until(lambda: all_taken(new), "pages are taken")
        (block_hash,) = chain("a")
        page, epoch = new[0]
        attachment.page_view(page)[:] = content(block_hash)
        attachment.seal([SealEntry(page, epoch, block_hash, SEED, 4)])
        with closing(EngineAttachment(mempool.socket, InstanceId("decode-0"), DESCRIPTION, 0)) as reader:
            assert reader.wait_connected(30)
            until(lambda: reader.is_sealed(page, epoch), "the block is sealed")
            assert bytes(reader.page_view(page)) == content(block_hash)
