"""The memory that a pool plans once an engine has told its block size. No I/O."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from services.mempool.core.actions import Action, CreateSlabs, PoolLimits, SendLayerWords, SendSlabs
from services.mempool.core.engines import Engines
from services.mempool.core.page_table import PageTable
from services.mempool.core.radix import Index
from shared.errors import PeerProtocolError
from shared.ids import Epoch
from shared.kv.layout import EngineDescription, may_share_slabs, num_slabs, page_bytes_for, slab_plan
from shared.kv.transfer_mode import layer_bytes_of
from shared.wire.mempool import Attach, LayerWordsCall, PoolStatus, SlabsCall, SpaceStatus

MAX_SLABS_PER_CALL = 128
# of one rank: each is a descriptor in the keeper and an import in every process (the cost is per handle, not per byte)
MAX_SLABS = 4_096
DRAM_LABEL = "dram"  # of host memory behind other spaces (dram.py); no engine's
LOAN_LABEL = "loan"  # of pages of one space that are lent to another (lending.py); no memory of their own


@dataclass(slots=True)
class Memory:
    """What exists once the first engine has told its block size."""

    content_key: str
    family_key: str  # of spaces whose blocks are these, perhaps cut differently
    block_tokens: int
    page_bytes: int
    table: PageTable
    engines: Engines
    pages_per_slab: int = 0  # 0: in host memory
    label: str = ""  # of host memory that is apart from other host memory
    devices: dict[int, str] = field(default_factory=dict)  # of each rank that has attached, on GPUs
    num_slabs: int = 0  # of each rank
    num_ranks: int = 1
    num_layers: int = 0
    layer_bytes: int = 0  # of one layer in a page; 0: layers do not follow each other there
    # pages that copies read before they are sealed (layered.py), how often: whatever becomes of them, they stay mapped
    read_early: Counter[int] = field(default_factory=Counter)
    only_lends: bool = False  # no block of its own lies there (shared/aqua/lender.py)
    has_engine: bool = True  # else a process that uses shared/aqua has it

    @property
    def is_dram(self) -> bool:
        """Whether this is memory behind other spaces, in which no engine works."""
        return self.label == DRAM_LABEL

    @property
    def is_loan(self) -> bool:
        """Whether these are pages of another space, on loan."""
        return self.label == LOAN_LABEL

    @property
    def is_behind(self) -> bool:
        """Whether no engine works here: blocks come from other spaces."""
        return self.label in (DRAM_LABEL, LOAN_LABEL)

    def shares_content(self, other: "Memory") -> bool:
        """Whether blocks there hold the same, perhaps cut over other ranks; on loan: cut as the consumer's."""
        if self.is_loan or other.is_loan:
            return self.content_key == other.content_key
        return self.family_key == other.family_key


@dataclass(frozen=True, slots=True)
class Plan:
    """How many pages, of page_bytes for each rank. With num_pages 0, `shortage` says why."""

    num_pages: int
    page_bytes: int
    num_ranks: int
    pages_per_slab: int = 0
    shortage: str = ""


def is_host(device: str) -> bool:
    """Whether pages for this device (wire.Attach) lie in host memory: "cpu", or "cpu:" and a label."""
    return device == "cpu" or device.startswith("cpu:")


def label_of(device: str) -> str:
    """Of a device in host memory; "" without one, and on GPUs."""
    return device[4:] if device.startswith("cpu:") else ""


def described(message: Attach) -> EngineDescription:
    """Of an engine or a rank. Raises: PeerProtocolError when it does not say what a block is, or which of its ranks."""
    description = message.description
    if description is None or description.block_bytes <= 0 or description.block_tokens <= 0:
        raise PeerProtocolError(f"an {message.kind} describes itself, with block_bytes and block_tokens")
    if description.layout == "layer-major" and description.num_layers < 1:
        raise PeerProtocolError(f"a layer-major block of {description.num_layers} layers")
    if not 0 <= message.rank < description.num_ranks:
        raise PeerProtocolError(f"rank {message.rank} of an engine with {description.num_ranks}")
    if label_of(message.device) in (DRAM_LABEL, LOAN_LABEL):
        raise PeerProtocolError(f"device {message.device!r} is the mempool's own")
    return description


def plan(description: EngineDescription, message: Attach, limits: PoolLimits) -> Plan:
    """Pages for blocks of this engine: as many as it wants (0: any number), within the pool's capacity.

    On a GPU the first rank's word counts: it knows what the model left free there.
    """
    num_ranks = description.num_ranks
    wanted_bytes = message.capacity_bytes
    if is_host(message.device):
        page_bytes, pages_per_slab = page_bytes_for(description.block_bytes), 0
        capacity_bytes = min(wanted_bytes or limits.capacity_bytes, limits.capacity_bytes)
    else:
        try:
            page_bytes, pages_per_slab = slab_plan(description)
        except ValueError as error:
            return Plan(0, 0, num_ranks, shortage=str(error))
        capacity_bytes = min(wanted_bytes, limits.device_capacity_bytes or wanted_bytes)
    num_pages = max(0, capacity_bytes // (page_bytes * num_ranks))
    if pages_per_slab:
        if may_share_slabs(description):
            while num_pages // pages_per_slab > MAX_SLABS:
                pages_per_slab *= 2
        num_pages -= num_pages % pages_per_slab
    shortage = f"capacity_bytes {capacity_bytes} is less than a page of {page_bytes} on {num_ranks} ranks"
    return Plan(num_pages, page_bytes, num_ranks, pages_per_slab, "" if num_pages else shortage)


def make(
    description: EngineDescription,
    planned: Plan,
    limits: PoolLimits,
    boot_generation: Epoch,
    index: Index,
) -> Memory:
    """Tables for the planned pages, all of them free."""
    return _memory(description, planned, limits, PageTable(planned.num_pages, boot_generation), index)


def adopt(
    description: EngineDescription,
    planned: Plan,
    limits: PoolLimits,
    words: Sequence[int],
    index: Index,
) -> Memory:
    """Tables as an earlier mempool left them."""
    return _memory(description, planned, limits, PageTable.adopt(words), index)


def _memory(
    description: EngineDescription,
    planned: Plan,
    limits: PoolLimits,
    table: PageTable,
    index: Index,
) -> Memory:
    engines = Engines(table, limits.granted_share, limits.kept_share, index, limits.stock_share)
    return Memory(
        description.content_key,
        description.family_key,
        description.block_tokens,
        planned.page_bytes,
        table,
        engines,
        planned.pages_per_slab,
        num_slabs=num_slabs(description, planned.num_pages, planned.pages_per_slab)
        if planned.pages_per_slab
        else 0,
        num_ranks=planned.num_ranks,
        num_layers=description.num_layers,
        layer_bytes=layer_bytes_of(description),
        only_lends=description.only_lends,
        has_engine=description.has_engine,
    )


def other_device(memory: Memory, message: Attach) -> str:
    """Why this rank cannot work in the pool's pages; "" when it can: another GPU's would be read over the link."""
    if is_host(message.device) != (memory.pages_per_slab == 0):
        return f"this pool's pages are {'on GPUs' if memory.pages_per_slab else 'in host memory'}"
    if not memory.pages_per_slab:
        same = label_of(message.device) == memory.label
        return "" if same else f"this pool's pages are in {memory.label or 'common'!r} host memory"
    there = memory.devices.get(message.rank, message.device)
    return "" if there == message.device else f"this pool's pages of rank {message.rank} are on {there}"


def slabs_of(memory: Memory, number: int, connection: int, message: Attach) -> list[Action]:
    """What a rank that attaches needs on its GPU."""
    if not memory.pages_per_slab:
        return []
    slab_bytes = memory.table.num_pages * memory.page_bytes // memory.num_slabs
    memory.devices[message.rank] = message.device
    return [CreateSlabs(connection, message.rank, message.device, memory.num_slabs, slab_bytes, number)]


def send_slabs(memory: Memory | None, number: int, connection: int, call: SlabsCall) -> list[Action]:
    """Raises: PeerProtocolError when it is no rank's connection, or asks for what is not there."""
    rank = memory.engines.ranks.get(connection) if memory is not None else None
    if memory is None or rank is None or not memory.pages_per_slab:
        raise PeerProtocolError("only ranks of a GPU pool ask for slabs")
    count = memory.num_slabs
    if not (call.first >= 0 and 0 < call.count <= MAX_SLABS_PER_CALL and call.first + call.count <= count):
        raise PeerProtocolError(f"slabs {call.first} and {call.count} more of {count}")
    return [SendSlabs(connection, call.call_id, rank.number, call.first, call.count, number)]


def send_layer_words(
    memory: Memory | None, number: int, connection: int, call: LayerWordsCall
) -> list[Action]:
    """Raises: PeerProtocolError when it is no rank's connection."""
    rank = memory.engines.ranks.get(connection) if memory is not None else None
    if rank is None:
        raise PeerProtocolError("only ranks ask for layer words")
    return [SendLayerWords(connection, call.call_id, rank.number, rank.instance, number)]


def of_space(number: int, memory: Memory | None, num_indexed: int, num_pinned: int) -> SpaceStatus | None:
    """One space; None before it has memory."""
    if memory is None:
        return None
    table = memory.table
    return SpaceStatus(
        number=number,
        content_key=memory.content_key,
        devices=[memory.devices[rank] for rank in sorted(memory.devices)]
        or [f"cpu:{memory.label}".strip(":")],
        num_pages=table.num_present if memory.is_loan else table.num_pages,
        page_bytes=memory.page_bytes,
        pages_by_state=table.by_state() | ({"withdrawn": 0} if memory.is_loan else {}),
        num_indexed=num_indexed,
        num_pinned=num_pinned,
        engines=sorted(str(engine) for engine in memory.engines.attached.values()),
    )


def total(
    parts: Sequence[PoolStatus], spaces: list[SpaceStatus], call_id: int, counters: Counter[str]
) -> PoolStatus:
    """All spaces of a mempool together. `page_bytes`: of the first space that has memory."""
    first = parts[0]
    states: Counter[str] = Counter()
    summed = Counter(counters)
    for part in parts:
        states.update(part.pages_by_state)
        summed.update(part.counters)
    return PoolStatus(
        call_id=call_id,
        boot_generation=first.boot_generation,
        num_pages=sum(part.num_pages for part in parts),
        page_bytes=next((part.page_bytes for part in parts if part.page_bytes), 0),
        pages_by_state=dict(states),
        num_indexed=sum(part.num_indexed for part in parts),
        num_pinned=sum(part.num_pinned for part in parts),
        num_leases=sum(part.num_leases for part in parts),
        num_handoffs=sum(part.num_handoffs for part in parts),
        attachments=sorted({name for part in parts for name in part.attachments}),
        counters=dict(summed),
        num_kept=sum(part.num_kept for part in parts),
        spaces=spaces,
    )


class MemoryStatus(TypedDict):
    """The part of PoolStatus that tells of pages."""

    num_pages: int
    page_bytes: int
    pages_by_state: dict[str, int]
    attachments: list[str]
    num_kept: int


def status(memory: Memory | None, clients: list[str]) -> MemoryStatus:
    """Empty before there is memory."""
    engines = list(memory.engines.attached.values()) if memory else []
    counted = memory is not None and not memory.is_loan  # what is lent is counted where it is
    return MemoryStatus(
        num_pages=memory.table.num_pages if memory and counted else 0,
        page_bytes=memory.page_bytes if memory and counted else 0,
        pages_by_state=memory.table.by_state() if memory and counted else {},
        attachments=sorted([str(engine) for engine in engines] + clients),
        num_kept=sum(entry.branch is not None for engine in engines for entry in engine.pinned.values()),
    )
