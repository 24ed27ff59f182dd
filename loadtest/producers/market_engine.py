"""A vLLM engine of the memory market in a process of its own, for bench_long_prompt_reclaim.py: lender or borrower.

    python -m loadtest.producers.market_engine MODEL_DIR --role producer --socket PATH --coordinator-url URL

Commands (child_commands.py). producer: open, clients, window, report: from then on the mempool hears of its load as of
a worker's, and lends and takes back by it; nobody tells it to. consumer: open, borrow, prompt, watch, seen,
tokens_seen: pages of its running request lie outside its memory. Times are of time.perf_counter(), one for all.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.child_commands import serve
from loadtest.producers.lending_engine import LoadedEngine

PATIENCE_S = 120.0
BORROW_EVERY_MS, TTL_MS = 100, 120_000
POLL_S = 0.01
LOST = ("far_blocks_without_room", "far_engines_killed")


class MarketEngine(LoadedEngine):
    """Of either role: one of two engines of the same model, so that its space is known by its name."""

    _page_bytes = 0

    async def open(self) -> dict[str, Any]:  # type: ignore[override]
        """Started; nothing runs yet, and it reports no load, so that nothing of it is offered."""
        await self._engine.start()
        self._client.start()
        if not await self._client.wait_connected(10_000):
            raise ConnectionError("the mempool does not answer")
        space = await self._own()
        self._space, self._page_bytes = space.number, space.page_bytes
        return {"space": space.number, "page_bytes": space.page_bytes, "num_pages": space.num_pages}

    async def _own(self) -> Any:
        status = await self._client.status()
        return next(s for s in status.spaces if any(self._options.instance in name for name in s.engines))


class MarketProducer(MarketEngine):
    """See the module."""

    def __init__(self, options: argparse.Namespace, engine: Any, client: Any, market: Any) -> None:
        super().__init__(options, engine, client, market)
        self._wanted = 0
        self._reports: Any = None

    async def report(self) -> dict[str, Any]:
        """From now on the mempool hears of its load, as of a worker's."""
        from shared.engine.worker_loads import LoadReports
        from shared.ids import Epoch

        self._reports = LoadReports(
            self._client, self._engine.description.model,
            load=self._engine.load, num_arrived=lambda: self._num, epoch=lambda: Epoch(1),
        )  # fmt: skip
        self._reports.open()
        return {}

    async def clients(self, count: int) -> dict[str, Any]:
        """So many send requests from now on, each the next when it has its answer; who is too many ends then."""
        self._wanted = count
        self._tasks = [task for task in self._tasks if not task.done()]
        while len(self._tasks) < count:
            self._tasks.append(asyncio.create_task(self._ask_while(len(self._tasks))))
        return {}

    async def _ask_while(self, number: int) -> None:
        while number < self._wanted:
            await self._ask(self._options.output_tokens)

    async def window(self, seconds: float) -> dict[str, Any]:
        """As LoadedEngine's, with when it began, and the most requests that waited for a slot."""
        begin_s = time.perf_counter()
        measured = asyncio.create_task(super().window(seconds))
        waiting = 0
        while not measured.done():
            waiting = max(waiting, self._engine.load().num_waiting)
            await asyncio.sleep(0.05)
        return {**await measured, "begin_s": begin_s, "most_waiting": waiting}

    async def close(self) -> None:
        """As LoadedEngine's."""
        self._wanted = 0
        if self._reports is not None:
            await self._reports.close()
        await super().close()


class MarketConsumer(MarketEngine):
    """See the module. It reports no load: what it borrows is asked for in its name."""

    def __init__(self, options: argparse.Namespace, engine: Any, client: Any, market: Any) -> None:
        super().__init__(options, engine, client, market)
        self._events: list[list[float]] = []  # when tokens came, and how many
        self._course: list[list[float]] = []
        self._borrower: Any = None

    async def borrow(self, num_bytes: int) -> dict[str, Any]:
        """So many bytes are wanted from now on, whoever lends them; returns when they are there for the first time."""
        from shared.aqua.borrower import Borrower
        from shared.ids import InstanceId

        num_bytes -= num_bytes % self._page_bytes
        self._borrower = Borrower(
            InstanceId(self._options.instance), self._client, self._market, lambda _: None, wanted_bytes=num_bytes,
            min_bytes=num_bytes, ttl_ms=TTL_MS, every_ms=BORROW_EVERY_MS,
        )  # fmt: skip
        self._tasks.append(asyncio.create_task(self._borrower.run()))
        async with asyncio.timeout(PATIENCE_S):
            while not self._borrower.held_bytes:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
        return {"held_bytes": self._borrower.held_bytes}

    async def prompt(self, prompt_tokens: int, answer_tokens: int) -> dict[str, Any]:
        """Begins; returns with its first token."""
        from shared.engine.interface import EngineRequest
        from shared.wire.requests import SamplingSpec

        ids = [self._rng.randrange(10, self._options.vocabulary) for _ in range(prompt_tokens)]
        sampling = SamplingSpec(max_tokens=answer_tokens, temperature=0, ignore_eos=True)
        request = EngineRequest("long", "colocated", ids, sampling, self._seed)
        begin_s = time.perf_counter()
        running = asyncio.create_task(self._stream(request))
        self._tasks.append(running)
        async with asyncio.timeout(PATIENCE_S):
            while not self._events:
                if running.done():
                    running.result()
                    raise RuntimeError("the long prompt ended without a token")
                await asyncio.sleep(POLL_S)
        return {"begin_s": begin_s, "ttft_s": self._events[0][0] - begin_s}

    async def _stream(self, request: Any) -> None:
        async with contextlib.aclosing(self._engine.generate(request)) as deltas:
            async for delta in deltas:
                if delta.token_ids:
                    self._events.append([round(time.perf_counter(), 4), len(delta.token_ids)])

    async def watch(self) -> dict[str, Any]:
        """From now on it is looked where blocks lie, every POLL_S, and what is set aside for loans."""
        self._tasks.append(asyncio.create_task(self._watch()))
        return {}

    async def _watch(self) -> None:
        """A row where something changed: when; bytes read in lent pages, in host memory; bytes that are set aside or
        lent; reclaims so far; blocks that moved to host memory, that went back, that were lost.
        """
        while True:
            status = await self._client.status()
            now_s = round(time.perf_counter(), 4)
            if status is not None:
                pins = {"loan": 0, "dram": 0}
                for space in status.spaces:
                    for kind in pins:
                        pins[kind] += (
                            space.num_pinned * space.page_bytes if f"cpu:{kind}" in space.devices else 0
                        )
                count = status.counters.get
                row = [
                    pins["loan"], pins["dram"],
                    sum(s.pages_by_state.get("leased", 0) * s.page_bytes for s in status.spaces),
                    count("lending_loans_reclaim", 0), count("far_blocks_moved", 0), count("far_blocks_back", 0),
                    sum(count(name, 0) for name in LOST),
                ]  # fmt: skip
                if not self._course or self._course[-1][1:] != row:
                    self._course.append([now_s, *row])
            await asyncio.sleep(POLL_S)

    async def seen(self, after: int) -> dict[str, Any]:
        """Rows of the course from this one on, and tokens so far."""
        for task in self._tasks:
            if task.done():
                task.result()
        return {"course": self._course[after:], "num_rows": len(self._course), "now_s": time.perf_counter()}

    async def tokens_seen(self) -> dict[str, Any]:
        """All of them."""
        return {"rows": self._events}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir")
    parser.add_argument("--role", choices=("producer", "consumer"), required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--coordinator-url", required=True)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2_048)
    parser.add_argument("--max-model-len", type=int, default=2_048)
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--kv-cache-bytes", type=int, required=True)
    parser.add_argument("--far-bytes", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    options.instance, options.lenders = options.role, 0
    return options


def main(argv: Sequence[str]) -> int:
    """Until the input ends."""
    options = parse(argv)
    from shared.engine.factory import make_engine
    from shared.engine.worker_config import WorkerSettings
    from shared.ids import InstanceId
    from shared.mempool.client import MempoolClient
    from shared.transport.lending_client import LendingClient

    options.vocabulary = json.loads(Path(options.model_dir, "config.json").read_text())["vocab_size"]
    cuda, is_lender = options.device == "cuda", options.role == "producer"
    settings = WorkerSettings(
        instance=options.instance, role="colocated", model_dir=options.model_dir, model_name="bench",
        device=options.device, load_format="dummy", mempool_socket=options.socket, kv_cache="pages",
        kv_space="own", dtype="auto" if cuda else "float32", block_tokens=options.block_tokens,
        max_model_len=options.max_model_len, max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens, kv_cache_bytes=options.kv_cache_bytes,
        far_bytes=options.far_bytes, enforce_eager=cuda and not is_lender, calibrate="off",
    )  # fmt: skip
    engine = make_engine(settings)

    async def run() -> None:
        client = MempoolClient(options.socket, InstanceId(options.instance))
        market = LendingClient(options.coordinator_url, patience_ms=10_000)
        made = (MarketProducer if is_lender else MarketConsumer)(options, engine, client, market)
        names = (
            ("report", "clients", "window")
            if is_lender
            else ("borrow", "prompt", "watch", "seen", "tokens_seen")
        )
        try:
            await serve({name: getattr(made, name) for name in ("open", *names)})
        finally:
            await made.close()

    asyncio.run(run())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
