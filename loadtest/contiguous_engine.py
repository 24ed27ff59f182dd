"""One engine of bench_contiguous.py in a process of its own: stock vLLM with blocks, or Quire with request slots.

    python -m loadtest.contiguous_engine stock|token-major|layer-major MODEL_DIR OUT.json [--block-tokens N ...]

It imports vLLM, then waits for the file --go, so that several can import while another one measures. Prompts are random
and new; `--budget-s` ends the list of measurements where it is then. Prefill: one request, time to its only token.
Decode: requests that arrive together, median gap between two outputs while all of them decode.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

from loadtest.pages_engine import Stream, decode_gaps, one

OUTPUT_TOKENS = 64
CONTEXT_TOKENS = 4096  # of each decoding request
Switch = Callable[[str], Awaitable[None]]


class Job:
    """What is measured, in order of importance. `kernels`: the engine's own first."""

    def __init__(self, options: argparse.Namespace, kernels: list[str]) -> None:
        first, rest = kernels[0], kernels[1:]
        long = [n for n in options.prefill if n > 65536]
        short = [n for n in options.prefill if n <= 65536]
        self.steps: list[tuple[str, str, int]] = [("decode", first, max(options.decode))]
        self.steps += [("prefill", first, tokens) for tokens in (*short, *long)]
        for kernel in rest:
            self.steps += [("decode", kernel, max(options.decode)), ("prefill", kernel, max(short))]
        self.steps += [("decode", first, size) for size in options.decode if size < max(options.decode)]
        for kernel in kernels:
            self.steps += [("prefill", kernel, tokens) for tokens in short]


async def measure(
    stream: Stream, switch: Switch, options: argparse.Namespace, kernels: list[str]
) -> list[dict[str, Any]]:
    """Samples, after a warm-up that is not kept."""
    rng = random.Random(7)
    samples: list[dict[str, Any]] = []

    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(10, options.vocabulary) for _ in range(tokens)]

    async def decode(size: int, context: int, number: int, tokens: int = OUTPUT_TOKENS) -> dict[str, Any]:
        jobs = [one(stream, f"decode-{number}-{i}", prompt(context), tokens) for i in range(size)]
        done = await asyncio.gather(*jobs)
        return {"batch": size, "tokens": context, "gap_ms": median(decode_gaps(done))}

    async def prefill(tokens: int, number: int) -> dict[str, Any]:
        done = await one(stream, f"prefill-{number}", prompt(tokens - 1), 1)
        return {"tokens": tokens, "ttft_ms": done["ttft_ms"]}

    await decode(2, min(options.prefill) // 4, -1, 8)
    await prefill(min(options.prefill), -1)
    begin = time.perf_counter()
    for number, (kind, kernel, size) in enumerate(Job(options, kernels).steps):
        if time.perf_counter() - begin > options.budget_s:
            print(f"  not measured: {kind} {kernel} {size}", flush=True)
            continue
        await switch(kernel)
        work = decode(size, options.context, number) if kind == "decode" else prefill(size, number)
        sample = {"part": "serving", "kernel": kernel, "kind": kind, **await work}
        samples.append(sample)
        print(f"  {sample}", flush=True)
    return samples


async def with_stock(options: argparse.Namespace, stock: Any) -> dict[str, Any]:
    """Blocks of vLLM's own, attention by block table."""

    async def keep(_kernel: str) -> None:
        return None

    out = {**stock.facts(), "samples": await measure(stock.stream, keep, options, ["flash3"])}
    stock.close()
    return out


async def with_slots(options: argparse.Namespace, engine: Any, client: Any) -> dict[str, Any]:
    """As a worker does: lease what the mempool knows of the prompt, then generate."""
    from shared.engine.interface import EngineRequest
    from shared.engine.slot_measured import slot_counters, switch_kernel
    from shared.engine.worker_pages import PromptPages
    from shared.kv.block_hash import chain_seed, pack_tokens
    from shared.wire.requests import SamplingSpec

    await engine.start()
    client.start()
    await client.wait_connected(10_000)
    pages = PromptPages(client, engine.description, engine.settings, kept=True)
    seed = chain_seed(engine.description.fingerprint, "")

    async def stream(name: str, prompt: list[int], max_tokens: int) -> AsyncIterator[int]:
        lease = await pages.for_prompt(seed, pack_tokens(prompt), "")
        request = EngineRequest(
            name, "colocated", prompt, SamplingSpec(max_tokens=max_tokens, temperature=0, ignore_eos=True), seed,
            held=lease.held if lease else None,
        )  # fmt: skip
        done = False
        async for delta in engine.generate(request):
            done = delta.request_done
            yield len(delta.token_ids)
        if lease is not None:
            pages.settle(lease.lease_id, engine, done)

    async def switch(kernel: str) -> None:
        await switch_kernel(engine, kernel)

    kernels = ["torch_sdpa"] if options.device == "cpu" else ["flash3", "torch_flash2"]
    samples = await measure(stream, switch, options, kernels)
    counters = await slot_counters(engine)
    await client.close()
    await engine.close()
    return {"block_tokens": options.block_tokens, "counters": counters, "samples": samples}


def wait_for(path: str, timeout_s: float = 600) -> None:
    """Until somebody makes the file."""
    deadline = time.monotonic() + timeout_s
    while path and not Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def parsed(argv: list[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=("stock", "token-major", "layer-major"))
    parser.add_argument("model_dir")
    parser.add_argument("out")
    parser.add_argument("--go", default="")
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--prefill", type=lambda text: [int(n) for n in text.split(",")], default=[16384])
    parser.add_argument("--decode", type=lambda text: [int(n) for n in text.split(",")], default=[1, 32])
    parser.add_argument("--context", type=int, default=CONTEXT_TOKENS)
    parser.add_argument("--max-model-len", type=int, default=131072)
    parser.add_argument("--batched-tokens", type=int, default=16384)
    parser.add_argument("--kv-cache-bytes", type=int, default=64 << 30)
    parser.add_argument("--budget-s", type=float, default=40)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--mempool-socket", default="")
    parser.add_argument("--graphs", action="store_true", help="stock only: torch.compile and CUDA graphs")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Exit status 0; the result is in OUT.json."""
    options = parsed(argv)
    from shared.engine.vllm_setup import prepare_environment

    prepare_environment(options.device, 1, in_pages=True)
    from shared.engine import measured, slot_measured, vllm_engine
    from shared.engine.worker_config import WorkerSettings
    from shared.ids import InstanceId
    from shared.mempool.client import MempoolClient

    options.vocabulary = json.loads(Path(options.model_dir, "config.json").read_text())["vocab_size"]
    max_seqs = max(options.decode)
    wait_for(options.go)
    begin = time.perf_counter()
    if options.engine == "stock":
        slot_measured.fork_cores()
        stock = measured.StockEngine(
            options.model_dir, kv_cache_bytes=options.kv_cache_bytes, block_size=options.block_tokens,
            enforce_eager=not options.graphs, max_model_len=options.max_model_len, max_num_seqs=max_seqs,
            max_num_batched_tokens=options.batched_tokens,
        )  # fmt: skip
        ready_s = time.perf_counter() - begin
        result = asyncio.run(with_stock(options, stock))
    else:
        settings = WorkerSettings(
            instance="bench", role="colocated", model_dir=options.model_dir, model_name="bench",
            device=options.device, load_format="dummy", mempool_socket=options.mempool_socket, kv_cache="pages",
            kv_layout=options.engine, block_tokens=options.block_tokens, max_model_len=options.max_model_len,
            max_num_seqs=max_seqs, max_num_batched_tokens=options.batched_tokens,
            kv_cache_bytes=options.kv_cache_bytes, enforce_eager=True,
        )  # fmt: skip
        engine = vllm_engine.VllmEngine(settings)
        ready_s = time.perf_counter() - begin
        client = MempoolClient(options.mempool_socket, InstanceId("bench"))
        result = asyncio.run(with_slots(options, engine, client))
    Path(options.out).write_text(json.dumps({"ready_s": round(ready_s, 1), **result}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
