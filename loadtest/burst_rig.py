"""Engines of bench_burst.py: two in order of arrival, one in fair slices with a lender that can be switched on.

Each is a cluster of its own (`quire up`), so that all may be up at once: on two GPUs one in order of arrival has
the lender's GPU, whose memory beyond its own it leaves alone, the other one the fair engine's. Requests are sent by
a process of their own for each run.
"""

import asyncio
import json
import math
import threading
import time
import urllib.error
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from deploy.local.config import paths_of
from deploy.local.services_table import Ports
from loadtest import burst_counts, burst_plan
from loadtest.bench_footprint import free_base_port
from loadtest.bench_pages import model_folder
from loadtest.burst_expected import BLOCK_TOKENS
from loadtest.http_client import Client
from loadtest.locality_cluster import Arm, LocalityCluster
from loadtest.open_loop import OpenLoop, Plan, verdict
from loadtest.outcomes import Outcome
from loadtest.peer_memory import PeerMemory, gpu_device
from loadtest.results import quantile
from loadtest.workloads.request import Request
from shared import http_get
from shared.mempool.rank_memory import CONTEXT_BYTES

INSTANCE = "colocated-0"
# of ports: all are chosen before one listens
BASE_OFFSETS = {"cfs": 0, burst_plan.BESIDE: 3_000, burst_plan.FCFS: 6_000}
MEMORY_SHARE = 0.4  # of a GPU, that has to be free when an engine starts: another one may be there
READ_S, GET_TIMEOUT_S = 0.2, 5.0
SETTLE_S = 1.3  # an engine's counts are told once a second
IDLE_LIMIT_S = 120.0
RUN_TIMEOUT_S = 500.0
MAX_IN_FLIGHT = 4_096
OVERLOAD = 64.0  # nobody is refused: who waits, waits in the engine


@dataclass(frozen=True, slots=True)
class Setup:
    """How both engines are started. gpus: of the machine; 0: on CPU. worker, mempool: more keys of these sections.

    swap_bytes: of host memory behind the fair engine's pages, and of the loan.
    """

    device: str
    gpus: int
    pool_bytes: int
    swap_bytes: int
    worker: Mapping[str, Any] = field(default_factory=dict)
    fair: Mapping[str, Any] = field(default_factory=dict)
    mempool: Mapping[str, Any] = field(default_factory=dict)
    cluster: Sequence[str] = ()
    model_dir: str = ""
    max_lag_ms: float = 100.0


class Engine:
    """A cluster with one engine. `with Engine("cfs", setup, folder) as engine:`. Raises: RuntimeError."""

    def __init__(self, name: str, setup: Setup, folder: Path) -> None:
        """`folder`: with the model; each engine's home is in it."""
        self.name, self._setup = name, setup
        self._is_fair = name == "cfs"
        home = folder / name
        env = {"CUDA_VISIBLE_DEVICES": "1"} if name == burst_plan.FCFS and setup.gpus > 1 else {}
        arm = Arm("any", "least_load", {"overload_factor": OVERLOAD})
        self.cluster = LocalityCluster(
            home, self._flags(folder), self._sections(), arm, max_lag_ms=setup.max_lag_ms, env=env,
            base=free_base_port() + BASE_OFFSETS[name],
        )  # fmt: skip
        self._paths = paths_of(home)
        self._peer: PeerMemory | None = None

    def _flags(self, folder: Path) -> list[str]:
        setup = self._setup
        words = ["--device", setup.device, "--topology", "colocated", "--decode", "1"]
        if setup.device == "cuda":
            words += ["--model", setup.model_dir or str(folder / "model-8b")]
        elif setup.model_dir:
            words += ["--model", setup.model_dir]
        pairs = {"trace_sample_ratio": "0.0"}
        if setup.device == "cpu":
            pairs |= {"mempool_bytes": str(setup.pool_bytes), "kv_space": "own", "dtype": "float32"}
        if self._is_fair:
            pairs |= {"memory_market": "true", "dram_bytes": str(setup.swap_bytes)}
        pairs |= dict(pair.split("=", 1) for pair in setup.cluster)
        return words + [word for key, value in pairs.items() for word in ("--set", f"{key}={value}")]

    def _sections(self) -> dict[str, dict[str, Any]]:
        setup = self._setup
        # what burst_expected.py counts with, on GPUs too: the two are compared
        worker: dict[str, Any] = {"calibrate": "off", "block_tokens": BLOCK_TOKENS, **setup.worker}
        mempool: dict[str, Any] = {"lending": "off", **setup.mempool}
        if setup.device == "cuda":
            worker |= {} if setup.model_dir else {"load_format": "dummy"}
            # not mempool.device_capacity_bytes, which would bound the lender's pages too
            worker |= {
                "kv_cache_bytes": setup.pool_bytes + CONTEXT_BYTES,
                "gpu_memory_utilization": MEMORY_SHARE,
            }
        if self._is_fair:
            worker |= {"local_policy": "cfs", **setup.fair}
        else:
            mempool = {}
        return {"worker": worker, "mempool": mempool}

    def __enter__(self) -> "Engine":
        self.cluster.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            if self._peer is not None:
                self._peer.close()
                self._peer = None
        finally:
            self.cluster.__exit__(*error)

    # -- swap space -----------------------------------------------------------------------------------

    def peer(self) -> PeerMemory:
        """The lender beside it; made at the first call."""
        if self._peer is None:
            device = gpu_device(1) if self._setup.device == "cuda" else "cpu:lender"
            self._peer = PeerMemory(
                str(self._paths.sockets / "mempool.sock"), f"http://127.0.0.1:{self._ports.coordinator}",
                consumer=INSTANCE, device=device, num_bytes=self._setup.swap_bytes,
                content_key=self.status()["content_key"],
            )  # fmt: skip
        return self._peer

    def swap_to(self, *, peer: bool) -> None:
        """Have blocks leave for lent pages (while there is room), or for host memory alone."""
        if peer:
            held = self.peer().lend()
            print(f"  {held / 1e9:.2f} GB are lent", flush=True)
        elif self._peer is not None:
            self._peer.take_back()

    # -- what it says ---------------------------------------------------------------------------------

    @property
    def _ports(self) -> Ports:
        return Ports(gateway=self.cluster.base + 90, base=self.cluster.base)

    def status(self) -> dict[str, Any]:
        """Of the worker. Raises: OSError, ValueError."""
        return _read(f"http://127.0.0.1:{self._ports.worker('colocated', 0)[1]}/status")

    def pool(self) -> dict[str, Any]:
        """Of the mempool. Raises: OSError, ValueError."""
        return _read(f"http://127.0.0.1:{self._ports.mempool_admin}/status")

    def counts(self) -> dict[str, int]:
        """Totals of the engine, of its mempool's swaps and overflow, and of its copies by path."""
        return burst_counts.totals(self.status(), self.pool())

    def wait_idle(self) -> None:
        """What a run before left is over. Raises: RuntimeError after IDLE_LIMIT_S."""
        end_s = time.monotonic() + IDLE_LIMIT_S
        while True:
            found = self.status()
            if not found["num_running"] + found["num_waiting"]:
                return
            if time.monotonic() > end_s:
                raise RuntimeError(
                    f"{self.name}: {found['num_running']} run and {found['num_waiting']} wait for ever"
                )
            time.sleep(0.1)

    # -- runs -----------------------------------------------------------------------------------------

    def run(self, requests: Sequence[Request], *, is_measured: bool = True) -> "Ran":
        """Send all and wait for all. Raises: RuntimeError when nothing came back, or the client was late."""
        self.wait_idle()
        before = self.counts()
        plan = Plan(
            model=self.cluster.model(), token_ids=True, receipts=False, max_in_flight=MAX_IN_FLIGHT,
            timeout_s=RUN_TIMEOUT_S, max_lag_ms=self._setup.max_lag_ms if is_measured else math.inf,
        )  # fmt: skip
        watch = Watch(self)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:
            outcomes, tbt_p99_ms = apart.submit(drive, self.cluster.url, plan, list(requests)).result()
        watch.close()
        if why := verdict(outcomes, plan):
            raise RuntimeError(f"the client was the bottleneck: {why}")
        time.sleep(SETTLE_S)
        after = self.counts()
        grown = {
            name: after[name] - before.get(name, 0) for name in after if after[name] - before.get(name, 0)
        }
        found = self.status()
        pool_bytes = found["num_kv_blocks"] * found["block_bytes"]
        return Ran(outcomes, tbt_p99_ms, watch.peak, grown, pool_bytes)


@dataclass(frozen=True, slots=True)
class Ran:
    """A run. peak_share: of the engine's pages, the most in use by requests. counts: what grew meanwhile. pool_bytes:
    of the engine's pages.
    """

    outcomes: list[Outcome]
    tbt_p99_ms: float
    peak_share: float
    counts: dict[str, int]
    pool_bytes: int


class Watch:
    """Reads an engine's memory from construction to close()."""

    def __init__(self, engine: Engine) -> None:
        self.peak = 0.0
        self._engine = engine
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(READ_S):
            try:
                self.peak = max(self.peak, float(self._engine.status()["kv_used_share"]))
            except (OSError, ValueError):  # a busy moment: the next reading comes
                continue

    def close(self) -> None:
        """Returns when the last reading is in."""
        self._closing.set()
        self._thread.join()


def drive(url: str, plan: Plan, requests: list[Request]) -> tuple[list[Outcome], float]:
    """In a process of its own: outcomes, and P99 of the times between tokens."""

    async def run() -> tuple[list[Outcome], float]:
        client = Client(url)
        loop = OpenLoop(client, plan)
        try:
            outcomes = await loop.run(requests)
        finally:
            client.close()
        return outcomes, quantile(loop.gaps_ms, 0.99) if loop.gaps_ms else 0.0

    return asyncio.run(run())


def make_model(folder: Path, setup: Setup) -> None:
    """The 8B shape, where no model is named on a GPU."""
    if setup.device == "cuda" and not setup.model_dir:
        model_folder(folder / "model-8b")


def _read(url: str) -> dict[str, Any]:
    try:
        with http_get.open_url(url, timeout_s=GET_TIMEOUT_S) as reply:
            return json.load(reply)
    except urllib.error.URLError as error:
        raise OSError(f"{url}: {error}") from error
