"""How wrong is the simulator: the real CPU cluster and a simulated one, the same requests at the same times.

    python -m loadtest.bench_simulator [--quick] [--requests 60] [--rates 1,4]      writes results/simulator.json

One prefill and one decode worker with vLLM and the demo model (`quire up`, policy cost). After a warm-up the
coefficients and corrections that its workers have found are read, and nothing else of the simulator is fitted: gateway
and messages take what loadtest/simulator/frontend.py says. Per rate, documents with questions (LooGLE-like) are sent
open-loop.
Both engines share the machine's cores, which the simulator does not model: run it on an otherwise idle machine.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from loadtest.locality_cluster import Arm, LocalityCluster
from loadtest.outcomes import Outcome
from loadtest.registry import RESULTS, ROOT
from loadtest.results import Metrics, Samples, quantile, write_result
from loadtest.simulator.cluster import simulate
from loadtest.simulator.links import Rate
from loadtest.simulator.prices import ModelPrices, kv_bytes_per_token
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
    "With the coefficients that its workers found, the simulator predicts the mean TTFT of the real CPU cluster under "
    "the same requests; the error is the largest over the rates."
)
ARM = Arm("cost", "cost", {})
BLOCK_TOKENS = 32  # of engines on CPU
MEMPOOL_BYTES = 1 << 30
MAX_RUNNING = 256
WARM_REQUESTS, WARM_RATE = 24, 4.0
DOCUMENT_TOKENS = 1_000
FIGURES = ("ttft_mean", "ttft_p50", "ttft_p99", "tpot_mean", "jct_mean")


def metrics_from_samples(samples: Samples) -> Metrics:
    """Relative errors, the largest over the rates; `ttft_error_ratio`: of the mean."""
    out: Metrics = {}
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


def prices_of(costs: Mapping[str, Any]) -> ModelPrices:
    """Prefill's factor of the prefill worker, decode's of the decode worker. Raises: StopIteration without them."""
    prefill = next(cost for name, cost in costs.items() if name.startswith("prefill"))
    decode = next(cost for name, cost in costs.items() if name.startswith("decode"))
    return ModelPrices(
        msgspec.convert(prefill["coefficients"], CostCoefficients),
        prefill_correction=prefill["corrections"]["prefill"]["factor"],
        decode_correction=decode["corrections"]["decode"]["factor"],
    )


def simulated(requests: Sequence[Request], prices: ModelPrices) -> list[Outcome]:
    """What the simulator says of the same requests: one host, whose engines work in the same pages."""
    coefficients = prices.coefficients
    spec = ClusterSpec(
        roles_of(1, 1),
        block_tokens=BLOCK_TOKENS,
        memory_tokens=MEMPOOL_BYTES // kv_bytes_per_token(coefficients.shape) // 2,
        policy="cost",
        cost=CostSettings(disaggregation="always"),  # what `quire up --topology disaggregated` says
        limits=EngineLimits(MAX_RUNNING, coefficients.max_batched_tokens, BLOCK_TOKENS),
        instances_per_host=2,
        peer=Rate(0.0, 0.0),
    )
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


def measure(options: argparse.Namespace, cluster: LocalityCluster) -> list[dict[str, Any]]:
    """Every rate once. The corrections are read after the warm-up: the simulator sees none of what it predicts."""
    cluster.run(workload(WARM_REQUESTS, WARM_RATE, 99, "warm"), is_measured=False)
    prices = prices_of(cluster.costs())
    samples = []
    for rate in options.rates:
        requests = workload(options.requests, rate, options.seed, rate)
        row = compare(rate, cluster.run(requests), simulated(requests, prices))
        samples.append(row)
        print(f"rate {rate:g}: real {row['real']}\n        simulated {row['simulated']}", flush=True)
    return samples


def main(argv: Sequence[str]) -> int:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer requests, one rate; writes no result file"
    )
    parser.add_argument("--requests", type=int, default=60, help="a rate")
    parser.add_argument("--rates", default="1,4")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    options.rates = [float(word) for word in options.rates.split(",")]
    if options.quick:
        options.requests, options.rates = 20, options.rates[:1]
    flags = ["--device", "cpu", "--topology", "disaggregated", "--prefill", "1", "--decode", "1"]
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
                "requests": options.requests,
                "rates_per_s": options.rates,
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
