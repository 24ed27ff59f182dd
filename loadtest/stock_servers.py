"""Plain vLLM beside Quire: servers as `vllm serve` starts them, a GPU and a prefix cache each, and a client that shares
them out.

    with StockServers(folder, start, 2) as servers: servers.run(requests, real_history=True)

vLLM decides all that is not said here: prefix caching, chunked prefill, tokens of a step, block size, CUDA graphs. Told
is what the other engines are told too: model, random weights, dtype, longest sequence, most sequences, bytes of KV,
and as many API processes for each server as Quire's gateway has for all: one alone is busy at 16 requests/s.
The router is the client itself: sessions go to the servers in turn, in the order of their first requests, and every
turn of a session to the server that has its history. It takes no time and no hop; what several sessions share is
computed on each server.
"""

import asyncio
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.local.config import visible_gpus
from loadtest.http_client import Client, Reply
from loadtest.locality_cluster import (
    CPU_CACHE_BYTES,
    GPU_CACHE_BYTES,
    MAX_IN_FLIGHT,
    Arm,
    Start,
    until_in_time,
)
from loadtest.open_loop import OpenLoop, Plan
from loadtest.outcomes import Outcome
from loadtest.processes import Fleet, free_port
from loadtest.registry import ROOT
from loadtest.workloads.request import Request
from shared.engine.worker_config import CPU_SEQS, GPU_SEQS

DEMO_MODEL = ROOT / "deploy" / "models" / "quire-demo"
SERVED_MODEL = "stock"
READY_S = 300.0
# settings of our workers that are vLLM's own; the others say what Quire does
TOLD = (
    "dtype",
    "load_format",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
)
ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # after its 5 s it closes connections while a request is on its way
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # as in our engines: it is compiled at the first start, and nothing is sampled
}
CPU_ENV = {  # as in our engines on CPU: a compiler's minute for the sampler alone, threads that bind each other's cores
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


def serve_words(start: Start, model: Path, port: int, api_processes: int = 0) -> list[str]:
    """The command of one server. With one API process the module that `vllm serve` runs, as not every build has that
    command. api_processes: 0: as many as Quire's gateway is told.

    Raises: ValueError for a worker setting that is no JSON.
    """
    is_cuda = start.device == "cuda"
    worker = {"max_num_seqs": GPU_SEQS if is_cuda else CPU_SEQS, **start.sections().get("worker", {})}
    cache_bytes = start.cache_bytes or (GPU_CACHE_BYTES if is_cuda else CPU_CACHE_BYTES)
    num_apis = api_processes or gateway_processes(start)
    serve = ["vllm.entrypoints.openai.api_server", "--model"]
    if num_apis > 1:
        serve = ["vllm.entrypoints.cli.main", "serve"]
    words = [
        sys.executable, "-m", *serve, str(model),
        "--served-model-name", SERVED_MODEL, "--host", "127.0.0.1", "--port", str(port),
        "--kv-cache-memory-bytes", str(cache_bytes), "--enable-prompt-tokens-details", "--disable-uvicorn-access-log",
    ]  # fmt: skip
    for name in TOLD:
        if worker.get(name):
            words += [f"--{name.replace('_', '-')}", str(worker[name])]
    if num_apis > 1:
        words += ["--api-server-count", str(num_apis)]
    return words + (["--enforce-eager"] if worker.get("enforce_eager") or not is_cuda else [])


def gateway_processes(start: Start) -> int:
    """As many as Quire's gateway is told."""
    told = dict(setting.split("=", 1) for setting in start.cluster)
    return int(told.get("gateway_processes", "1"))


class SessionsInTurn:
    """Sends every session's requests to one of several clients; `server_of`: its number by session."""

    def __init__(self, clients: Sequence[Client]) -> None:
        self._clients = clients
        self.server_of: dict[str, int] = {}

    def request_bytes(self, path: str, body: Mapping[str, Any]) -> bytes:
        """As Client's; the host header says whose it is. `user` names the session."""
        number = self.server_of.setdefault(body["user"], len(self.server_of) % len(self._clients))
        return self._clients[number].request_bytes(path, body)

    async def post(self, request: bytes, *, timeout_s: float = 60.0, reply: Reply | None = None) -> Reply:
        """As Client's. Raises: TimeoutError, OSError, httptools.HttpParserError."""
        client = next(one for one in self._clients if one.wrote(request))
        return await client.post(request, timeout_s=timeout_s, reply=reply)


class StockServers:
    """Used as LocalityCluster is. gpus: of each server; none: those that this process may use. api_processes: of each;
    0: as many as Quire's gateway is told. `urls`: of each.

    Raises: StartFailed with the log of a server.
    """

    def __init__(
        self,
        folder: Path,
        start: Start,
        num_servers: int,
        *,
        max_lag_ms: float = 100.0,
        gpus: Sequence[str] = (),
        api_processes: int = 0,
    ) -> None:
        self._start = start
        self._api_processes = api_processes
        self._folder = folder
        self._fleet = Fleet(folder / "stock")
        self._num_servers = num_servers
        self._max_lag_ms = max_lag_ms
        self._gpus = list(gpus)
        self.urls: list[str] = []

    def __enter__(self) -> "StockServers":
        model = self._start.model(self._folder) or DEMO_MODEL
        is_cuda = self._start.device == "cuda"
        ports = [free_port() for _ in range(self._num_servers)]
        asked = visible_gpus()  # those that this process may use, where it may not use all
        gpus = asked.split(",") if asked else [str(number) for number in range(self._num_servers)]
        gpus = self._gpus or gpus
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        try:
            for number, port in enumerate(ports):
                env = {**ENV, **({"CUDA_VISIBLE_DEVICES": gpus[number]} if is_cuda else CPU_ENV)}
                words = serve_words(self._start, model, port, self._api_processes)
                self._fleet.begin(f"stock-{number}", words, env=env)
            for number, url in enumerate(self.urls):
                self._fleet.wait_ready(f"stock-{number}", f"{url}/health", timeout_s=READY_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._fleet.__exit__()

    def pid(self, number: int) -> int:
        """Of a server's first process."""
        return self._fleet.pid(f"stock-{number}")

    def use(self, arm: Arm) -> None:
        """Nothing: there is one way to place."""

    def run(
        self, requests: Sequence[Request], *, is_measured: bool = True, real_history: bool = False
    ) -> list[Outcome]:
        """As LocalityCluster.run(). What was cached comes from vLLM's usage. Raises: RuntimeError."""
        plan = Plan(
            model=SERVED_MODEL, token_ids=True, real_history=real_history, receipts=False,
            max_in_flight=MAX_IN_FLIGHT, max_lag_ms=self._max_lag_ms if is_measured else math.inf,
        )  # fmt: skip
        return until_in_time(lambda again: asyncio.run(self._send(again, plan)), requests, plan)

    async def _send(self, requests: Sequence[Request], plan: Plan) -> list[Outcome]:
        clients = [Client(url) for url in self.urls]
        routes = SessionsInTurn(clients)
        try:
            outcomes = await OpenLoop(routes, plan).run(requests)
        finally:
            for client in clients:
                client.close()
        fill_in(outcomes, routes.server_of)
        return outcomes


def fill_in(outcomes: Iterable[Outcome], server_of: Mapping[str, int]) -> None:
    """What Quire's receipts say of the others: where each went, and its prompt's tokens by source."""
    for one in outcomes:
        if one.ok:
            one.placement, one.instances = "colocated", [f"stock-{server_of[one.session]}"]
            found = {"engine": one.cached_tokens, "computed": one.prompt_tokens - one.cached_tokens}
            one.sources = {name: count for name, count in found.items() if count}
