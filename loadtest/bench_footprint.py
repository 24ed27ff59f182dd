"""How long `quire up` takes from an installed clone, and how much memory the whole cluster holds.

    python -m loadtest.bench_footprint [--quick]      writes loadtest/results/cluster-footprint.json

Each run starts a cluster of its own (own QUIRE_HOME, free ports): demo model, one prefill and one decode
worker, gateway, scheduler, coordinator, mempool, Redis, supervisor. `ready_s` is the time until `quire up`
returns, which it does when every service is ready. Memory is the proportional set size of all processes
of the cluster after requests have used both workers, from /proc/<pid>/smaps_rollup: shared pages count once.
"""

import argparse
import asyncio
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.http_client import Client
from loadtest.load import CHAT
from loadtest.processes import family, free_port, pss_bytes
from loadtest.registry import ROOT
from loadtest.results import Metrics, Samples, quantile, write_result

NAME = "cluster-footprint"
CLAIM = (
    "Installed once, the cluster (1 prefill, 1 decode and all else, demo model, CPU) is ready within 40 s on "
    "2 cores and holds at most 5 GiB PSS."
)
RUNS = 3
UP_TIMEOUT_S = 300
CALL_TIMEOUT_S = 60
NUM_REQUESTS = 8
OUTPUT_TOKENS = 64


def metrics_from_samples(samples: Samples) -> Metrics:
    """Median and worst start; the largest memory of any run."""
    ready = [sample["ready_s"] for sample in samples]
    return {
        "ready_s": quantile(ready, 0.5),
        "ready_max_s": max(ready),
        "pss_bytes": float(max(sum(sample["pss_bytes"].values()) for sample in samples)),
        "failed_requests": float(sum(sample["failed"] for sample in samples)),
    }


def quire(home: Path, *args: str, timeout_s: float) -> str:
    """Standard output of a `quire` command. Raises: RuntimeError with what it said."""
    command = [str(Path(sys.executable).with_name("quire")), *args]
    env = {k: v for k, v in os.environ.items() if not k.startswith("QUIRE_")}  # noqa: TID251
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**env, "QUIRE_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode != 0:
        said = f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}:\n{said}")
    return done.stdout


def free_base_port() -> int:
    """First of the ports that a cluster takes by offset; below those that the kernel gives to clients.

    Raises: RuntimeError when there are none.
    """
    for base in range(12_000, 30_000, 100):
        if all(_is_free(port) for port in range(base, base + 60)):
            return base
    raise RuntimeError("no 60 free ports between 12000 and 30000")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


async def use(url: str, model: str) -> int:
    """Some streamed chats; how many failed."""
    client = Client(url)
    failed = 0
    for number in range(NUM_REQUESTS):
        body = {
            "model": model,
            "messages": [{"role": "user", "content": f"What is a list in Python? Answer {number}."}],
            "max_tokens": OUTPUT_TOKENS,
            "stream": True,
        }
        reply = await client.post(client.request_bytes(CHAT, body), timeout_s=CALL_TIMEOUT_S)
        failed += not reply.ok
    client.close()
    return failed


def memory(status: dict[str, Any]) -> dict[str, int]:
    """PSS in bytes by service: its processes, less those that are a service themselves."""
    own = {service["name"]: service["pid"] for service in status["services"] if service["pid"]}
    roots = {"supervisor": status["pid"], **own}
    taken: set[int] = set(roots.values())
    found = {}
    for name, root in roots.items():
        members = {root, *(pid for pid in family(root) if pid not in taken)}
        taken |= members
        found[name] = sum(pss_bytes(pid) for pid in members)
    return found


def one_run(home: Path) -> dict[str, Any]:
    """Up, use, weigh, down."""
    port, base_port = free_port(), free_base_port()
    begin = time.monotonic()
    try:
        quire(home, "up", "--port", str(port), "--base-port", str(base_port), timeout_s=UP_TIMEOUT_S)
        ready_s = round(time.monotonic() - begin, 3)
        status = json.loads(quire(home, "status", "--json", timeout_s=CALL_TIMEOUT_S))
        failed = asyncio.run(use(status["url"], status["model"]))
        return {"ready_s": ready_s, "failed": failed, "pss_bytes": memory(status)}
    finally:
        quire(home, "down", timeout_s=CALL_TIMEOUT_S)


def main(argv: Sequence[str]) -> int:
    """Measure and write the result file; exit status 1 when a request failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one run; writes no result file")
    options = parser.parse_args(argv)
    samples = []
    for number in range(1 if options.quick else RUNS):
        with tempfile.TemporaryDirectory(prefix="quire-footprint-") as folder:
            samples.append(one_run(Path(folder)))
        total = sum(samples[-1]["pss_bytes"].values()) / 2**30
        print(f"  run {number}: ready after {samples[-1]['ready_s']:.1f} s, {total:.2f} GiB", flush=True)
    metrics = metrics_from_samples(samples)
    for key, value in sorted(metrics.items()):
        print(f"{key:24} {value:16.2f}")
    if not options.quick:
        path = write_result(
            NAME,
            claim=CLAIM,
            command=shlex.join(["python", "-m", "loadtest.bench_footprint", *argv]),
            settings={"runs": RUNS, "requests": NUM_REQUESTS, "output_tokens": OUTPUT_TOKENS},
            metrics=metrics,
            samples=samples,
        )
        print(f"wrote {path.relative_to(ROOT)}")
    return 1 if metrics["failed_requests"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
