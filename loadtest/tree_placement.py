"""A gateway's routing decision under load: block hashes, prompt tree, scheduler; everything but the tokenizer."""

import asyncio
import gc
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from loadtest.precise_timer import poisson
from loadtest.processes import Fleet, free_port, process_cpu_us
from loadtest.tree_reporters import MODEL
from loadtest.tree_rig import BLOCK_TOKENS, DOCUMENT_BLOCKS, PROMPT_BLOCKS, SEED, TAG, Trees
from services.gateway.deps import MAX_HASH_CHUNKS
from services.gateway.scheduler_link import SchedulerLink
from shared.errors import Overloaded, PeerGone
from shared.ids import RequestId
from shared.mempool.api_hashes import HashMemory
from shared.prompttree.client import PromptTreeClient
from shared.prompttree.lookup_cache import LookupCache
from shared.prompttree.scripts import OWNERS, WRITE
from shared.wire.placement import Place, Placed, PrefixHit, SchedulerToGateway

ANSWER_S = 5.0


@dataclass(slots=True)
class Times:
    """Of every request, in ms. `whole`: hashes, look-up and scheduler."""

    whole_ms: list[float] = field(default_factory=list)
    lookup_ms: list[float] = field(default_factory=list)
    place_ms: list[float] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)  # how late the load itself was
    failed: int = 0
    with_hits: int = 0


class Requester:
    """Asks as a gateway does. open() first."""

    def __init__(self, endpoint: str, tree: PromptTreeClient) -> None:
        self._tree = tree
        self._hashes = HashMemory(BLOCK_TOKENS, max_chunks=MAX_HASH_CHUNKS)
        self._waiting: dict[str, asyncio.Future[SchedulerToGateway]] = {}
        self._link = SchedulerLink(endpoint, on_message=self._on_message, on_down=lambda: None)
        self._next = 0
        self.policies: set[str] = set()

    async def open(self) -> None:
        """Returns once the scheduler answers."""
        self._link.open()
        while not self._link.up:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)

    def close(self) -> None:
        """Drop the connection."""
        self._link.close()

    def _on_message(self, seq: int, message: SchedulerToGateway, raw: list[bytes]) -> None:
        del seq, raw
        waiting = self._waiting.pop(message.request_id, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    async def place(self, hits: list[PrefixHit]) -> SchedulerToGateway:
        """One placement; it ends at once. Raises: TimeoutError, PeerGone, Overloaded."""
        self._next += 1
        request_id = RequestId(f"r{self._next}")
        future = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        tokens = PROMPT_BLOCKS * BLOCK_TOKENS
        self._link.place(
            Place(
                request_id=request_id,
                attempt=0,
                num_prompt_tokens=tokens,
                max_tokens=64,
                model=MODEL,
                hits=hits,
                explain=False,
            )
        )
        async with asyncio.timeout(ANSWER_S):
            answer = await future
        self._link.ended(request_id, 0)
        if isinstance(answer, Placed):
            self.policies.add(answer.policy)
        return answer

    async def decide(self, packed: bytes, times: Times) -> None:
        """What the bench times."""
        begin = time.perf_counter()
        hits = await self._tree.lookup(self._hashes.hashes(SEED, packed), BLOCK_TOKENS)
        found = time.perf_counter()
        try:
            answer = await self.place(hits)
        except (TimeoutError, PeerGone, Overloaded):
            times.failed += 1
            return
        end = time.perf_counter()
        times.failed += not isinstance(answer, Placed)
        times.with_hits += bool(hits)
        times.lookup_ms.append(round((found - begin) * 1e3, 3))
        times.place_ms.append(round((end - found) * 1e3, 3))
        times.whole_ms.append(round((end - begin) * 1e3, 3))

    async def load(
        self, rng: random.Random, docs: Sequence[bytes], *, rate_per_s: float, seconds: float
    ) -> Times:
        """Poisson arrivals of new prompts about random documents; none waits for another."""
        times = Times()
        question_bytes = 4 * BLOCK_TOKENS * (PROMPT_BLOCKS - DOCUMENT_BLOCKS)
        tasks: set[asyncio.Task[None]] = set()
        gc.collect()
        gc.disable()
        try:
            async for due_s in poisson(rng, rate_per_s, int(rate_per_s * seconds)):
                times.late_ms.append(round((time.monotonic() - due_s) * 1e3, 3))
                packed = rng.choice(docs) + rng.randbytes(question_bytes)
                task = asyncio.create_task(self.decide(packed, times))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.gather(*tasks)
        finally:
            gc.enable()
        return times


def start_scheduler(fleet: Fleet, num_instances: int, policy: str) -> str:
    """The scheduler and its instances; the address for placements."""
    places, reports, admin = (f"127.0.0.1:{free_port()}" for _ in range(3))
    command = [
        *(sys.executable, "-m", "services.scheduler", "--listen", f"tcp://{places}"),
        *("--report-listen", f"tcp://{reports}", "--admin-listen", admin, "--log-level", "warning"),
        *(("--policy", policy) if policy else ()),
    ]
    fleet.start("scheduler", command, ready_url=f"http://{admin}/ready")
    words = ("--endpoint", f"tcp://{reports}", "--count", str(num_instances))
    fleet.start(
        "reporters", [sys.executable, "-m", "loadtest.tree_reporters", *words], ready_url=f"tcp://{reports}"
    )
    return f"tcp://{places}"


def cpu_us(fleet: Fleet, trees: Trees) -> dict[str, int]:
    """Of everybody who takes part, so far."""
    return {
        "scheduler": fleet.cpu_us("scheduler"),
        "redis": process_cpu_us(trees.server.pid),
        "reporters": fleet.cpu_us("reporters"),
        "sender": process_cpu_us(os.getpid()),
    }


async def retract(trees: Trees, per_s: float) -> None:
    """Owners evict, so often in all, until this is cancelled."""
    while True:
        await asyncio.sleep(1 / per_s)
        await trees.link.run(WRITE, OWNERS, "i0", 1, TAG, b"", b"\0" * 16, timeout_ms=5_000)


async def placements(
    trees: Trees,
    endpoint: str,
    docs: Sequence[bytes],
    rng: random.Random,
    *,
    rate_per_s: float,
    seconds: float,
    cache: LookupCache | None = None,
    retractions_per_s: float = 0.0,
) -> tuple[Times, set[str]]:
    """Under load, after a second of the same to warm up: times, and the policies that answered."""
    tree = PromptTreeClient(trees.server.url, cache=cache)
    tree.open()
    assert await tree.wait_up(5_000)
    requester = Requester(endpoint, tree)
    await requester.open()
    while not isinstance(await requester.place([]), Placed):  # noqa: ASYNC110 - until instances have reported
        await asyncio.sleep(0.05)
    retracting = asyncio.create_task(retract(trees, retractions_per_s)) if retractions_per_s else None
    try:
        await requester.load(rng, docs, rate_per_s=rate_per_s, seconds=1.0)
        if cache is not None:
            cache.num_hits = cache.num_misses = 0
        return await requester.load(rng, docs, rate_per_s=rate_per_s, seconds=seconds), requester.policies
    finally:
        if retracting is not None:
            retracting.cancel()
        requester.close()
        await tree.close()
