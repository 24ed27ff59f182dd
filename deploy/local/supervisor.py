"""The supervisor of one machine's cluster: carries out what supervision.py decides.

run_supervisor.py starts it. Progress goes to watchers of the control socket and, a line each, to stderr.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deploy.local import damaged_journal, probes
from deploy.local.config import REPO, Paths, child_environment
from deploy.local.control import ControlServer
from deploy.local.launch import ExecProcess, Guard, Launched, cap_log, errors, tail
from deploy.local.plan import redis_folder
from deploy.local.services_table import ZYGOTE, Service
from deploy.local.supervision import Health, Notice, Rules, Signal, Spawn, State, Supervision
from deploy.local.zygote_client import ForkedProcess, ZygoteClient

START_PROBE_S = 0.1
HEALTH_PROBE_S = 2.0
PROBE_TIMEOUT_S = 2.0
DRAIN_PROBE_S = 0.2
LOG_CHECK_S = 5.0
TAIL_LINES = 12
JOURNAL_LINES = 100
REDIS = "redis"  # its service
WITH_LOG_TAIL = ("exited", "crash_loop", "give_up", "start_timeout", "unresponsive")


class Supervisor:
    """One run: run() returns 0 after a stop that was asked for, 1 when a service could not be started."""

    def __init__(
        self,
        services: Sequence[Service],
        paths: Paths,
        *,
        info: Mapping[str, Any] | None = None,
        rules: Rules | None = None,
        log_cap_bytes: int = 16 << 20,
        python: str = sys.executable,
        health_probe_s: float = HEALTH_PROBE_S,
    ) -> None:
        self._services = {service.name: service for service in services}
        self._paths = paths
        self._info = dict(info or {})
        self._log_cap_bytes = log_cap_bytes
        self._python = python
        self._health_probe_s = health_probe_s
        self._core = Supervision([service.spec for service in services], rules)
        self._processes: dict[str, Launched] = {}
        self._log_starts: dict[str, int] = {}  # where the log of the present process begins
        self._probing: dict[str, asyncio.Task[None]] = {}
        self._draining: dict[str, asyncio.Task[None]] = {}
        self._said: dict[str, str] = {}  # why a service is not ready, in its own words
        self._began = time.monotonic()
        self._wake: asyncio.TimerHandle | None = None
        self._done = asyncio.Event()
        self._control = ControlServer(paths.control, self._handle)
        self._zygote = ZygoteClient(
            paths.sockets / "zygote.sock", on_spawned=self._forked, on_exited=self._exited
        )
        self._guard: Guard | None = None

    async def run(self) -> int:
        """Start everything, keep it running, stop everything."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._told_to_stop)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            loop.add_signal_handler(signal.SIGHUP, self._stop)  # a closed terminal may say so twice
        self._guard = Guard()
        await self._control.start()
        capping = loop.create_task(self._cap_logs())
        try:
            self._apply(self._core.start(now_ms=self._now_ms()))
            await self._done.wait()
        finally:
            capping.cancel()
            self._zygote.close()
            self._guard.close()
            self._write_state()
            await asyncio.sleep(0)  # let the last notices leave
            await self._control.close()
        return 1 if self._core.gave_up else 0

    def status(self) -> dict[str, Any]:
        """What `quire status` shows."""
        core, now_ms = self._core, self._now_ms()
        return {
            **self._info,
            "pid": os.getpid(),
            "uptime_s": round(time.monotonic() - self._began, 1),
            "ready": all(e.state is State.READY and e.health is Health.OK for e in core.entries.values()),
            "was_ready": core.all_ready_once,
            "stopping": core.stopping,
            "gave_up": core.gave_up,
            "services": [
                {
                    "name": name,
                    "state": str(entry.state),
                    "health": str(entry.health),
                    "says": self._said.get(name, ""),
                    "pid": entry.pid,
                    "state_s": round((now_ms - entry.since_ms) / 1000, 1),
                    "restarts": entry.restarts,
                    "failures": entry.failures,
                    "last_exit": entry.last_exit,
                    "probe": _probe_text(self._services[name]),
                    "log": str(self._log(name)),
                }
                for name, entry in core.entries.items()
            ],
        }

    # -- carrying out ---------------------------------------------------------------------------------------

    def _apply(self, actions: Sequence[Spawn | Signal | Notice]) -> None:
        for action in actions:
            match action:
                case Spawn(name=name):
                    self._spawn(self._services[name])
                case Signal(name=name, signum=signum):
                    if (process := self._processes.get(name)) is not None:
                        process.send(signum)
                        self._watch_end(name, process)
                    elif signum == signal.SIGKILL:
                        self._zygote.disown(name)
                case Notice():
                    self._tell(action)
        if self._core.stopped:
            self._done.set()
        self._set_wake()

    def _spawn(self, service: Service) -> None:
        log = self._log(service.name)
        self._log_starts[service.name] = log.stat().st_size if log.exists() else 0
        if service.launcher == "zygote":
            self._zygote.spawn(
                service.name,
                module=service.module,
                argv=service.command,
                log=log,
                env=service.env,
            )
            return
        head = (self._python, "-m", service.module) if service.module else ()
        name = service.name
        if name == ZYGOTE:
            self._zygote.connect()  # first: it removes an old socket, and must not meet the new one
        try:
            process = ExecProcess(
                [*head, *service.command],
                log=log,
                env=child_environment(service.env),
                cwd=REPO,
                on_exit=lambda code: self._exited(name, code),
            )
        except OSError as error:
            # the log itself may be what cannot be opened
            with contextlib.suppress(OSError), log.open("a") as out:
                out.write(f"cannot start {service.command[0]}: {error}\n")
            asyncio.get_running_loop().call_soon(self._exited, name, 127)
            return
        self._spawned(name, process)

    def _forked(self, name: str, process: ForkedProcess) -> None:
        self._spawned(name, process)

    def _spawned(self, name: str, process: Launched) -> None:
        self._processes[name] = process
        if self._guard is not None:
            self._guard.add(process.pid)
        self._probing[name] = asyncio.get_running_loop().create_task(self._probe(name, process))
        self._apply(self._core.on_spawned(name, process.pid))

    def _exited(self, name: str, returncode: int) -> None:
        process = self._processes.pop(name, None)
        if process is not None and self._guard is not None:
            self._guard.remove(process.pid)
        if (task := self._probing.pop(name, None)) is not None:
            task.cancel()
        if (task := self._draining.pop(name, None)) is not None:
            task.cancel()
        if name == ZYGOTE:
            self._zygote.close()
        if name == REDIS and returncode > 0:
            with contextlib.suppress(OSError):  # a log that cannot be read just now: at its next end
                self._look_at_journal()
        self._apply(self._core.on_exit(name, returncode, now_ms=self._now_ms()))

    def _look_at_journal(self) -> None:
        """Of the own Redis, which has just ended: a damaged one would end it at every start."""
        lines = tail(self._log(REDIS), lines=JOURNAL_LINES, start=self._log_starts.get(REDIS, 0))
        if damaged_journal.is_damaged(lines) and (
            text := damaged_journal.set_aside(redis_folder(self._paths))
        ):
            self._info["journal"] = text
            self._tell(Notice("journal_damaged", REDIS, text))

    async def _probe(self, name: str, process: Launched) -> None:
        """Until the process is gone: often while it starts, seldom afterwards."""
        probe = self._services[name].probe
        while self._processes.get(name) is process:
            if probe.kind == "zygote":
                health = await self._zygote.health(PROBE_TIMEOUT_S)
            elif probe.kind == "redis":
                health, said = await probes.probe_redis(probe.host, probe.port, timeout_s=PROBE_TIMEOUT_S)
                self._said[name] = said
            elif probe.kind == "keeper":
                health = await probes.probe_keeper(probe.path, timeout_s=PROBE_TIMEOUT_S)
            else:
                health = await probes.probe_http(
                    probe.host, probe.port, probe.path, timeout_s=PROBE_TIMEOUT_S
                )
            self._apply(self._core.on_probe(name, health, now_ms=self._now_ms()))
            starting = self._core.entries[name].state is State.STARTING
            await asyncio.sleep(START_PROBE_S if starting else self._health_probe_s)

    def _watch_end(self, name: str, process: Launched) -> None:
        if self._services[name].drain_ms and name not in self._draining:
            draining = asyncio.get_running_loop().create_task(self._ask_in_flight(name, process))
            self._draining[name] = draining

    async def _ask_in_flight(self, name: str, process: Launched) -> None:
        """From its SIGTERM until the process is gone."""
        probe = self._services[name].probe
        while self._processes.get(name) is process:
            count = await probes.in_flight(probe.host, probe.port, probe.path, timeout_s=PROBE_TIMEOUT_S)
            self._apply(self._core.on_in_flight(name, count, now_ms=self._now_ms()))
            await asyncio.sleep(DRAIN_PROBE_S)

    def _tell(self, notice: Notice) -> None:
        """No full disk stops it: the actions behind the notice must be carried out, too."""
        event: dict[str, Any] = {"event": notice.event, "name": notice.name, "text": notice.text}
        if notice.event in WITH_LOG_TAIL:
            event["log"] = str(self._log(notice.name))
            start = self._log_starts.get(notice.name, 0)
            event["log_tail"], event["log_errors"] = [], []
            with contextlib.suppress(OSError):
                event["log_errors"] = errors(self._log(notice.name), start=start)
                event["log_tail"] = tail(self._log(notice.name), lines=TAIL_LINES, start=start)
        stamp = (
            datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        )  # as services' logs
        with contextlib.suppress(OSError):
            print(f"{stamp} {notice.event} {notice.name}: {notice.text}", file=sys.stderr, flush=True)
        self._control.publish(event)
        self._write_state()

    def _write_state(self) -> None:
        scratch = self._paths.state.with_suffix(".tmp")
        with contextlib.suppress(OSError):  # a full disk must not end the cluster
            scratch.write_text(json.dumps(self.status(), indent=1))
            scratch.replace(self._paths.state)

    # -- time and requests ----------------------------------------------------------------------------------

    def _set_wake(self) -> None:
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        wake_ms = self._core.next_wake_ms()
        if wake_ms is not None and not self._done.is_set():
            delay_s = max(0, wake_ms - self._now_ms()) / 1000
            self._wake = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._apply(self._core.tick(now_ms=self._now_ms()))

    def _stop(self, at_once: bool = False) -> None:
        self._apply(self._core.stop(now_ms=self._now_ms(), at_once=at_once))

    def _told_to_stop(self) -> None:
        """Told twice: at once."""
        self._stop(at_once=self._core.stopping)

    def _handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """One control request. Bad ones are answered, never raised."""
        op, name = request.get("op"), request.get("name")
        if op in ("status", "watch"):
            return self.status()
        if op == "stop":
            at_once = self._core.stopping or request.get("now") is True
            asyncio.get_running_loop().call_soon(self._stop, at_once)
            return {"ok": True, "pid": os.getpid(), "longest_stop_s": self._core.longest_stop_ms / 1000}
        if op not in ("kill", "restart"):
            return {"error": f"unknown op {op!r}"}
        if not isinstance(name, str) or name not in self._core.entries:
            return {"error": f"no service {name!r}; there are: {', '.join(self._core.order)}"}
        if op == "restart":
            self._apply(self._core.restart(name, now_ms=self._now_ms()))
            return {"ok": True}
        return self._kill(name, request.get("signal", signal.SIGKILL))

    def _kill(self, name: str, signum: object) -> dict[str, Any]:
        process = self._processes.get(name)
        if process is None:
            return {"error": f"{name} is not running ({self._core.entries[name].state})"}
        if not isinstance(signum, int) or signum not in set(signal.Signals):
            return {"error": f"no signal {signum!r}"}
        process.send(signum)
        return {"ok": True, "pid": process.pid}

    async def _cap_logs(self) -> None:
        while True:
            await asyncio.sleep(LOG_CHECK_S)
            for log in self._paths.logs.glob("*.log"):
                with contextlib.suppress(OSError):
                    cap_log(log, self._log_cap_bytes)

    def _log(self, name: str) -> Path:
        return self._paths.logs / f"{name}.log"

    @staticmethod
    def _now_ms() -> int:
        return time.monotonic_ns() // 1_000_000


def _probe_text(service: Service) -> str:
    probe = service.probe
    return {
        "http": f"http://{probe.host}:{probe.port}{probe.path}",
        "redis": f"redis://{probe.host}:{probe.port}",
        "keeper": f"unix:{probe.path}",
        "zygote": "zygote",
    }[probe.kind]
