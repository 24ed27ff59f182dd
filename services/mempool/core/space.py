"""The memory that a pool plans once an engine has told its block size. No I/O."""

from collections.abc import Callable
from dataclasses import dataclass

from services.mempool.core.actions import PoolLimits
from services.mempool.core.engines import Engines
from services.mempool.core.index import Entry
from services.mempool.core.page_table import PageTable
from shared.errors import PeerProtocolError
from shared.ids import Epoch
from shared.kv.layout import EngineDescription, page_bytes_for
from shared.wire.mempool import Attach


@dataclass(slots=True)
class Memory:
    """What exists once the first engine has told its block size."""

    content_key: str
    block_tokens: int
    page_bytes: int
    table: PageTable
    engines: Engines


@dataclass(frozen=True, slots=True)
class Plan:
    """How many pages, of page_bytes for each rank. With num_pages 0, `shortage` says why."""

    num_pages: int
    page_bytes: int
    num_ranks: int
    shortage: str = ""


def described(message: Attach) -> EngineDescription:
    """Of an engine or a rank. Raises: PeerProtocolError when it does not say what a block is."""
    description = message.description
    if description is None or description.block_bytes <= 0 or description.block_tokens <= 0:
        raise PeerProtocolError(f"an {message.kind} describes itself, with block_bytes and block_tokens")
    return description


def plan(description: EngineDescription, wanted_bytes: int, limits: PoolLimits) -> Plan:
    """Pages for blocks of this engine: as many as it wants (0: any number), within the pool's capacity."""
    page_bytes = page_bytes_for(description.block_bytes)
    num_ranks = max(1, description.tp_size)
    capacity_bytes = min(wanted_bytes, limits.capacity_bytes) if wanted_bytes > 0 else limits.capacity_bytes
    num_pages = capacity_bytes // (page_bytes * num_ranks)
    shortage = f"capacity_bytes {capacity_bytes} is less than a page of {page_bytes} on {num_ranks} ranks"
    return Plan(num_pages, page_bytes, num_ranks, "" if num_pages else shortage)


def make(
    description: EngineDescription,
    planned: Plan,
    limits: PoolLimits,
    boot_generation: Epoch,
    unpin: Callable[[Entry], None],
) -> Memory:
    """Tables for the planned pages, all of them free."""
    table = PageTable(planned.num_pages, boot_generation)
    engines = Engines(table, limits.granted_share, limits.kept_share, unpin)
    return Memory(description.content_key, description.block_tokens, planned.page_bytes, table, engines)
