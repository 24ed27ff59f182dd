"""A handoff between two hosts without RDMA, beside NIXL alone with the same bytes: what the product adds to the wire.

    python -m loadtest.bench_host_handoff [--quick] [--out FOLDER] [--commit HEAD]      writes two-host-handoff.json

Root only. The hosts are network namespaces joined by a veth pair, as in bench_two_hosts.py, each with a mempool; the
workers (host_handoff_worker.py) reach theirs by its unix socket. Handoff: one worker has written and sealed a prompt's
blocks; timed from its "handoff ready" until the other one, which asks at that moment, holds a lease on all of them:
both mempools' questions, the bytes over UCX/TCP, the source's check of the epochs. Every word is compared behind it.
Raw is the same bytes by NIXL's agents in the same namespaces, the faster of spinning and napping ends. All take turns.
"""

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from loadtest.bench_two_hosts import WAYS
from loadtest.child_commands import Child
from loadtest.lending_rig import child, module
from loadtest.processes import Fleet, free_port
from loadtest.registry import RESULTS
from loadtest.results import Metrics, Samples, write_result
from loadtest.two_hosts import Ends, TwoHosts, why_not

NAME = "two-host-handoff"
CLAIM = (
    "Between two hosts over UCX/TCP, a handoff from one worker's pages to another's runs at >= 0.8 of a raw NIXL "
    "transfer of the same bytes."
)
PAGE_BYTES = 2 << 20
NUM = 64
ROUNDS = 15
WARM_UP = 3
POOL_PAGES = 4 * NUM
RAW = [way for way in WAYS if way != "pull"]


def metrics_from_samples(samples: Samples) -> Metrics:
    """Median rates; the ratio of the handoff's to the better raw one."""
    rates = {
        way: median(row["bytes"] / row["seconds"] / 1e9 for row in samples if row["way"] == way)
        for way in ("handoff", *RAW)
    }
    raw = max(rates[way] for way in RAW)
    took = [row["seconds"] * 1e3 for row in samples if row["way"] == "handoff"]
    return {
        "handoff_gb_per_s": rates["handoff"],
        "handoff_ms": median(took),
        "raw_nixl_gb_per_s": raw,
        "handoff_share_ratio": rates["handoff"] / raw,
    }


class Rig:
    """A mempool on each host and a worker at each: 0 hands over, 1 acquires."""

    def __init__(self, hosts: TwoHosts, folder: Path, stack: ExitStack) -> None:
        fleet = stack.enter_context(Fleet(folder / "logs"))
        self.workers: list[Child] = []
        self.addresses: list[str] = []
        for number in range(2):
            socket = folder / f"pool-{number}.sock"
            flags = ["--instance", f"mempool-{number}", "--socket", str(socket), "--admin-listen"]
            flags += [f"127.0.0.1:{free_port()}", "--peer-listen", f"tcp://10.213.7.{number + 1}:8107"]
            flags += ["--ucx-tls", "tcp", "--capacity-bytes", str(POOL_PAGES * PAGE_BYTES)]
            command = [*hosts.prefix(number), *module("services.mempool", flags)]
            fleet.start(f"mempool-{number}", command, ready_url=f"unix://{socket}")
            worker = child(f"worker-{number}", ["loadtest.host_handoff_worker"], folder, stack)
            quota = NUM if number == 0 else 1
            opened = worker.ask(
                "open", socket=str(socket), instance=f"worker-{number}", page_bytes=PAGE_BYTES, quota=quota
            )
            self.workers.append(worker)
            self.addresses.append(opened["peer_address"])

    def hand_off(self, prompt: str) -> dict[str, Any]:
        """One prompt. Raises: RuntimeError when a block is missing or wrong."""
        source, reader = self.workers
        source.ask("save", prompt=prompt, num=NUM)
        reader.say("acquire", prompt=prompt, num=NUM, source=self.addresses[0])
        begun = source.ask("ready", prompt=prompt, num=NUM)
        got = reader.answer(120)
        if got["num_blocks"] != NUM or got["num_wrong"]:
            raise RuntimeError(f"handoff failed: {got}")
        for worker in self.workers:
            worker.ask("drop")
        seconds = got["at_s"] - max(begun["at_s"], got["begin_s"])
        return {"bytes": NUM * PAGE_BYTES, "seconds": seconds}


def measure(rounds: int) -> list[dict[str, Any]]:
    """Handoff and raw in turns. Raises: RuntimeError when a byte is wrong."""
    samples: list[dict[str, Any]] = []
    with (
        TwoHosts() as hosts,
        tempfile.TemporaryDirectory(prefix="quire-hosts-") as name,
        ExitStack() as stack,
    ):
        rig = Rig(hosts, Path(name), stack)
        ends = Ends(hosts, page_bytes=PAGE_BYTES, num_pages=2 * NUM)
        stack.callback(ends.close)
        for number in range(rounds + WARM_UP):
            pages = np.random.default_rng(number).permutation(2 * NUM).tolist()
            order = ["handoff", *RAW]
            for way in order if number % 2 else reversed(order):
                if way == "handoff":
                    answer = rig.hand_off(f"prompt-{number}")
                else:
                    what, arguments = WAYS[way]
                    answer = ends.order(what, source=pages[:NUM], target=pages[NUM:], **arguments)
                    if not answer.get("right"):
                        raise RuntimeError(f"{way} failed: {answer}")
                if number >= WARM_UP:
                    row = {"way": way, "round": number, "bytes": answer["bytes"]}
                    samples.append({**row, "seconds": round(answer["seconds"], 6)})
    return samples


def main(argv: Sequence[str]) -> int:
    """Measure, print, write. Exit status 1 where two hosts cannot be made."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three rounds; writes no result file")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="")
    options = parser.parse_args(argv)
    if reason := why_not():
        print(f"two hosts cannot be made here: {reason}", file=sys.stderr)
        return 1
    begun_s = time.monotonic()
    rounds = 3 if options.quick else ROUNDS
    samples = measure(rounds)
    metrics = metrics_from_samples(samples)
    if not options.quick:
        path = write_result(
            NAME, claim=CLAIM, command=shlex.join(["python", "-m", "loadtest.bench_host_handoff", *argv]),
            settings={"page_bytes": PAGE_BYTES, "pages": NUM, "rounds": rounds, "ucx_tls": "tcp"},
            metrics=metrics, samples=samples, folder=options.out, commit=options.commit,
        )  # fmt: skip
        print(f"wrote {path.name}")
    for key, value in sorted(metrics.items()):
        print(f"{key:24} {value:12.3f}")
    print(f"{time.monotonic() - begun_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
