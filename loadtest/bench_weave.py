"""Prefill steps of engines with several ranks: vLLM's all-reduce and norm, fused, woven, and without communication.

    python -m loadtest.bench_weave [--groups 70b:4:4,8b:2:32] [--tokens 1024,...] [--budget-s S] [--out DIR]

writes loadtest/results/h200-weave.json; a short table last (TokenWeave's Figures 2, 11 and 16). A group is
SHAPE:RANKS:LAYERS, random weights. Each engine (weave_engine.py) is a process; what is timed is the model's forward
pass of a step that is one new prompt, on the slowest rank, embedding and last norm included, sampling not.

stock: vLLM as it comes, compiled, its own choice of all-reduce, but without its fusion of all-reduce and norm.
stock-fused: with it (FlashInfer; failed where it is not installed). Nothing asks for multicast.
stock-alone: ranks add nothing up.
weave: one eager engine in four modes: off (vLLM's operations), fuse, full, alone.

`prefill_gain_ratio`: the better stock over full, median over 4K to 32K tokens, of the 70B shape on the most ranks that
were measured (`prefill_gain_ranks_count`); `communication_recovered_ratio`: of the time that stock loses to
communication, there.

`--parts serving` (beside steps, with layers enough that they matter: 70b:4:16): requests of ShareGPT's lengths asked at
once, in steps of `--chunks` tokens (Figures 12 and 13): stock against fuse and full, whose steps from 1K tokens on are
cut. `serving_gain_CHUNK_ratio`: tokens per second of full over stock's.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from loadtest.bench_pages import LLAMA_8B
from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, write_result

NAME = "h200-weave"
CLAIM = (
    "Prefill steps whose sums are fused and woven are faster than stock vLLM's on the same GPUs; the share of the "
    "communication time that is won back is stated."
)
SHAPES = {
    "8b": LLAMA_8B,
    "70b": LLAMA_8B
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8},
}
ENGINES = ("weave", "stock", "stock-alone", "stock-fused")
LONG_TOKENS = 4096  # the gain is that of steps from here on
START_S = 45.0  # an engine that has less time left is not begun
TOKENS = "1024,2048,4096,8192,16384,32768"


def _times(samples: Samples) -> dict[tuple[str, int, int], dict[str, float]]:
    """(shape, ranks, tokens) -> mode -> median ms."""
    found: dict[tuple[str, int, int], dict[str, list[float]]] = {}
    for sample in samples:
        if sample["kind"] == "step":
            key = (f"{sample['shape']}_{sample['layers']}_layers", sample["ranks"], sample["tokens"])
            found.setdefault(key, {}).setdefault(sample["mode"], []).append(sample["ms"])
    return {key: {mode: median(values) for mode, values in modes.items()} for key, modes in found.items()}


def _gains(samples: Samples, shape: str, ranks: int) -> dict[str, list[float]]:
    """Ratios of the long steps of a shape on so many ranks."""
    out: dict[str, list[float]] = {"gain": [], "fuse": [], "recovered": []}
    for (name, count, tokens), ms in _times(samples).items():
        if not name.startswith(f"{shape}_") or count != ranks or tokens < LONG_TOKENS:
            continue
        stocks = [ms[mode] for mode in ("stock", "stock-fused") if mode in ms]
        if not stocks or "full" not in ms:
            continue
        out["gain"].append(min(stocks) / ms["full"])
        out["fuse"].append(min(stocks) / ms["fuse"])
        if "stock-alone" in ms and min(stocks) > ms["stock-alone"]:
            out["recovered"].append((min(stocks) - ms["full"]) / (min(stocks) - ms["stock-alone"]))
    return out


def metrics_from_samples(samples: Samples) -> Metrics:
    """See the module. Medians over rounds; what failed has no metric but its count."""
    out: Metrics = {}
    for (shape, ranks, tokens), modes in _times(samples).items():
        for mode, ms in modes.items():
            out[f"{shape}_tp{ranks}_{tokens}_{mode.replace('-', '_')}_ms"] = ms
    groups = sorted({(s["shape"], s["ranks"]) for s in samples if s["kind"] == "step"})
    for shape, ranks in groups:
        found = _gains(samples, shape, ranks)
        for name, values in found.items():
            if values:
                out[f"{shape}_tp{ranks}_{name}_ratio"] = median(values)
        if shape == "70b" and found["gain"]:  # in order of ranks: the most of them stay
            out["prefill_gain_ratio"] = median(found["gain"])
            out["prefill_gain_ranks_count"] = float(ranks)
            out.pop("communication_recovered_ratio", None)
            if found["recovered"]:
                out["communication_recovered_ratio"] = median(found["recovered"])
    out |= _serving(samples)
    out["failed_count"] = float(sum(sample["kind"] == "failed" for sample in samples))
    return out


def _serving(samples: Samples) -> Metrics:
    rates: dict[tuple[str, int, int], dict[str, list[float]]] = {}
    for sample in samples:
        if sample["kind"] == "serving":
            key = (f"{sample['shape']}_{sample['layers']}_layers", sample["ranks"], sample["step_tokens"])
            rates.setdefault(key, {}).setdefault(sample["mode"], []).append(sample["tokens"] / sample["s"])
    out: Metrics = {}
    for (shape, ranks, chunk), modes in rates.items():
        found = {mode: median(values) for mode, values in modes.items()}
        for mode, rate in found.items():
            out[f"{shape}_tp{ranks}_serving_{chunk}_{mode}_tokens_per_s"] = rate
        if "stock" in found and "full" in found:
            out[f"{shape}_tp{ranks}_serving_gain_{chunk}_ratio"] = found["full"] / found["stock"]
    return out


def table(samples: Samples) -> list[str]:
    """A line for each group and length, a column for each way, in ms."""
    times = _times(samples)
    columns = sorted({mode for modes in times.values() for mode in modes})
    lines = [f"{'':28}" + "".join(f"{column:>13}" for column in columns) + f"{'stock/full':>13}"]
    for (shape, ranks, tokens), modes in sorted(times.items()):
        cells = "".join(f"{modes[c]:13.3f}" if c in modes else f"{'-':>13}" for c in columns)
        stocks = [modes[mode] for mode in ("stock", "stock-fused") if mode in modes]
        gain = f"{min(stocks) / modes['full']:13.3f}" if stocks and "full" in modes else f"{'-':>13}"
        lines.append(f"{shape + ' tp' + str(ranks):20}{tokens:8}{cells}{gain}")
    return lines


def model_folder(folder: Path, shape: str, layers: int) -> Path:
    """A model without weights."""
    made = folder / f"{shape}-{layers}"
    if not made.exists():
        made.mkdir()
        (made / "config.json").write_text(json.dumps(SHAPES[shape] | {"num_hidden_layers": layers}))
    return made


def run_engine(
    engine: str,
    group: tuple[str, int, int],
    folder: Path,
    options: argparse.Namespace,
    left_s: float,
    chunk: int = 0,
) -> list[dict[str, Any]]:
    """Samples of one engine's process; a failure is one, too. Nothing of it is left behind.

    `chunk`: tokens of the steps in which it serves; 0: it computes single steps.
    """
    shape, ranks, layers = group
    out, log = folder / f"{engine}-{shape}-{ranks}-{layers}-{chunk}.json", folder / "engine.log"
    words = [sys.executable, "-m", "loadtest.weave_engine", engine, str(model_folder(folder, shape, layers))]
    words += [str(out), "--tp", str(ranks), "--tokens", options.tokens, "--rounds", str(options.rounds)]
    words += [
        "--budget-s",
        str(options.engine_budget_s),
        "--sms",
        str(options.sms),
        "--device",
        options.device,
    ]
    if chunk:
        words += ["--serve", str(options.requests), "--step-tokens", str(chunk)]
    begin, why = time.monotonic(), ""
    with log.open("wb") as file:
        process = subprocess.Popen(
            words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(min(options.engine_timeout_s, left_s))
            why = f"exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            why = f"took more than {time.monotonic() - begin:.0f} s"
        finally:
            _end_group(process)
    about = {"engine": engine, "shape": shape, "ranks": ranks, "layers": layers}
    if why or not out.exists():
        lines = log.read_text(errors="replace").splitlines()
        wrong = [line for line in lines if "Error" in line or "error:" in line]
        print(f"{engine} {shape} on {ranks}: {why}", *wrong[-8:], *lines[-12:], sep="\n", flush=True)
        return [{"kind": "failed", **about, "why": why or "no result"}]
    found = json.loads(out.read_text())
    print(
        f"{engine} {shape} on {ranks}: {time.monotonic() - begin:.0f} s, ready {found['ready_s']} s",
        flush=True,
    )
    kind = "serving" if chunk else "step"
    return [{"kind": kind, **about, **sample} for sample in found["samples"]]


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """Its ranks, too, which are of its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(20)


def groups_of(text: str) -> list[tuple[str, int, int]]:
    """ "70b:4:4,8b:2:32" -> shape, ranks, layers. Raises: ValueError."""
    out = []
    for word in text.split(","):
        shape, ranks, layers = word.split(":")
        if shape not in SHAPES:
            raise ValueError(f"{shape} is none of {', '.join(SHAPES)}")
        out.append((shape, int(ranks), int(layers)))
    return out


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=groups_of, default=groups_of("70b:4:4,8b:2:32"))
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument("--parts", default="steps", help="steps,serving")
    parser.add_argument(
        "--chunks", type=lambda text: [int(n) for n in text.split(",")], default=[1024, 2048, 4096, 8192]
    )
    parser.add_argument("--requests", type=int, default=64, help="that are served at once")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--sms", type=int, default=16, help="for the sums of a part under the other's compute"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget-s", type=float, default=540)
    parser.add_argument("--engine-budget-s", type=float, default=25, help="of measuring, after the warm-up")
    parser.add_argument("--engine-timeout-s", type=float, default=170)
    parser.add_argument("--no-result", action="store_true", help="only print")
    parser.add_argument("--out", default=str(RESULTS))
    parser.add_argument("--commit", default="")
    return parser.parse_args(argv)


def measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Samples of all engines for which there is time, the most important first."""
    samples: list[dict[str, Any]] = []
    deadline = time.monotonic() + options.budget_s
    jobs = [
        (group, engine, 0)
        for group in options.groups
        for engine in options.engines.split(",")
        if "steps" in options.parts
    ]
    jobs += [
        (group, engine, chunk)
        for group in options.groups
        for chunk in options.chunks
        for engine in ("weave", "stock")
        if "serving" in options.parts
    ]
    with tempfile.TemporaryDirectory(prefix="quire-weave-") as name:
        for group, engine, chunk in jobs:
            left_s = deadline - time.monotonic()
            if left_s < START_S:
                print(f"no time left for {engine} {group} {chunk or ''}", flush=True)
                continue
            samples += run_engine(engine, group, Path(name), options, left_s, chunk)
    return samples


def main(argv: Sequence[str]) -> int:
    """Measure, write the result file, print the table."""
    options = parsed(argv)
    began = time.monotonic()
    samples = measured(options)
    metrics: Mapping[str, float] = metrics_from_samples(samples)
    if not options.no_result:
        path = write_result(
            NAME,
            claim=CLAIM,
            command=shlex.join(["python", "-m", "loadtest.bench_weave", *argv]),
            settings={
                "groups": options.groups, "tokens": options.tokens, "sms": options.sms, "shapes": SHAPES,
                "engines": options.engines, "parts": options.parts, "requests": options.requests,
            },
            metrics=dict(metrics),
            samples=samples,
            folder=Path(options.out),
            commit=options.commit,
        )  # fmt: skip
        print(f"wrote {path.name}")
    print(*table(samples), sep="\n")
    for key in sorted(metrics):
        if key.endswith(("_ratio", "_count", "_tokens_per_s")):
            print(f"{key:48} {metrics[key]:8.3f}")
    print(f"{time.monotonic() - began:.0f} s")
    return int(not any(sample["kind"] in ("step", "serving") for sample in samples))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
