"""The engine of bench_release.py in a process of its own: it fills its pages, decodes steadily, and presses.

    python -m loadtest.release_engine MODEL_DIR OUT.json --mempool-socket PATH [--rounds N ...]

A round: prompts that no cache knows fill the pool; requests begin to decode; once all do, and have for a while, a
client presses for memory; later it is taken again. Nothing but decoding goes on from there to the end of the round.
Behind each such round comes one with the same requests and waits in which nobody presses: contexts grow, so that later
steps take longer than earlier ones anyway.
Times are of CLOCK_MONOTONIC, which every process of the machine shares.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from loadtest import core_steps

FLUSH_TOKENS = 520  # the recorder of steps writes 500 at a time
SETTLE_S = 0.5


class Driver:
    """An engine in pages, as a worker has it; requests go to it without leases."""

    def __init__(self, options: argparse.Namespace, engine: Any, client: Any) -> None:
        from shared.kv.block_hash import chain_seed

        self.options, self.engine, self.client = options, engine, client
        self.rng = random.Random(options.seed)
        self.seed = chain_seed(engine.description.fingerprint, "")
        self.num = 0

    async def ask(self, num_tokens: int, max_tokens: int, on_token: asyncio.Event | None = None) -> None:
        """One request with a prompt of its own, to its end."""
        from shared.engine.interface import EngineRequest
        from shared.wire.requests import SamplingSpec

        self.num += 1
        prompt = [self.rng.randrange(10, self.options.vocabulary) for _ in range(num_tokens)]
        sampling = SamplingSpec(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        request = EngineRequest(f"r{self.num}", "colocated", prompt, sampling, self.seed)
        async with contextlib.aclosing(self.engine.generate(request)) as deltas:
            async for _ in deltas:
                if on_token is not None:
                    on_token.set()

    async def fill(self) -> float:
        """Until hardly any page of the pool is free or unused. How long that took."""
        begin = time.perf_counter()
        options = self.options
        status = await self.client.status()
        assert status is not None, "the mempool does not answer"
        unused = sum(status.pages_by_state.get(state, 0) for state in ("free", "granted", "writing"))
        num_tokens = unused * self.engine.description.block_tokens
        count = max(1, num_tokens // options.fill_tokens)
        for first in range(0, count, options.requests):
            batch = range(first, min(count, first + options.requests))
            await asyncio.gather(*(self.ask(options.fill_tokens, 1) for _ in batch))
        return time.perf_counter() - begin

    async def _begin(self) -> list[asyncio.Task[None]]:
        """All requests decode, and have for a while."""
        options = self.options
        begun = [asyncio.Event() for _ in range(options.requests)]
        tasks = [
            asyncio.create_task(self.ask(options.prompt_tokens, options.max_tokens, event)) for event in begun
        ]
        for event in begun:
            await event.wait()
        await asyncio.sleep(SETTLE_S)
        return tasks

    async def _end(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def calm(self, like: dict[str, Any]) -> dict[str, Any]:
        """A round without a press; its moments are as far apart as the other's."""
        tasks = await self._begin()
        begin_s = time.perf_counter()
        moments = ("begin_s", "pressed_s", "answered_s", "regain_s", "regained_s")
        at = {name: begin_s + like[name] - like["begin_s"] for name in moments}
        await asyncio.sleep(max(0.0, at["regained_s"] - time.perf_counter()))
        await self._end(tasks)
        return {"round": like["round"], "is_pressed": False, **at}

    async def round(self, number: int) -> dict[str, Any]:
        """One press under steady decoding, and the memory's way back."""
        options = self.options
        fill_s = await self.fill()
        tasks = await self._begin()
        at = [time.perf_counter()]
        await asyncio.sleep(options.window_s)
        before = await self.client.status()
        at.append(time.perf_counter())
        changed = await self.client.release_memory(options.release_bytes, wait_ms=20_000)
        at.append(time.perf_counter())
        await asyncio.sleep(SETTLE_S)
        at.append(time.perf_counter())
        back = await self.client.regain_memory(wait_ms=20_000)
        at.append(time.perf_counter())
        await self._end(tasks)
        if changed is None or back is None or before is None:
            raise RuntimeError("the mempool refused, or did not answer")
        print(f"round {number}: {changed}, {back}, {before.pages_by_state}", flush=True)
        return {
            "round": number, "is_pressed": True,
            "fill_s": round(fill_s, 3),
            "begin_s": at[0], "pressed_s": at[1], "answered_s": at[2], "regain_s": at[3], "regained_s": at[4],
            "released_bytes": changed.num_bytes, "regained_bytes": back.num_bytes,
            "pages_by_state": before.pages_by_state,
        }  # fmt: skip

    async def run(self) -> list[dict[str, Any]]:
        """All rounds, and then what the recorder of steps has not written."""
        await self.engine.start()
        self.client.start()
        await self.client.wait_connected(10_000)
        out: list[dict[str, Any]] = []
        for number in range(self.options.rounds):
            out.append(await self.round(number))
            out.append(await self.calm(out[-1]))
        await self.ask(8, FLUSH_TOKENS)
        await self.client.close()
        await self.engine.close()
        return out


def add_steps(path: Path, samples: list[dict[str, Any]], num_requests: int) -> None:
    """Steps before, during (until the memory was seen, at least until the answer) and after, in ms.

    Rounds without a press: of the same lengths, counted from the moment at which the other was pressed.
    """
    took_s = 0.0
    for sample in samples:
        if sample["is_pressed"]:
            took_s = max(sample["answered_s"], sample["seen_s"]) - sample["pressed_s"]
        seen_s = sample["pressed_s"] + took_s
        for name, begin, end in (
            ("before", sample["begin_s"], sample["pressed_s"]),
            ("during", sample["pressed_s"], seen_s),
            ("after", seen_s, sample["regain_s"]),
            ("regain", sample["regain_s"], sample["regained_s"]),
        ):
            sample[f"steps_{name}_ms"] = core_steps.decode_steps(path, begin, end, num_requests)


def main(argv: list[str]) -> int:
    """Exit status 0; the result is in OUT.json, the steps beside it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir")
    parser.add_argument("out")
    parser.add_argument("--mempool-socket", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--fill-tokens", type=int, default=4_096)
    parser.add_argument("--max-tokens", type=int, default=3_000)
    parser.add_argument("--window-s", type=float, default=1.0)
    parser.add_argument("--release-bytes", type=int, default=32 << 30)
    parser.add_argument("--kv-cache-bytes", type=int, default=48 << 30)
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=8_192)
    parser.add_argument("--batched-tokens", type=int, default=8_192)
    parser.add_argument("--utilization", type=float, default=0.85)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    from shared.engine.vllm_setup import prepare_environment

    prepare_environment(options.device, 1, in_pages=True)
    from shared.engine import measured

    measured.record_steps(Path(options.out).with_suffix(".steps"))
    from shared.engine.factory import make_engine
    from shared.engine.worker_config import WorkerSettings
    from shared.ids import InstanceId
    from shared.mempool.client import MempoolClient

    options.vocabulary = json.loads(Path(options.model_dir, "config.json").read_text())["vocab_size"]
    settings = WorkerSettings(
        instance="bench", role="colocated", model_dir=options.model_dir, model_name="bench",
        device=options.device, load_format="dummy", mempool_socket=options.mempool_socket, kv_cache="pages",
        block_tokens=options.block_tokens, max_model_len=options.max_model_len, max_num_seqs=options.requests,
        max_num_batched_tokens=options.batched_tokens, kv_cache_bytes=options.kv_cache_bytes,
        gpu_memory_utilization=options.utilization,
    )  # fmt: skip
    engine = make_engine(settings)
    client = MempoolClient(options.mempool_socket, InstanceId("bench"))
    samples = asyncio.run(Driver(options, engine, client).run())
    Path(options.out).write_text(json.dumps({"requests": options.requests, "samples": samples}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
