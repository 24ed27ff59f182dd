"""Which ports are taken, and who has them?"""

import contextlib
import errno
import os
from collections.abc import Iterable

from shared.free_ports import bind_error

LISTEN_STATE = "0A"  # of /proc/net/tcp
# the gateway's setting, and that of all others
HOST_KEYS = ("cluster.host", "cluster.address")
PORT_KEYS = ("cluster.port", "cluster.base_port")


def owner(port: int) -> str:
    """'python3 (pid 123)' of the process that listens on the port; "" when it cannot be seen."""
    inodes = _listening_inodes(port)
    if not inodes:
        return ""
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            for fd in os.listdir(f"/proc/{entry}/fd"):
                if os.readlink(f"/proc/{entry}/fd/{fd}") in inodes:
                    return f"{_command(entry)} (pid {entry})"
    return ""


def busy_ports(listens: Iterable[tuple[str, str, int]]) -> list[str]:
    """One line for each of (service, host, port) that somebody else has."""
    lines: list[str] = []
    for service, host, port in listens:
        if _is_taken(bind_error(host, port)):
            who = owner(port)
            by = f" by {who}" if who else ""
            lines.append(f"port {port}, wanted by {service} on {host}, is in use{by}")
    return lines


def refused_listens(listens: Iterable[tuple[str, str, int]]) -> list[str]:
    """One line for each host that cannot be listened on, and each port that this user may not have."""
    lines: list[str] = []
    for service, host, port in listens:
        error = bind_error(host, port)
        if error is None or _is_taken(error):
            continue
        is_port = isinstance(error, PermissionError)
        where = f"{host}:{port}" if is_port else host
        key = (PORT_KEYS if is_port else HOST_KEYS)[0 if service == "gateway" else 1]
        lines.append(f"cannot listen on {where}: {error.strerror}; see {key}")
    return list(dict.fromkeys(lines))  # many services are on one host


def _is_taken(error: OSError | None) -> bool:
    return error is not None and error.errno == errno.EADDRINUSE


def _listening_inodes(port: int) -> set[str]:
    found: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as lines:
            next(lines, None)
            for line in lines:
                words = line.split()
                if words[3] == LISTEN_STATE and int(words[1].rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{words[9]}]")
    return found


def _command(pid: str) -> str:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        words = file.read().split(b"\0")
    return b" ".join(words[:4]).decode("utf-8", "replace").strip() or "a process"
