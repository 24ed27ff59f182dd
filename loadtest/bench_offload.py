"""vLLM's OffloadingConnector with its own swap copies and with ours, on one GPU (serving tables of vLLM PR 38460).

    python -m loadtest.bench_offload [--quick] [--out FOLDER] [--commit HEAD]        writes results/h200-offload.json

8B shape, random weights, vLLM 0.26 in its fastest configuration, a GPU cache of 6 GiB and 16 GiB of pinned memory
behind it. Both engines are up at once and take turns phase by phase, the order changing every round, so that they see
the same machine; an idle engine computes and copies nothing. Under 200 s; a short table last. Phases:
offload_phases.py; `new` comes last, because it drives the pool of prompts out of host memory.

    *_load_gb_per_s, *_store_gb_per_s    bytes over time by CUDA events around each transfer, as the pull request has it
    *_requests_per_s, *_ttft_p99_ms      8 clients in a loop
    *_tpot_*_ms                          reuse: of the answers; quiet, control, swap: of 16 streams of 256 tokens
    *_tpot_swap_of_control_ratio         TPOT beside requests that load, over TPOT beside requests that compute as much
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
from statistics import mean, median
from typing import Any

from loadtest.bench_pages import LLAMA_8B, model_folder
from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, quantile, write_result

NAME = "h200-offload"
CLAIM = (
    "Behind vLLM 0.26's OffloadingConnector our copies move KV no slower than vLLM's own batch, requests per second "
    "and p99 TTFT are no worse, and decode TPOT grows by at most 5% while blocks are swapped in."
)
ENGINES = ("stock", "quire")
SERVED = ("reuse", "new")
DECODED = ("quiet", "control", "swap")
START_TIMEOUT_S, PHASE_TIMEOUT_S = 150.0, 60.0


def metrics_from_samples(samples: Samples) -> Metrics:
    """See the module. Of all rounds together; TPOT is the median over streams, and its p99."""
    out: Metrics = {}
    for engine in ENGINES:
        for load in (*SERVED, *DECODED):
            mine = [row for row in samples if (row["engine"], row["load"]) == (engine, load)]
            if mine:
                out |= {f"{engine}_{load}_{name}": value for name, value in _of(mine, load).items()}
        swap = out.get(f"{engine}_swap_tpot_p50_ms")
        for other in ("quiet", "control"):
            base = out.get(f"{engine}_{other}_tpot_p50_ms")
            if swap and base:
                out[f"{engine}_tpot_swap_of_{other}_ratio"] = swap / base
    pairs = {
        "requests_of_stock_ratio": "reuse_requests_per_s",
        "ttft_p99_of_stock_ratio": "reuse_ttft_p99_ms",
        "load_of_stock_ratio": "reuse_load_gb_per_s",
        "store_of_stock_ratio": "new_store_gb_per_s",
        "submit_of_stock_ratio": "reuse_load_submit_p50_us",
    }
    for name, key in pairs.items():
        ours, theirs = out.get(f"quire_{key}"), out.get(f"stock_{key}")
        if ours and theirs:
            out[name] = ours / theirs
    return out


def _of(rows: list[Any], load: str) -> Metrics:
    out: Metrics = {}
    for direction in ("load", "store"):
        moved = [one for row in rows for one in row["transfers"] if one["direction"] == direction]
        if moved:
            out[f"{direction}_gb_per_s"] = (
                sum(one["bytes"] for one in moved) / sum(one["s"] for one in moved) / 1e9
            )
            out[f"{direction}_bytes"] = float(sum(one["bytes"] for one in moved))
            out[f"{direction}_submit_p50_us"] = median(one["submit_us"] for one in moved)
    tpots = [tpot for row in rows for tpot in row["tpot_ms"]]
    if tpots:
        out["tpot_p50_ms"] = quantile(tpots, 0.5)
        out["tpot_p99_ms"] = quantile(tpots, 0.99)
    if load in SERVED:
        out["requests_per_s"] = mean(row["requests"] / (row["end_s"] - row["begin_s"]) for row in rows)
        firsts = [ttft for row in rows for ttft in row["ttft_ms"]]
        out["ttft_p50_ms"] = quantile(firsts, 0.5)
        out["ttft_p99_ms"] = quantile(firsts, 0.99)
    else:
        gaps = [gap for row in rows for gap in row["gaps_ms"]]
        out["gap_p99_ms"] = quantile(gaps, 0.99)
        out["beside_per_s_count"] = mean(row["requests"] / (row["end_s"] - row["begin_s"]) for row in rows)
    return out


class Engine:
    """One process of offload_engine.py."""

    def __init__(self, name: str, folder: Path, options: argparse.Namespace) -> None:
        self.name = name
        self._out = folder / f"{name}.jsonl"
        self._log = folder / f"{name}.log"
        words = [
            sys.executable,
            "-m",
            "loadtest.offload_engine",
            name,
            str(options.model_dir),
            str(self._out),
        ]
        words += shlex.split(options.engine_flags)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                words, cwd=ROOT, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True
            )
        self._seen = 0

    def say(self, word: str) -> None:
        """A line to the process. Raises: BrokenPipeError when it is gone."""
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Its next sample. Raises: RuntimeError with the end of its log when it ends, or takes too long."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self._process.poll() is None:
            lines = self._out.read_text().splitlines(keepends=True) if self._out.exists() else []
            if len(lines) > self._seen and lines[self._seen].endswith("\n"):
                self._seen += 1
                return json.loads(lines[self._seen - 1])
            time.sleep(0.02)
        raise RuntimeError(f"{self.name}: no answer\n{self._log.read_text(errors='replace')[-3000:]}")

    def phase(self, load: str) -> dict[str, Any]:
        """Run it: its sample, with the transfers that ended meanwhile."""
        before = len(self._transfers())
        self.say(load)
        sample = self.answer(PHASE_TIMEOUT_S)
        return {"engine": self.name, **sample, "transfers": self._transfers()[before:]}

    def _transfers(self) -> list[dict[str, Any]]:
        path = self._out.with_suffix(".transfers")
        return transfers_of(path.read_text()) if path.exists() else []

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            try:
                self.say("end")
                self._process.wait(20)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait(10)
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except BrokenPipeError:  # a word that it never read
                self._process.stdin = None


def transfers_of(text: str) -> list[dict[str, Any]]:
    """What shared/engine/measured_offload.py wrote; a last line that is not whole is left out."""
    out = []
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            _, direction, num_bytes, seconds, submit_us, copies = line.split()
            row = {"direction": direction, "bytes": int(num_bytes), "s": float(seconds)}
            out.append(row | {"submit_us": float(submit_us), "copies": int(copies)})
    return out


def measure(engines: Sequence[Engine], rounds: int) -> list[dict[str, Any]]:
    """Samples of all phases; engines start one after another, and take turns then."""
    samples = []
    for engine in engines:
        begin = time.monotonic()
        engine.say("start")
        ready = engine.answer(START_TIMEOUT_S)
        print(f"{engine.name}: ready after {time.monotonic() - begin:.0f} s, {ready}", flush=True)
        samples.append({"engine": engine.name, **ready})
        for load in ("warm", "fill"):
            engine.phase(load)
    for number in range(rounds):
        for load in ("reuse", *DECODED, *(("new",) if number == rounds - 1 else ())):
            for engine in engines if number % 2 == 0 else list(reversed(engines)):
                samples.append(engine.phase(load) | {"round": number})
                shown = {k: v for k, v in samples[-1].items() if not isinstance(v, list)}
                print(f"{shown}, {len(samples[-1]['transfers'])} transfers", flush=True)
    return samples


def show(metrics: Metrics) -> None:
    """A line for each phase and figure, stock beside ours."""
    print(f"{'':38}{'stock':>12}{'quire':>12}")
    for key in [key for key in metrics if key.startswith("stock_")]:
        name = key.removeprefix("stock_")
        ours = metrics.get(f"quire_{name}")
        print(f"{name:38}{metrics[key]:12.3f}" + (f"{ours:12.3f}" if ours is not None else ""))
    for key in metrics:
        if not key.startswith(ENGINES):
            print(f"{key:38}{metrics[key]:24.3f}")


def main(argv: Sequence[str]) -> int:
    """Measure and write the result file; exit status 1 when an engine failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one short round; writes no result file")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--engine-flags", default="", help="for offload_engine, e.g. '--kv-gib 4'")
    parser.add_argument("--model-dir", default="")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="", help="of these files, on a machine without the repository")
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds, options.engine_flags = 1, f"--seconds 2 {options.engine_flags}"
    samples: list[dict[str, Any]] = []
    failed = ""
    with tempfile.TemporaryDirectory(prefix="quire-offload-") as name:
        folder = Path(name)
        options.model_dir = options.model_dir or model_folder(folder / "llama-8b-shape")
        engines = [Engine(each, folder, options) for each in ENGINES]
        try:
            samples = measure(engines, options.rounds)
        except (RuntimeError, OSError, ValueError) as error:
            failed = str(error)
        finally:
            for engine in engines:
                engine.close()
    metrics = metrics_from_samples(samples)
    if not options.quick and not failed:
        path = write_result(
            NAME,
            claim=CLAIM,
            command=shlex.join(["python", "-m", "loadtest.bench_offload", *argv]),
            settings={"rounds": options.rounds, "engine_flags": options.engine_flags, "model": LLAMA_8B},
            metrics=metrics,
            samples=samples,
            folder=options.out,
            commit=options.commit,
        )
        print(f"wrote {path.name}")
    show(metrics)
    if failed:
        print(f"FAILED: {failed}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
