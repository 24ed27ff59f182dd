"""Attention without a block table against attention with one, on one GPU: kernels, then serving.

    python -m loadtest.bench_contiguous [--quick] [--parts kernels,serving] [--out FOLDER] [--commit HEAD]

writes loadtest/results/h200-contiguous.json; under four minutes, a short table last. 8B shape, random weights
(vAttention Tables 6 and 7, Figures 7, 8 and 11). Kernels (slot_measured_kernels.py): one layer's prefill of a whole
prompt, and all layers of a decode step at 16K tokens, over vLLM's blocks of 16 and 256, our cross-layer blocks of 64,
plain memory (the ceiling), and slots in both layouts; with FlashAttention-3, torch's FlashAttention-2, and vLLM's
Triton kernel. Serving (contiguous_engine.py): every engine eager, so that only the cache and its kernel differ.

Metrics: PART_KIND_SIZE_CACHE_KERNEL_UNIT; `*_ratio`: speed of the slot cache over that of blocks of 16, both with
FlashAttention-3.
"""

import argparse
import json
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.bench_pages import LLAMA_8B, model_folder
from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, write_result

NAME = "h200-contiguous"
CLAIM = (
    "vLLM serves from request slots without a block table, with unmodified kernels of two libraries; their speed "
    "beside the same kernel over blocks is stated, whichever is faster."
)
ENGINES = {  # name: (engine, flags)
    "paged16": ("stock", ["--block-tokens", "16"]),
    "token-major": ("token-major", ["--block-tokens", "64"]),
    "layer-major": ("layer-major", ["--block-tokens", "1024"]),
    "paged256": ("stock", ["--block-tokens", "256"]),
    "paged16-graphs": ("stock", ["--block-tokens", "16", "--graphs"]),
}
DEFAULT_ENGINES = "paged16,token-major,layer-major,paged256"


def _kernel_metrics(samples: Samples) -> Metrics:
    out: Metrics = {}
    for sample in samples:
        if sample["part"] != "kernel":
            continue
        name = sample["variant"].replace("-", "_").replace(".", "_")
        if sample["kind"] == "prefill":
            rate = sample["tflop"] / (sample["layer_ms"] / 1e3)
            out[f"kernel_prefill_{sample['tokens']}_{name}_tflop_per_s"] = rate
        elif sample["kind"] == "decode":
            out[f"kernel_decode_{sample['batch']}_{name}_ms"] = sample["ms"]
            out[f"kernel_decode_{sample['batch']}_{name}_gb_per_s"] = sample["gb"] / (sample["ms"] / 1e3)
    return out


def _serving_metrics(samples: Samples) -> Metrics:
    times: dict[tuple[str, str], list[float]] = {}
    for sample in samples:
        if sample["part"] == "serving" and sample["kind"] in ("prefill", "decode"):
            size = sample["tokens"] if sample["kind"] == "prefill" else sample["batch"]
            name = f"{sample['engine']}_{sample['kernel']}".replace("-", "_")
            unit = "ttft_ms" if sample["kind"] == "prefill" else "gap_ms"
            times.setdefault((f"serving_{sample['kind']}_{size}_{name}", unit), []).append(sample[unit])
    return {f"{key}_{unit}": min(values) for (key, unit), values in times.items()}


def metrics_from_samples(samples: Samples) -> Metrics:
    """See the module; the best of repeated measurements. Checks and failures have no metric but their count."""
    out = {**_kernel_metrics(samples), **_serving_metrics(samples)}
    ratios: Metrics = {}
    for key, value in out.items():
        for layout in ("token_major", "layer_major"):
            base = out.get(key.replace(f"{layout}_flash3", "paged16_flash3"))
            if f"{layout}_flash3" not in key or not base or not value:
                continue
            kind = key.partition(f"_{layout}_")[0]
            if key.endswith("tflop_per_s"):
                ratios[f"{kind}_{layout}_ratio"] = value / base
            elif key.endswith("_ms"):
                ratios[f"{kind}_{layout}_ratio"] = base / value
    failed = sum(sample["kind"] == "failed" or isinstance(sample.get("error"), str) for sample in samples)
    return {**out, **ratios, "failed_count": float(failed)}


def table(metrics: Mapping[str, float]) -> list[str]:
    """Lines: one for each measured thing, a column for each cache and kernel."""
    rows: dict[str, dict[str, float]] = {}
    for key, value in metrics.items():
        if not key.startswith(("kernel_", "serving_")) or key.endswith(("_ratio", "_gb_per_s")):
            continue
        part, kind, size, *rest = key.split("_")
        text = "_".join(rest)
        unit = next(u for u in ("_tflop_per_s", "_ttft_ms", "_gap_ms", "_ms") if text.endswith(u))
        rows.setdefault(f"{part} {kind} {size}, {unit[1:]}", {})[text.removesuffix(unit)] = value
    columns = sorted({column for row in rows.values() for column in row})
    lines = [f"{'':34}" + "".join(f"{column[-24:]:>26}" for column in columns)]
    for name, row in rows.items():
        cells = "".join(f"{row[c]:26.2f}" if c in row else f"{'-':>26}" for c in columns)
        lines.append(f"{name:34}{cells}")
    return lines


def run_kernels(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Samples of the kernel part; what there is of them when it fails."""
    out = folder / "kernels.json"
    words = [
        sys.executable,
        "-m",
        "shared.engine.slot_measured_kernels",
        str(out),
        "--device",
        options.device,
    ]
    words += ["--quick"] * options.quick + (["--only", options.caches] if options.caches else [])
    found = _run(words, options.kernels_timeout_s)
    samples = json.loads(out.read_text()) if out.exists() else []
    if found:
        samples.append({"part": "kernel", "variant": "all", "kind": "failed", "why": found})
    return samples


def _run(words: list[str], timeout_s: float) -> str:
    """ "" or why it failed."""
    try:
        done = subprocess.run(words, cwd=ROOT, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return f"took more than {timeout_s} s"
    return f"exit status {done.returncode}" if done.returncode else ""


class Engines:
    """Every engine's process imports vLLM at once, and makes its engine when it is its turn."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder, self._options = folder, options
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._pool: subprocess.Popen[bytes] | None = None
        names = options.engines.split(",")
        socket = folder / "pool.sock"
        for name in names:
            engine, flags = ENGINES[name]
            words = [sys.executable, "-m", "loadtest.contiguous_engine", engine, options.model_dir]
            words += [str(folder / f"{name}.json"), "--go", str(folder / f"{name}.go"), *flags]
            words += [
                "--device",
                options.device,
                "--mempool-socket",
                str(socket),
                *shlex.split(options.engine_flags),
            ]
            log = (folder / f"{name}.log").open("wb")
            self._running[name] = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)

    def measure(self, name: str) -> list[dict[str, Any]]:
        """Samples of one engine; a failure is one, too."""
        if ENGINES[name][0] != "stock":
            self._start_pool()
        begin = time.monotonic()
        (self._folder / f"{name}.go").touch()
        process = self._running.pop(name)
        why = ""
        try:
            status = process.wait(self._options.engine_timeout_s)
            why = f"exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            why = f"took more than {self._options.engine_timeout_s} s"
            self._end(process)
        self._stop_pool()
        out = self._folder / f"{name}.json"
        log = (self._folder / f"{name}.log").read_text(errors="replace")
        if why or not out.exists():
            wrong = [line for line in log.splitlines() if "Error" in line or "error" in line]
            print(f"{name}: {why}", *wrong[-12:], log[-2500:], sep="\n", flush=True)
            return [{"part": "serving", "engine": name, "kind": "failed", "why": why or "no result"}]
        found = json.loads(out.read_text())
        samples = found.pop("samples")
        print("\n".join(line for line in log.splitlines() if line.startswith("  ")), flush=True)
        print(f"{name}: {time.monotonic() - begin:.0f} s, {found}", flush=True)
        rows = [{**sample, "engine": name} for sample in samples]
        return [*rows, {"part": "serving", "engine": name, "kind": "facts", **found}]

    def _start_pool(self) -> None:
        """A mempool of its own for each: the layouts differ, and the memory goes back between them."""
        socket = self._folder / "pool.sock"
        log = (self._folder / "mempool.log").open("ab")
        self._pool = subprocess.Popen(
            [sys.executable, "-m", "services.mempool", "--socket", str(socket), "--admin-listen", "127.0.0.1:0"],
            stdout=log, stderr=log, cwd=ROOT,
        )  # fmt: skip
        deadline = time.monotonic() + 20
        while not socket.exists() and time.monotonic() < deadline and self._pool.poll() is None:
            time.sleep(0.05)

    def _stop_pool(self) -> None:
        if self._pool is not None:
            self._pool.terminate()
            self._pool.wait(20)
            self._pool = None
            (self._folder / "pool.sock").unlink(missing_ok=True)

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)

    def close(self) -> None:
        """End what has not measured."""
        for process in self._running.values():
            self._end(process)
        self._stop_pool()


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes; writes no result file")
    parser.add_argument("--parts", default="kernels,serving")
    parser.add_argument("--caches", default="", help="of the kernel part, e.g. token-major,layer-major")
    parser.add_argument("--engines", default=DEFAULT_ENGINES, help=f"of {','.join(ENGINES)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model-dir", default="")
    parser.add_argument("--engine-flags", default="", help="for contiguous_engine")
    parser.add_argument("--engine-timeout-s", type=float, default=110)
    parser.add_argument("--kernels-timeout-s", type=float, default=110)
    parser.add_argument("--out", default=str(RESULTS))
    parser.add_argument("--commit", default="")
    options = parser.parse_args(argv)
    sizes = "16384,32768" if options.quick else "16384,32768,65536,131072"
    budget = "10" if options.quick else "32"
    options.engine_flags = f"--prefill {sizes} --budget-s {budget} {options.engine_flags}"
    return options


def main(argv: Sequence[str]) -> int:
    """Measure, write the result file, print the table."""
    options = parsed(argv)
    samples: list[dict[str, Any]] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="quire-contiguous-") as name:
        folder = Path(name)
        options.model_dir = options.model_dir or str(model_folder(folder / "llama-8b-shape"))
        engines = Engines(folder, options) if "serving" in options.parts else None
        try:
            if "kernels" in options.parts:
                samples += run_kernels(folder, options)
            for engine in options.engines.split(",") if engines else ():
                assert engines is not None
                samples += engines.measure(engine)
        finally:
            if engines is not None:
                engines.close()
    metrics = metrics_from_samples(samples)
    for sample in samples:
        if sample["kind"] in ("failed", "check"):
            print({k: v for k, v in sample.items() if k != "part"})
    if not options.quick:
        path = write_result(
            NAME,
            claim=CLAIM,
            command=shlex.join(["python", "-m", "loadtest.bench_contiguous", *argv]),
            settings={"engines": options.engines, "engine_flags": options.engine_flags, "model": LLAMA_8B},
            metrics=metrics,
            samples=samples,
            folder=Path(options.out),
            commit=options.commit,
        )
        print(f"wrote {path.name}")
    for key in sorted(metrics):
        if key.endswith("_ratio"):
            print(f"{key:60} {metrics[key]:8.3f}")
    print(*table(metrics), sep="\n")
    print(f"{time.monotonic() - began:.0f} s; failed: {metrics['failed_count']:.0f}")
    return int(not any(sample["kind"] in ("prefill", "decode") for sample in samples))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
