"""How wrong is the simulator: the real CPU cluster and a simulated one, the same requests at the same times.

    python -m loadtest.bench_simulator [--quick] [--rounds 3] [--rates 1,4]      writes results/simulator.json

One prefill and one decode worker with vLLM and the demo model (`quire up`, policy cost). Documents with questions
(LooGLE-like) are sent open-loop at every rate, and to the simulator the same at the same times. In turns with them come
calibration runs, with requests of their own at --calibration-rate. From these come, and from nothing else: the prompts'
times (a line through what the coefficients of the prefill worker predict and what receipts say), the factor of decode
steps, and what a request takes beyond its steps (gateway, scheduler, messages, hand-off, client).
Both engines share the machine's cores, which the simulator does not model: run it on an otherwise idle machine.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from loadtest.locality_cluster import Arm, LocalityCluster
from loadtest.outcomes import Outcome
from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, quantile, write_result
from loadtest.simulator.cluster import simulate
from loadtest.simulator.frontend import Delays
from loadtest.simulator.links import Rate
from loadtest.simulator.prices import Chunk, ModelPrices, kv_bytes_per_token
from loadtest.simulator.records import summarize
from loadtest.simulator.request import from_workload
from loadtest.simulator.spec import ClusterSpec, roles_of
from loadtest.simulator.task import EngineLimits
from loadtest.workloads.catalogue import Options, build
from loadtest.workloads.request import Request, salted
from services.scheduler.core.predict import CostSettings
from shared.wire.cost import CostCoefficients

NAME = "simulator"
CLAIM = (
    "Calibrated by one run, the simulator predicts the mean TTFT of the real CPU cluster under other requests at other "
    "rates; the error is the largest over the rates."
)
ARM = Arm("cost", "cost", {})
BLOCK_TOKENS = 32  # of engines on CPU
MEMPOOL_BYTES = 1 << 30
MAX_RUNNING = 256
WARM_REQUESTS, WARM_RATE = 24, 4.0
CALIBRATION_SEED = 98
SLACK_MS = 5.0  # between two prompts on the prefill worker that do not disturb each other
DOCUMENT_TOKENS = 1_000
FIGURES = ("ttft_mean", "ttft_p50", "ttft_p99", "tpot_mean", "jct_mean")


def metrics_from_samples(samples: Samples) -> Metrics:
    """Relative errors, the largest over the rates; `ttft_error_ratio`: of the mean."""
    out: Metrics = {}
    found = [row for row in samples if row["part"] == "calibration"]
    for row in found:
        out["request_delay_ms"] = row["request_ms"]
        out["prompt_slope_ratio"], out["prompt_offset_ms"] = row["slope"], row["offset_ms"]
        out["decode_factor_ratio"] = row["decode_factor"]
    samples = [row for row in samples if row["part"] == "rate"]
    for row in samples:
        head = f"rate_{row['rate_per_s']:g}".replace(".", "_")
        for figure in FIGURES:
            out[f"{head}_{figure}_real_ms"] = row["real"][f"{figure}_ms"]
            out[f"{head}_{figure}_simulated_ms"] = row["simulated"][f"{figure}_ms"]
    for figure in FIGURES:
        errors = [abs(r["simulated"][f"{figure}_ms"] / r["real"][f"{figure}_ms"] - 1) for r in samples]
        name = figure.removesuffix("_mean")
        out[f"{name}_error_ratio"] = max(errors)
    out["hit_error_points"] = max(
        100 * abs(r["simulated"]["hit_ratio"] - r["real"]["hit_ratio"]) for r in samples
    )
    out["pair_error_median_ratio"] = quantile([e for r in samples for e in r["pair_errors"]], 0.5)
    return out


@dataclass(frozen=True, slots=True)
class Calibration:
    """What one run of the real cluster says of it.

    slope, offset_ms: of a prompt's steps, over what the coefficients predict; decode_factor: of steps of decodes alone.
    request_ms: what a request takes beyond its steps.
    """

    slope: float = 1.0
    offset_ms: float = 0.0
    decode_factor: float = 1.0
    request_ms: float = 0.0


class MeasuredPrices(ModelPrices):
    """The model as a run found it. A last position that is computed again is a decode, as it is for the engine."""

    def __init__(self, coefficients: CostCoefficients, found: Calibration) -> None:
        super().__init__(coefficients, prefill_correction=found.slope, decode_correction=found.decode_factor)
        self._offset_ms = found.offset_ms

    def step_ms(self, chunks: Sequence[Chunk], num_decodes: int, decode_context_tokens: int) -> float:
        """See StepPrices."""
        again = [past for new, past in chunks if new == 1]
        prompts = [chunk for chunk in chunks if chunk[0] > 1]
        num_decodes, context = num_decodes + len(again), decode_context_tokens + sum(again)
        if not prompts:
            return self.decode_ms(num_decodes, context)
        return max(0.1, self._offset_ms + super().step_ms(prompts, num_decodes, context))


def coefficients_of(costs: Mapping[str, Any]) -> CostCoefficients:
    """The prefill worker's, else the other's. Raises: StopIteration where no worker has any."""
    by_role = sorted(costs.items(), key=lambda item: not item[0].startswith("prefill"))
    return msgspec.convert(
        next(cost["coefficients"] for _, cost in by_role if cost["coefficients"]), CostCoefficients
    )


def line(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(slope, offset) of least squares; of equal x, the ratio of the means. Raises: ValueError on no pairs."""
    if not pairs:
        raise ValueError("no prompt was alone on its worker")
    x_mean, y_mean = (sum(pair[n] for pair in pairs) / len(pairs) for n in (0, 1))
    spread = sum((x - x_mean) ** 2 for x, _ in pairs)
    slope = sum((x - x_mean) * (y - y_mean) for x, y in pairs) / spread if spread > 1e-9 else 0.0
    if slope <= 0:
        return y_mean / x_mean, 0.0
    return slope, y_mean - slope * x_mean


def alone(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Answers whose prompts no other prompt disturbed."""
    spans = sorted(
        (one.sent_ms, one.sent_ms + sum(one.stages.values()) + SLACK_MS, n)
        for n, one in enumerate(outcomes)
        if one.ok and one.stages
    )
    found, busy_ms = [], 0.0
    for place, (begin_ms, end_ms, number) in enumerate(spans):
        following_ms = spans[place + 1][0] if place + 1 < len(spans) else float("inf")
        if begin_ms >= busy_ms and following_ms >= end_ms:
            found.append(outcomes[number])
        busy_ms = max(busy_ms, end_ms)
    return found


def calibrate(
    coefficients: CostCoefficients, runs: Sequence[tuple[Sequence[Request], Sequence[Outcome]]]
) -> Calibration:
    """From what was sent and answered: prompts by their receipts, decodes by their TPOT, and what is left of TTFT.

    All by means, over all runs.
    """
    model = ModelPrices(coefficients)
    answered = [one for _, real in runs for one in real]
    prompts = [one for _, real in runs for one in alone(real) if one.sources.get("computed", 0) > 1]
    totals = [sum(one.sources.values()) for one in prompts]
    pairs = [
        (model.prefill_ms(total, total - one.sources["computed"]), one.stages["compute_ms"])
        for one, total in zip(prompts, totals, strict=True)
    ]
    found = Calibration(*line(pairs))
    for name in ("decode_factor", "request_ms"):
        told = [one for requests, _ in runs for one in simulated(requests, coefficients, found)]
        if name == "decode_factor":
            found = replace(found, decode_factor=_mean(answered, "tpot_ms") / _mean(told, "tpot_ms"))
        else:
            left_ms = _mean(answered, "ttft_ms") - _mean(told, "ttft_ms")
            found = replace(found, request_ms=max(0.0, left_ms))
    return found


def _mean(outcomes: Sequence[Outcome], name: str) -> float:
    values = [value for one in outcomes if one.ok and (value := getattr(one, name)) > 0]
    return sum(values) / len(values)


def simulated(
    requests: Sequence[Request], coefficients: CostCoefficients, found: Calibration
) -> list[Outcome]:
    """What the simulator says of the same requests: one host, whose engines work in the same pages."""
    spec = ClusterSpec(
        roles_of(1, 1),
        block_tokens=BLOCK_TOKENS,
        memory_tokens=MEMPOOL_BYTES // kv_bytes_per_token(coefficients.shape) // 2,
        policy="cost",
        cost=CostSettings(disaggregation="always"),  # what `quire up --topology disaggregated` says
        limits=EngineLimits(MAX_RUNNING, coefficients.max_batched_tokens, BLOCK_TOKENS),
        instances_per_host=2,
        peer=Rate(0.0, 0.0),
        delays=Delays(gateway_ms=found.request_ms, hop_ms=0.0),
    )
    prices = MeasuredPrices(coefficients, found)
    return simulate(spec, prices, from_workload(requests, BLOCK_TOKENS)).outcomes


def figures(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """What is compared."""
    found = summarize(outcomes)
    times = {f"{figure}_ms": round(found.times_ms[figure], 3) for figure in FIGURES}
    shares = {"hit_ratio": round(found.hit_ratio, 4), "failed": float(found.num_failed)}
    pairs = sum(one.placement == "disaggregated" for one in outcomes) / len(outcomes)
    return {**times, **shares, "disaggregated_ratio": round(pairs, 4)}


def compare(rate: float, real: Sequence[Outcome], told: Sequence[Outcome]) -> dict[str, Any]:
    """One sample. pair_errors: of each request's TTFT."""
    errors = [
        round(abs(b.ttft_ms / a.ttft_ms - 1), 4) for a, b in zip(real, told, strict=True) if a.ok and b.ok
    ]
    return {
        "part": "rate",
        "rate_per_s": rate,
        "requests": len(real),
        "real": figures(real),
        "simulated": figures(told),
        "pair_errors": errors,
    }


def workload(num_requests: int, rate: float, seed: int, *salt: object) -> list[Request]:
    """The same for both."""
    options = Options(
        seed=seed,
        rate_per_s=rate,
        num_requests=num_requests,
        document_tokens=DOCUMENT_TOKENS,
        think_ms=4_000 / rate,
    )
    return salted(build("loogle", options), *salt)


@dataclass(frozen=True, slots=True)
class Sent:
    """One run of the real cluster. rate: 0: of the calibration."""

    rate: float
    requests: list[Request]
    real: list[Outcome]


def measure(options: argparse.Namespace, cluster: LocalityCluster) -> list[dict[str, Any]]:
    """Calibration and rates in turns, so that what else the machine does disturbs all alike; then the simulator.

    It is told nothing of the rates' runs.
    """
    cluster.run(workload(WARM_REQUESTS, WARM_RATE, 99, "warm"), is_measured=False)
    coefficients = coefficients_of(cluster.costs())
    runs: list[Sent] = []
    for number, rate in enumerate([*[0.0, *options.rates] * options.rounds, 0.0]):
        seed = (options.seed if rate else CALIBRATION_SEED) + number
        requests = workload(options.requests, rate or options.calibration_rate, seed, rate, number)
        runs.append(Sent(rate, requests, cluster.run(requests)))
        word = f"rate {rate:g}" if rate else "calibration"
        print(f"{word}: {figures(runs[-1].real)}", flush=True)
    known = [run for run in runs if not run.rate]
    found = calibrate(coefficients, [(run.requests, run.real) for run in known])
    kept = {"coefficients": msgspec.to_builtins(coefficients), "real": [figures(run.real) for run in known]}
    samples = [{"part": "calibration", **asdict(found), **kept}]
    print(f"calibrated at {options.calibration_rate:g}/s: {found}", flush=True)
    for rate in options.rates:
        some = [run for run in runs if run.rate == rate]
        told = [one for run in some for one in simulated(run.requests, coefficients, found)]
        samples.append(compare(rate, [one for run in some for one in run.real], told))
        print(f"rate {rate:g}: real      {samples[-1]['real']}", flush=True)
        print(f"        simulated {samples[-1]['simulated']}", flush=True)
    return samples


def main(argv: Sequence[str]) -> int:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer requests, one rate; writes no result file"
    )
    parser.add_argument(
        "--engine", default="vllm", choices=("vllm", "mock"), help="mock: tries the script alone"
    )
    parser.add_argument("--requests", type=int, default=20, help="a run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each rate")
    parser.add_argument("--rates", default="1,4")
    parser.add_argument("--calibration-rate", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    options.rates = [float(word) for word in options.rates.split(",")]
    if options.quick:
        options.rounds, options.rates = 1, options.rates[:1]
    flags = [
        "--device",
        "cpu",
        "--engine",
        options.engine,
        "--topology",
        "disaggregated",
        "--prefill",
        "1",
        "--decode",
        "1",
    ]
    flags += ["--set", f"mempool_bytes={MEMPOOL_BYTES}", "--set", "trace_sample_ratio=0.0"]
    with (
        tempfile.TemporaryDirectory(prefix="quire-simulator-") as folder,
        LocalityCluster(Path(folder) / "home", flags, {}, ARM) as cluster,
    ):
        samples = measure(options, cluster)
    metrics = metrics_from_samples(samples)
    if not options.quick:
        path = write_result(
            NAME,
            claim=CLAIM,
            command="python -m loadtest.bench_simulator " + " ".join(argv),
            settings={
                "requests_of_a_run": options.requests,
                "rounds": options.rounds,
                "rates_per_s": options.rates,
                "calibration_rate_per_s": options.calibration_rate,
                "seed": options.seed,
                "model": "quire-demo",
                "workload": f"loogle-like, documents of {DOCUMENT_TOKENS} tokens",
            },
            metrics=metrics,
            samples=samples,
            folder=options.out,
        )
        print(f"wrote {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    for key, value in sorted(metrics.items()):
        print(f"{key:40} {value:10.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
