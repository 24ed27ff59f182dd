"""Long prompts through serving, with and without a block table: offline throughput, latency under load, on one GPU.

    python -m loadtest.bench_arxiv_long [--keep FILE] [--budget-s 480] [--out FOLDER] [--commit HEAD]

writes h200-arxiv-long.json (vAttention Figures 9 and 10, bounded). 8B shape, random weights, every engine eager, so
that only the cache and its kernel differ: vLLM's own blocks of 16, our cross-layer blocks of 64, token-major and
layer-major request slots; FlashAttention-3. `offline`: prompts of 64K to 128K tokens all at once, requests per second
until the last one ended. `online`: the lengths of the workload arxiv-long (22K to 45K), Poisson arrivals, time from
arrival to the last token. Answers are cut at 512 tokens. Requests that a part had no time for count as unfinished, and
the ratios of that part are left out. `*_ratio`: of that layout over blocks of 16, above 1 is better.
"""

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.bench_pages import LLAMA_8B, model_folder
from loadtest.progress import Progress
from loadtest.registry import RESULTS
from loadtest.results import Metrics, Samples, quantile, write_result
from loadtest.waiting_engines import EngineFailed, Waiting

NAME = "h200-arxiv-long"
CLAIM = (
    "vLLM serves prompts of 22K to 128K tokens from request slots without a block table, with unmodified kernels; "
    "throughput offline and latency under load beside blocks are stated, whichever is better."
)
ENGINES = {  # name: (engine, flags)
    "paged16": ("stock", []),
    "cross-layer64": ("cross-layer", ["--block-tokens", "64"]),
    "token-major": ("token-major", ["--block-tokens", "64"]),
    "layer-major": ("layer-major", ["--block-tokens", "1024"]),
}
BASE = "paged16"


def metrics_from_samples(samples: Samples) -> Metrics:
    """See the module."""
    out: Metrics = {}
    for row in samples:
        if row["kind"] not in ("offline", "online"):
            continue
        name, done = f"{row['kind']}_{row['engine'].replace('-', '_')}", row["requests"]
        out[f"{name}_unfinished_requests"] = row["asked"] - len(done)
        if not done:
            continue
        latencies = [each["latency_ms"] for each in done]
        out[f"{name}_latency_p50_ms"] = quantile(latencies, 0.5)
        out[f"{name}_latency_p99_ms"] = quantile(latencies, 0.99)
        out[f"{name}_ttft_p50_ms"] = quantile([each["ttft_ms"] for each in done], 0.5)
        if row["kind"] == "offline":
            out[f"{name}_requests_per_s"] = len(done) / row["wall_s"]
            out[f"{name}_prompt_tokens_per_s"] = sum(each["prompt_tokens"] for each in done) / row["wall_s"]
    for engine in ENGINES:
        if engine != BASE:
            out |= _ratios(out, engine.replace("-", "_"))
    return out


def _ratios(metrics: Metrics, name: str) -> Metrics:
    out: Metrics = {}
    for kind, unit in (
        ("offline", "requests_per_s"),
        ("online", "latency_p50_ms"),
        ("online", "latency_p99_ms"),
    ):
        mine, base = f"{kind}_{name}", f"{kind}_{BASE}"
        if f"{mine}_{unit}" not in metrics or f"{base}_{unit}" not in metrics:
            continue
        if metrics[f"{mine}_unfinished_requests"] or metrics[f"{base}_unfinished_requests"]:
            continue
        over = metrics[f"{mine}_{unit}"] / metrics[f"{base}_{unit}"]
        what = unit.removesuffix("_ms").removesuffix("_per_s")
        out[f"{mine}_{what}_ratio"] = over if kind == "offline" else 1 / over
    return out


def measure(options: argparse.Namespace, folder: Path, progress: Progress) -> None:
    """Every engine that is not measured yet, while there is time."""
    end_s = time.monotonic() + options.budget_s
    model = Path(options.model_dir) if options.model_dir else model_folder(folder / "llama-8b-shape")
    waiting = Waiting(folder)
    todo = [name for name in options.engines.split(",") if not progress.has(engine=name, kind="facts")]
    try:
        for name in todo:
            engine, flags = ENGINES[name]
            given = [*flags, "--device", options.device, *shlex.split(options.engine_flags)]
            waiting.begin(name, ["loadtest.arxiv_engine", *given, engine, str(model)])
        for name in todo:
            left_s = end_s - time.monotonic()
            if left_s < options.engine_s:
                print(f"{name}: no time left", flush=True)
                continue
            try:
                found = waiting.measure(name, left_s, in_pages=ENGINES[name][0] != "stock")
            except EngineFailed as error:
                print(error, flush=True)
                continue
            for sample in found.pop("samples"):
                progress.add({"engine": name, **sample})
            progress.add({"engine": name, "kind": "facts", **found})
    finally:
        waiting.close()


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", default=",".join(ENGINES), help="in this order")
    parser.add_argument("--quick", action="store_true", help="writes no result file")
    parser.add_argument("--keep", type=Path, help="file of what is measured; a later call goes on there")
    parser.add_argument("--budget-s", type=float, default=480.0, help="it ends by then")
    parser.add_argument("--engine-s", type=float, default=95.0, help="no engine is begun with less time left")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model-dir", default="")
    parser.add_argument("--engine-flags", default="", help="for arxiv_engine")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="")
    return parser.parse_args(argv)


def said(row: dict[str, Any]) -> str:
    """A line for a sample."""
    shown = {key: value for key, value in row.items() if key not in ("requests", "counters")}
    return json.dumps(shown | ({"done": len(row["requests"])} if "requests" in row else {}))


def main(argv: Sequence[str]) -> int:
    """Measure, write what there is once blocks and one layout without them are measured. Exit status 1: not yet."""
    options = parsed(argv)
    begun_s = time.monotonic()
    progress = Progress(options.keep, said)
    with tempfile.TemporaryDirectory(prefix="quire-arxiv-") as name:
        measure(options, Path(name), progress)
    metrics = metrics_from_samples(progress.samples)
    enough = any(key.endswith("_ratio") for key in metrics)
    if enough and not options.quick:
        path = write_result(
            NAME, claim=CLAIM, command=shlex.join(["python", "-m", "loadtest.bench_arxiv_long", *argv]),
            settings={"engines": options.engines, "engine_flags": options.engine_flags, "model": LLAMA_8B},
            metrics=metrics, samples=progress.samples, folder=options.out, commit=options.commit,
        )  # fmt: skip
        print(f"wrote {path.name}")
    for key in sorted(metrics):
        print(f"{key:52} {metrics[key]:14.3f}")
    lacking = [name for name in ENGINES if not progress.has(engine=name, kind="facts")]
    print(f"{time.monotonic() - begun_s:.0f} s; not measured yet: {', '.join(lacking) or 'nothing'}")
    return int(not enough)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
