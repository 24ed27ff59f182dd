"""A vLLM engine that lends pages of its KV pool, in a process of its own, for bench_producer_cost.py.

    python -m loadtest.producers.lending_engine MODEL_DIR --device cuda --socket PATH --coordinator-url URL [--ranks 4]

Commands (child_commands.py): open, load, lend, window, reclaim, as those of lending_model.py. Load is a closed loop:
so many requests are always under way, each with a prompt that no cache knows, begun at different times, so that steps
decode and compute prompts as those of a served engine do. With --lenders it does not lend pages of its pool, which only
an engine of as many ranks could borrow, but of a space of its own on each of so many of its GPUs.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.child_commands import serve
from loadtest.results import quantile

PATIENCE_S = 60.0
POLL_S = 0.02
DEADLINE_MS = 60_000  # nothing is forgotten, whatever the machine
INSTANCE = "engine"


class LoadedEngine:
    """Its methods are the commands. `tokens`: that came out, since the start."""

    def __init__(self, options: argparse.Namespace, engine: Any, client: Any, market: Any) -> None:
        from shared.kv.block_hash import chain_seed

        self._options, self._engine, self._client, self._market = options, engine, client, market
        self._seed = chain_seed(engine.description.fingerprint, "")
        self._rng = random.Random(options.seed)
        self._tasks: list[asyncio.Task[None]] = []
        self._num = self.tokens = 0
        self._gaps_s: list[
            tuple[float, int]
        ] = []  # between two outputs of a request, and tokens of the later
        self._offer: Any = None
        self._space = -1
        self._lenders: list[Any] = []

    async def open(self, most_bytes: int, page_bytes: int) -> dict[str, Any]:
        """Started; nothing runs yet."""
        await self._engine.start()
        self._client.start()
        if not await self._client.wait_connected(10_000):
            raise ConnectionError("the mempool does not answer")
        space = await self._own()
        self._space = space.number
        found = {"page_bytes": space.page_bytes, "unit": "tokens", "space": space.number}
        if self._options.lenders:
            self._open_lenders(most_bytes // self._options.lenders, page_bytes)
            found["page_bytes"] = page_bytes
        return found

    async def load(self) -> dict[str, Any]:
        """Requests run from now on; returns when they have for a while."""
        self._tasks = [asyncio.create_task(self._client_loop()) for _ in range(self._options.requests)]
        await asyncio.sleep(self._options.settle_s)
        return {}

    def _open_lenders(self, most_bytes: int, page_bytes: int) -> None:
        """A space on each GPU. The engine has forked by now: this process may ask CUDA for names."""
        import torch

        from shared.aqua.lender import Lender, LenderSettings
        from shared.aqua.local_memory import mempool_device

        options = self._options
        for rank in range(options.lenders):
            device = torch.device(f"cuda:{rank}" if options.device == "cuda" else "cpu")
            name = f"lender-{rank}"
            settings = LenderSettings(
                options.socket, name, mempool_device(device, name), most_bytes,
                coordinator_url=options.coordinator_url, page_bytes=page_bytes,
            )  # fmt: skip
            self._lenders.append(Lender(settings))

    async def _own(self) -> Any:
        status = await self._client.status()
        key = self._engine.description.content_key
        return next(s for s in status.spaces if s.content_key == key and s.engines)

    async def _client_loop(self) -> None:
        options = self._options
        first = self._rng.randrange(1, options.output_tokens + 1)
        await self._ask(first)
        while True:
            await self._ask(options.output_tokens)

    async def _ask(self, max_tokens: int) -> None:
        from shared.engine.interface import EngineRequest
        from shared.wire.requests import SamplingSpec

        options = self._options
        self._num += 1
        prompt = [self._rng.randrange(10, options.vocabulary) for _ in range(options.prompt_tokens)]
        sampling = SamplingSpec(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        request = EngineRequest(f"r{self._num}", "colocated", prompt, sampling, self._seed)
        last_s = 0.0
        async with contextlib.aclosing(self._engine.generate(request)) as deltas:
            async for delta in deltas:
                now_s = time.perf_counter()
                if last_s and delta.token_ids:
                    self._gaps_s.append((now_s - last_s, len(delta.token_ids)))
                self.tokens += len(delta.token_ids)
                last_s = now_s

    async def lend(self, num_bytes: int) -> dict[str, Any]:
        """Offered, and set aside by the engine. Raises: RuntimeError when it cannot spare so much."""
        if self._lenders:
            share = num_bytes // len(self._lenders)
            return {"lent_bytes": sum([await self._lend_one(lender, share) for lender in self._lenders])}
        self._offer = await self._offered(num_bytes)
        space = await self._own()
        end_s = time.monotonic() + PATIENCE_S
        while space.pages_by_state.get("leased", 0) < num_bytes // space.page_bytes:
            if time.monotonic() > end_s:
                raise RuntimeError(f"the engine gave back {space.pages_by_state} for {num_bytes} bytes")
            await asyncio.sleep(POLL_S)
            space = await self._own()
        return {"lent_bytes": num_bytes}

    async def _lend_one(self, lender: Any, num_bytes: int) -> int:
        from shared.errors import Overloaded

        end_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                return await asyncio.to_thread(lender.lend, num_bytes)
            except Overloaded:
                if time.monotonic() > end_s:
                    raise
                await asyncio.sleep(0.05)

    async def _offered(self, num_bytes: int) -> Any:
        from shared.ids import InstanceId, SpaceId
        from shared.wire.lending import LendingRefused, OfferMemory
        from shared.wire.mempool_lending import LendingDone

        boot, end_s = self._client.boot_generation, time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            view = await self._market.market()
            mine = [] if isinstance(view, LendingRefused) else view.mempools
            mine = [m for m in mine if m.boot_generation == boot]
            made: Any = None
            if mine:
                body = OfferMemory(
                    producer=InstanceId(INSTANCE), mempool=mine[0].mempool, boot_generation=boot,
                    space=SpaceId(self._space), length_bytes=num_bytes,
                )  # fmt: skip
                made = await self._market.offer(body)
            if mine and not isinstance(made, LendingRefused):
                answer = await self._client.present(made.offer, timeout_ms=10_000)
                if not isinstance(answer, LendingDone):
                    raise RuntimeError(f"the mempool did not take the offer: {answer}")
                return made.offer
            await asyncio.sleep(0.05)
        raise RuntimeError("the coordinator takes no offer")

    async def window(self, seconds: float) -> dict[str, Any]:
        """Tokens that came out within `seconds`; TPOT is over all gaps that ended there, in ms."""
        self._gaps_s = []
        tokens, began_s = self.tokens, time.perf_counter()
        await asyncio.sleep(seconds)
        took_s, gaps = time.perf_counter() - began_s, self._gaps_s
        for task in self._tasks:
            if task.done():
                task.result()
        each = [1e3 * gap_s / count for gap_s, count in gaps]
        return {
            "items": self.tokens - tokens, "seconds": took_s,
            "tpot_mean_ms": 1e3 * sum(gap_s for gap_s, _ in gaps) / sum(count for _, count in gaps),
            "tpot_p50_ms": quantile(each, 0.5), "tpot_p99_ms": quantile(each, 0.99),
        }  # fmt: skip

    async def reclaim(self) -> dict[str, Any]:
        """All lent pages are the engine's again. `began_s`: of the monotonic clock; watch() of the consumer sees the
        end, which this busy process would see late."""
        from shared.wire.lending import AskReclaim, ReclaimOrder
        from shared.wire.mempool import CallFailed

        began_s = time.perf_counter()
        if self._lenders:
            for lender in self._lenders:
                await asyncio.to_thread(lender.reclaim, DEADLINE_MS)
            return {"began_s": began_s}
        offer = self._offer
        order = ReclaimOrder(
            reclaim_id="measured", offer_id=offer.offer_id, keep_bytes=0, deadline_ms=DEADLINE_MS
        )
        answer = await self._client.present(order, timeout_ms=10_000)
        if answer is None or isinstance(answer, CallFailed):
            raise RuntimeError(f"the mempool did not take the order: {answer}")
        while (await self._own()).pages_by_state.get("leased", 0):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        ask = AskReclaim(offer_id=offer.offer_id, producer=offer.producer, deadline_ms=DEADLINE_MS)
        await self._market.reclaim(ask)
        return {"began_s": began_s}

    async def close(self) -> None:
        """Requests are aborted, the engine's processes end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()
        await self._market.close()
        await self._engine.close()


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--coordinator-url", required=True)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--lenders", type=int, default=0)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--settle-s", type=float, default=3.0)
    parser.add_argument("--kv-cache-bytes", type=int, default=64 << 30)
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=2_048)
    parser.add_argument("--utilization", type=float, default=0.85)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Until the input ends."""
    options = parse(argv)
    from shared.engine.factory import make_engine
    from shared.engine.worker_config import WorkerSettings
    from shared.ids import InstanceId
    from shared.mempool.client import MempoolClient
    from shared.transport.lending_client import LendingClient

    options.vocabulary = json.loads(Path(options.model_dir, "config.json").read_text())["vocab_size"]
    settings = WorkerSettings(
        instance=INSTANCE, role="colocated", model_dir=options.model_dir, model_name="bench",
        device=options.device, load_format="dummy", mempool_socket=options.socket, kv_cache="pages",
        kv_space="own", dtype="float32" if options.device == "cpu" else "auto", block_tokens=options.block_tokens,
        max_model_len=options.max_model_len, max_num_seqs=options.requests, kv_cache_bytes=options.kv_cache_bytes,
        gpu_memory_utilization=options.utilization if options.device == "cuda" else 0.0,
        tensor_parallel_size=options.ranks, calibrate="off",
    )  # fmt: skip
    engine = make_engine(settings)

    async def run() -> None:
        client = MempoolClient(options.socket, InstanceId(INSTANCE))
        market = LendingClient(options.coordinator_url, patience_ms=10_000)
        loaded = LoadedEngine(options, engine, client, market)
        names = ("open", "load", "lend", "window", "reclaim")
        try:
            await serve({name: getattr(loaded, name) for name in names})
        finally:
            await loaded.close()

    asyncio.run(run())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
