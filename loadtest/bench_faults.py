"""Answers while processes are killed and stopped under load, on one GPU, beside stock vLLM's, token for token.

    python -m loadtest.bench_faults [--seconds 240] [--every-s 6] [--clients 8] [--seed 1] [--device cuda|cpu]
                                    [--out FOLDER] [--commit HEAD]        writes loadtest/results/h200-faults.json

`quire up` with two prefill and two decode workers on the first GPU, the demo model in float32, eager, spaces so small
that blocks leave for host memory and come back. Clients ask the cases of tests/support/exactness_cases.py, as streams
and whole. Every --every-s seconds a process is killed (SIGKILL) or stopped for half a second to four: workers and their
engine cores half of the time, else mempool, keeper, scheduler, coordinator, Redis or gateway, by --seed. Whoever gets
no answer, or half of one, asks again. Then the faults end, the cluster is given time to be whole, and every case is
asked once more.

Of every answer, and of what was heard of each that broke off, the tokens are compared with stock vLLM's two (empty
cache, cached prompt); where they are like neither, stock says how near a tie the first differing token was
(exactness_shares.py); `wrong_count`: no near tie. `refused_count`: requests without an answer's end, by what the client
saw. Afterwards: seconds until all is ready, leases and hand-offs that nobody holds.

Exit status 1: an answer was wrong, or the cluster did not come back.
"""

import argparse
import asyncio
import collections
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest import exactness_rig as rig
from loadtest import exactness_shares as shares
from loadtest import faults_rig
from loadtest.registry import RESULTS
from loadtest.results import Metrics, Samples, quantile, write_result

NAME = "h200-faults"
CLAIM = (
    "While processes of a cluster on a GPU are killed and stopped under load, no client gets a token that stock vLLM "
    "would not have given, whole answers or broken off; then the cluster is whole again, and every answer is."
)
MODE, TOPOLOGY = "float32", "faults"
KV_BYTES, DRAM_BYTES = (
    (640 + 512) << 20,
    1 << 30,
)  # of each engine, the mempool's CUDA context in it; behind all
BACK_S = 150.0  # to be whole again


def metrics_from_samples(samples: Samples) -> Metrics:
    """See the module."""
    answers = [s for s in samples if s["kind"] == "answer"]
    during = [s for s in answers if not s["after"]]
    ended = [s for s in during if s["ended"]]
    faults = [s for s in samples if s["kind"] == "fault"]
    verdicts = _verdicts(samples)
    out: Metrics = {
        "answers_count": len(ended),
        "broken_off_count": sum(not s["ended"] and s["found"] != "nothing" for s in during),
        "refused_count": sum(not s["ended"] for s in during),
        "equal_count": sum(s["found"] == "equal" for s in ended),
        "like_cached_count": sum(s["found"] == "like_cached" for s in ended),
        "near_tie_count": sum(s["found"] == "unlike" and verdicts[s["which"]] == "near_tie" for s in answers),
        "wrong_count": sum(s["found"] == "unlike" and verdicts[s["which"]] == "wrong" for s in answers),
        "faults_count": len(faults),
        "kills_count": sum(s["how"] == faults_rig.KILL for s in faults),
        "cores_count": sum(s["part"] == "core" for s in faults),
    }
    if ended:
        out["answer_p50_s"] = quantile([s["took_s"] for s in ended], 0.5)
        out["answer_max_s"] = max(s["took_s"] for s in ended)
    after = [s for s in answers if s["after"]]
    out["after_count"] = len(after)
    out["after_unanswered_count"] = sum(not s["ended"] for s in after)
    for end in (s for s in samples if s["kind"] == "end"):
        out |= {name: end[name] for name in ("back_s", "left_leases_count", "left_handoffs_count")}
    return {key: float(value) for key, value in out.items()}


def _verdicts(samples: Samples) -> list[str]:
    """Of each row of `unlike`."""
    return [shares.verdict(MODE, row["case"], row["shares"]) for row in samples if row["kind"] == "unlike"]


def table(metrics: Metrics) -> list[str]:
    """All of them."""
    return [f"{name:28} {value:10.2f}" for name, value in metrics.items()]


async def faults(cluster: Any, options: argparse.Namespace, begun_s: float) -> list[dict[str, Any]]:
    """One after another until the time is up; a sample each."""
    rng, found = random.Random(options.seed), []
    while time.monotonic() - begun_s < options.seconds:
        await asyncio.sleep(options.every_s)
        status = await asyncio.to_thread(cluster.status)
        services = {
            s["name"]: s["pid"] for s in status.get("services", []) if s["state"] == "ready" and s["pid"]
        }
        fault = faults_rig.plan(rng, sorted(services))
        if fault is None or not await faults_rig.do(fault, services[fault.service]):
            continue
        row = {"kind": "fault", "how": fault.how, "service": fault.service, "part": fault.part}
        row |= {"stopped_s": fault.stopped_s, "at_s": round(time.monotonic() - begun_s, 2)}
        print(
            f"  {row['at_s']:7.1f} {fault.how} {fault.service} {fault.part} {fault.stopped_s or ''}",
            flush=True,
        )
        found.append(row)
    return found


async def wait_whole(cluster: Any) -> float:
    """Seconds until everything is ready. Raises: RuntimeError."""
    begun_s, status = time.monotonic(), {}
    while time.monotonic() - begun_s < BACK_S:
        status = await asyncio.to_thread(cluster.status)
        if status.get("ready"):
            return time.monotonic() - begun_s
        await asyncio.sleep(0.5)
    raise RuntimeError(f"the cluster was not ready {BACK_S:.0f} s behind the last fault: {status}")


async def under_faults(
    cluster: Any, options: argparse.Namespace, cases: list[dict[str, Any]], stock: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Samples, and the rows that are unlike stock's."""
    begun_s = time.monotonic()
    clients = faults_rig.Clients(cluster.url, cases, stock, options.seed)
    load = asyncio.ensure_future(clients.run(options.clients))
    samples = await faults(cluster, options, begun_s)
    clients.stop.set()
    await load
    during = len(clients.answers)
    back_s = await wait_whole(cluster)
    await clients.once()
    samples += [{**row, "after": i >= during} for i, row in enumerate(clients.answers)]
    pool = await asyncio.to_thread(cluster.pool_at_rest)
    samples.append({
        "kind": "end", "back_s": round(back_s, 1), "left_leases_count": pool["num_leases"],
        "left_handoffs_count": pool["num_handoffs"], "counters": {k: v for k, v in pool["counters"].items() if v},
    })  # fmt: skip
    return samples, list(clients.unlike.values())


def start(folder: Path, options: argparse.Namespace) -> Any:
    """The cluster, not entered."""
    from tests.support.cluster_dram import dram_behind_host_memory
    from tests.support.local_cluster import LocalCluster

    home = folder / "home"
    words = ["topology=disaggregated", "num_prefill=2", "num_decode=2", f"dtype={MODE}", "max_model_len=2048"]
    env = {
        "HF_HUB_OFFLINE": "1",
        "QUIRE_CLUSTER_READY_TIMEOUT_S": "300",
        "QUIRE_WORKER_ENFORCE_EAGER": "true",
    }
    if options.device == "cuda":
        words += ["gpu_memory_utilization=0.1", f"kv_cache_bytes={KV_BYTES}", f"dram_bytes={DRAM_BYTES}"]
        env["CUDA_VISIBLE_DEVICES"] = rig.find_gpus()[0]
    else:
        words += ["kv_space=own", f"mempool_bytes={14 << 20}"]
        env |= dram_behind_host_memory(home)
    flags = [word for pair in words for word in ("--set", pair)]
    return LocalCluster(home, "--device", options.device, *flags, env=env, is_patient=options.device == "cpu")


def judged(folder: Path, unlike: list[dict[str, Any]], cases: Any, stock: Any) -> list[dict[str, Any]]:
    """Samples of what stock says of answers that are like neither of its own, in their order."""
    run = {"mode": MODE, "topology": TOPOLOGY, "device": "", "cases": unlike}
    asked = iter(rig.shares_row(folder, run, cases, stock)["shares"])
    samples = []
    for row in unlike:
        mine = [next(asked) for _ in shares.unlike_choices(row)]
        samples.append(
            {"kind": "unlike", "case": row, "asked": mine, "shares": [one["share"] for one in mine]}
        )
        print(
            f"  unlike: {row['id']} {[(o['at'], o['ours'], o['stock'], o['share']) for o in mine]}",
            flush=True,
        )
    return samples


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=240.0, help="faults for so long")
    parser.add_argument("--every-s", type=float, default=6.0, help="between two of them")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu writes no result file")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Measure, print the table, write the result file."""
    options = parsed(argv)
    cases = rig.cases()
    with tempfile.TemporaryDirectory(prefix="quire-faults-") as name:
        folder = Path(name)
        stock = rig.stock_answers(folder, cases, MODE)
        print(f"stock vLLM: {len(stock)} cases", flush=True)
        cluster = start(folder, options)
        with cluster:
            samples, unlike = asyncio.run(under_faults(cluster, options, cases, stock))
        samples += judged(folder, unlike, cases, stock)
    lost = [s for s in samples if s["kind"] == "answer" and not s["ended"]]
    why = collections.Counter(f"{s['status']} {s['why'][:90]}" for s in lost)
    for said, count in why.most_common(8):
        print(f"  {count:4} times {said}")
    metrics = metrics_from_samples(samples)
    print(*table(metrics), sep="\n")
    if options.device == "cuda":
        write_result(
            NAME, claim=CLAIM, command=shlex.join(["python", "-m", "loadtest.bench_faults", *argv]),
            settings={k: v for k, v in vars(options).items() if k not in ("out", "commit")},
            metrics=metrics, samples=samples, folder=options.out, commit=options.commit,
        )  # fmt: skip
    return 1 if metrics["wrong_count"] or metrics["after_unanswered_count"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
