"""Ports of loopback for servers that are about to be started, given out so that nobody gets one twice.

A port that was free a moment ago may be taken when its server comes to bind it: by a connection, which the kernel
gives a port of its own choice, or by another process that looked for one at the same time. So these lie below what the
kernel chooses from by default (32,768), and go round: all processes of a user count on in one file.
"""

import errno
import fcntl
import os
import socket
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

PORTS = range(10_000, 20_000)


def free_ports(count: int) -> list[int]:
    """`count` different ports on which nobody listens, and which no other caller on this machine gets soon.

    Cost: one file lock, and a bind each. Raises: OSError: there are not so many.
    """
    return in_turn("ports", PORTS, count, partial(is_free, "127.0.0.1"))


def free_port() -> int:
    """One of free_ports."""
    return free_ports(1)[0]


def in_turn(name: str, numbers: range, count: int, is_good: Callable[[int], bool]) -> list[int]:
    """The next `count` good ones of `numbers` behind those that any process of this user got last under this name.

    Raises: OSError: there are not so many.
    """
    path = Path(tempfile.gettempdir()) / f"quire-{name}-{os.getuid()}"
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        said = file.read(16)
        last = int(said) if said.isdecimal() else 0
        begin = numbers.index(last) + 1 if last in numbers else 0
        found: list[int] = []
        for number in (*numbers[begin:], *numbers[:begin]):
            if is_good(number):
                found.append(number)
            if len(found) == count:
                file.seek(0)
                file.truncate()
                file.write(str(number))
                return found
    raise OSError(f"{count} free {name} between {numbers[0]} and {numbers[-1]} are not to be had")


def is_free(host: str, port: int) -> bool:
    """Whether a listener could bind to host:port now."""
    return bind_error(host, port) is None


def bind_error(host: str, port: int) -> OSError | None:
    """Why no listener could bind to host:port now: EADDRINUSE, or what no other owner would change; None: it could."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
        except UnicodeError:  # its name has a part that no name in DNS may have
            return OSError(errno.EINVAL, "not a name of a host")
    return None
