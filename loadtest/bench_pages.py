"""vLLM on the mempool's pages beside stock vLLM in its fastest configuration, on one GPU.

    python -m loadtest.bench_pages [--quick] [--out FOLDER] [--commit HEAD]   writes loadtest/results/h200-vmm.json

8B shape, random weights. The engines take turns on the same GPU, each in a process of its own (pages_engine.py).
Ratios are pages over stock: throughput of cold and of cached prompts (the smaller one counts), p99 of the engine
core's steps while all requests decode, median time to first output (the larger ratio counts). `gap`: between two
outputs as a client sees them, which has each front's own work for 256 tokens in it.
`capacity_ratio`: tokens that fit, per byte of GPU memory used as seen from outside, the mempool's context included.
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

from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, quantile, write_result

NAME = "h200-vmm"
CLAIM = (
    "With its KV cache in the mempool's pages vLLM serves at least 0.98 of stock vLLM's output tokens per second, "
    "with a p99 step and a time to first token of at most 1.02 of stock's, and at least 0.97 of its KV capacity."
)
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
    "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def metrics_from_samples(samples: Samples) -> Metrics:
    """See the module. Medians over rounds."""
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
        facts = [s for s in samples if (s["engine"], s["kind"]) == (engine, "facts")]
        if facts:
            out[f"{engine}_capacity_tokens"] = facts[-1]["num_blocks"] * facts[-1]["block_tokens"]
            out[f"{engine}_used_bytes"] = facts[-1]["used_bytes"]
    if "pages_cold_tokens_per_s" in out and "stock_cold_tokens_per_s" in out:
        both = ("cold", "cached")

        def ratio(name: str, kind: str) -> float:
            return out[f"pages_{kind}_{name}"] / out[f"stock_{kind}_{name}"]

        for kind in both:
            out[f"{kind}_throughput_ratio"] = ratio("tokens_per_s", kind)
        out["throughput_ratio"] = min(ratio("tokens_per_s", kind) for kind in both)
        out["step_p99_ratio"] = max(ratio("step_p99_ms", kind) for kind in both)
        out["ttft_ratio"] = max(ratio("ttft_p50_ms", kind) for kind in both)
        if out["stock_used_bytes"] and out["pages_used_bytes"]:
            per_byte = {e: out[f"{e}_capacity_tokens"] / out[f"{e}_used_bytes"] for e in ("stock", "pages")}
            out["capacity_ratio"] = per_byte["pages"] / per_byte["stock"]
    return out


def model_folder(folder: Path) -> Path:
    """A model of 8B shape without weights; the tokenizer is there because vLLM wants one."""
    demo = ROOT / "deploy" / "models" / "quire-demo"
    folder.mkdir()
    for path in demo.iterdir():
        if path.suffix in (".json", ".jinja") and path.name not in ("config.json", "generation_config.json"):
            (folder / path.name).write_bytes(path.read_bytes())
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
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
        subprocess.run(words, cwd=ROOT, check=True, timeout=options.engine_timeout_s)
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


def main(argv: Sequence[str]) -> int:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round each, stock once; writes no result file"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--order", default="stock,pages,pages,stock")
    parser.add_argument("--model-dir", default="")
    parser.add_argument("--engine-flags", default="", help="for pages_engine, e.g. '--requests 64'")
    parser.add_argument("--engine-timeout-s", type=float, default=400)
    parser.add_argument("--out", default=str(RESULTS))
    parser.add_argument("--commit", default="")
    options = parser.parse_args(argv)
    order = ["stock", "pages"] if options.quick else options.order.split(",")
    if options.quick:
        options.engine_flags += " --rounds 1"
    samples: list[dict[str, Any]] = []
    failed = False
    with tempfile.TemporaryDirectory(prefix="quire-pages-") as name:
        folder = Path(name)
        options.model_dir = options.model_dir or model_folder(folder / "llama-8b-shape")
        for number, engine in enumerate(order):
            try:
                samples += run_engine(engine, number, folder, options)
            except (subprocess.SubprocessError, OSError, ValueError) as error:
                print(f"{engine} {number}: {error}", flush=True)
                failed = True
    metrics = metrics_from_samples(samples)
    for key in sorted(metrics):
        print(f"{key:34} {metrics[key]:16.4f}")
    if not options.quick and not failed:
        path = write_result(
            NAME,
            claim=CLAIM,
            command=shlex.join(["python", "-m", "loadtest.bench_pages", *argv]),
            settings={"order": order, "engine_flags": options.engine_flags, "model": LLAMA_8B},
            metrics=metrics,
            samples=samples,
            folder=Path(options.out),
            commit=options.commit,
        )
        print(f"wrote {path.name}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
