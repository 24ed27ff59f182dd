"""What a SlotTable asks for: maps and unmaps at places of its slots, joined into runs. No I/O."""

from collections.abc import Iterable
from typing import NamedTuple


class Map(NamedTuple):
    """Map `pages` at the place `first` and behind it. A slot's places are consecutive, and so are the slots."""

    first: int
    pages: tuple[int, ...]
    writable: bool


class Unmap(NamedTuple):
    """Make holes of `num_places` places from `first` on."""

    first: int
    num_places: int


Command = Map | Unmap


def merged(commands: Iterable[Command]) -> list[Command]:
    """The same commands with neighbours joined into runs; their order is kept."""
    joined: list[Command] = []
    for command in commands:
        run = _join(joined[-1], command) if joined else None
        if run is None:
            joined.append(command)
        else:
            joined[-1] = run
    return joined


def _join(last: Command, command: Command) -> Command | None:
    if isinstance(command, Map):
        if not isinstance(last, Map) or last.writable != command.writable:
            return None
        follows = last.first + len(last.pages) == command.first
        return Map(last.first, last.pages + command.pages, last.writable) if follows else None
    if isinstance(last, Unmap):
        if last.first + last.num_places == command.first:
            return Unmap(last.first, last.num_places + command.num_places)
        if command.first + command.num_places == last.first:
            return Unmap(command.first, last.num_places + command.num_places)
    return None
