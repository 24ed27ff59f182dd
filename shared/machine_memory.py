"""How much memory this process may still take: the machine's, or what a limit of its control groups leaves."""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

CGROUPS = Path("/sys/fs/cgroup")
# of either version of control groups: a limit, what is in use, and the line of memory.stat that counts pages of files
# which the kernel only keeps until somebody needs the room
V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


class MachineMemory:
    """Read anew at every call. Limits count of the group that the process is in, and of all around it.

    Args: proc, cgroups: where the kernel shows them. Nothing is raised where it does not: then the machine's counts.
    """

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = CGROUPS) -> None:
        self._proc, self._cgroups = proc, cgroups

    def total_bytes(self) -> int:
        """The machine's memory, or the least limit."""
        machine = self._meminfo("MemTotal")
        if machine is None:
            machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return min([machine, *(limit for limit, _ in self._limits())])

    def available_bytes(self) -> int:
        """That can be taken without swapping or reaching a limit: not what other processes have. At least 0."""
        machine = self._meminfo("MemAvailable")
        if machine is None:
            machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        return max(0, min([machine, *(limit - used for limit, used in self._limits())]))

    def _meminfo(self, key: str) -> int | None:
        return _number_of(self._proc / "meminfo", f"{key}:", 1024)

    def _limits(self) -> Iterator[tuple[int, int]]:
        """(limit, bytes in use that the kernel could not give back at once) of each group that has a limit."""
        for folder, (most, used, kept) in self._folders():
            try:
                limit, taken = int((folder / most).read_text()), int((folder / used).read_text())
            except (OSError, ValueError):  # no such group in this container's view, or "max"
                continue
            yield limit, max(0, taken - (_number_of(folder / "memory.stat", kept, 1) or 0))

    def _folders(self) -> Iterator[tuple[Path, tuple[str, str, str]]]:
        """Groups from the innermost out, with the names of their files."""
        try:
            lines = (self._proc / "self" / "cgroup").read_text().splitlines()
        except OSError:
            return
        for line in lines:
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if (number, controllers) == ("0", ""):
                mount, names = self._cgroups, V2
            elif "memory" in controllers.split(","):
                mount, names = self._cgroups / "memory", V1
            else:
                continue
            inner = PurePosixPath(*(part for part in path.split("/") if part not in ("", "..")))
            for group in (inner, *inner.parents):  # ends with the mount itself, a container's own group
                yield mount / group, names


def _number_of(path: Path, key: str, unit: int) -> int | None:
    """The number behind a word at the beginning of a line, times unit; None: there is none."""
    try:
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) > 1 and words[0] == key:
                return int(words[1]) * unit
    except (OSError, ValueError):
        return None
    return None
