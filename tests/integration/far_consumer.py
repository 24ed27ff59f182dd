"""An engine without a model that reads far blocks: python -m tests.integration.far_consumer SOCKET NAME NUM [STEP].

It says "ready", waits for a line, seals blocks, has them copied out and mapped, says "placed", and reads them in place
again and again: every byte must be the block's. It follows what is moved, says "moved" each time, and ends when another
line comes. At STEP it stops by itself, once, as by SIGSTOP: "asked" for copies, its rank has "mapped" them and not said
so, it has heard that they were "moved", has "dropped" the old places, its rank has "unmapped" them and not said so.
"""

import select
import signal
import sys
from typing import Any

from shared.engine.page_window import open_window
from shared.ids import InstanceId
from shared.kv.words import u32_list
from shared.mempool.page_quota import PageQuota, SealedPage
from shared.mempool.rank_memory import RankMemory
from shared.wire.mempool_far import NO_PLACE, FarPlaced
from tests.integration.mempool_rig import BLOCK_BYTES, DESCRIPTION, SEED, chain, content

NUM_PLACES = 16


class Stopping:
    """A rank's far places that stop the process, and `at()` for the steps between."""

    def __init__(self, far: Any, step: str) -> None:
        self.far, self.step = far, step

    def at(self, step: str) -> None:
        if step == self.step:
            self.step = ""
            signal.raise_signal(signal.SIGSTOP)  # to this thread: it does not get any further

    def map(self, *args: Any) -> None:
        self.far.map(*args)
        self.at("mapped")

    def unmap(self, places: Any) -> None:
        self.at("dropped")
        self.far.unmap(places)
        self.at("unmapped")


def main(socket: str, name: str, num_blocks: int, step: str = "") -> None:
    """See the module's docstring."""
    import torch

    instance = InstanceId(name)
    memory = RankMemory(socket, instance, DESCRIPTION, 0, device=f"cpu:{name}", far_places=NUM_PLACES)
    window = open_window(memory, torch.device("cpu"), NUM_PLACES)
    stopping = Stopping(window.far, step)
    memory.stay_attached(None, stopping)
    quota = PageQuota(socket, instance, DESCRIPTION, memory.header.num_pages)
    quota.attach()
    print("ready", flush=True)
    sys.stdin.readline()
    page_bytes, pages = memory.header.page_bytes, []
    while len(pages) < num_blocks:
        quota.wait_granted(1.0)
        pages += quota.take_granted()
    hashes = chain(*(f"{name}-{n}" for n in range(num_blocks)))
    bytes_of = memoryview(window.owner)
    quota.writing(pages[:num_blocks])
    for (page, _), block_hash in zip(pages, hashes, strict=False):
        bytes_of[(page + 1) * page_bytes :][:BLOCK_BYTES] = content(block_hash)
    lines = zip(pages, hashes, [SEED, *hashes], strict=False)
    quota.seal([SealedPage(page, epoch, h, parent, 4) for (page, epoch), h, parent in lines])
    quota.far_out(1, hashes)
    stopping.at("asked")
    places: list[int] = []
    first = memory.header.num_pages + 1
    while not select.select([sys.stdin], [], [], 0.0)[0]:
        quota.wait_far(0.01)
        for message in quota.take_far():
            if isinstance(message, FarPlaced):
                places = u32_list(message.places)
                assert NO_PLACE not in places
                quota.unpin(pages[:num_blocks])
                print("placed", flush=True)
                continue
            moved = dict(zip(u32_list(message.places), u32_list(message.to), strict=True))
            assert NO_PLACE not in moved.values()
            places = [moved.get(place, place) for place in places]
            stopping.at("moved")
            quota.far_drop(list(moved))
            print("moved", flush=True)
        for place, block_hash in zip(places, hashes, strict=False):
            found = bytes_of[(first + place) * page_bytes :][:BLOCK_BYTES]
            assert found == content(block_hash), f"block at place {place}"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
