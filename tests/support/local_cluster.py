"""The cluster as a user starts it: `quire up` with its own home and ports, real vLLM, the real supervisor."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from deploy.local.services_table import Ports
from shared.free_ports import in_turn, is_free
from tests.support import patience

ROOT = Path(__file__).resolve().parents[2]
BASES = range(20_000, 32_000, 100)


def free_base_port() -> int:
    """The first of a run of ports that a small cluster can have."""

    def is_good(base: int) -> bool:
        ports = Ports(gateway=base + 90, base=base)
        wanted = [*range(base + 1, base + 8), ports.gateway]
        wanted += [*ports.worker("prefill", 0), *ports.worker("decode", 0)]
        return all(is_free("127.0.0.1", port) for port in wanted)

    return in_turn("clusters", BASES, 1, is_good)[0]


class LocalCluster:
    """`with LocalCluster(home) as cluster:` is `quire up` ... `quire down`."""

    def __init__(
        self,
        home: Path,
        *flags: str,
        env: dict[str, str] | None = None,
        prefix: tuple[str, ...] = (),
        is_patient: bool = True,
    ) -> None:
        """prefix: words before the command, such as `ip netns exec NAME`; is_patient: by the limits of patience.py."""
        self.home = home
        self.prefix = prefix
        self.base = free_base_port()
        self.pool_at_start: dict[str, Any] = {}  # for whoever notes it: the mempool before the first request
        self.url = f"http://127.0.0.1:{self.base + 90}"
        self.flags = ["--port", str(self.base + 90), "--base-port", str(self.base), *flags]
        clean = {k: v for k, v in os.environ.items() if not k.startswith("QUIRE_")}
        # hand-offs are what most tests are about, whatever is predicted to be cheaper, and however long other tests
        # keep a worker or the mempool from the machine's cores
        pairs = {
            "QUIRE_SCHEDULER_DISAGGREGATION": "always",
            "QUIRE_WORKER_CALIBRATE": "off",
            "QUIRE_CLUSTER_READY_TIMEOUT_S": "800",
            **(patience.environment() if is_patient else {}),
        }
        if {"topology=disaggregated", "disaggregated"} & set(flags):  # which says so itself
            del pairs["QUIRE_SCHEDULER_DISAGGREGATION"]
        self.env = {**clean, **pairs, "QUIRE_HOME": str(home), "COLUMNS": "200", **(env or {})}

    def quire(
        self, *words: str, check: bool = True, timeout_s: float = 900
    ) -> subprocess.CompletedProcess[str]:
        """Run the command; with check, a failure shows its output."""
        done = subprocess.run(
            [*self.prefix, sys.executable, "-m", "deploy.local.cli", *words],
            cwd=ROOT,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if check and done.returncode != 0:
            raise AssertionError(f"quire {words}: {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def __enter__(self) -> "LocalCluster":
        try:
            self.quire("up", *self.flags)
        except BaseException:
            self.quire("down", "--now", check=False)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.quire("down", "--now")

    def status(self) -> dict[str, Any]:
        """`quire status --json`, ready or not."""
        return json.loads(self.quire("status", "--json", check=False).stdout)

    def pool(self) -> dict[str, Any]:
        """The mempool's own status."""
        return httpx.get(f"http://127.0.0.1:{self.base + 5}/status", timeout=30).json()

    def pool_at_rest(self, timeout_s: float = 60) -> dict[str, Any]:
        """The mempool's status once nothing is leased or handed over: answers are out before leases are released.

        After the time whatever it is then, for the caller to say what is wrong.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            pool = self.pool()
            if not pool["num_leases"] + pool["num_handoffs"] or time.monotonic() > deadline:
                return pool
            time.sleep(0.05)

    def evidence(self, request_id: str) -> str:
        """What a failed test is to show of a request: its trace, the mempool's status, the last lines of the logs."""
        trace = self.quire("trace", request_id, check=False).stdout
        logs = self.quire("logs", check=False).stdout.splitlines()[-60:]
        return "\n".join([trace, json.dumps(self.pool()), *logs])

    def pid_of(self, name: str) -> int:
        """Process id of a service, from the supervisor."""
        return next(s["pid"] for s in self.status()["services"] if s["name"] == name)

    def kill(self, name: str) -> int:
        """SIGKILL; returns the pid that was killed."""
        pid = self.pid_of(name)
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait_replaced(self, name: str, old_pid: int, timeout_s: float = 120) -> float:
        """Seconds until another process serves in its place and everything is ready again."""
        started = time.monotonic()
        while time.monotonic() - started < timeout_s:
            status = self.status()
            pids = {s["name"]: s["pid"] for s in status.get("services", [])}
            if status.get("ready") and pids.get(name) not in (None, 0, old_pid):
                return time.monotonic() - started
            time.sleep(0.2)
        raise AssertionError(f"{name} was not replaced in {timeout_s} s: {self.status()}")
