"""Two colocated workers on two hosts with a link of limited rate between, and what a scheduler would say of them.

The hosts are network namespaces (two_hosts.py), each with a mempool; a worker reaches its own by its unix socket. The
workers report to this process, which keeps them in the scheduler's own table and predicts with the scheduler's own
core, from the coefficients, corrections and link rates that they send. Requests go to the workers directly, so that
either of eq 2's verdicts can be forced. Redis and a coordinator are there because a worker gets its epoch from them.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.lending_rig import module
from loadtest.processes import Fleet, free_port
from loadtest.two_hosts import TwoHosts
from services.scheduler.core.instances import Instance, Instances
from services.scheduler.core.policies import Candidate
from services.scheduler.core.predict import CostSettings, FirstStage, Holders, Predictor
from services.scheduler.core.rates import rates_of
from services.scheduler.core.request import PlacementRequest
from shared.ids import InstanceId, RequestId
from shared.prompttree.embedded import EmbeddedRedis
from shared.testing.scripted_gateway import ScriptedGateway
from shared.transport.zmq_channel import RouterServer
from shared.wire.reports import (
    REPORT_REPLIES,
    REPORTS,
    Goodbye,
    Hello,
    Report,
    SchedulerToWorker,
    WorkerToScheduler,
)
from shared.wire.requests import Finished, KvPlan, StageReceipt

HOLDER, READER = 0, 1
POOL_BYTES = 384 << 20
CACHE_BYTES = 256 << 20
START_TIMEOUT_S = 240.0
KNOWN_TIMEOUT_S = 30.0
REQUEST_TIMEOUT_S = 60.0
FETCH_WAIT_MS = 20_000  # on the slowest link: a fetch that is given up would be a recompute
REPORT_INTERVAL_MS = 50


class Reports:
    """A scheduler's half that listens to workers."""

    def __init__(self) -> None:
        self.instances = Instances()
        self.known = asyncio.Event()  # both workers, and where their mempools are
        self._server: RouterServer[WorkerToScheduler, SchedulerToWorker] = RouterServer(
            "tcp://127.0.0.1:*", into=REPORTS, out=REPORT_REPLIES, on_message=self._on_worker
        )

    async def start(self) -> str:
        """Where it listens."""
        await self._server.start()
        return self._server.address

    def close(self) -> None:
        """Stop listening."""
        self._server.close()

    def _on_worker(self, identity: bytes, _seq: int, message: WorkerToScheduler, _raw: list[bytes]) -> None:
        now_ms, answer = time.monotonic_ns() // 1_000_000, None
        match message:
            case Hello():
                answer = self.instances.hello(message, now_ms=now_ms)
            case Report():
                answer = self.instances.report(message, now_ms=now_ms)
                if sum(one.pool is not None and bool(one.pool.address) for one in self.instances) == 2:
                    self.known.set()
            case Goodbye():
                self.instances.goodbye(message)
        if answer is not None:
            self._server.send(identity, answer)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the scheduler says of one prompt, in ms. `chosen`: eq 2's verdict."""

    fetch_ms: float
    left_ms: float  # computing, behind the fetch
    compute_ms: float  # all of it
    chosen: str  # "fetch" or "recompute"
    link_gb_per_s: float
    link_latency_ms: float
    correction: float  # of computing, in the above


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one request, from sending it to its one token."""

    ms: float
    receipt: StageReceipt


class CrossoverRig:
    """`async with CrossoverRig(hosts, folder, model_dir) as rig`.

    Raises: StartFailed, TimeoutError; RuntimeError where the reader's profile was too disturbed to predict with.
    """

    def __init__(self, hosts: TwoHosts, folder: Path, model_dir: Path) -> None:
        self._hosts = hosts
        self._folder = folder
        self._model_dir = model_dir
        self._stack = ExitStack()
        self._reports = Reports()
        self._links: list[ScriptedGateway] = []
        self._number = 0

    async def __aenter__(self) -> "CrossoverRig":
        try:
            reports = await self._reports.start()
            fleet = self._stack.enter_context(Fleet(self._folder / "logs"))
            await asyncio.to_thread(self._start_control, fleet)
            starts = [asyncio.to_thread(self._start_worker, fleet, n, reports) for n in range(2)]
            await asyncio.gather(*starts)
            async with asyncio.timeout(KNOWN_TIMEOUT_S):
                await self._reports.known.wait()
            if self.instance(READER).model is None:
                raise RuntimeError("worker-1 has no coefficients: the machine was too busy for its profile")
            for number in range(2):
                known = self.instance(number)
                link = ScriptedGateway(known.endpoint, known.epoch)
                self._links.append(await link.__aenter__())
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for link in self._links:
            link.close()
        await asyncio.to_thread(self._stack.close)  # the workers still say goodbye
        self._reports.close()

    def _start_control(self, fleet: Fleet) -> None:
        redis = EmbeddedRedis(0, self._folder / "redis")
        redis.start()
        self._stack.callback(redis.kill)
        listen = f"127.0.0.1:{free_port()}"
        self._coordinator = f"http://{listen}"
        flags = ["--listen", listen, "--redis-url", redis.url]
        fleet.start(
            "coordinator", module("services.coordinator", flags), ready_url=f"{self._coordinator}/health"
        )
        for number in range(2):
            socket = self._folder / f"pool-{number}.sock"
            flags = ["--instance", f"mempool-{number}", "--socket", str(socket), "--admin-listen"]
            flags += [f"127.0.0.1:{free_port()}", "--peer-listen", f"tcp://10.213.7.{number + 1}:8107"]
            flags += ["--ucx-tls", "tcp", "--capacity-bytes", str(POOL_BYTES)]
            command = [*self._hosts.prefix(number), *module("services.mempool", flags)]
            fleet.start(f"mempool-{number}", command, ready_url=f"unix://{socket}")

    def _start_worker(self, fleet: Fleet, number: int, reports: str) -> None:
        admin = f"127.0.0.1:{free_port()}"
        flags = ["--instance", f"worker-{number}", "--role", "colocated", "--listen", "tcp://127.0.0.1:*"]
        flags += ["--admin-listen", admin, "--scheduler-reports", reports, "--redis-url", ""]
        flags += ["--coordinator-url", self._coordinator, "--model-dir", str(self._model_dir)]
        flags += ["--mempool-socket", str(self._folder / f"pool-{number}.sock"), "--device", "cpu"]
        flags += ["--dtype", "float32", "--threads", "1", "--kv-cache-bytes", str(CACHE_BYTES)]
        flags += ["--calibrate", "always" if number == READER else "off", "--trace-sample-ratio", "0"]
        flags += ["--fetch-wait-ms", str(FETCH_WAIT_MS), "--report-interval-ms", str(REPORT_INTERVAL_MS)]
        fleet.start(
            f"worker-{number}",
            module("services.decode", flags),
            ready_url=f"http://{admin}/ready",
            timeout_s=START_TIMEOUT_S,
        )

    def instance(self, number: int) -> Instance:
        """As the scheduler's table has it now."""
        known = self._reports.instances.get(InstanceId(f"worker-{number}"))
        assert known is not None, "start waits for it"
        return known

    # -- requests -----------------------------------------------------------------------------------

    async def ask(self, number: int, prompt: Sequence[int], plan: KvPlan | None = None) -> Answer:
        """One token behind the prompt. Raises: RuntimeError where it fails."""
        self._number += 1
        link, name = self._links[number], f"ask-{self._number}"
        begin_s = time.perf_counter()
        link.generate(name, prompt, max_tokens=1, kv=plan, deadline_ms=int(REQUEST_TIMEOUT_S * 1e3))
        end = await link.end_of(name, REQUEST_TIMEOUT_S)
        ms = (time.perf_counter() - begin_s) * 1e3
        if not isinstance(end, Finished):
            raise RuntimeError(f"worker-{number}: {end}")
        return Answer(ms, end.receipt)

    def plan(self, cached: int, *, recompute: bool) -> KvPlan:
        """Either verdict of eq 2 over a prefix that the holder has, as the scheduler would send it."""
        pool = self.instance(HOLDER).pool
        assert pool is not None
        words: Mapping[str, Any] = {
            "source": self.instance(HOLDER).instance,
            "tokens": cached,
            "path": "remote",
        }
        if recompute:
            return KvPlan(reach="host", recompute=True, **words)
        return KvPlan(reach="remote", source_mempool=pool.address, **words)

    def predict(self, num_tokens: int, cached: int) -> Prediction:
        """For the reader, idle, of a prompt of which the holder alone has so much."""
        known = self.instance(READER)
        first = {name: self._first(num_tokens, cached, name) for name in ("auto", "always", "never")}
        verdict = first["auto"].kv
        link = known.links.rates.get("remote")
        return Prediction(
            fetch_ms=first["always"].fetch_ms,
            left_ms=first["always"].compute_ms,
            compute_ms=first["never"].compute_ms,
            chosen="fetch" if verdict is not None and not verdict.recompute else "recompute",
            link_gb_per_s=link.gb_per_s if link is not None else 0.0,
            link_latency_ms=link.latency_ms if link is not None else 0.0,
            correction=known.prefill_correction,
        )

    def _first(self, num_tokens: int, cached: int, fetch: Any) -> FirstStage:
        holder, reader = self.instance(HOLDER), self.instance(READER)
        view = reader.view(now_ms=time.monotonic_ns() // 1_000_000)
        candidate = Candidate(reader, view, 0, reader.instance, rates_of(reader, view))
        request = PlacementRequest((RequestId("predicted"), 1), num_tokens)
        return Predictor(request, Holders([(holder, cached, cached)]), CostSettings(fetch=fetch)).first(
            candidate
        )
