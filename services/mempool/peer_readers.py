"""Who reads from here, and the paths that each has opened (peers.py)."""

from dataclasses import dataclass, field

from services.mempool.peer_paths import PathEnd
from shared.wire import mempool_peer as wire


@dataclass(slots=True, eq=False)
class ServedPath:
    """This side's end of a path that a peer has opened, and how its spaces are cut, where not as the reader's."""

    cuts: list[wire.SpaceCut] = field(default_factory=list)
    end: PathEnd | None = None
    closed: bool = False


@dataclass(slots=True, eq=False)
class Reader:
    """A mempool that reads from here."""

    identity: bytes
    number: int
    instance: str
    paths: dict[int, ServedPath] = field(default_factory=dict)
    num_ends: int = 0  # of paths, also of closed ones, that are being made, or made and not destroyed
    missed_other_cut: bool = False  # said once
