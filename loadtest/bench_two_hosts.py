"""Pages between two hosts without RDMA, beside NIXL alone with the same bytes: what the transfer layer costs.

    python -m loadtest.bench_two_hosts [--quick]      writes loadtest/results/two-host-transfer.json

Root only. The hosts are network namespaces joined by a veth pair (two_hosts.py), both on this machine's CPUs, so the
rates are the machine's; the ratio is what is claimed. A pull is timed at the puller: question, bytes, answer. Raw is
the same pages written by the source's NIXL agent, timed from post to DONE, with both ends spinning and with naps of
50 us between polls; the ratio is to the faster of the two. All take turns.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from loadtest.results import Metrics, Samples, write_result
from loadtest.two_hosts import Ends, TwoHosts, why_not

NAME = "two-host-transfer"
CLAIM = (
    "Between two hosts over UCX/TCP, a pull of pages runs at >= 0.8 of a raw NIXL transfer of the same bytes."
)
PAGE_BYTES = 2 << 20
NUM_PAGES = 128
NUM = 64
ROUNDS = 15
WARM_UP = 3
WAYS: dict[str, tuple[str, dict[str, int]]] = {
    "pull": ("pull", {}),
    "raw spinning": ("raw", {"nap_us": 0}),
    "raw napping": ("raw", {"nap_us": 50}),
}


def metrics_from_samples(samples: Samples) -> Metrics:
    """Median rates; the ratio of the pull's to the better raw one."""
    rates = {
        way: median(row["bytes"] / row["seconds"] / 1e9 for row in samples if row["way"] == way)
        for way in WAYS
    }
    raw = max(rates[way] for way in WAYS if way != "pull")
    return {
        "pull_gb_per_s": rates["pull"],
        "raw_nixl_gb_per_s": raw,
        "nixl_share_ratio": rates["pull"] / raw,
    }


def measure(rounds: int) -> list[dict[str, Any]]:
    """Pull and raw in turns, each round other pages. Raises: RuntimeError when a byte is wrong."""
    samples = []
    with TwoHosts() as hosts:
        ends = Ends(hosts, page_bytes=PAGE_BYTES, num_pages=NUM_PAGES)
        try:
            for number in range(rounds + WARM_UP):
                pages = np.random.default_rng(number).permutation(NUM_PAGES).tolist()
                for way in list(WAYS) if number % 2 else list(reversed(WAYS)):
                    order, arguments = WAYS[way]
                    answer = ends.order(order, source=pages[:NUM], target=pages[NUM:], **arguments)
                    if not answer.get("right"):
                        raise RuntimeError(f"{way} failed: {answer}")
                    if number >= WARM_UP:
                        row = {"way": way, "round": number, "bytes": answer["bytes"]}
                        samples.append({**row, "seconds": round(answer["seconds"], 6)})
        finally:
            ends.close()
    return samples


def main(argv: Sequence[str]) -> int:
    """Measure, print, write. Exit status 1 where two hosts cannot be made."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three rounds; writes no result file")
    options = parser.parse_args(argv)
    if reason := why_not():
        print(f"two hosts cannot be made here: {reason}", file=sys.stderr)
        return 1
    rounds = 3 if options.quick else ROUNDS
    samples = measure(rounds)
    metrics = metrics_from_samples(samples)
    for key, value in sorted(metrics.items()):
        print(f"{key:24} {value:12.3f}")
    if not options.quick:
        write_result(
            NAME,
            claim=CLAIM,
            command=shlex.join(["python", "-m", "loadtest.bench_two_hosts", *argv]),
            settings={"page_bytes": PAGE_BYTES, "pages": NUM, "rounds": rounds, "ucx_tls": "tcp"},
            metrics=metrics,
            samples=samples,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
