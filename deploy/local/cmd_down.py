"""`quire down`: stop everything."""

import os
import signal
import time
from typing import Annotated

import typer

from deploy.local import config, run_supervisor
from deploy.local.control import ControlClient
from deploy.local.terminal import connect, out
from shared.errors import PeerGone

PATIENCE_S = 20.0
LOCK_WAIT_S = 5.0


def down(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing when nothing runs.")] = False,
) -> None:
    """Stop every service of this machine's cluster, gateway first. Nothing running is no error."""
    try:
        client = connect()
    except PeerGone:
        if not quiet:
            out.print("nothing is running")
        return
    began = time.monotonic()
    with client:
        pid = client.supervisor_pid
        try:
            _stop(client)
        except (TimeoutError, PeerGone):
            out.print(f"the supervisor (pid {pid}) does not answer: killed, and its services with it")
            os.kill(pid, signal.SIGKILL)
    _wait_for_lock()
    out.print(f"stopped in {time.monotonic() - began:.1f} s")


def _wait_for_lock() -> None:
    """Until the supervisor's process is really gone, so that the next `quire up` finds the place free."""
    paths = config.paths_of(config.default_home())
    end = time.monotonic() + LOCK_WAIT_S
    while time.monotonic() < end:
        lock = run_supervisor.take_lock(paths)
        if lock is not None:
            lock.close()
            return
        time.sleep(0.02)


def _stop(client: ControlClient) -> None:
    client.call(op="stop")
    end = time.monotonic() + PATIENCE_S
    for event in client.events(timeout_s=PATIENCE_S):
        if event["event"] in ("start_timeout", "unresponsive"):
            out.print(f"{event['name']}: {event['text']}", markup=False)
        if time.monotonic() > end:
            raise TimeoutError
