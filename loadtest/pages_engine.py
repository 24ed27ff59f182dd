"""One engine of bench_pages.py in a process of its own: stock vLLM, or Quire's engine in the mempool's pages.

    python -m loadtest.pages_engine stock|pages MODEL_DIR OUT.json [--requests N ...] [--mempool-socket PATH]

Both run on AsyncLLM with the same model, random weights, prompts and load; all requests of a round arrive at once.
A round sends prompts that no cache knows (cold), then the same ones again (cached). Only requests/s, gaps between
outputs of a request and times to first output are looked at, the way a client sees them.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from loadtest import core_steps
from loadtest.gpu_memory import by_process, of_engine

Stream = Callable[[str, list[int], int], AsyncIterator[int]]  # id, prompt, max_tokens -> tokens per output
Work = Callable[[Stream, argparse.Namespace], Awaitable[list[dict[str, Any]]]]  # samples


async def one(stream: Stream, name: str, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """Times of one request, in ms from its start; `gaps`: between its outputs."""
    begin = time.perf_counter()
    last, ttft, count = begin, 0.0, 0
    gaps: list[float] = []
    async for num_tokens in stream(name, prompt, max_tokens):
        now = time.perf_counter()
        if count == 0:
            ttft = now - begin
        else:
            gaps.append(round((now - last) * 1e3, 3))
        last = now
        count += num_tokens
    return {"ttft_ms": round(ttft * 1e3, 3), "gaps_ms": gaps, "tokens": count, "end_s": last}


async def rounds(stream: Stream, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Samples: a warm-up that is not kept, then cold and cached rounds in turn."""
    rng = random.Random(options.seed)

    async def burst(kind: str, number: int, prompts: list[list[int]]) -> dict[str, Any]:
        begin = time.perf_counter()
        jobs = (
            one(stream, f"{kind}-{number}-{i}", prompt, options.max_tokens)
            for i, prompt in enumerate(prompts)
        )
        done = await asyncio.gather(*jobs)
        wall_s = max(d.pop("end_s") for d in done) - begin
        steady = decode_gaps(done)
        spans.append((begin, time.perf_counter()))
        return {
            "kind": kind,
            "round": number,
            "wall_s": round(wall_s, 4),
            "output_tokens": sum(d["tokens"] for d in done),
            "ttft_ms": [d["ttft_ms"] for d in done],
            "gaps_ms": steady,
        }

    def prompts() -> list[list[int]]:
        return [
            [rng.randrange(10, options.vocabulary) for _ in range(options.prompt_tokens)]
            for _ in range(options.requests)
        ]

    out: list[dict[str, Any]] = []
    spans: list[tuple[float, float]] = []
    await burst("warm", 0, prompts())
    spans.clear()
    for number in range(options.rounds):
        fresh = prompts()
        for kind in ("cold", "cached"):
            out.append(await burst(kind, number, fresh))
            print({k: v for k, v in out[-1].items() if not isinstance(v, list)}, flush=True)
            await asyncio.sleep(0.5)
    await burst("flush", 0, prompts())  # the recorder writes in batches
    for sample, (begin, end) in zip(out, spans, strict=False):
        sample["steps_ms"] = core_steps.decode_steps(options.steps, begin, end, options.requests)
        sample["driver_calls"] = core_steps.driver_calls(options.steps, begin, end, options.requests)
    return out


def decode_gaps(done: list[dict[str, Any]], most: int = 4_000) -> list[float]:
    """Gaps of the second half of every answer, when all requests decode; an even selection of at most `most`."""
    gaps = [gap for d in done for gap in d["gaps_ms"][len(d["gaps_ms"]) // 2 :]]
    stride = max(1, len(gaps) // most)
    return gaps[::stride]


async def with_stock(options: argparse.Namespace, work: Work = rounds) -> dict[str, Any]:
    """vLLM as it comes: its own runner, asynchronous scheduling, prefix caching."""
    from shared.engine import measured

    stock = measured.StockEngine(
        options.model_dir,
        max_model_len=options.max_model_len,
        max_num_seqs=options.requests,
        max_num_batched_tokens=options.batched_tokens,
        gpu_memory_utilization=options.utilization,
        kv_cache_bytes=options.kv_cache_bytes,
        enforce_eager=options.eager,
    )
    facts = {**stock.facts(), "used_bytes": measured.used_bytes()}
    samples = await work(stock.stream, options)
    facts["used_after_bytes"] = measured.used_bytes()
    facts["memory_after"] = {"processes": by_process(), "torch": of_engine(Path(options.out))}
    facts["late_steps"] = core_steps.late_steps(options.steps, options.requests)
    stock.close()
    return {**facts, "samples": samples}


async def with_pages(
    options: argparse.Namespace, engine: Any, client: Any, work: Work = rounds
) -> dict[str, Any]:
    """As a worker does: lease what the mempool knows of the prompt, then generate."""
    from shared.engine import measured
    from shared.engine.interface import EngineRequest
    from shared.engine.worker_pages import PromptPages
    from shared.kv.block_hash import chain_seed, pack_tokens
    from shared.wire.requests import SamplingSpec

    await engine.start()
    client.start()
    await client.wait_connected(10_000)
    pages = PromptPages(client, engine.description, engine.settings, kept=True)
    seed = chain_seed(engine.description.fingerprint, "")
    leased: Counter[str] = Counter()  # requests with a lease, by name without their number

    async def stream(name: str, prompt: list[int], max_tokens: int) -> AsyncIterator[int]:
        lease = await pages.for_prompt(seed, pack_tokens(prompt), "")
        leased[name.rpartition("-")[0]] += lease is not None
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

    status = await all_granted(client)
    facts = {
        "block_tokens": engine.description.block_tokens,
        "num_blocks": status.counters["pages_granted"] if status else 0,  # what the pool lets one engine have
        "page_bytes": status.page_bytes if status else 0,
        "used_bytes": measured.used_bytes(),
    }
    samples = await work(stream, options)
    facts["used_after_bytes"] = measured.used_bytes()
    facts["memory_after"] = {"processes": by_process(), "torch": of_engine(Path(options.out))}
    facts["late_steps"] = core_steps.late_steps(options.steps, options.requests)
    status = await client.status()
    counters = status.counters if status else {}
    await client.close()
    await engine.close()
    return {**facts, "samples": samples, "counters": counters, "leased": dict(leased)}


async def all_granted(client: Any, patience_s: float = 10.0) -> Any:
    """The pool's status once it has stopped granting pages: many small ones come in several messages."""
    end_s = time.monotonic() + patience_s
    status = await client.status()
    while time.monotonic() < end_s:
        await asyncio.sleep(0.3)
        now = await client.status()
        if now and status and now.counters["pages_granted"] == status.counters["pages_granted"]:
            return now
        status = now
    return status


def device_first(options: argparse.Namespace) -> None:
    """vLLM reads its environment when it is imported; then its steps are recorded."""
    from shared.engine.vllm_setup import prepare_environment

    prepare_environment(options.device, 1, in_pages=True)
    from shared.engine import measured

    measured.record_steps(options.steps)


def main(argv: list[str]) -> int:
    """Exit status 0; the result is in OUT.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=("stock", "pages"))
    parser.add_argument("model_dir")
    parser.add_argument("out")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--batched-tokens", type=int, default=8192)
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--utilization", type=float, default=0.85)
    parser.add_argument("--kv-cache-bytes", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="neither torch.compile nor CUDA graphs")
    parser.add_argument("--go", default="", help="make no engine before this file exists")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--mempool-socket", default="")
    options = parser.parse_args(argv)
    options.steps = Path(options.out).with_suffix(".steps")
    device_first(options)
    while options.go and not Path(options.go).exists():
        time.sleep(0.05)
    options.vocabulary = json.loads(Path(options.model_dir, "config.json").read_text())["vocab_size"]
    if options.engine == "stock":
        result = asyncio.run(with_stock(options))
    else:
        from shared.engine.factory import make_engine
        from shared.engine.worker_config import WorkerSettings
        from shared.ids import InstanceId
        from shared.mempool.client import MempoolClient

        settings = WorkerSettings(
            instance="bench", role="colocated", model_dir=options.model_dir, model_name="bench",
            device=options.device, load_format="dummy", mempool_socket=options.mempool_socket, kv_cache="pages",
            block_tokens=options.block_tokens, max_model_len=options.max_model_len,
            max_num_seqs=options.requests, max_num_batched_tokens=options.batched_tokens,
            gpu_memory_utilization=options.utilization, kv_cache_bytes=options.kv_cache_bytes,
            enforce_eager=options.eager,
        )  # fmt: skip
        engine = make_engine(settings)
        client = MempoolClient(options.mempool_socket, InstanceId("bench"))
        result = asyncio.run(with_pages(options, engine, client))
    Path(options.out).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
