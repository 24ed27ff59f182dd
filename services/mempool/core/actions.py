"""What the pool asks its shell to do, in order, and its bounds. No I/O."""

from dataclasses import dataclass

from shared.ids import PageId
from shared.kv.layout import EngineDescription
from shared.wire.mempool import FromMempool


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Bounds of everything that a peer could make grow."""

    capacity_bytes: int  # in host memory
    device_capacity_bytes: int = 0  # on GPUs, all ranks of an engine together; 0: what the engine found free
    granted_share: float = 0.5  # of all pages: how many may be granted to engines and not yet sealed
    # of the pages: at most so many for engines that work in the pages, cached ones too
    kept_share: float = 0.99
    max_leases: int = 65_536
    max_handoffs: int = 65_536
    max_waiting: int = 4_096  # Acquire calls that wait for a handoff
    max_blocks_per_call: int = 65_536
    max_ttl_ms: int = 120_000
    max_wait_ms: int = 30_000
    idle_punch_ms: int = 30_000  # quiet for so long: memory of free pages goes back; 0: never


@dataclass(frozen=True, slots=True)
class CreateMemory:
    """Make the page and table memory; before any other action that needs it."""

    description: EngineDescription
    num_pages: int
    page_bytes: int
    num_ranks: int = 1  # each with page_bytes for every page
    pages_per_slab: int = 0  # on GPUs: pages of one allocation; 0: the pages of all ranks lie in one memfd


@dataclass(frozen=True, slots=True)
class CreateSlabs:
    """Make one rank's pages on its GPU, unless they exist; where that fails, end the connection."""

    connection: int
    rank: int
    device: str
    num_slabs: int
    slab_bytes: int


@dataclass(frozen=True, slots=True)
class SendSlabs:
    """Answer to SlabsCall."""

    connection: int
    call_id: int
    rank: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class WriteWords:
    """Publish page words, in this order, before any later action: (page, word)."""

    words: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class WriteEntries:
    """Note what the index knows of these pages, before the words that say they are sealed: (page, packed ENTRY)."""

    entries: list[tuple[int, bytes]]


@dataclass(frozen=True, slots=True)
class PunchPages:
    """Give the memory of these free pages back to the operating system."""

    pages: list[PageId]


@dataclass(frozen=True, slots=True)
class Send:
    """To one connection. `with_memory`: the page fd (read-write) and the table fd (read-only) go along."""

    connection: int
    message: FromMempool
    with_memory: bool = False


@dataclass(frozen=True, slots=True)
class Disconnect:
    """End a connection. The pool has forgotten it already."""

    connection: int
    reason: str


Action = CreateMemory | CreateSlabs | WriteWords | WriteEntries | PunchPages | Send | SendSlabs | Disconnect
