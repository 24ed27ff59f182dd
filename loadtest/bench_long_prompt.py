"""Prompts longer than the engine's KV memory: what does not fit is read in place on a peer GPU, or in host memory.

    python -m loadtest.bench_long_prompt [--out FOLDER] [--commit HEAD]      writes h200x2-long-prompt.json
    python -m loadtest.bench_long_prompt --device cpu --quick                the demo model; no result file

AQUA's Figures 9b and 12. 8B shape, random weights, eager, one request at a time over HTTP. The engine on GPU 0 has KV
memory for --own-tokens, GPU 1 lends. One code path (docs/decisions/0022): the oldest blocks are copied out by the
mempool and mapped where the copies are, attention reads them there; only where the mempool found room differs. Every
request is new to all caches, and the loan begins anew for each, so that its blocks go where they are meant to.

A decode step = the step of a prompt that fits ("own") + reading what is far. `ceiling`: plain copies to GPU 0 from
GPU 1 and from page-locked host memory, by nothing of Quire, in the same run; `possible` is a step at that rate.
Prompts become longer until --budget-s would not suffice for the next.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from loadtest import tier_measure
from loadtest.burst_rig import Engine, Setup, make_model
from loadtest.results import Metrics, Samples, quantile
from loadtest.tier_measure import add

NAME = "h200x2-long-prompt"
CLAIM = (
    "A prompt longer than the engine's KV memory is decoded 4 times faster with what does not fit on a peer GPU than "
    "with it in host memory, one code path, attention reading in place (AQUA Figures 9b, 12); else the parts say why."
)
TIERS = ("dram", "peer")  # in this order: what is measured first has no loan
TIMEOUT_S = 160.0
POOL_SPARE_BLOCKS = 4  # blocks that the pool has beyond the engine's


def metrics_from_samples(samples: Samples) -> Metrics:
    """By ratio of prompt to memory and tier; `throughput_gain_ratio`: decode, at the longest that both tiers had."""
    out: Metrics = {}
    own = [s for s in samples if s["kind"] == "decode" and s["tier"] == "own"]
    own_ms = quantile([step_ms(s) for s in own], 0.5) if own else 0.0
    if own:
        out["own_step_ms"] = own_ms
        out["own_tokens_per_s"] = 1e3 / own_ms
    for tier in TIERS:
        copies = [s for s in samples if s["kind"] == "ceiling" and s["tier"] == tier]
        if copies:
            out[f"{tier}_ceiling_gb_per_s"] = quantile([s["bytes"] / 1e9 / s["seconds"] for s in copies], 0.5)
    far = [s for s in samples if s["kind"] == "decode" and s["tier"] in TIERS]
    for sample in far:
        out |= _of(sample, own_ms, out.get(f"{sample['tier']}_ceiling_gb_per_s", 0.0))
    for ratio in sorted({s["ratio"] for s in far}):
        at = f"x{ratio:g}"
        for name, (a, b) in {
            "decode_gain_ratio": ("peer_tokens_per_s", "dram_tokens_per_s"),
            "prefill_gain_ratio": ("peer_prefill_tokens_per_s", "dram_prefill_tokens_per_s"),
            "possible_gain_ratio": ("dram_possible_step_ms", "peer_possible_step_ms"),
        }.items():
            if out.get(f"{at}_{a}") and out.get(f"{at}_{b}"):
                out[f"{at}_{name}"] = out[f"{at}_{a}"] / out[f"{at}_{b}"]
        if f"{at}_decode_gain_ratio" in out:  # the longest comes last
            out["throughput_gain_ratio"] = out[f"{at}_decode_gain_ratio"]
            out["prefill_gain_ratio"] = out[f"{at}_prefill_gain_ratio"]
            out["longest_ratio"] = ratio
    return out


def step_ms(sample: Mapping[str, Any]) -> float:
    """Of one token behind the first."""
    return sample["decode_ms"] / sample["decode_tokens"]


def _of(sample: Mapping[str, Any], own_ms: float, ceiling: float) -> Metrics:
    at = f"x{sample['ratio']:g}_{sample['tier']}"
    step, far_gb = step_ms(sample), sample["far_bytes"] / 1e9
    out: Metrics = {
        f"{at}_tokens_per_s": 1e3 / step,
        f"{at}_step_ms": step,
        f"{at}_prefill_tokens_per_s": sample["prompt_tokens"] * 1e3 / sample["ttft_ms"],
        f"{at}_far_gb": far_gb,
        f"{at}_in_its_tier_ratio": sample["tier_bytes"] / sample["far_bytes"] if sample["far_bytes"] else 0.0,
    }
    if own_ms and step > own_ms:
        out[f"{at}_read_gb_per_s"] = far_gb / (step - own_ms) * 1e3
    if own_ms and ceiling:
        out[f"{at}_possible_step_ms"] = own_ms + far_gb / ceiling * 1e3
    return out


# -- measuring ------------------------------------------------------------------------------------------


class Asker:
    """One new request at a time. Args: engine: up."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine = engine
        self._client = httpx.Client(base_url=engine.cluster.url, timeout=TIMEOUT_S, trust_env=False)
        self._model = engine.cluster.model()
        self._random = random.Random(seed)
        self._page_bytes = int(engine.status()["block_bytes"])

    def ask(self, tier: str, ratio: float, prompt_tokens: int, answer_tokens: int) -> dict[str, Any]:
        """Times over HTTP, and what went far meanwhile. Raises: RuntimeError on an error."""
        prompt = [self._random.randrange(300, 4_000) for _ in range(prompt_tokens)]
        body = {
            "model": self._model, "prompt": prompt, "max_tokens": answer_tokens, "temperature": 0, "stream": True,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        before = self._far()
        begin_s = time.perf_counter()
        came: list[tuple[float, int]] = []  # when, how many tokens
        for event in tier_measure.streamed(self._client, body):
            ids = event["choices"][0].get("token_ids") if event["choices"] else None
            if ids:
                came.append((time.perf_counter() - begin_s, len(ids)))
        if len(came) < 2:
            raise RuntimeError(f"{len(came)} deltas in an answer of {answer_tokens} tokens")
        gone = {name: count - before[name] for name, count in self._far().items()}
        return {
            "kind": "decode", "tier": tier, "ratio": ratio, "prompt_tokens": prompt_tokens,
            "ttft_ms": round(came[0][0] * 1e3, 3), "decode_ms": round((came[-1][0] - came[0][0]) * 1e3, 3),
            "decode_tokens": sum(count for _, count in came[1:]),
            "far_bytes": sum(gone.values()) * self._page_bytes,
            "tier_bytes": gone.get(tier, 0) * self._page_bytes,
        }  # fmt: skip

    def _far(self) -> dict[str, int]:
        counters = self._engine.pool()["counters"]
        return {tier: int(counters.get(f"far_blocks_out_{tier}", 0)) for tier in TIERS}

    def close(self) -> None:
        self._client.close()


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Samples of one engine, and of plain copies while it is idle."""
    setup = setup_of(options)
    make_model(folder, setup)
    begin_s = time.monotonic()
    samples: list[dict[str, Any]] = []
    with Engine("cfs", setup, folder) as engine:
        tier_measure.say_since("ready", begin_s)
        asker = Asker(engine, options.seed)
        try:
            half = options.own_tokens // 2
            asker.ask("own", 0.5, half, 4)  # warms up
            add(samples, asker.ask("own", 0.5, half, options.answer_tokens))
            biggest = int((max(options.ratios) - 1) * options.pool_bytes)
            samples += tier_measure.ceilings(options.device, min(biggest, 2 << 30))
            took_s, last = 0.0, 1.0
            for ratio in sorted(options.ratios):
                # what reads far blocks while a prompt is computed grows with the square of what is far
                needs_s = took_s * ((ratio - 1) / (last - 1)) ** 2 if took_s else 0.0
                if time.monotonic() - begin_s + needs_s > options.budget_s:
                    print(f"  {ratio:g} times is left out: {needs_s:.0f} s more", flush=True)
                    break
                at_s, last = time.monotonic(), ratio
                for tier in TIERS:
                    engine.swap_to(peer=tier == "peer")
                    tokens = int(ratio * options.own_tokens)
                    add(samples, asker.ask(tier, ratio, tokens, options.answer_tokens))
                engine.swap_to(peer=False)
                took_s = time.monotonic() - at_s
            print(json.dumps({k: v for k, v in engine.pool()["counters"].items() if "far_" in k}), flush=True)
        finally:
            asker.close()
    tier_measure.say_since("all", begin_s)
    return samples


def setup_of(options: argparse.Namespace) -> Setup:
    """Of the engine: its memory, and room for the longest prompt beside it in either tier."""
    longest, on_gpu = max(options.ratios), options.device == "cuda"
    far_bytes = int((longest - 0.75) * options.pool_bytes)
    room_bytes = far_bytes + 2 * options.pool_bytes  # what the engine caches leaves too, for the same place
    worker = {
        "max_model_len": int(longest * options.own_tokens) + options.answer_tokens + 64, "max_num_seqs": 4,
        "max_num_batched_tokens": options.chunk_tokens, "block_tokens": options.block_tokens, "far_bytes": far_bytes,
        "report_interval_ms": 500, **({"enforce_eager": True} if on_gpu else {}),
    }  # fmt: skip
    mempool = {"copy_timeout_ms": 60_000, "out_timeout_ms": 60_000, "pin_host": on_gpu}
    return Setup(
        device=options.device, gpus=2 if on_gpu else 0, pool_bytes=options.pool_bytes,
        swap_bytes=room_bytes, worker=worker, fair={"local_policy": "fcfs"}, mempool=mempool,
        cluster=options.set, model_dir=options.model_dir,
    )  # fmt: skip


# -- the command ----------------------------------------------------------------------------------------

DEFAULTS: dict[str, dict[str, int]] = {
    "cuda": {
        "own_tokens": 16_384, "answer_tokens": 48, "chunk_tokens": 2_048, "block_tokens": 64, "token_bytes": 131_072,
    },
    "cpu": {
        "own_tokens": 512, "answer_tokens": 16, "chunk_tokens": 256, "block_tokens": 32, "token_bytes": 6_144,
    },
}  # fmt: skip
RATIOS = {"cuda": "1.5,2,3,4", "cpu": "1.5,2,3"}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options with the device's defaults filled in."""
    parser = tier_measure.parser_of(__doc__, list(DEFAULTS["cuda"]), "two lengths")
    parser.add_argument("--ratios", default="", help="of prompts to the engine's memory, e.g. 1.5,2,4")
    parser.add_argument("--budget-s", type=float, default=170.0, help="from the engine's start")
    options = parser.parse_args(argv)
    tier_measure.fill_in(options, DEFAULTS[options.device])
    options.ratios = [float(word) for word in (options.ratios or RATIOS[options.device]).split(",")]
    if min(options.ratios) <= 1.0:
        parser.error("--ratios: a prompt that fits has nothing far")
    if options.quick:
        options.ratios = options.ratios[:2]
    options.pool_bytes = (options.own_tokens + POOL_SPARE_BLOCKS * options.block_tokens) * options.token_bytes
    return options


def main(argv: Sequence[str]) -> int:
    """Measure and write the result file."""
    return tier_measure.run(
        NAME, CLAIM, "loadtest.bench_long_prompt", argv, parse(argv), measure, metrics_from_samples
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
