"""What a handoff from a prefill to a decode worker costs, end to end, beside computing the prompt again.

    python -m loadtest.bench_handoff [--quick] [--out FOLDER] [--commit HEAD]   writes h200x2-handoff.json

`quire up` with prefill and decode on a GPU each, 8B shape, random weights, graphs, one request at a time over HTTP.
`handoff`: time to the decode worker's first token, less what prefill computed: the copy of the pages, one decode step,
and everything that passes the messages on. Where decode goes on behind prefill's token (decision 0017) that is the
second of the answer, and `ttft` lies before the handoff. `fetch`: the part in which the decode worker waits for pages,
from the receipt. `recompute`: what prefill took for the same prompt; a decode worker without the pages would need as
long.
`nixl`: the same prompts by vLLM's own NixlConnector between two stock engines (handoff_nixl.py), with nothing but the
two engines between prefill's answer and the first token; where NIXL cannot run, the result's settings say why.
"""

import argparse
import itertools
import json
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from loadtest.bench_pages import model_folder
from loadtest.handoff_nixl import NixlPair, NixlUnavailable
from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, quantile, write_result

NAME = "h200x2-handoff"
CLAIM = (
    "A handoff between workers on two GPUs of a host costs a small part of computing the prompt again: every page is "
    "pulled over NVLink by the mempool before the first token."
)
LENGTHS = (4_096, 32_768)
OUTPUT_TOKENS = 12


def metrics_from_samples(samples: Samples) -> Metrics:
    """Medians by prompt length."""
    out: Metrics = {}
    for length in sorted({s["prompt_tokens"] for s in samples}):
        mine = [s for s in samples if (s["prompt_tokens"], s["system"]) == (length, "quire")]
        name = f"{length // 1024}k"
        for key in ("handoff", "fetch", "recompute", "ttft", "gap"):
            out[f"{name}_{key}_ms"] = quantile([s[f"{key}_ms"] for s in mine], 0.5)
        out[f"{name}_pulled_gb_per_s"] = quantile(
            [s["pulled_bytes"] / 1e6 / s["fetch_ms"] for s in mine], 0.5
        )
        out[f"{name}_handoff_of_recompute_ratio"] = out[f"{name}_handoff_ms"] / out[f"{name}_recompute_ms"]
        out[f"{name}_disaggregated_ratio"] = sum(s["disaggregated"] for s in mine) / len(mine)
        nixl = [s for s in samples if (s["prompt_tokens"], s["system"]) == (length, "nixl")]
        if nixl:
            for key in ("handoff", "recompute", "ttft", "gap"):
                out[f"{name}_nixl_{key}_ms"] = quantile([s[f"{key}_ms"] for s in nixl], 0.5)
            out[f"{name}_handoff_of_nixl_ratio"] = out[f"{name}_handoff_ms"] / out[f"{name}_nixl_handoff_ms"]
    return out


def one(client: httpx.Client, model: str, prompt: list[int]) -> dict[str, Any]:
    """A streamed request; times in ms from its start."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "stream": True,
        "ignore_eos": True, "quire_receipt": True, "return_token_ids": True,
    }  # fmt: skip
    begin, at, receipt = time.perf_counter(), [], {}
    with client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"])
            receipt = event.get("quire_receipt") or receipt
            if event["choices"] and event["choices"][0].get("token_ids"):
                at.append((time.perf_counter() - begin) * 1e3)
    gaps = [b - a for a, b in itertools.pairwise(at)]
    stages = {stage["stage"]: stage for stage in receipt["stages"]}
    prefill_ms = stages["prefill"].get("compute_ms", 0.0)
    by_decode = at[1 if stages.get("decode", {}).get("handoff_mode") == "continue" else 0]
    return {
        "system": "quire",
        "prompt_tokens": len(prompt),
        "ttft_ms": round(at[0], 3),
        "gap_ms": round(quantile(gaps, 0.5), 3),
        "handoff_ms": round(by_decode - prefill_ms - stages["prefill"].get("queue_ms", 0.0), 3),
        "fetch_ms": stages.get("decode", {}).get("fetch_ms", 0.0),
        "recompute_ms": prefill_ms,
        "disaggregated": receipt["placement"] == "disaggregated",
        "stages": receipt["stages"],
    }


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Samples of one cluster."""
    from tests.support.local_cluster import LocalCluster

    model = Path(options.model_dir) if options.model_dir else model_folder(folder / "model-8b")
    flags = ["--device", options.device, "--topology", "disaggregated", "--model", str(model)]
    for pair in options.set:
        flags += ["--set", pair]
    env = {"HF_HUB_OFFLINE": "1", **({"QUIRE_WORKER_ENFORCE_EAGER": "true"} if options.eager else {})}
    if not options.model_dir:
        env["QUIRE_WORKER_LOAD_FORMAT"] = "dummy"
    lengths = [int(word) for word in options.lengths.split(",")]
    rng = random.Random(options.seed)
    samples: list[dict[str, Any]] = []
    with LocalCluster(folder / "home", *flags, env=env) as cluster:
        with httpx.Client(base_url=cluster.url, timeout=120, trust_env=False) as client:
            name = client.get("/v1/models").json()["data"][0]["id"]
            for turn in range(options.repeats + 1):
                for length in lengths:
                    before = cluster.pool()
                    sample = one(client, name, [rng.randrange(300, 4000) for _ in range(length)])
                    after = cluster.pool()
                    blocks = after["counters"].get("blocks_pulled", 0) - before["counters"].get(
                        "blocks_pulled", 0
                    )
                    sample["pulled_blocks"] = blocks
                    sample["pulled_bytes"] = blocks * after["page_bytes"]
                    print({k: v for k, v in sample.items() if k != "stages"}, flush=True)
                    if turn:  # the first of each length warms up
                        samples.append({"turn": turn, **sample})
        print(json.dumps(cluster.pool().get("copies", {})), flush=True)
    return samples


def measure_nixl(options: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Samples of two stock engines, and what kept them from running ("" when they ran)."""
    model = Path(options.model_dir) if options.model_dir else model_folder(folder / "model-8b-nixl")
    lengths = [int(word) for word in options.lengths.split(",")]
    flags = ["--max-model-len", str(max(lengths) + 64), *shlex.split(options.nixl_flags)]
    flags += ["--eager"] if options.eager else []
    rng = random.Random(options.seed)
    samples: list[dict[str, Any]] = []
    try:
        with NixlPair(model, folder, options.device, flags) as pair:
            for turn in range(options.repeats + 1):
                for length in lengths:
                    prompt = [rng.randrange(300, 4000) for _ in range(length)]
                    sample = {"system": "nixl", **pair.one(prompt, OUTPUT_TOKENS)}
                    print(sample, flush=True)
                    if turn:  # the first of each length warms up, and links the two
                        samples.append({"turn": turn, **sample})
    except NixlUnavailable as error:
        print(f"NixlConnector: {error}", flush=True)
        return [], str(error)[:300]
    return samples, ""


def main(argv: Sequence[str]) -> int:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two of each length; writes no result file")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model-dir", default="", help="a real model instead of the 8B shape")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--set", action="append", default=[], help="cluster setting, e.g. kv_space=own")
    parser.add_argument(
        "--nixl-flags", default="", help="for handoff_nixl, e.g. '--kv-cache-bytes 8589934592'"
    )
    parser.add_argument("--no-nixl", action="store_true")
    parser.add_argument(
        "--eager", action="store_true", help="no graphs, in either: a step then waits for two launches"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default=str(RESULTS))
    parser.add_argument("--commit", default="")
    options = parser.parse_args(argv)
    if options.quick:
        options.repeats = 2
    if not any(pair.startswith("max_model_len=") for pair in options.set):
        options.set.append(f"max_model_len={max(map(int, options.lengths.split(','))) + 64}")
    with tempfile.TemporaryDirectory() as name:
        samples = measure(options, Path(name))
        nixl, missing = ([], "left out") if options.no_nixl else measure_nixl(options, Path(name))
    samples += nixl
    metrics = metrics_from_samples(samples)
    for key, value in metrics.items():
        print(f"{key:40} {value:12.3f}")
    if not options.quick:
        settings = {
            "shape": "8B" if not options.model_dir else Path(options.model_dir).name, "lengths": options.lengths,
            "repeats": options.repeats, "output_tokens": OUTPUT_TOKENS, "cluster": options.set, "eager": options.eager,
            "nixl_connector": missing or "ran",
        }  # fmt: skip
        path = write_result(
            NAME, claim=CLAIM, command="python -m loadtest.bench_handoff " + " ".join(argv), settings=settings,
            metrics=metrics, samples=samples, folder=Path(options.out), commit=options.commit,
        )  # fmt: skip
        print(f"wrote {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
