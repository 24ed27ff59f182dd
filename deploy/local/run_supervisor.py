"""`python -m deploy.local.run_supervisor --home DIR`: what `quire up` starts in the background.

Exit codes: 0 stopped on request, 1 a service could not be started or a setting is wrong, 4 another one runs.
"""

import argparse
import asyncio
import fcntl
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from deploy.local import addresses, config, host_memory, plan, services_table
from deploy.local.cluster_settings import ClusterSettings
from deploy.local.ports import busy_ports, refused_listens
from deploy.local.services_table import Plan, Service
from deploy.local.supervisor import Supervisor
from shared.errors import SettingsError
from shared.wire.codec import MALFORMED

ALREADY_RUNNING = 4
PORT_WAIT_S = 1.0


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """run/settings.json: what the supervisor is to run."""

    settings: ClusterSettings
    model: plan.Model
    services: dict[str, str] = {}  # config_digest.digests(): the services read their settings themselves


def differences(running: Start, wanted: Start) -> list[str]:
    """Names of the settings that are not the same, without their values: keys are among them."""
    ours, theirs = (msgspec.structs.asdict(start.settings) for start in (wanted, running))
    found = [f"cluster.{key}" for key, value in ours.items() if theirs[key] != value]
    if wanted.model != running.model and not {"cluster.model", "cluster.model_name"} & set(found):
        found.append("cluster.model")  # a relative path, said in another folder
    return found + sorted({key for key, _ in wanted.services.items() ^ running.services.items()})


def take_lock(paths: config.Paths) -> IO[bytes] | None:
    """The run's lock, held for as long as the file is open, so not by a killed process; None: taken.

    `quire up` takes it before it looks at anything, and hands the open file to its supervisor.
    Raises: SettingsError where no such file can be opened.
    """
    try:
        fd = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _not_written(paths.lock, error) from error
    lock = os.fdopen(fd, "r+b")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def is_locked(paths: config.Paths) -> bool:
    """Whether somebody has the run's lock now: a supervisor, or an `up` that will start one."""
    try:
        with paths.lock.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is no such file, or it is not ours
        return False
    return False


def planned(start: Start) -> tuple[Plan, list[Service]]:
    """What would run; nothing is made yet. Raises: SettingsError."""
    made = plan.make_plan(start.settings, config.paths_of(start.settings.home), start.model)
    plan.check_handoffs(start.settings, made.workers, config.kv_layout())
    services = services_table.build(made)
    config.check_overrides(services_table.managed_keys(services))
    return made, services


def listens_of(services: Sequence[Service]) -> list[tuple[str, str, int]]:
    """(service, host, port) of each that must be free."""
    return [(service.name, host, port) for service in services for host, port in service.listens]


def prepare(start: Start) -> tuple[config.Paths, Plan, list[Service]]:
    """Everything that can be refused before a process is started. Raises: SettingsError."""
    paths = config.paths_of(start.settings.home)
    config.make_folders(paths)
    made, services = planned(start)
    listens = listens_of(services)
    if refused := refused_listens(listens):
        raise SettingsError("; ".join(refused))
    end = time.monotonic() + PORT_WAIT_S  # the last cluster may have been killed a moment ago
    while (lines := busy_ports(listens)) and time.monotonic() < end:
        time.sleep(0.1)
    if lines:
        raise SettingsError(
            "\n".join(lines) + "\nstop it (`quire down` if it is an older cluster), or choose other ports: "
            "--port, --base-port (QUIRE_CLUSTER_PORT, QUIRE_CLUSTER_BASE_PORT)"
        )
    return paths, made, services


def describe(start: Start, made: Plan) -> dict[str, Any]:
    """The part of the status that does not change."""
    host = addresses.in_url(addresses.reachable(made.host))
    traces = start.settings.trace_endpoint or str(config.paths_of(start.settings.home).traces)
    return {
        "url": "" if made.join else f"http://{host}:{made.ports.gateway}",
        "joined": made.join.host if made.join else "",  # who has the gateway, and alone knows its port
        "coordinators": services_table.coordinators(made),
        "model": made.model_name,
        "model_dir": made.model_dir,
        "device": made.device,
        "engine": made.engine,
        "topology": "colocated" if made.workers[0].role == "colocated" else start.settings.topology,
        "host_memory": host_memory.said(start.settings, made.device),
        "traces": traces,
        "trace_endpoint": start.settings.trace_endpoint,
        "authenticated": bool(start.settings.api_keys) or config.gateway_wants_keys(),
        "mempool_admin": f"http://{addresses.LOOPBACK}:{made.ports.mempool_admin}",
        "logs": str(config.paths_of(start.settings.home).logs),
    }


async def supervise(start: Start) -> int:
    """Run until stopped. Raises: SettingsError."""
    paths, made, services = prepare(start)
    if made.redis_command:
        plan.redis_folder(paths).mkdir(mode=0o700, exist_ok=True)
    supervisor = Supervisor(
        services, paths, info=describe(start, made), log_cap_bytes=start.settings.log_cap_bytes
    )
    return await supervisor.run()


def read_start(paths: config.Paths) -> Start:
    """Raises: SettingsError when the file is missing or not ours."""
    try:
        return msgspec.json.decode(paths.settings.read_bytes(), type=Start)
    except (OSError, *MALFORMED) as error:
        raise SettingsError(f"cannot read {paths.settings}: {error}; run `quire up`") from error


def write_start(paths: config.Paths, start: Start) -> None:
    """For the supervisor to read; 0600, because API keys may be in it. Raises: SettingsError when that fails."""
    try:
        encoded = msgspec.json.encode(start)  # first: what cannot be written must not empty the file
    except UnicodeEncodeError as error:  # of a folder that was found, say
        raise SettingsError(f"{error.object!a} is no UTF-8; rename it") from error
    try:
        fd = os.open(paths.settings, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(encoded)
    except OSError as error:
        raise _not_written(paths.settings, error) from error


def _not_written(path: Path, error: OSError) -> SettingsError:
    return SettingsError(
        f"cannot write {path}: {error.strerror}; move it away or make room, or set QUIRE_HOME elsewhere"
    )


def _inherited(fd: int) -> IO[bytes]:
    """The lock as `quire up` handed it over; the services must not have it, too."""
    os.set_inheritable(fd, False)
    return os.fdopen(fd, "r+b")


def main(argv: Sequence[str] | None = None, *, lock: IO[bytes] | None = None) -> int:
    """One cluster, until stopped. Args: lock: the run's, where this process has it already."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", required=True, type=Path)
    parser.add_argument("--lock-fd", type=int, help="of the run's lock, where it was taken for this process")
    given = parser.parse_args(argv)
    paths = config.paths_of(given.home)
    try:
        if lock is None:
            lock = take_lock(paths) if given.lock_fd is None else _inherited(given.lock_fd)
        if lock is None:
            print("another supervisor holds the lock", file=sys.stderr)
            return ALREADY_RUNNING
        with lock:
            return asyncio.run(supervise(read_start(paths)))
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
