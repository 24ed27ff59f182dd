"""Redis, a coordinator and a mempool that lends by the load that engines report, for bench_long_prompt_reclaim.py."""

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from loadtest.lending_rig import COPY_TIMEOUT_MS, RigSettings, mempool_words, start_market
from shared import http_get
from shared.mempool.rank_memory import CONTEXT_BYTES as CONTEXT_BYTES  # for whoever uses this rig

GET_TIMEOUT_S = 10.0
LENDING = {
    "interval-ms": 50, "steady-ms": 2_000, "hold-ms": 4_000, "window-ms": 3_000, "peak-ms": 3_000, "queue-limit": 4,
    "rate-rise": 3.0, "reclaim-deadline-ms": COPY_TIMEOUT_MS, "silent-ms": 30_000, "idle-ms": 3_600_000,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MarketRig:
    """What runs. `folder`: of sockets and logs."""

    folder: Path
    socket: Path
    coordinator_url: str
    admin: str

    def offered_bytes(self) -> int:
        """Of all spaces, lent ones too."""
        with http_get.open_url(f"http://{self.admin}/status", timeout_s=GET_TIMEOUT_S) as reply:
            return sum(space["offered_bytes"] for space in json.load(reply)["lending"]["spaces"].values())

    def say_errors(self) -> None:
        """The last of the mempool's."""
        lines = (self.folder / "logs" / "mempool.log").read_text().splitlines()
        bad = [line[:300] for line in lines if "failed" in line or '"level":"error"' in line]
        print("\n".join(bad[-8:]), end="\n" if bad else "", flush=True)


def words_of(options: argparse.Namespace, folder: Path, coordinator_url: str, admin: str) -> list[str]:
    """The mempool's command line. What an engine may lend is more than the consumer's memory, which lends nothing."""
    settings = RigSettings(
        options.device, dram_bytes=options.far_bytes + 2 * options.pool_bytes, capacity_bytes=options.lender_bytes,
        pin_host=options.device == "cuda",
    )  # fmt: skip
    words = mempool_words(settings, folder, coordinator_url, admin)
    for key, value in LENDING.items():
        words += [f"--lending-{key}", str(value)]
    return [*words, "--lending-threshold-bytes", str(options.lent_bytes)]


@contextmanager
def running(options: argparse.Namespace) -> Iterator[MarketRig]:
    """All of it, ended behind the block. Raises: StartFailed."""
    with tempfile.TemporaryDirectory(prefix="quire-reclaim-") as name, ExitStack() as stack:
        folder = Path(name)
        url, admin = start_market(folder, stack, lambda url, admin: words_of(options, folder, url, admin))
        yield MarketRig(folder, folder / "mempool.sock", url, admin)
