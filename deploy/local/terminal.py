"""What every command shares: the consoles, exit codes, and errors as one sentence."""

import contextlib
import errno
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, NoReturn, TextIO

from rich.console import Console

from deploy.local import config
from deploy.local.control import ControlClient
from shared import http_get
from shared.errors import PeerGone

OK, FAILED, USAGE, NOT_RUNNING = 0, 1, 2, 3
EXIT_CODES = "Exit codes: 0 ok, 1 failed, 2 wrong usage or setting, 3 no cluster is running."
MAX_REPLY_BYTES = 8 << 20

# without a file's name
OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE, errno.EBADF, errno.EAGAIN)
WIDE_COLUMNS = 160  # of what is not a terminal


class _Output(Console):
    """Rich's, but that a closed pipe is an error as a full disk is: whoever writes may have something to undo."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def _console(*, stderr: bool) -> Console:
    # no emoji: their codes are parts of addresses too, as in fd00:a:b::1; markup only where it is asked for: models,
    # folders and what services say may have square brackets
    made = _Output(stderr=stderr, highlight=False, soft_wrap=True, emoji=False, markup=False)
    if not made.is_terminal:
        made.width = WIDE_COLUMNS
    return made


# the services are on this machine, whatever http_proxy says
out = _console(stderr=False)
err = _console(stderr=True)


def fail(message: str, code: int = FAILED) -> NoReturn:
    """Print `error: ...`, where that can be printed, and exit."""
    try:
        err.print(f"error: {message}", style="red")
    except OSError:
        drop(sys.stderr)
    sys.exit(code)


def drop(stream: TextIO) -> None:
    """Nothing more can be written there; what waits in its buffer would fail again at the exit."""
    with contextlib.suppress(OSError, ValueError), Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


def os_error_text(error: OSError) -> str:
    """What to say of one that nobody was there for."""
    what = str(error.strerror or error)
    if error.filename:
        return f"{error.filename}: {what}"
    return f"cannot write the output: {what}" if error.errno in OUTPUT_ERRORS else what


def program() -> str:
    """`quire`, or its path as it was typed where the shell would not find the name: hints are there to be copied."""
    typed = Path(config.typed_command())
    return str(typed) if typed.name == "quire" and shutil.which("quire") is None else "quire"


def connect() -> ControlClient:
    """To the supervisor of this home. Raises: PeerGone when none runs; SettingsError."""
    paths = config.paths_of(config.default_home())
    return ControlClient(paths.control, home=paths.home)


def status_or_none() -> dict[str, Any] | None:
    """The running cluster's status."""
    try:
        with connect() as client:
            return client.call(op="status")
    except PeerGone:
        return None


def get_json(url: str, *, timeout_s: float = 2.0) -> dict[str, Any] | None:
    """A JSON object by GET; None when it cannot be had."""
    try:
        with http_get.open_directly(url, timeout_s=timeout_s) as reply:
            found = json.loads(reply.read(MAX_REPLY_BYTES))
    except http_get.NO_ANSWER:
        return None
    return found if isinstance(found, dict) else None


def show_log_tail(event: dict[str, Any], *, lines: int = 12) -> None:
    """The last log lines that a notice carries, the first errors before them, and where the rest is."""
    told = event.get("log_tail", [])[-lines:]
    for error in event.get("log_errors", []):
        if not any(error in line for line in told):
            err.print(f"    {error}", style="bold")
    for line in told:
        err.print(f"    {line}", style="dim")
    if event.get("log"):
        err.print(f"  log: {event['log']}")


def bytes_text(count: float) -> str:
    """12.3 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def duration_text(seconds: float) -> str:
    """42 s, 3 min 20 s, 5 h 7 min."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def shorten(path: str) -> str:
    """Relative to the working directory where that is shorter."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path
