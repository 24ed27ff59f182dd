"""Ports of loopback for servers that are about to be started, given out so that nobody gets one twice.

A port that was free a moment ago may be taken when its server comes to bind it: by a connection, which the kernel
gives a port of its own choice, or by another process that looked for one at the same time. So these lie below what the
kernel chooses from, and go round: all processes of a user count on in one file.
"""

import fcntl
import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TextIO

FIRST = 10_000
_KERNEL_CHOOSES = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_END = 32_768


def free_ports(count: int) -> list[int]:
    """`count` different ports on which nobody listens, and which no other caller on this machine gets soon.

    Cost: one file lock and a bind each. Raises: OSError: there are not so many.
    """
    end = _kernel_begins_at()
    found: list[int] = []
    with _counter() as counter:
        at = min(max(FIRST, _number(counter.read())), end)
        for _ in range(FIRST, end):
            at = at + 1 if at + 1 < end else FIRST
            if _is_free(at):
                found.append(at)
            if len(found) == count:
                counter.seek(0)
                counter.truncate()
                counter.write(str(at))
                return found
    raise OSError(f"{count} free ports between {FIRST} and {end} are not to be had")


def free_port() -> int:
    """One of free_ports."""
    return free_ports(1)[0]


def _counter() -> TextIO:
    """The file in which callers count, locked until it is closed."""
    path = Path(tempfile.gettempdir()) / f"quire-ports-{os.getuid()}"
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _kernel_begins_at() -> int:
    with suppress(OSError, ValueError):
        begin = int(_KERNEL_CHOOSES.read_text().split()[0])
        if begin > FIRST + 1_000:
            return begin
    return _DEFAULT_END


def _is_free(port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        return True
    return False
