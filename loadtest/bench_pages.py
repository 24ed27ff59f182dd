"""vLLM on the mempool's pages beside stock vLLM in its fastest configuration, on one GPU.

    python -m loadtest.bench_pages [--quick] [--parts serve,capacity,release] [--keep FILE] [--budget-s 520]
                                   [--out FOLDER] [--commit HEAD]      writes loadtest/results/h200-vmm.json

8B shape, random weights. `serve`: the engines take turns on the same GPU, each in a process of its own
(pages_engine.py). Ratios are pages over stock: throughput of cold and of cached prompts (the smaller one counts), p99
of the engine core's steps while all requests decode, median time to first output (the larger ratio counts). `gap`:
between two outputs as a client sees them, which has each front's own work for 256 tokens in it.
`decode_driver_calls_count`: calls of CUDA's virtual memory that a thread waits for in those steps, in the engine's
process, all rounds together, of `decode_steps_count` steps; `start_driver_calls_count`: before the first round, so that
one sees the counter count.
`capacity_ratio`: tokens that fit, at stock's device memory as seen from outside, the mempool's context included; the
smallest of four shapes: 8B as it served, the other three by `capacity` (vmm_capacity.py; eager).
`release`: rounds of bench_release.py in the same run; `release_...` as there.
Over several calls --keep goes on where the last one stopped; a part that was not measured has no metric.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest import vmm_capacity
from loadtest.progress import Progress
from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, quantile, write_result

NAME = "h200-vmm"
CLAIM = (
    "With its KV cache in the mempool's pages vLLM serves at least 0.98 of stock vLLM's output tokens per second, "
    "with a p99 step and a time to first token of at most 1.02 of stock's, no call of CUDA's virtual memory in its "
    "decode steps, and at least 0.97 of its KV capacity for four shapes; under a pressure call memory is the system's "
    "again at 40 GiB/s or more."
)
PARTS = ("serve", "capacity", "release")
SERVED = "8b_tp1"
RELEASE = ("release_gib_per_s", "release_slowest_gib_per_s", "release_step_p99_ratio", "released_gib")
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
    "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def metrics_from_samples(samples: Samples) -> Metrics:
    """See the module. Medians over rounds."""
    out = _serving([s for s in samples if s["kind"] in ("cold", "cached", "facts")])
    shapes = [s for s in samples if s["kind"] == vmm_capacity.KIND]
    shapes += [
        {**s, "shape": SERVED, "token_bytes": vmm_capacity.token_bytes(LLAMA_8B)}
        for s in samples
        if s["kind"] == "facts"
    ]
    out |= vmm_capacity.metrics_of(shapes)
    ratios = [value for key, value in out.items() if key.startswith("capacity_")]
    if ratios:
        out |= {"capacity_ratio": min(ratios), "capacity_shapes_count": len(ratios)}
    released = [s for s in samples if s["kind"] == "release"]
    if released:
        from loadtest.bench_release import metrics_from_samples as release_metrics

        of_release = release_metrics(released)
        out |= {key: of_release[key] for key in RELEASE if key in of_release}
    return out


def _serving(samples: Samples) -> Metrics:
    out: Metrics = {}
    for engine in ("stock", "pages"):
        for kind in ("cold", "cached"):
            mine = [s for s in samples if (s["engine"], s["kind"]) == (engine, kind)]
            if not mine:
                continue
            rates = [s["output_tokens"] / s["wall_s"] for s in mine]
            out[f"{engine}_{kind}_tokens_per_s"] = quantile(rates, 0.5)
            steps = [step for s in mine for step in s["steps_ms"]]
            out[f"{engine}_{kind}_step_p50_ms"] = quantile(steps, 0.5)
            out[f"{engine}_{kind}_step_p99_ms"] = quantile(steps, 0.99)
            gaps = [gap for s in mine for gap in s["gaps_ms"]]
            out[f"{engine}_{kind}_gap_p99_ms"] = quantile(gaps, 0.99)
            firsts = [t for s in mine for t in s["ttft_ms"]]
            out[f"{engine}_{kind}_ttft_p50_ms"] = quantile(firsts, 0.5)
            out[f"{engine}_{kind}_ttft_p99_ms"] = quantile(firsts, 0.99)
    if "pages_cold_tokens_per_s" in out and "stock_cold_tokens_per_s" in out:
        both = ("cold", "cached")

        def ratio(name: str, kind: str) -> float:
            return out[f"pages_{kind}_{name}"] / out[f"stock_{kind}_{name}"]

        for kind in both:
            out[f"{kind}_throughput_ratio"] = ratio("tokens_per_s", kind)
        out["throughput_ratio"] = min(ratio("tokens_per_s", kind) for kind in both)
        out["step_p99_ratio"] = max(ratio("step_p99_ms", kind) for kind in both)
        out["ttft_ratio"] = max(ratio("ttft_p50_ms", kind) for kind in both)
    calls = [s["driver_calls"] for s in samples if s["engine"] == "pages" and s["kind"] != "facts"]
    if calls:
        out["decode_driver_calls_count"] = sum(found["inline"] for found in calls)
        out["decode_background_driver_calls_count"] = sum(found["background"] for found in calls)
        out["decode_steps_count"] = sum(found["steps"] for found in calls)
        out["start_driver_calls_count"] = min(found["before"] for found in calls)
    return out


def model_folder(folder: Path, config: dict[str, Any] = LLAMA_8B) -> Path:
    """A model of 8B shape without weights; the tokenizer is there because vLLM wants one."""
    demo = ROOT / "deploy" / "models" / "quire-demo"
    folder.mkdir()
    for path in demo.iterdir():
        if path.suffix in (".json", ".jinja") and path.name not in ("config.json", "generation_config.json"):
            (folder / path.name).write_bytes(path.read_bytes())
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def run_engine(engine: str, number: int, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Samples of one engine process. Raises: CalledProcessError."""
    out = folder / f"{engine}-{number}.json"
    words = [sys.executable, "-m", "loadtest.pages_engine", engine, str(options.model_dir), str(out)]
    words += ["--device", options.device, *shlex.split(options.engine_flags)]
    pool: subprocess.Popen[bytes] | None = None
    if engine == "pages":
        socket = folder / f"pool-{number}.sock"
        log = (folder / f"mempool-{number}.log").open("wb")
        admin = "127.0.0.1:0"
        pool = subprocess.Popen(
            [sys.executable, "-m", "services.mempool", "--socket", str(socket), "--admin-listen", admin],
            stdout=log, stderr=log, cwd=ROOT,
        )  # fmt: skip
        deadline = time.monotonic() + 20
        while not socket.exists() and time.monotonic() < deadline and pool.poll() is None:
            time.sleep(0.05)
        words += ["--mempool-socket", str(socket)]
    begin = time.monotonic()
    try:
        limit_s = min(options.engine_timeout_s, options.end_s - begin)
        subprocess.run(words, cwd=ROOT, check=True, timeout=limit_s)
    finally:
        if pool is not None:
            pool.terminate()
            pool.wait(20)
            sys.stdout.write((folder / f"mempool-{number}.log").read_text()[-1500:])
    found = json.loads(out.read_text())
    samples = found.pop("samples")
    print(f"{engine} {number}: {time.monotonic() - begin:.0f} s, {found}", flush=True)
    rows = [{"engine": engine, "run": number, **sample} for sample in samples]
    return [*rows, {"engine": engine, "run": number, "kind": "facts", **found}]


def serve(options: argparse.Namespace, folder: Path, progress: Progress) -> None:
    """Both engines in turn, those that are not measured yet."""
    for number, engine in enumerate(options.order):
        if progress.has(kind="facts", run=number):
            continue
        if time.monotonic() > options.end_s - options.engine_s:
            print(f"serve {engine} {number}: no time left", flush=True)
            continue
        try:
            for row in run_engine(engine, number, folder, options):
                progress.add(row)
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            print(f"{engine} {number}: {error}", flush=True)


def capacity(options: argparse.Namespace, folder: Path, progress: Progress) -> None:
    """Of the shapes that `serve` does not have."""
    own = Path(options.model_dir) if options.given_model else None
    models = {
        shape: own or model_folder(folder / shape, config)
        for shape, config in vmm_capacity.SHAPES.items()
        if shape != SERVED
    }
    rows = [s for s in progress.samples if s["kind"] == vmm_capacity.KIND]
    for row in vmm_capacity.measure(
        folder, models, {(s["shape"], s["engine"]) for s in rows}, device=options.device,
        flags=shlex.split(options.capacity_flags), end_s=options.end_s, engine_s=options.engine_s / 2,
    ):  # fmt: skip
        progress.add(row)


def release(options: argparse.Namespace, folder: Path, progress: Progress) -> None:
    """Rounds of bench_release.py."""
    from loadtest import bench_release

    if progress.has(kind="release") or time.monotonic() > options.end_s - options.engine_s:
        return
    own = argparse.Namespace(
        model_dir=str(options.model_dir), device=options.device, mempool_flags="",
        rounds=1 if options.quick else options.release_rounds, engine_flags=options.release_flags,
        engine_timeout_s=max(60.0, options.end_s - time.monotonic()),
    )  # fmt: skip
    try:
        for row in bench_release.measure(own, folder):
            progress.add({"engine": "pages", "kind": "release", "run": 0, **row})
    except (subprocess.SubprocessError, RuntimeError, OSError) as error:
        print(f"release: {error}", flush=True)


def missing(options: argparse.Namespace, samples: Samples) -> list[str]:
    """What is not measured yet."""
    out = [f"serve {n}" for n in range(len(options.order)) if not _has(samples, kind="facts", run=n)]
    out += [
        f"capacity {shape} {engine}"
        for shape in vmm_capacity.SHAPES
        for engine in vmm_capacity.ENGINES
        if shape != SERVED and not _has(samples, kind=vmm_capacity.KIND, shape=shape, engine=engine)
    ]
    return out + ([] if _has(samples, kind="release") else ["release"])


def _has(samples: Samples, **key: Any) -> bool:
    return any(all(s.get(name) == value for name, value in key.items()) for s in samples)


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round each, stock once; writes no result file"
    )
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--keep", type=Path, help="file of what is measured; a later call goes on there")
    parser.add_argument(
        "--budget-s", type=float, default=3_000.0, help="no engine is begun that may end later"
    )
    parser.add_argument("--engine-s", type=float, default=75.0, help="what an engine of `serve` may take")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--order", default="stock,pages,pages,stock")
    parser.add_argument("--model-dir", default="")
    parser.add_argument("--engine-flags", default="", help="for pages_engine, e.g. '--requests 64'")
    parser.add_argument("--capacity-flags", default="", help="for pages_engine in `capacity`")
    parser.add_argument("--release-flags", default="", help="for release_engine")
    parser.add_argument("--release-rounds", type=int, default=4)
    parser.add_argument("--engine-timeout-s", type=float, default=400)
    parser.add_argument("--out", default=str(RESULTS))
    parser.add_argument("--commit", default="")
    options = parser.parse_args(argv)
    options.order = ["stock", "pages"] if options.quick else options.order.split(",")
    options.end_s = time.monotonic() + options.budget_s
    options.given_model = bool(options.model_dir)
    if options.quick:
        options.engine_flags += " --rounds 1"
    return options


def main(argv: Sequence[str]) -> int:
    """Measure, and write the result file once both engines have served. Exit status 1: something asked for lacks."""
    options = parsed(argv)
    progress = Progress(options.keep, said)
    parts = options.parts.split(",")
    with tempfile.TemporaryDirectory(prefix="quire-pages-") as name:
        folder = Path(name)
        options.model_dir = options.model_dir or model_folder(folder / "llama-8b-shape")
        for part, work in (("serve", serve), ("capacity", capacity), ("release", release)):
            if part in parts:
                work(options, folder, progress)
    lacking = missing(options, progress.samples)
    metrics = metrics_from_samples(progress.samples)
    if not options.quick and not any(text.startswith("serve") for text in lacking):
        path = write_result(
            NAME,
            claim=CLAIM,
            command=shlex.join(["python", "-m", "loadtest.bench_pages", *argv]),
            settings={"order": options.order, "engine_flags": options.engine_flags, "model": LLAMA_8B}
            | {"shapes": vmm_capacity.SHAPES, "release_rounds": options.release_rounds},
            metrics=metrics,
            samples=progress.samples,
            folder=Path(options.out),
            commit=options.commit,
        )
        print(f"wrote {path.name}")
    for key in sorted(metrics):
        print(f"{key:38} {metrics[key]:16.4f}")
    print(f"not measured yet: {', '.join(lacking)}" if lacking else "all parts are measured")
    return int(any(text.partition(" ")[0] in parts for text in lacking))


def said(row: dict[str, Any]) -> str:
    """A line for a sample."""
    return str({key: value for key, value in row.items() if not isinstance(value, list | dict)})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
