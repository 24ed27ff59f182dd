"""One engine of bench_arxiv_long.py in a process of its own: long prompts all at once, then a Poisson stream of them.

    python -m loadtest.arxiv_engine stock|cross-layer|token-major|layer-major MODEL_DIR OUT.json [--go FILE ...]

Every engine is eager, gets the same prompts in the same order at the same times, and sees no prompt twice.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from loadtest.pages_engine import Stream, with_pages, with_stock
from loadtest.workloads.conversations import ARXIV_OUTPUT, ARXIV_PROMPT
from loadtest.workloads.distributions import Bounded

LONG_PROMPT = Bounded(
    64_000, 128_000, 88_000
)  # of the paper's 64K to 192K what fits a model of 128K; shape ours
LONG_OUTPUT_TOKENS = 248  # mean prompt over mean answer: 356
LEAST_OUTPUT_TOKENS = 6
WARM_UP = (16_384, 8)


class Load:
    """Requests by number: the same for every engine."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._rng = random.Random(options.seed)

    def prompt(self, num_tokens: float) -> list[int]:
        """Of so many tokens over `scale`."""
        count = max(8, int(num_tokens / self._options.scale))
        return [self._rng.randrange(10, self._options.vocabulary) for _ in range(count)]

    def long(self) -> list[tuple[list[int], int]]:
        """All at once: lengths at even shares of their distribution, in no order."""
        shares = [(number + 0.5) / self._options.offline for number in range(self._options.offline)]
        self._rng.shuffle(shares)
        return [
            (self.prompt(LONG_PROMPT.quantile(share)), self.output(LONG_OUTPUT_TOKENS)) for share in shares
        ]

    def online(self) -> list[tuple[float, list[int], int]]:
        """(arrival in s, prompt, output tokens)."""
        at_s, out = 0.0, []
        for _ in range(self._options.online):
            at_s += self._rng.expovariate(self._options.rate)
            prompt = self.prompt(ARXIV_PROMPT.quantile(self._rng.random()))
            out.append((at_s, prompt, self.output(ARXIV_OUTPUT.quantile(self._rng.random()))))
        return out

    def output(self, num_tokens: float) -> int:
        """Tokens of an answer, cut to what a bounded run has time for."""
        scaled = min(num_tokens, self._options.most_output) / min(self._options.scale, 16)
        return max(LEAST_OUTPUT_TOKENS, int(scaled))


async def one(stream: Stream, name: str, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """A request's lengths and times, in ms."""
    begin_s, first_s, count = time.perf_counter(), 0.0, 0
    async for num_tokens in stream(name, prompt, max_tokens):
        first_s = first_s or time.perf_counter()
        count += num_tokens
    end_s = time.perf_counter()
    return {
        "prompt_tokens": len(prompt), "output_tokens": count, "ttft_ms": round((first_s - begin_s) * 1e3, 2),
        "latency_ms": round((end_s - begin_s) * 1e3, 2),
    }  # fmt: skip


async def within(
    tasks: list[asyncio.Task[dict[str, Any]]], limit_s: float
) -> tuple[list[dict[str, Any]], float]:
    """(requests that ended in time, seconds until the last of them); the others are given up."""
    begin_s = time.perf_counter()
    done, late = await asyncio.wait(tasks, timeout=limit_s)
    wall_s = time.perf_counter() - begin_s
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    return [task.result() for task in tasks if task in done], wall_s


async def requests(stream: Stream, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Samples: offline, then online."""
    load = Load(options)
    await one(stream, "warm", load.prompt(WARM_UP[0]), WARM_UP[1])
    jobs = load.long()
    tasks = [
        asyncio.create_task(one(stream, f"offline-{number}", prompt, output))
        for number, (prompt, output) in enumerate(jobs)
    ]
    found, wall_s = await within(tasks, options.limit_s)
    samples = [
        {"kind": "offline", "asked": len(jobs), "wall_s": round(wall_s, 3), "requests": found},
    ]
    print({k: v for k, v in samples[-1].items() if k != "requests"}, flush=True)
    begin_s = time.perf_counter()

    async def later(number: int, at_s: float, prompt: list[int], output: int) -> dict[str, Any]:
        await asyncio.sleep(at_s - (time.perf_counter() - begin_s))
        return {"arrival_s": round(at_s, 3), **await one(stream, f"online-{number}", prompt, output)}

    stream_of = [asyncio.create_task(later(number, *job)) for number, job in enumerate(load.online())]
    found, wall_s = await within(stream_of, options.limit_s)
    samples.append(
        {"kind": "online", "rate_per_s": options.rate, "asked": len(stream_of), "wall_s": round(wall_s, 3),
         "requests": found}
    )  # fmt: skip
    print({k: v for k, v in samples[-1].items() if k != "requests"}, flush=True)
    return samples


def parsed(argv: list[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=("stock", "cross-layer", "token-major", "layer-major"))
    parser.add_argument("model_dir")
    parser.add_argument("out")
    parser.add_argument("--go", default="", help="make no engine before this file exists")
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--offline", type=int, default=5, help="requests at once")
    parser.add_argument("--online", type=int, default=18, help="requests of the stream")
    parser.add_argument("--rate", type=float, default=0.6, help="of the stream, requests/s")
    parser.add_argument("--most-output", type=int, default=512, help="an answer's tokens, at most")
    parser.add_argument("--limit-s", type=float, default=75.0, help="of each of both parts")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="lengths over this, to try it on a small model"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=16, help="at most at once in the engine")
    parser.add_argument("--max-model-len", type=int, default=131072)
    parser.add_argument("--batched-tokens", type=int, default=16384)
    parser.add_argument("--kv-cache-bytes", type=int, default=80 << 30)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--mempool-socket", default="")
    options = parser.parse_args(argv)
    options.utilization, options.eager = 0.9, True
    return options


def main(argv: list[str]) -> int:
    """Exit status 0; the result is in OUT.json."""
    options = parsed(argv)
    from shared.engine.vllm_setup import prepare_environment

    prepare_environment(options.device, 1, in_pages=True)
    from shared.engine import slot_measured, vllm_engine
    from shared.engine.worker_config import WorkerSettings
    from shared.ids import InstanceId
    from shared.mempool.client import MempoolClient

    options.vocabulary = json.loads(Path(options.model_dir, "config.json").read_text())["vocab_size"]
    while options.go and not Path(options.go).exists():
        time.sleep(0.05)
    slot_measured.fork_cores()
    begin_s = time.perf_counter()
    if options.engine == "stock":
        result = asyncio.run(with_stock(options, requests))
    else:
        settings = WorkerSettings(
            instance="bench", role="colocated", model_dir=options.model_dir, model_name="bench",
            device=options.device, load_format="dummy", mempool_socket=options.mempool_socket, kv_cache="pages",
            kv_layout=options.engine, block_tokens=options.block_tokens, max_model_len=options.max_model_len,
            max_num_seqs=options.requests, max_num_batched_tokens=options.batched_tokens,
            kv_cache_bytes=options.kv_cache_bytes, enforce_eager=True,
        )  # fmt: skip
        engine = vllm_engine.VllmEngine(settings)
        client = MempoolClient(options.mempool_socket, InstanceId("bench"))
        result = asyncio.run(with_pages(options, engine, client, requests))
    Path(options.out).write_text(json.dumps({"took_s": round(time.perf_counter() - begin_s, 1), **result}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
