"""`quire down`: stop everything."""

import contextlib
import os
import select
import signal
import time
from typing import Annotated

import typer

from deploy.local import config, plan, run_supervisor
from deploy.local.control import ControlClient
from deploy.local.terminal import connect, fail, out
from shared.errors import PeerGone

PATIENCE_S = 20.0  # beyond what the supervisor says that a stop may take
END_WAIT_S = 5.0
# for a start that cannot be asked to stop yet: `quire up` looks at the GPUs, then its supervisor does
UNDER_WAY_WAIT_S = 2 * plan.NVIDIA_SMI_TIMEOUT_S + 20.0
SAY_AFTER_S = 1.0
POLL_S = 0.05


def down(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing when nothing runs.")] = False,
    now: Annotated[bool, typer.Option("--now", help="End at once, with answers that are under way.")] = False,
) -> None:
    """Stop every service of this machine's cluster, gateway first. Nothing running is no error.

    Answers under way may finish, for as long as gateway.drain_deadline_ms says (30 s); then they end with an error.

    Ctrl-C, or another `quire down`, ends them at once.

    Exit code 1: a `quire up` has begun that cannot be stopped yet.
    """
    client = _connected()
    if client is None:
        if not quiet:
            out.print("nothing is running")
        return
    began = time.monotonic()
    with client, contextlib.suppress(ProcessLookupError):  # it ends by itself, too, as where two say `down`
        _end(client, is_now=now)
    out.print(f"stopped in {time.monotonic() - began:.1f} s")


def _connected() -> ControlClient | None:
    """None: nothing runs. Who has the run's lock will answer, or let go of it. Exits 1 when neither happens."""
    paths = config.paths_of(config.default_home())
    began, is_said = time.monotonic(), False
    while True:
        with contextlib.suppress(PeerGone):
            return connect()
        if not run_supervisor.is_locked(paths):
            return None
        waited_s = time.monotonic() - began
        if waited_s > UNDER_WAY_WAIT_S:
            fail(f"a `quire up` is under way, and cannot be stopped yet; {paths.lock} is held")
        if waited_s > SAY_AFTER_S and not is_said:
            out.print("a `quire up` is under way: waiting until it can be stopped")
            is_said = True
        time.sleep(POLL_S)


def _end(client: ControlClient, *, is_now: bool) -> None:
    """Until the process is really gone, so that the next `quire up` finds the place free.

    Raises: ProcessLookupError: it is gone already.
    """
    pid = client.supervisor_pid
    pidfd = os.pidfd_open(pid)  # a number may be another process's by the time it is killed
    try:
        try:
            try:
                _stop(client, is_now=is_now)
            except KeyboardInterrupt:
                out.print("ending what is under way")
                _stop_now()
        except (TimeoutError, PeerGone):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            out.print(f"the supervisor (pid {pid}) does not answer: killed, and its services with it")
        select.select([pidfd], [], [], END_WAIT_S)
    finally:
        os.close(pidfd)


def _stop_now() -> None:
    """By a connection of its own: what came by the first one may have been cut inside a line."""
    try:
        client = connect()
    except PeerGone:
        return  # it has ended meanwhile
    with client:
        _stop(client, is_now=True)


def _stop(client: ControlClient, *, is_now: bool) -> None:
    answer = client.call(op="stop", now=is_now)
    patience_s = PATIENCE_S + answer.get("longest_stop_s", 0.0)
    end = time.monotonic() + patience_s
    for event in client.events(timeout_s=patience_s):
        if event["event"] in ("start_timeout", "unresponsive", "waiting"):
            out.print(f"{event['name']}: {event['text']}")
        if time.monotonic() > end:
            raise TimeoutError
