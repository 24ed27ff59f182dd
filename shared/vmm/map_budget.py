"""How many mappings this process may still make: the kernel refuses at vm.max_map_count, we refuse well before.

At the kernel's own limit not only our maps fail but also every malloc, thread start and library load of the process.
"""

from pathlib import Path

from shared.vmm.errors import TooManyMappings

DEFAULT_MAX_MAP_COUNT = 65_530


class MapBudget:
    """Counts the mappings of all windows that share it. Maps stop at `limit`; unmaps, which may split a mapping and
    are how a process gets out of trouble, at an eighth more."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def change(self, delta: int, *, unmapping: bool = False) -> None:
        """Raises: TooManyMappings; nothing is counted then."""
        most = self.limit + self.limit // 8 if unmapping else self.limit
        if delta > 0 and self.used + delta > most:
            raise TooManyMappings(
                f"{self.used} + {delta} mappings of {most}; use longer runs or raise vm.max_map_count"
            )
        self.used += delta


_of_process: list[MapBudget] = []


def process_budget() -> MapBudget:
    """The one budget of this process: three quarters of vm.max_map_count less what was mapped at the first call."""
    if not _of_process:
        _of_process.append(MapBudget(max(64, _max_map_count() * 3 // 4 - _mappings_now())))
    return _of_process[0]


def _max_map_count() -> int:
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return DEFAULT_MAX_MAP_COUNT


def _mappings_now() -> int:
    try:
        with open("/proc/self/maps", "rb") as maps:
            return sum(1 for _ in maps)
    except OSError:
        return 0
