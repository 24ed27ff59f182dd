"""Prompt trees in a Redis of our own for measuring: owners with documents in them, and prompts that ask for those."""

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from loadtest.processes import family, process_cpu_us
from shared.ids import BlockHash
from shared.kv.block_hash import chain_seed, hash_blocks, pack_tokens
from shared.prompttree.client import PromptTreeClient
from shared.prompttree.embedded import EmbeddedRedis
from shared.prompttree.hits import pack_audience
from shared.prompttree.scripts import CLAIM, MAX_BATCH_BLOCKS, OWNERS, SHORT_HASH_BYTES, SPACES, WRITE
from shared.transport.redis_link import RedisLink

BLOCK_TOKENS = 16
PROMPT_BLOCKS = 256
DOCUMENT_BLOCKS = 250  # of a prompt; the rest is a question that nobody has seen
CALL_MS = 5_000
TAG = "ab" * 8
SEED = chain_seed("bench", "")


def documents(rng: random.Random, count: int) -> list[bytes]:
    """Packed tokens of as many different beginnings."""
    size = DOCUMENT_BLOCKS * BLOCK_TOKENS
    return [pack_tokens([rng.randrange(32_000) for _ in range(size)]) for _ in range(count)]


def prompt(rng: random.Random, document: bytes) -> bytes:
    """The document and a question of its own, PROMPT_BLOCKS in all."""
    size = (PROMPT_BLOCKS - DOCUMENT_BLOCKS) * BLOCK_TOKENS
    return document + pack_tokens([rng.randrange(32_000) for _ in range(size)])


def hashes_of(packed: bytes) -> list[BlockHash]:
    """As the gateway makes them."""
    return hash_blocks(SEED, packed, BLOCK_TOKENS)


def short(hashes: Sequence[bytes]) -> bytes:
    """As the scripts take them."""
    return b"".join([h[:SHORT_HASH_BYTES] for h in hashes])


@dataclass(slots=True)
class Trees:
    """An own server on loopback with a connection to fill and to ask it."""

    server: EmbeddedRedis
    link: RedisLink
    client: PromptTreeClient

    @classmethod
    async def start(cls, folder: Path) -> "Trees":
        """Raises: SettingsError without a server's binary."""
        server = EmbeddedRedis(0, folder)
        server.start()
        out = cls(server, RedisLink(server.url), PromptTreeClient(server.url, deadline_ms=CALL_MS))
        out.link.open()
        out.client.open()
        assert await out.link.wait_up(CALL_MS)
        assert await out.client.wait_up(CALL_MS)
        return out

    async def stop(self) -> None:
        """The server too."""
        await self.client.close()
        await self.link.close()
        self.server.stop()

    async def clear(self) -> None:
        """No owners."""
        await self.link.call("FLUSHDB", timeout_ms=CALL_MS)

    async def add(self, owner: str, row: str, blob: bytes, *, table: str = OWNERS) -> None:
        """An owner that holds these short hashes."""
        await self.link.run(CLAIM, table, owner, 1, TAG, 3_600, row, timeout_ms=CALL_MS)
        step = MAX_BATCH_BLOCKS * SHORT_HASH_BYTES
        for begin in range(0, len(blob), step):
            part = blob[begin : begin + step]
            await self.link.run(WRITE, table, owner, 1, TAG, part, b"", timeout_ms=CALL_MS)

    async def fill(
        self, rng: random.Random, docs: Sequence[bytes], num_instances: int, background: int, *, spaces: bool
    ) -> None:
        """Instances i0, i1, ... of which one to four hold each document, to some depth.

        Args: background: more blocks of each; spaces: the same once more as a mempool's space for each instance.
        """
        await self.clear()
        held: list[list[bytes]] = [[rng.randbytes(16 * background)] for _ in range(num_instances)]
        for doc in docs:
            blob = short(hashes_of(doc))
            for owner in rng.sample(range(num_instances), min(num_instances, rng.randint(1, 4))):
                depth = DOCUMENT_BLOCKS if rng.random() < 0.5 else rng.randint(1, DOCUMENT_BLOCKS)
                held[owner].append(blob[: depth * SHORT_HASH_BYTES])
        for number, parts in enumerate(held):
            role = ("prefill", "decode", "colocated")[number % 3]
            await self.add(f"i{number}", role, b"".join(parts))
            if spaces:
                row = f"pool/dram {pack_audience({f'i{number}': 'hbm'})}"  # type: ignore[dict-item]
                await self.add(f"pool/{number}", row, b"".join(parts), table=SPACES)
        if spaces:
            await self.add("pool/dram", "dram ", rng.randbytes(16 * background), table=SPACES)

    async def cpu_us(self, call: Callable[[], Awaitable[None]], num_calls: int, *, rounds: int = 1) -> float:
        """CPU time of the server for each of num_calls that `call` makes."""
        before = process_cpu_us(self.server.pid)
        for _ in range(rounds):
            await call()
        return (process_cpu_us(self.server.pid) - before) / (rounds * num_calls)


async def timed_us(call: Callable[[int], Awaitable[object]], count: int, *, warm: int = 50) -> list[float]:
    """Each call's time, one at a time."""
    for i in range(warm):
        await call(i)
    out = []
    for i in range(count):
        begin = time.perf_counter()
        await call(warm + i)
        out.append(round((time.perf_counter() - begin) * 1e6, 1))
        if i % 64 == 63:
            await asyncio.sleep(0)
    return out


@contextmanager
def ahead_of_others(wanted: bool) -> Iterator[None]:
    """Let this process and all its descendants run before everything else on a machine that others use too.

    Needs root. Only for load of a given rate, which leaves the machine to others in between.
    """
    if wanted:
        _schedule(os.SCHED_FIFO, 1)
    try:
        yield
    finally:
        if wanted:
            _schedule(os.SCHED_OTHER, 0)


def _schedule(policy: int, number: int) -> None:
    for pid in family(os.getpid()):
        for thread in (Path("/proc") / str(pid) / "task").iterdir():
            with suppress(ProcessLookupError):
                os.sched_setscheduler(int(thread.name), policy, os.sched_param(number))


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait for what becomes true in its own time. Raises: TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - of several processes
            await asyncio.sleep(0.002)
