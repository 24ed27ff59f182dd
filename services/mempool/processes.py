"""Which living process is behind a connection, and proof of its death: a pidfd that became readable."""

import asyncio
import contextlib
import os
import select
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shared.observe.log import get_logger
from shared.transport.unix_channel import UnixConnection

log = get_logger("mempool")


@dataclass(slots=True)
class Watched:
    """One living process; `number` is never used again for another."""

    number: int
    key: tuple[int, str]
    pidfd: int


class ProcessWatch:
    """Watches peers on the running loop; on_dead(number, pid) runs once per process.

    A process is known by pid and start time, so that a second connection of it is recognized. A peer whose
    pid is not visible here (another pid namespace) counts as a new process with each connection: then its
    earlier pages wait for its death.
    """

    def __init__(self, on_dead: Callable[[int, int], None]) -> None:
        self._on_dead = on_dead
        self._next_number = 1
        self._watched: dict[tuple[int, str], Watched] = {}

    def number_of(self, connection: UnixConnection) -> int | None:
        """The process's number, watching it from now on. None: dead, or its death could not be proven."""
        pid = connection.peer.pid
        key = (pid, start_time(pid)) if pid else (0, f"connection {connection.state}")
        # Alive after its start time was read: that time is its own, not that of a later owner of its pid.
        if connection.pidfd < 0 or _is_readable(connection.pidfd):
            return None
        known = self._watched.get(key)
        if known is not None:
            return known.number
        watched = Watched(self._next_number, key, connection.take_pidfd())
        self._next_number += 1
        self._watched[key] = watched
        asyncio.get_running_loop().add_reader(watched.pidfd, self._died, watched)
        return watched.number

    def adopt(self, pid: int, pidfd: int) -> int:
        """Watch a process that an earlier mempool knew; its number. Takes over `pidfd`."""
        watched = Watched(self._next_number, (pid, start_time(pid)), pidfd)
        self._next_number += 1
        self._watched[watched.key] = watched
        asyncio.get_running_loop().add_reader(pidfd, self._died, watched)
        return watched.number

    def pidfd_of(self, number: int) -> tuple[int, int] | None:
        """(pid, pidfd) of a living process; the pidfd stays this object's."""
        return next(((w.key[0], w.pidfd) for w in self._watched.values() if w.number == number), None)

    def kill(self, number: int, reason: str) -> None:
        """Rule 5: it held on beyond a deadline. What it holds returns when its death is proven."""
        found = self.pidfd_of(number)
        if found is not None:
            log.warning("process_killed", process=number, pid=found[0], reason=reason)
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(found[1], signal.SIGKILL)

    def _died(self, watched: Watched) -> None:
        asyncio.get_running_loop().remove_reader(watched.pidfd)
        os.close(watched.pidfd)
        del self._watched[watched.key]
        self._on_dead(watched.number, watched.key[0])


def _is_readable(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def start_time(pid: int) -> str:
    """Field 22 of /proc/<pid>/stat, "" when the process is gone."""
    try:
        raw = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ""
    return raw.rpartition(b")")[2].split()[19].decode()  # its name, before that, may be any bytes
