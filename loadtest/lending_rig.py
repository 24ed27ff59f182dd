"""Redis, a coordinator, a mempool and a consumer, for measurements of lending. A producer comes beside them."""

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from loadtest.child_commands import Child
from loadtest.processes import Fleet, free_port
from shared.prompttree.embedded import EmbeddedRedis

REPORTS = ("--report-interval-ms", "50", "--report-idle-ms", "100", "--report-ttl-ms", "5000")
LEASES = ("--lease-ttl-ms", "3600000", "--leader-lease-ms", "60000")
COPY_TIMEOUT_MS = 60_000


@dataclass(frozen=True, slots=True)
class RigSettings:
    """`dram_bytes`: behind the consumer's pages, at least what it borrows; `pin_host`: page-locked, for GPUs.

    `budget_bytes_per_s`: of each lender; 0: none.
    """

    device: str
    dram_bytes: int
    capacity_bytes: int = 0  # of each space in host memory
    budget_bytes_per_s: int = 0
    pin_host: bool = False


@dataclass(frozen=True, slots=True)
class Rig:
    """What runs. `folder`: of sockets and logs."""

    folder: Path
    socket: Path
    coordinator_url: str
    consumer: Child


def mempool_words(settings: RigSettings, folder: Path, coordinator_url: str, admin: str) -> list[str]:
    """Its command line."""
    words = [
        "--socket", str(folder / "mempool.sock"), "--api-socket", str(folder / "api.sock"), "--admin-listen", admin,
        "--coordinator-url", coordinator_url, "--dram-bytes", str(settings.dram_bytes),
        "--offer-patience-ms", "20000", "--copy-timeout-ms", str(COPY_TIMEOUT_MS),
        "--out-timeout-ms", str(COPY_TIMEOUT_MS), "--lending-budget-bytes-per-s", str(settings.budget_bytes_per_s),
    ]  # fmt: skip
    if settings.device == "cpu":
        words += ["--capacity-bytes", str(settings.capacity_bytes), "--dram-for-host", "true"]
    if settings.pin_host:
        words += ["--pin-host", "true"]
    return words


def module(name: str, flags: Sequence[str]) -> list[str]:
    """`python -m name flags`."""
    return [sys.executable, "-m", name, *flags]


def start_market(
    folder: Path, stack: ExitStack, words: Callable[[str, str], Sequence[str]]
) -> tuple[str, str]:
    """A Redis, a coordinator and a mempool, that end with `stack`. Raises: StartFailed.

    Args: words: the mempool's command line, of the coordinator's URL and the mempool's admin address. Returns: these.
    """
    redis = EmbeddedRedis(0, folder / "redis", appendonly=True)
    redis.start()
    stack.callback(redis.kill)
    fleet = stack.enter_context(Fleet(folder / "logs"))
    listen, admin = (f"127.0.0.1:{free_port()}" for _ in range(2))
    url = f"http://{listen}"
    flags = ["--listen", listen, "--redis-url", redis.url, *REPORTS, *LEASES]
    fleet.start("coordinator", module("services.coordinator", flags), ready_url=f"{url}/health")
    fleet.start("mempool", module("services.mempool", words(url, admin)), ready_url=f"http://{admin}/health")
    return url, admin


@contextmanager
def running(settings: RigSettings) -> Iterator[Rig]:
    """All of it, ended behind the block. Raises: StartFailed, ChildFailed."""
    with tempfile.TemporaryDirectory(prefix="quire-lend-") as name, ExitStack() as stack:
        folder = Path(name)
        url, _ = start_market(folder, stack, lambda url, admin: mempool_words(settings, folder, url, admin))
        words = ["loadtest.producers.lent_traffic", "--device", settings.device, "--coordinator-url", url]
        words += ["--socket", str(folder / "mempool.sock"), "--api-socket", str(folder / "api.sock")]
        consumer = child("consumer", words, folder, stack, gpus=(0,))
        yield Rig(folder, folder / "mempool.sock", url, consumer)


def child(name: str, words: Sequence[str], folder: Path, stack: ExitStack, gpus: Sequence[int] = ()) -> Child:
    """A process that ends with `stack`. `gpus`: that it sees."""
    env = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}
    made = Child(name, words, folder / "logs" / f"{name}.log", env)
    stack.callback(made.close)
    return made
