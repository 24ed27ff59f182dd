"""A cached context of 100K tokens reloaded for 256 new ones: from a peer GPU, from host memory, or computed again.

    python -m loadtest.bench_context_reload [--out FOLDER] [--commit HEAD]      writes h200x2-context-reload.json
    python -m loadtest.bench_context_reload --device cpu --quick                the demo model; no result file

AQUA's Figure 9a. 8B shape, random weights, one request at a time over HTTP. The engine on GPU 0 has KV memory
for a little more than the context, GPU 1 lends. Each turn: short prompts push the context's blocks out of the engine's
memory into the tier, then a request comes with the same context and other tokens at its end. One code path: the mempool
brings the blocks back from wherever they are (services/mempool/core/pulls.py); only that place differs.

TTFT = reload (the receipt's `fetch`) + prefill of what is new (its `prefill`) + its `queue` + everything else. The
first token is known by its row of log probabilities: random weights say no text, and to be told its id is to be sent
the prompt's too, which takes a client longer to read than the gateway takes in all.
`ceiling`: plain copies of as many bytes to GPU 0, from GPU 1 and from page-locked host memory, by nothing of Quire, in
the same run.
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
from loadtest.outcomes import sources_of
from loadtest.results import Metrics, Samples, quantile
from loadtest.tier_measure import add

NAME = "h200x2-context-reload"
CLAIM = (
    "A context of 100K tokens whose blocks are in a peer GPU's memory is there again 3.5 times sooner than from host "
    "memory, by time to first token of a request with 256 new tokens at its end (AQUA 9.3); else the parts say why."
)
TIERS = ("peer", "dram")
PARTS = ("reload", "prefill", "queue", "other")  # of a time to first token
FILL_TOKENS = {"cuda": 4_096, "cpu": 256}  # of each prompt that pushes the context out
TIMEOUT_S = 180.0


def metrics_from_samples(samples: Samples) -> Metrics:
    """Medians. `possible`: if the reload took what a plain copy takes and the rest stayed."""
    out: Metrics = {}
    for tier in TIERS:
        rows = [s for s in samples if (s["kind"], s.get("tier")) == ("reload", tier)]
        if not rows:
            continue
        parts = [parts_ms(row) for row in rows]
        for name in ("ttft", *PARTS):
            out[f"{tier}_{name}_ms"] = quantile([part[name] for part in parts], 0.5)
        out[f"{tier}_moved_gb"] = quantile([row["bytes_moved"] for row in rows], 0.5) / 1e9
        rates = [row["bytes_moved"] / 1e6 / row["fetch_ms"] for row in rows if row["fetch_ms"]]
        out[f"{tier}_reload_gb_per_s"] = quantile(rates, 0.5) if rates else 0.0
        copies = [s for s in samples if (s["kind"], s.get("tier")) == ("ceiling", tier)]
        if copies:
            ceiling = quantile([copy["bytes"] / 1e9 / copy["seconds"] for copy in copies], 0.5)
            out[f"{tier}_ceiling_gb_per_s"] = ceiling
            out[f"{tier}_share_of_ceiling_ratio"] = out[f"{tier}_reload_gb_per_s"] / ceiling
            at_best_ms = out[f"{tier}_moved_gb"] / ceiling * 1e3
            rest = [out[f"{tier}_{name}_ms"] for name in PARTS if name != "reload"]
            out[f"{tier}_possible_ttft_ms"] = at_best_ms + sum(rest)
        out[f"{tier}_found_ratio"] = sum(row["sources"].get(tier, 0) for row in rows) / sum(
            row["prompt_tokens"] for row in rows
        )
    computed = [s["ttft_ms"] for s in samples if s["kind"] == "recompute"]
    if computed:
        out["recompute_ttft_ms"] = quantile(computed, 0.5)
    return out | _ratios(out)


def _ratios(out: Metrics) -> Metrics:
    pairs = {
        "ttft_gain_ratio": ("dram_ttft_ms", "peer_ttft_ms"),
        "reload_gain_ratio": ("dram_reload_ms", "peer_reload_ms"),
        "possible_ttft_gain_ratio": ("dram_possible_ttft_ms", "peer_possible_ttft_ms"),
        "ceiling_gain_ratio": ("peer_ceiling_gb_per_s", "dram_ceiling_gb_per_s"),
        "recompute_over_peer_ratio": ("recompute_ttft_ms", "peer_ttft_ms"),
        "recompute_over_dram_ratio": ("recompute_ttft_ms", "dram_ttft_ms"),
    }
    return {name: out[a] / out[b] for name, (a, b) in pairs.items() if a in out and out.get(b)}


def parts_ms(row: Mapping[str, Any]) -> dict[str, float]:
    """Of a time to first token."""
    other = row["ttft_ms"] - row["fetch_ms"] - row["prefill_ms"] - row["queue_ms"]
    parts = {
        "reload": row["fetch_ms"],
        "prefill": row["prefill_ms"],
        "queue": row["queue_ms"],
        "other": other,
    }
    return {"ttft": row["ttft_ms"], **parts}


# -- measuring ------------------------------------------------------------------------------------------


class Asker:
    """One request at a time. Args: engine: up."""

    def __init__(self, engine: Engine, seed: int) -> None:
        found = engine.status()
        self._token_bytes = found["block_bytes"] / found["block_tokens"]
        self._client = httpx.Client(base_url=engine.cluster.url, timeout=TIMEOUT_S, trust_env=False)
        self._model = engine.cluster.model()
        self._random = random.Random(seed)

    def tokens(self, count: int) -> list[int]:
        """New ones."""
        return [self._random.randrange(300, 4_000) for _ in range(count)]

    def ask(self, prompt: Sequence[int]) -> dict[str, Any]:
        """TTFT over HTTP, and what the receipt says. Raises: RuntimeError on an error."""
        body = {
            "model": self._model, "prompt": list(prompt), "max_tokens": 2, "temperature": 0, "stream": True,
            "ignore_eos": True, "quire_receipt": True, "logprobs": 0,
        }  # fmt: skip
        events = tier_measure.streamed(self._client, body)  # writing its ids down is the client's time
        begin_s, ttft_ms, receipt = time.perf_counter(), 0.0, None
        for event in events:
            receipt = event.get("quire_receipt") or receipt
            if not ttft_ms and event["choices"] and event["choices"][0].get("logprobs"):
                ttft_ms = (time.perf_counter() - begin_s) * 1e3
        if receipt is None:
            raise RuntimeError("the answer has no receipt")
        stage = receipt["stages"][0]
        sources = sources_of(stage)
        came = sources.get("peer", 0) + sources.get("dram", 0)
        return {
            "prompt_tokens": len(prompt), "ttft_ms": round(ttft_ms, 3),
            **{name: round(float(stage.get(name) or 0.0), 3) for name in ("queue_ms", "fetch_ms", "prefill_ms")},
            "sources": sources, "bytes_moved": round(came * self._token_bytes),
        }  # fmt: skip

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
            others = [asker.tokens(options.fill_tokens) for _ in range(num_fills(options))]
            asker.ask(others[0])
            context = asker.tokens(options.context_tokens - options.tail_tokens)
            first = asker.ask(context + asker.tokens(options.tail_tokens))
            add(samples, {"kind": "recompute", "turn": 0, **first})
            for tier in options.tiers:
                engine.swap_to(peer=tier == "peer")
                for turn in range(options.repeats + 1):
                    for other in others:  # the same each time: they come from the tier, too
                        asker.ask(other)
                    found = asker.ask(context + asker.tokens(options.tail_tokens))
                    if turn:  # the first of a tier warms up
                        add(samples, {"kind": "reload", "tier": tier, "turn": turn, **found})
            print(json.dumps({k: v for k, v in engine.pool()["counters"].items() if v}), flush=True)
        finally:
            asker.close()
        engine.swap_to(peer=False)
        moved = [s["bytes_moved"] for s in samples if s["kind"] == "reload"]
        for row in tier_measure.ceilings(options.device, max(moved, default=0) or options.context_bytes):
            add(samples, row)
    tier_measure.say_since("all", begin_s)
    return samples


def num_fills(options: argparse.Namespace) -> int:
    """Other prompts, one after the other, until the engine's memory holds nothing of the context."""
    return -(-options.pool_tokens // options.fill_tokens) + 1


def setup_of(options: argparse.Namespace) -> Setup:
    """Of the engine: it waits for what is away as long as it takes."""
    patient = {"acquire_timeout_ms": 30_000, "fetch_wait_ms": 30_000, "lease_ttl_ms": 60_000}
    worker = {
        "max_model_len": options.context_tokens + 64, "max_num_seqs": 16,
        "max_num_batched_tokens": options.chunk_tokens, **patient,
        **({"block_tokens": 0} if options.device == "cuda" else {}),  # the default, as graphs are
    }  # fmt: skip
    mempool = {
        "pull_patience_ms": 10_000, "copy_timeout_ms": 30_000, "out_timeout_ms": 30_000,
        "out_in_flight_bytes": options.in_flight_bytes, "pin_host": options.device == "cuda",
    }  # fmt: skip
    return Setup(
        device=options.device, gpus=2 if options.device == "cuda" else 0, pool_bytes=options.pool_bytes,
        swap_bytes=int(options.pool_bytes * TIER_SHARE), worker=worker, fair={"local_policy": "fcfs"}, mempool=mempool,
        cluster=options.set, model_dir=options.model_dir,
    )  # fmt: skip


# -- the command ----------------------------------------------------------------------------------------

DEFAULTS: dict[str, dict[str, int]] = {
    "cuda": {
        # whole blocks of 64 come back, and 256 tokens are computed
        "context_tokens": 100_096, "tail_tokens": 256, "repeats": 5, "chunk_tokens": 8_192, "token_bytes": 131_072,
        "in_flight_bytes": 2 << 30,
    },
    "cpu": {
        "context_tokens": 2_048, "tail_tokens": 64, "repeats": 3, "chunk_tokens": 1_024, "token_bytes": 6_144,
        "in_flight_bytes": 64 << 20,
    },
}  # fmt: skip
POOL_SHARE = 1.15  # of the engine's memory, over the context's
TIER_SHARE = 2.5  # of a tier, over the engine's memory: the context and what pushes it out


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options with the device's defaults filled in."""
    parser = tier_measure.parser_of(__doc__, list(DEFAULTS["cuda"]), "two turns of each tier")
    parser.add_argument("--tiers", default=",".join(TIERS))
    options = parser.parse_args(argv)
    tier_measure.fill_in(options, DEFAULTS[options.device])
    if options.quick:
        options.repeats = min(2, options.repeats)
    options.tiers = options.tiers.split(",")
    options.eager = False
    options.fill_tokens = FILL_TOKENS[options.device]
    options.context_bytes = options.context_tokens * options.token_bytes
    options.pool_bytes = int(options.context_bytes * POOL_SHARE)
    options.pool_tokens = options.pool_bytes // options.token_bytes
    return options


def main(argv: Sequence[str]) -> int:
    """Measure and write the result file."""
    return tier_measure.run(
        NAME, CLAIM, "loadtest.bench_context_reload", argv, parse(argv), measure, metrics_from_samples
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
