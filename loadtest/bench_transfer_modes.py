"""by-request-agg, by-request and by-layer: what a handoff waits for, prompt by prompt and under load (MemServe 5.2).

    python -m loadtest.bench_transfer_modes --device cpu                     writes transfer-modes.json
    python -m loadtest.bench_transfer_modes --device cuda [--out F] [--commit C]     h200x2-transfer-modes.json

`move`: blocks of one prompt of the 8B shape by the mempool's mover between two spaces (host memory, or a GPU each),
behind a clock that computes 32 layers at the pace of LAYER_US_PER_TOKEN. `exposed`: from the last layer to the last
byte. `prompt`: `quire up` with prefill and decode apart, one request at a time; handoff and fetch as in
bench_handoff.py. `rate`: 1,024 prompt and 32 answer tokens, Poisson arrivals, on the same clusters: job completion
time, time to the first and second token (MemServe Figure 12). On CPU the engine is the demo model, with spaces apart
by `kv_space = own`; cuda needs two GPUs, under 9 minutes.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx

from loadtest.bench_handoff import one
from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, quantile, write_result
from loadtest.sse import events, shown_ids
from shared.kv.transfer_mode import TransferMode

NAMES = {"cpu": "transfer-modes", "cuda": "h200x2-transfer-modes"}
CLAIM = (
    "A layer that is sent while the next one is computed is not waited for: what a handoff adds behind the prompt's "
    "last layer is smallest by layer, and whole pages cost less than layers sent when the prompt is done."
)
SHORT = {
    TransferMode.BY_REQUEST_AGG: "agg",
    TransferMode.BY_REQUEST: "request",
    TransferMode.BY_LAYER: "layer",
}
LAYER_US_PER_TOKEN = {
    "cpu": 10.0,
    "cuda": 0.73,
}  # cuda: 4,096 tokens of the 8B shape take 96 ms (h200x2-handoff)
BLOCKS = (16, 64)
MOVE_LENGTHS = {"cpu": (512, 1_024, 2_048), "cuda": (1_024, 2_048, 4_096, 16_384, 32_768)}
PROMPT_LENGTHS = {"cpu": (512, 1_500, 3_000), "cuda": (1_024, 4_096, 16_384, 32_768)}
RATES = {"cpu": (0.5, 1.5), "cuda": (2.0, 8.0, 16.0)}
RATE_S = {"cpu": 10.0, "cuda": 12.0}
RATE_PROMPT, RATE_OUTPUT = 1_024, 32

Sample = dict[str, Any]


def metrics_from_samples(samples: Samples) -> Metrics:
    """Medians of what is exposed, fetched and handed off; means of job completion."""
    out: Metrics = {}
    for mode, short in SHORT.items():
        mine = [s for s in samples if s["mode"] == mode]
        moves = [s for s in mine if s["kind"] == "move"]
        for block, tokens in sorted({(s["block_tokens"], s["tokens"]) for s in moves}):
            rows = [s for s in moves if (s["block_tokens"], s["tokens"]) == (block, tokens)]
            name = f"{short}_block{block}_{tokens}"
            out[f"{name}_exposed_ms"] = quantile([s["exposed_ms"] for s in rows], 0.5)
            out[f"{name}_calls_count"] = quantile([s["parts"] for s in rows], 0.5)
        prompts = [s for s in mine if s["kind"] == "prompt"]
        for tokens in sorted({s["prompt_tokens"] for s in prompts}):
            rows = [s for s in prompts if s["prompt_tokens"] == tokens]
            for key in ("fetch", "handoff", "recompute", "ttft"):
                out[f"{short}_{tokens}_{key}_ms"] = quantile([s[f"{key}_ms"] for s in rows], 0.5)
        for row in (s for s in mine if s["kind"] == "rate"):
            name = f"{short}_rate{row['rate']:g}".replace(".", "p")
            for key in ("jct", "ttft", "ttst"):
                out[f"{name}_{key}_mean_ms"] = fmean(row[f"{key}_ms"])
            out[f"{name}_jct_p99_ms"] = quantile(row["jct_ms"], 0.99)
    return out


async def moves(device: str, lengths: Sequence[int], repeats: int) -> list[Sample]:
    """The mover alone."""
    from loadtest.transfer_modes_rig import ModesRig

    samples: list[Sample] = []
    for block_tokens in BLOCKS:
        async with ModesRig(device, max(lengths) // block_tokens + 3, block_tokens) as rig:
            for tokens in lengths:
                layer_ms = tokens * LAYER_US_PER_TOKEN[device] / 1e3
                for turn in range(repeats + 1):
                    for mode in SHORT:
                        moved = await rig.move(mode, tokens // block_tokens, layer_ms)
                        row = {
                            "kind": "move", "mode": mode.value, "block_tokens": block_tokens, "tokens": tokens,
                            "layer_ms": round(layer_ms, 4), "exposed_ms": round(moved.exposed_ms, 3),
                            "after_first_ms": round(moved.after_first_ms, 3), "parts": moved.parts,
                            "bytes": moved.num_bytes,
                        }  # fmt: skip
                        if turn:  # the first warms up
                            samples.append(row)
                print(f"  moved {tokens} tokens in blocks of {block_tokens}", flush=True)
    return samples


def serve(options: argparse.Namespace, mode: TransferMode, folder: Path) -> list[Sample]:
    """One cluster of this mode: prompts one by one, then rates."""
    from tests.support.local_cluster import LocalCluster

    flags = ["--device", options.device]
    env = {"HF_HUB_OFFLINE": "1"}
    pairs = ["topology=disaggregated", f"transfer_mode={mode}", *options.set]
    if options.device == "cuda":
        from loadtest.bench_pages import model_folder

        flags += ["--model", options.model_dir or str(model_folder(folder.with_name(f"{mode.value}-8b")))]
        pairs.append(f"max_model_len={max(options.prompts) + 64}")
        env["QUIRE_WORKER_ENFORCE_EAGER"] = "true"
        if not options.model_dir:
            env["QUIRE_WORKER_LOAD_FORMAT"] = "dummy"
    else:
        pairs += ["kv_space=own", "dtype=float32"]
    for pair in pairs:
        flags += ["--set", pair]
    rng = random.Random(options.seed)
    samples: list[Sample] = []
    with LocalCluster(folder, *flags, env=env) as cluster:
        with httpx.Client(base_url=cluster.url, timeout=120, trust_env=False) as client:
            name = client.get("/v1/models").json()["data"][0]["id"]
            for turn in range(options.repeats + 1):
                for length in options.prompts:
                    sample = one(client, name, [rng.randrange(300, 4000) for _ in range(length)])
                    sample.pop("stages")
                    if turn:
                        samples.append({"kind": "prompt", "mode": mode.value, "turn": turn, **sample})
        loads = [load(cluster.url, name, rate, options, rng) for rate in options.rates]
        samples += [{"mode": mode.value, **row} for row in loads]
        counters = cluster.pool()["counters"]
    print(f"  {mode}: { ({k: v for k, v in counters.items() if 'pull' in k or 'layer' in k}) }", flush=True)
    return samples


def load(url: str, model: str, rate: float, options: argparse.Namespace, rng: random.Random) -> Sample:
    """Requests at this rate for rate_s seconds, each on a thread of its own; all are waited for."""
    ended: list[list[float]] = []
    lock = threading.Lock()

    def request(prompt: list[int]) -> None:
        at = times_of(url, model, prompt)
        with lock:
            ended.append(at)

    threads: list[threading.Thread] = []
    begin_s, due_s = time.perf_counter(), rng.expovariate(rate)
    while due_s < options.rate_s:
        prompt = [rng.randrange(300, 4000) for _ in range(RATE_PROMPT)]
        time.sleep(max(0.0, begin_s + due_s - time.perf_counter()))
        threads.append(threading.Thread(target=request, args=(prompt,), daemon=True))
        threads[-1].start()
        due_s += rng.expovariate(rate)
    for thread in threads:
        thread.join(180)
    if len(ended) < len(threads):
        raise RuntimeError(
            f"{len(threads) - len(ended)} of {len(threads)} requests failed at {rate} a second"
        )
    columns = zip(*((round(at[0], 2), round(at[1], 2), round(at[-1], 2)) for at in ended), strict=True)
    ttft, ttst, jct = (list(column) for column in columns)
    print(f"  rate {rate}: {len(ended)} requests, mean JCT {fmean(jct):.0f} ms", flush=True)
    return {"kind": "rate", "rate": rate, "ttft_ms": ttft, "ttst_ms": ttst, "jct_ms": jct}


def times_of(url: str, model: str, prompt: list[int]) -> list[float]:
    """When each token of a streamed answer came, in ms from the request."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": RATE_OUTPUT, "temperature": 0, "stream": True,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    begin, at = time.perf_counter(), list[float]()
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=180, trust_env=False) as response:
        lines = (f"{line}\n".encode() for line in response.iter_lines())
        for data in events(lambda: next(lines, b"")):
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(event["error"])
            at += [(time.perf_counter() - begin) * 1e3] * len(shown_ids(event))
    if len(at) < RATE_OUTPUT:
        raise RuntimeError(f"{len(at)} of {RATE_OUTPUT} tokens came")
    return at


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options with the device's defaults filled in."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="few of each; writes no result file")
    parser.add_argument("--parts", default="move,serve", help="move, serve or both")
    parser.add_argument("--model-dir", default="", help="a real model instead of the 8B shape")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], help="cluster setting, e.g. max_num_seqs=8")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default=str(RESULTS))
    parser.add_argument("--commit", default="")
    options = parser.parse_args(argv)
    options.moves = MOVE_LENGTHS[options.device]
    options.prompts = PROMPT_LENGTHS[options.device]
    options.rates, options.rate_s = RATES[options.device], RATE_S[options.device]
    if options.quick:
        options.repeats, options.moves, options.prompts = 2, options.moves[:2], options.prompts[:2]
        options.rates, options.rate_s = options.rates[:1], 5.0
    return options


def main(argv: Sequence[str]) -> int:
    """Measure and write the result file."""
    options = parse(argv)
    samples: list[Sample] = []
    if "move" in options.parts:
        samples += asyncio.run(moves(options.device, options.moves, options.repeats))
    if "serve" in options.parts:
        with tempfile.TemporaryDirectory() as name:
            for mode in SHORT:
                samples += serve(options, mode, Path(name) / mode.value)
    metrics = metrics_from_samples(samples)
    for key, value in metrics.items():
        print(f"{key:48} {value:12.3f}")
    if not options.quick and options.parts == "move,serve":
        settings = {
            "device": options.device, "moves": list(options.moves), "blocks": list(BLOCKS),
            "prompts": list(options.prompts), "rates": list(options.rates), "rate_s": options.rate_s,
            "repeats": options.repeats, "layer_us_per_token": LAYER_US_PER_TOKEN[options.device],
            "rate_prompt_tokens": RATE_PROMPT, "rate_output_tokens": RATE_OUTPUT, "cluster": options.set,
        }  # fmt: skip
        path = write_result(
            NAMES[options.device], claim=CLAIM, settings=settings, metrics=metrics, samples=samples,
            command="python -m loadtest.bench_transfer_modes " + " ".join(argv),
            folder=Path(options.out), commit=options.commit,
        )  # fmt: skip
        print(f"wrote {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
