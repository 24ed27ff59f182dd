"""`quire up` with workers whose scheduler can be told another policy.

The policy is in the cluster's TOML file; the scheduler alone is ended and comes back with the new one, as it keeps
nothing that workers do not report again. Engines and their caches stay.
"""

import asyncio
import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.bench_footprint import free_base_port
from loadtest.bench_pages import model_folder
from loadtest.http_client import Client
from loadtest.open_loop import OpenLoop, Plan, verdict
from loadtest.outcomes import Outcome
from loadtest.registry import ROOT
from loadtest.workloads.request import Request, salted
from shared import http_get

UP_TIMEOUT_S = 600
SWITCH_TIMEOUT_S = 60
TRIES = 3
MAX_IN_FLIGHT = 4_096
SCHEDULER_ADMIN = 6  # offset of its port (deploy/local/services_table.py)
GPU_CACHE_BYTES, CPU_CACHE_BYTES = 48 << 30, 256 << 20  # of each instance


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to place requests. settings: of the scheduler, beside the policy."""

    name: str
    policy: str
    settings: Mapping[str, Any]


class LocalityCluster:
    """`with LocalityCluster(home, up_flags, sections) as cluster:`; one at a time on a machine.

    Args: sections: TOML sections by name, of plain values. env: more variables of its processes. base: of its
    ports; 0: any that are free.
    Raises: RuntimeError with what `quire` said.
    """

    def __init__(
        self,
        home: Path,
        up_flags: Sequence[str],
        sections: Mapping[str, Mapping[str, Any]],
        first: Arm,
        *,
        max_lag_ms: float = 100.0,
        env: Mapping[str, str] | None = None,
        base: int = 0,
    ) -> None:
        self._home = home
        self._env = dict(env or {})
        self._flags = list(up_flags)
        self._sections = {name: dict(body) for name, body in sections.items()}
        self.base = base or free_base_port()
        self._config = home / "locality.toml"
        self._arm = first
        self._max_lag_ms = max_lag_ms
        self.url = f"http://127.0.0.1:{self.base + 90}"

    def __enter__(self) -> "LocalityCluster":
        self._home.mkdir(parents=True, exist_ok=True)
        self._write(self._arm)
        try:
            ports = ["--port", str(self.base + 90), "--base-port", str(self.base)]
            self._quire("up", "--config", str(self._config), *ports, *self._flags)
        except BaseException:
            self._quire("down", check=False)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._quire("down", check=False)

    def use(self, arm: Arm) -> None:
        """Place by this arm from now on; returns when every instance is known again. Raises: RuntimeError."""
        if arm == self._arm:
            return
        wanted = len(self.scheduler()["instances"])
        self._write(arm)
        self._arm = arm
        os.kill(self._pid("scheduler"), signal.SIGTERM)
        told = time.monotonic()
        while time.monotonic() < told + SWITCH_TIMEOUT_S:
            with contextlib.suppress(OSError, ValueError):
                found = self.scheduler()
                is_new = (
                    found["uptime_ms"] < (time.monotonic() - told) * 1000
                )  # the old one answers until it ends
                known = found["policy"] == arm.policy and len(found["instances"]) >= wanted
                if is_new and known and found["uptime_ms"] > 500:
                    return
            time.sleep(0.2)
        raise RuntimeError(f"the scheduler did not come back with policy {arm.policy}")

    def run(
        self, requests: Sequence[Request], *, is_measured: bool = True, real_history: bool = False
    ) -> list[Outcome]:
        """Send all and wait; again with new tokens where the client was late, unless nothing is measured.

        Tokens without text are seen too: a model of random weights says hardly any. Raises: RuntimeError when the
        client always was late.
        """
        plan = Plan(
            model=self.model(),
            token_ids=True,
            real_history=real_history,
            max_in_flight=MAX_IN_FLIGHT,
            max_lag_ms=self._max_lag_ms if is_measured else math.inf,
        )
        return until_in_time(lambda again: asyncio.run(self._send(again, plan)), requests, plan)

    async def _send(self, requests: Sequence[Request], plan: Plan) -> list[Outcome]:
        client = Client(self.url)
        try:
            return await OpenLoop(client, plan).run(requests)
        finally:
            client.close()

    def scheduler(self) -> dict[str, Any]:
        """Its /status. Raises: OSError, ValueError."""
        url = f"http://127.0.0.1:{self.base + SCHEDULER_ADMIN}/status"
        with http_get.open_url(url, timeout_s=2) as reply:
            return json.load(reply)

    def costs(self) -> dict[str, Any]:
        """What `quire model show` knows of each instance; "coefficients": None where a profile was disturbed."""
        return json.loads(self._quire("model", "show", "--json", check=False))

    def model(self) -> str:
        """Name of the served model."""
        with http_get.open_url(f"{self.url}/v1/models", timeout_s=10) as reply:
            return str(json.load(reply)["data"][0]["id"])

    def pids(self) -> dict[str, int]:
        """First processes of the services that run, by name."""
        services = json.loads(self._quire("status", "--json"))["services"]
        return {one["name"]: int(one["pid"]) for one in services if one["pid"]}

    def _pid(self, name: str) -> int:
        return self.pids()[name]

    def _write(self, arm: Arm) -> None:
        sections = {**self._sections, "scheduler": {"policy": arm.policy, **arm.settings}}
        text = ""
        for name, body in sections.items():
            text += f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in body.items())
        self._config.write_text(text)

    def _quire(self, *words: str, check: bool = True) -> str:
        env = {key: value for key, value in os.environ.items() if not key.startswith("QUIRE_")}  # noqa: TID251
        env |= {"QUIRE_HOME": str(self._home), "HF_HUB_OFFLINE": "1", **self._env}
        done = subprocess.run(
            [sys.executable, "-m", "deploy.local.cli", *words],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=UP_TIMEOUT_S,
            check=False,
        )
        if check and done.returncode != 0:
            said = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            raise RuntimeError(f"quire {shlex.join(words)} ended with {done.returncode}:\n{said}")
        return done.stdout


def until_in_time(
    send: Callable[[Sequence[Request]], list[Outcome]], requests: Sequence[Request], plan: Plan
) -> list[Outcome]:
    """Send all; again with new tokens where the client was late. Raises: RuntimeError when it always was."""
    for attempt in range(TRIES):
        outcomes = send(salted(requests, "again", attempt) if attempt else list(requests))
        why = verdict(outcomes, plan)
        if not why:
            return outcomes
        print(f"  again, the client was the bottleneck: {why}", flush=True)
    raise RuntimeError(f"the client was the bottleneck {TRIES} times")


@dataclass(frozen=True, slots=True)
class Start:
    """How a benchmark's clusters are started, whatever their topology.

    model_dir: "": the demo model; on GPUs an 8B shape with random weights. cache_bytes: of each instance; 0: the
    device's. cluster: settings KEY=VALUE; worker: settings KEY=JSON. Every instance has pages of its own.
    """

    device: str
    engine: str
    model_dir: str = ""
    cache_bytes: int = 0
    cluster: Sequence[str] = ()
    worker: Sequence[str] = ()

    def flags(self, folder: Path, topology: Sequence[str]) -> list[str]:
        """Words after `quire up`. The 8B shape is made in `folder`."""
        cuda = self.device == "cuda"
        model = self.model(folder)
        found = ["--device", self.device, "--engine", self.engine, *topology]
        found += ["--model", str(model)] if model is not None else []
        wanted = {"trace_sample_ratio": "0.0"}
        if not cuda:
            wanted |= {"mempool_bytes": str(self.cache_bytes or CPU_CACHE_BYTES), "kv_space": "own"}
        wanted |= dict(pair.split("=", 1) for pair in self.cluster)
        return found + [word for key, value in wanted.items() for word in ("--set", f"{key}={value}")]

    def model(self, folder: Path) -> Path | None:
        """Of its weights or shape; None: the demo model. The 8B shape is made in `folder`, once."""
        if self.model_dir:
            return Path(self.model_dir)
        if self.device != "cuda":
            return None
        model = folder / "model-8b"
        if not model.is_dir():
            model_folder(model)
        return model

    def sections(self) -> dict[str, dict[str, Any]]:
        """Of the TOML file."""
        worker = {key: json.loads(value) for key, _, value in (one.partition("=") for one in self.worker)}
        if self.device != "cuda":
            return {"worker": worker} if worker else {}
        worker = {"max_model_len": 16_384, **({} if self.model_dir else {"load_format": "dummy"}), **worker}
        return {"worker": worker, "mempool": {"device_capacity_bytes": self.cache_bytes or GPU_CACHE_BYTES}}
