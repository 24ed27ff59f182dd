"""`quire down`: stop everything."""

import contextlib
import os
import select
import signal
import time
from typing import Annotated

import typer

from deploy.local.control import ControlClient
from deploy.local.terminal import connect, out
from shared.errors import PeerGone

PATIENCE_S = 20.0
END_WAIT_S = 5.0


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
    with client, contextlib.suppress(ProcessLookupError):  # it ends by itself, too, as where two say `down`
        _end(client)
    out.print(f"stopped in {time.monotonic() - began:.1f} s")


def _end(client: ControlClient) -> None:
    """Until the process is really gone, so that the next `quire up` finds the place free.

    Raises: ProcessLookupError: it is gone already.
    """
    pid = client.supervisor_pid
    pidfd = os.pidfd_open(pid)  # a number may be another process's by the time it is killed
    try:
        try:
            _stop(client)
        except (TimeoutError, PeerGone):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            out.print(f"the supervisor (pid {pid}) does not answer: killed, and its services with it")
        select.select([pidfd], [], [], END_WAIT_S)
    finally:
        os.close(pidfd)


def _stop(client: ControlClient) -> None:
    client.call(op="stop")
    end = time.monotonic() + PATIENCE_S
    for event in client.events(timeout_s=PATIENCE_S):
        if event["event"] in ("start_timeout", "unresponsive"):
            out.print(f"{event['name']}: {event['text']}", markup=False)
        if time.monotonic() > end:
            raise TimeoutError
