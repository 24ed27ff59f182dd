"""The cost model against an engine: lengths, cached ratios and batches that no profile has (MemServe 5.3, Figure 14).

    python -m loadtest.bench_cost_model [--quick] [--device cpu|cuda] [--tp 2] [--out FOLDER] [--commit HEAD]

writes loadtest/results/cost-model.json; another device's samples in it are kept, and fitted again, so that one fit made
all its models. One engine in its usual setting (the
demo model on one CPU thread; an 8B shape with random weights on a GPU), in rounds: a profile as a worker makes it at
its start, then points off its grid. What counts as measured is a point's fastest round, on the grid and off it: other
work on the machine only ever adds. Of a batch it is the middle round: its time begins with the first token of a prompt
ahead of it, which may come late. Nothing is corrected online.

DEVICE_median_error_ratio, DEVICE_p90_error_ratio: of all kinds. `start`: each round's profile by itself, as a worker
has it, disturbed or not. `arch`: the paper's direct fit of x and y, for single prompts, beside `prefill`, the same
points by operators. `tp2`: the coefficients of one rank, scaled, against two ranks; communication is what the profile
of two ranks says by its decode steps (each) and its longest prompt (per byte), and nothing else of it is used;
`tp2_arch`: halved. `crossover`: the link speed at which eq 2 turns, from
predicted against from measured times, half a prompt cached.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from loadtest.bench_pages import LLAMA_8B, model_folder
from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, commit_of, load_result, machine, quantile, write_result
from shared.costmodel.model import CostModel
from shared.costmodel.observation import Observation, predict
from shared.wire.cost import CostCoefficients

NAME = "cost-model"
CLAIM = (
    "The operator-level cost model, fitted by a worker's profile at its start, predicts prompts, batches and decode "
    "steps off its grid with a median error of at most 10% and p90 of at most 25%."
)
DEMO_MODEL = ROOT / "deploy" / "models" / "quire-demo"
FLAGS = {
    "cpu": ["--dtype", "float32"],
    "cuda": [
        *("--dtype", "bfloat16", "--load-format", "dummy", "--block-tokens", "64", "--batched-tokens", "8192"),
        *("--kv-cache-bytes", str(40 << 30), "--max-model-len", "32768", "--longest", "30000", "--limit-s", "120"),
        *("--rounds", "4"),
    ],
}  # fmt: skip
QUICK = ["--points", "12", "--rounds", "2"]
BEST = -1  # in place of a profile's number: each point of the grid at its truest
Row = Mapping[str, Any]


def observation(row: Row) -> Observation:
    """A sample as it was measured."""
    prompts = tuple((int(n), int(cached)) for n, cached in row.get("prompts", ()))
    return Observation(
        row["kind"],
        row["ms"],
        prompts,
        row.get("num_decodes", 0),
        row.get("context_tokens", 0),
        row["waited_ratio"],
    )


def truest(rows: Iterable[Row], part: str) -> list[Observation]:
    """One observation of everything that was measured in this part, on the grid or off it: see the module."""
    found: dict[object, list[Observation]] = {}
    for row in rows:
        if row["part"] == part:
            one = observation(row)
            key = (row.get("point"), one.kind, one.prompts, one.num_decodes, one.context_tokens)
            found.setdefault(key, []).append(one)
    out = []
    for some in found.values():
        some.sort(key=lambda one: one.ms)
        out.append(some[(len(some) - 1) // 2 if some[0].kind == "batch" else 0])
    return out


def arch_ms(model: Row, seen: Observation) -> float:
    """The arch-level model's prediction of a single prompt."""
    (tokens, cached) = seen.prompts[0]
    x, y = float(tokens), cached / tokens
    return sum(w * v for w, v in zip(model["arch"], (x * x * y, x * x, x * y, x, 1.0), strict=True))


def _cost(row: Row) -> CostModel:
    return CostModel(msgspec.convert(row["coefficients"], CostCoefficients))


def _errors(pairs: Iterable[tuple[float, Observation]]) -> list[float]:
    return [abs(predicted - seen.ms) / seen.ms for predicted, seen in pairs]


def _statistics(name: str, errors: Sequence[float]) -> Metrics:
    if not errors:
        return {}
    return {
        f"{name}_median_error_ratio": quantile(errors, 0.5),
        f"{name}_p90_error_ratio": quantile(errors, 0.9),
    }


def metrics_from_samples(samples: Samples) -> Metrics:
    """See the module."""
    out: Metrics = {}
    for device in sorted({row["device"] for row in samples}):
        rows = [row for row in samples if row["device"] == device]
        all_models = [row for row in rows if row["part"] == "model"]
        models = [row for row in all_models if row["profile"] == BEST]
        costs = [_cost(row) for row in models]
        seen = truest((row for row in rows if row["tp"] == 1), "off")
        starts = [_cost(row) for row in all_models if row["profile"] != BEST]
        pairs = [(predict(cost, one), one) for cost in starts for one in seen]
        out |= _statistics(f"{device}_start", _errors(pairs))
        out |= _statistics(device, _errors((predict(cost, one), one) for cost in costs for one in seen))
        for kind in ("prefill", "batch", "decode"):
            some = [one for one in seen if one.kind == kind]
            pairs = [(predict(cost, one), one) for cost in costs for one in some]
            out |= _statistics(f"{device}_{kind}", _errors(pairs))
        single = [one for one in seen if one.kind == "prefill"]
        out |= _statistics(
            f"{device}_arch", _errors((arch_ms(m, one), one) for m in models for one in single)
        )
        out |= _crossover(device, costs, single)
        out |= _two_ranks(device, models, costs, [row for row in rows if row["tp"] == 2])
    return out


def _crossover(device: str, costs: Sequence[CostModel], single: Sequence[Observation]) -> Metrics:
    """Bytes over the time saved is the link speed at which eq 2 turns, so its error is that of the time saved."""
    whole = {one.prompts[0][0]: one.ms for one in single if not one.prompts[0][1]}
    errors = []
    for one in single:
        tokens, cached = one.prompts[0]
        if tokens in whole and 0.4 < cached / tokens < 0.6:
            saved_ms = whole[tokens] - one.ms
            predicted = [cost.prefill_ms(tokens) - cost.prefill_ms(tokens, cached) for cost in costs]
            errors += [abs(saved_ms / ms - 1) for ms in predicted if ms > 0]
    return {f"{device}_crossover_error_ratio": quantile(errors, 0.5)} if errors else {}


def _two_ranks(
    device: str, models: Sequence[Row], costs: Sequence[CostModel], rows: Sequence[Row]
) -> Metrics:
    seen, grid = truest(rows, "off"), truest(rows, "grid")
    if not seen:
        return {}
    scaled = [_with_communication(cost, grid) for cost in costs]
    single = [one for one in seen if one.kind == "prefill"]
    return {
        **_statistics(f"{device}_tp2", _errors((predict(cost, one), one) for cost in scaled for one in seen)),
        **_statistics(
            f"{device}_tp2_prefill", _errors((predict(cost, one), one) for cost in scaled for one in single)
        ),
        **_statistics(
            f"{device}_tp2_arch",
            _errors((arch_ms(model, one) / 2, one) for model in models for one in single),
        ),
    }


def _with_communication(cost: CostModel, grid: Sequence[Observation]) -> CostModel:
    """Two ranks: what decode steps and the longest prompt take beyond the divided operators.

    Not short prompts: on a GPU they wait for their launches, and communication hides in that.
    """
    c = msgspec.structs.replace(cost.coefficients, tp=2, all_reduce_ms=0.0, all_reduce_ms_per_gb=0.0)
    reduces = 2 * c.shape.num_layers
    single = [one for one in grid if one.kind == "decode" and one.num_decodes == 1]
    each_ms = median((one.ms - predict(CostModel(c), one)) / reduces for one in single)
    c = msgspec.structs.replace(c, all_reduce_ms=max(0.0, each_ms))
    tokens, ms = max(
        (one.prompts[0][0], one.ms) for one in grid if one.kind == "prefill" and not one.prompts[0][1]
    )
    gb = tokens * c.shape.hidden_size * c.shape.dtype_bytes / 1e9
    per_gb = (ms - CostModel(c).prefill_ms(tokens)) / (reduces * gb)
    return CostModel(msgspec.structs.replace(c, all_reduce_ms_per_gb=max(0.0, per_gb)))


# -- measuring ------------------------------------------------------------------------------------------


def with_models(samples: Sequence[Row]) -> list[dict[str, Any]]:
    """The samples, and what was fitted to the profiles: from here on nothing needs numpy."""
    from shared.costmodel.fit import fit, fit_arch

    out = [dict(row) for row in samples]
    first = next(row for row in samples if row["part"] == "frame")
    frame = msgspec.convert(first["frame"], CostCoefficients)
    grid = [row for row in samples if row["part"] == "grid"]
    profiles = {BEST: truest(grid, "grid")}
    for row in grid:
        profiles.setdefault(row["profile"], []).append(observation(row))
    for number, seen in profiles.items():
        coefficients = fit(frame, seen, graph_tokens=first.get("graph_tokens"))  # older samples do not say
        found = {"coefficients": msgspec.to_builtins(coefficients), "arch": list(fit_arch(seen).weights)}
        out.append({"part": "model", "profile": number, **found})
    return out


def run_engine(folder: Path, options: argparse.Namespace, tp: int) -> list[dict[str, Any]]:
    """Samples of one engine over a mempool of its own. Raises: RuntimeError with the end of its log."""
    socket, out, log = folder / f"pool{tp}.sock", folder / f"tp{tp}.json", folder / f"tp{tp}.log"
    model = str(DEMO_MODEL if options.device == "cpu" else model_folder(folder / f"llama-8b-shape-{tp}"))
    pool = subprocess.Popen(
        [sys.executable, "-m", "services.mempool", "--socket", str(socket), "--admin-listen", "127.0.0.1:0"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT,
    )  # fmt: skip
    words = [sys.executable, "-m", "loadtest.cost_engine", model, str(out), "--device", options.device]
    words += ["--mempool-socket", str(socket), "--tp", str(tp), *FLAGS[options.device]]
    words += [*(QUICK if options.quick else []), *shlex.split(options.engine_flags)]
    try:
        deadline = time.monotonic() + 30
        while not socket.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        with log.open("wb") as file:
            status = subprocess.run(
                words, cwd=ROOT, stdout=file, stderr=file, timeout=580, check=False
            ).returncode
    finally:
        pool.terminate()
        pool.wait(20)
    if status or not out.exists():
        raise RuntimeError(
            f"the engine's exit status is {status}\n" + log.read_text(errors="replace")[-3000:]
        )
    samples = json.loads(out.read_text())
    device = samples[0]["frame"]["device"]
    name = "cpu" if device == "cpu" else device.lower().replace("nvidia ", "").split()[0]
    found = with_models(samples) if tp == 1 else samples
    found.append({"part": "machine", **machine()})
    return [{"device": name, "tp": tp, **row} for row in found]


def kept(path: Path, device: str) -> list[dict[str, Any]]:
    """Samples of other devices in the result file of before, their profiles fitted again."""
    if not path.exists():
        return []
    return fitted_again([row for row in load_result(path)["samples"] if row["device"] != device])


def measured_at(path: Path) -> dict[str, str]:
    """Commits by device, of the result file of before."""
    return dict(load_result(path)["settings"].get("measured_at", {})) if path.exists() else {}


def fitted_again(samples: Sequence[Row]) -> list[dict[str, Any]]:
    """The same measurements; every model is of today's fit."""
    found: list[dict[str, Any]] = []
    for device in dict.fromkeys(row["device"] for row in samples):
        for tp in (1, 2):
            rows = [
                {k: v for k, v in row.items() if k not in ("device", "tp")}
                for row in samples
                if (row["device"], row["tp"]) == (device, tp) and row["part"] != "model"
            ]
            if rows:
                found += [
                    {"device": device, "tp": tp, **row} for row in (with_models(rows) if tp == 1 else rows)
                ]
    return found


def table(metrics: Metrics) -> list[str]:
    """Median and p90 error by what was predicted."""
    lines = [f"{'relative error':24}{'median':>10}{'p90':>10}"]
    for key in metrics:
        if key.endswith("_median_error_ratio"):
            name = key.removesuffix("_median_error_ratio")
            lines.append(f"{name:24}{metrics[key]:10.3f}{metrics[f'{name}_p90_error_ratio']:10.3f}")
        elif key.endswith("_crossover_error_ratio"):
            lines.append(f"{key.removesuffix('_error_ratio'):24}{metrics[key]:10.3f}")
    return lines


def main(argv: Sequence[str]) -> int:
    """Measure, write the result file, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few points; writes no result file")
    parser.add_argument("--device", default="cpu", choices=list(FLAGS))
    parser.add_argument("--tp", type=int, default=1, choices=[1, 2], help="2: two ranks too, after one")
    parser.add_argument("--engine-flags", default="", help="for cost_engine")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="")
    options = parser.parse_args(argv)
    began = time.monotonic()
    samples: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="quire-cost-") as folder:
        for tp in range(1, options.tp + 1):
            samples += run_engine(Path(folder), options, tp)
    device, before = samples[0]["device"], options.out / f"{NAME}.json"
    if not options.quick:
        samples = kept(before, device) + samples
    metrics = metrics_from_samples(samples)
    if not options.quick:
        model = "demo model, float32, 1 thread" if options.device == "cpu" else LLAMA_8B
        commits = {**measured_at(before), device: options.commit or commit_of(ROOT)[0]}
        path = write_result(
            NAME,
            claim=CLAIM,
            command=shlex.join(["python", "-m", "loadtest.bench_cost_model", *argv]),
            settings={
                "device": device,
                "model": model,
                "flags": FLAGS[options.device],
                "engine_flags": options.engine_flags,
                "measured_at": commits,
            },
            metrics=metrics,
            samples=samples,
            folder=options.out,
            commit=options.commit,
        )
        print(f"wrote {path.name}")
    print(*table(metrics), sep="\n")
    print(f"{time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
