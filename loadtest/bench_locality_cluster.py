"""MemServe's Figure 15 on the real cluster on CPU: do the policies stand in the order of the paper and the simulator?

    make measure NAME=cluster-locality ARGS="--resume FILE [--budget-s S] [--quick]"           -> cluster-locality.json

What bench_locality.py measures on four GPUs, with its requests, arms and options: three prefill workers and one decode
worker (vLLM, the demo model), each with pages of its own, documents of 1K tokens with questions, 70% of what `session`
can take. Times of a small machine say nothing of GPUs; the order of the policies is what is compared. With --scale all
lengths are shorter. `figure15_order_ratio`: of what the paper's figure says where documents are shared (share ratio 2
and more), the part that is found: by prompt tree, and by cost, more hits and a lower P99 of TTFT than by session.
"""

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from loadtest import bench_locality
from loadtest.bench_locality import LOAD_SHARE, cluster_of, measure, said
from loadtest.progress import Progress
from loadtest.registry import ROOT
from loadtest.results import Metrics, Samples, write_result

NAME = "cluster-locality"
CLAIM = (
    "On the real cluster on CPU the policies have the same order in hits and in the P99 of TTFT, where documents are "
    "shared, as in the simulator and in MemServe's Figure 15: by prompt tree and by cost before by session."
)
MAX_LAG_MS = 250.0  # client and cluster share the cores
BETTER_ARMS = ("prompt_tree", "cost")


def metrics_from_samples(samples: Samples) -> Metrics:
    """Those of bench_locality.py, and how much of Figure 15's order they have."""
    out = bench_locality.metrics_from_samples(samples)
    found = order_of(out)
    if found:
        out["figure15_order_ratio"] = sum(found.values()) / len(found)
    return out


def order_of(metrics: Metrics) -> dict[str, bool]:
    """What Figure 15 says of each arm and share ratio that was measured, and whether it is so."""
    found: dict[str, bool] = {}
    for key, ratio in metrics.items():
        head, _, what = key.partition("_")
        arm = what.removesuffix("_p99_ttft_vs_session_ratio")
        if arm not in BETTER_ARMS or arm == what or head == "share1":
            continue
        found[f"{head} {arm}: lower P99 of TTFT"] = ratio < 1.0
        hits = f"{head}_{{}}_hit_ratio"
        found[f"{head} {arm}: more hits"] = metrics[hits.format(arm)] > metrics[hits.format("session")]
    return found


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """As bench_locality's, for the cluster on CPU. Raises: SystemExit on options of other places."""
    options = bench_locality.parse(["--max-lag-ms", str(MAX_LAG_MS), *argv])
    if options.device != "cpu" or options.simulate or options.cost:
        raise SystemExit("error: the CPU cluster only: for GPUs and the simulator there is bench_locality")
    return options


def main(argv: Sequence[str]) -> int:
    """Measure and write the result file; exit status 1 when a request failed, 3 when there are runs left."""
    options = parse(argv)
    progress = Progress(options.resume, said)
    with (
        tempfile.TemporaryDirectory(prefix="quire-locality-") as folder,
        cluster_of(options, Path(folder)) as cluster,
    ):
        measure(options, cluster, progress)
    metrics = metrics_from_samples(progress.samples)
    for key, value in metrics.items():
        print(f"{key:50} {value:12.3f}")
    for what, is_so in order_of(metrics).items():
        print(f"{'yes' if is_so else 'NO ':4} {what}")
    runs = sum(s["kind"] == "run" for s in progress.samples)
    wanted = len(options.ratios) * len(options.seeds) * len(options.arms.split(","))
    if runs < wanted:
        print(f"{runs} of {wanted} runs are there")
        return 3
    if not options.quick:
        path = write_result(
            NAME,
            claim=CLAIM,
            command=shlex.join(["python", "-m", "loadtest.bench_locality_cluster", *argv]),
            settings={
                "engine": options.engine,
                "arms": options.arms,
                "ratios": options.ratios,
                "seeds": options.seeds,
                "sessions": options.sessions,
                "document_tokens": options.document_tokens,
                "scale": options.scale,
                "cache_bytes": options.cache_bytes,
                "load_share": LOAD_SHARE,
                "cluster": options.set,
                "worker": options.worker,
                "model": options.model_dir or "quire-demo",
            },
            metrics=metrics,
            samples=progress.samples,
            folder=Path(options.out),
            commit=options.commit,
        )
        print(f"wrote {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    return 1 if metrics["failed_requests"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
