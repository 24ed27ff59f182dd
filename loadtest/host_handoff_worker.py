"""A worker of bench_host_handoff.py, attached to its host's mempool: it hands blocks over, or acquires them.

    python -m loadtest.host_handoff_worker      commands as in child_commands.py: open, save, ready, acquire

Block n of a prompt holds 64-bit words that only its hash says; every word of what came is compared.
"""

import asyncio
import hashlib
import sys
import time
from typing import Any

import numpy as np

from loadtest.child_commands import serve
from shared.ids import BlockHash, Epoch, HandoffId, InstanceId, PageId
from shared.kv.layout import EngineDescription
from shared.kv.words import u32_list, u64_list
from shared.mempool.client import MempoolClient
from shared.mempool.engine_attachment import EngineAttachment, SealEntry

SEED = BlockHash(b"\0" * 32)
BLOCK_TOKENS = 64
TTL_MS, WAIT_MS, CONNECT_S = 20_000, 20_000, 30.0


def chain(prompt: str, num: int) -> list[BlockHash]:
    """Hashes of its blocks."""
    out, link = [], SEED
    for number in range(num):
        link = BlockHash(hashlib.sha256(link + f"{prompt}-{number}".encode()).digest())
        out.append(link)
    return out


def word_of(block_hash: BlockHash) -> np.uint64:
    """What fills the block."""
    return np.frombuffer(block_hash[:8], np.uint64)[0]


class Worker:
    """What the commands do."""

    async def open(self, socket: str, instance: str, page_bytes: int, quota: int) -> dict[str, Any]:
        """Attached and connected. Returns: where other hosts reach this one's mempool."""
        described = EngineDescription(
            model="bench", fingerprint="bench", dtype="bfloat16", layout="layers-blocks", backend="none",
            block_tokens=BLOCK_TOKENS, block_bytes=page_bytes,
        )  # fmt: skip
        self._attachment = EngineAttachment(socket, InstanceId(instance), described, quota)
        if not await asyncio.to_thread(self._attachment.wait_connected, CONNECT_S):
            raise RuntimeError("the mempool does not take this engine")
        self._client = MempoolClient(socket, InstanceId(instance))
        self._client.start()
        if not await self._client.wait_connected(int(CONNECT_S * 1e3)):
            raise RuntimeError("the mempool does not take this client")
        return {"peer_address": self._client.peer_address}

    async def save(self, prompt: str, num: int) -> dict[str, Any]:
        """A prompt's blocks, written and sealed."""
        hashes, pages = chain(prompt, num), []
        end_s = time.monotonic() + CONNECT_S
        while len(pages) < num:
            pages += self._attachment.take_pages(num - len(pages))
            if time.monotonic() > end_s:
                raise RuntimeError(f"{len(pages)} of {num} pages were granted")
            await asyncio.sleep(0.002)
        self._attachment.writing(pages)
        for (page, _), block_hash in zip(pages, hashes, strict=True):
            np.frombuffer(self._attachment.page_view(page), np.uint64)[:] = word_of(block_hash)
        lines = zip(pages, hashes, [SEED, *hashes], strict=False)
        self._attachment.seal(
            [SealEntry(page, epoch, each, parent, BLOCK_TOKENS) for (page, epoch), each, parent in lines]
        )
        return {}

    async def ready(self, prompt: str, num: int) -> dict[str, Any]:
        """The prompt is done: whoever names its handoff may have the blocks."""
        at_s = time.perf_counter()
        self._attachment.handoff_ready(HandoffId(prompt), chain(prompt, num), TTL_MS)
        return {"at_s": at_s}

    async def acquire(self, prompt: str, num: int, source: str) -> dict[str, Any]:
        """Blocks of the handoff from the other host. `at_s`: when they were held here."""
        hashes = chain(prompt, num)
        begin_s = time.perf_counter()
        got = await self._client.acquire(
            hashes, handoff_id=HandoffId(prompt), wait_ms=WAIT_MS, source_mempool=source
        )
        at_s = time.perf_counter()
        wrong = 0
        for number, epoch, block_hash in zip(u32_list(got.pages), u64_list(got.epochs), hashes, strict=False):
            page = PageId(number)
            words = np.frombuffer(self._attachment.page_view(page), np.uint64)
            right = bool((words == word_of(block_hash)).all()) and self._attachment.is_sealed(
                page, Epoch(epoch)
            )
            wrong += not right
        if got.num_blocks:
            self._client.release(got.lease_id)
        return {"begin_s": begin_s, "at_s": at_s, "num_blocks": got.num_blocks, "num_wrong": wrong}

    async def drop(self) -> dict[str, Any]:
        """What is not pinned goes, so that the next prompt has room."""
        return {"num_blocks": await self._client.delete()}


def main() -> int:
    """Until the input ends."""
    worker = Worker()
    names = ("open", "save", "ready", "acquire", "drop")
    asyncio.run(serve({name: getattr(worker, name) for name in names}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
