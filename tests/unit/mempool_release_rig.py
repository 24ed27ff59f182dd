"""A pool of two GPUs' allocations (or of host memory), with processes that map them and a system that takes them."""

from collections import deque
from dataclasses import dataclass, field

from services.mempool.core.actions import (
    Action,
    OfferSlabs,
    OweMemory,
    PoolLimits,
    ReleaseUnits,
    RestoreUnits,
)
from services.mempool.core.pool import Pool
from shared.ids import Epoch, InstanceId
from shared.kv.layout import EngineDescription
from shared.kv.page import PageState
from shared.kv.words import u32_bytes, u32_list, u64_list
from shared.wire import mempool as wire
from tests.unit.mempool_harness import BLOCK_TOKENS, BOOT, Harness, Owned, page_lists

GPU_DESCRIPTION = EngineDescription(
    model="m", fingerprint="f", dtype="bfloat16", layout="layers-blocks", backend="none", block_tokens=BLOCK_TOKENS,
    block_bytes=1 << 20, tp_size=2,
)  # fmt: skip
PAGES_PER_SLAB = 2
UNIT_BYTES = 2 * (2 << 20)  # of both ranks


@dataclass
class RankProcess:
    """What one rank's process maps. It hears messages when the test lets it."""

    connection: int
    process: int
    slabs: set[int]
    inbox: deque = field(default_factory=deque)
    ready: bool = False


class ReleaseRig(Harness):
    """`memory`: slabs that the system has given. `pending`: what the shell was asked and has not answered."""

    def __init__(self, num_slabs: int = 4, *, boot: Epoch = BOOT, **limits: object) -> None:
        super().__init__(num_slabs * PAGES_PER_SLAB, boot)
        options = {"granted_share": 1.0, "kept_share": 1.0, "idle_punch_ms": 0} | limits
        self.pool = Pool(PoolLimits(capacity_bytes=1 << 30, **options), boot)
        self.num_slabs = num_slabs
        self.memory = set(range(num_slabs))
        self.ranks: dict[int, RankProcess] = {}
        self.pending: deque[ReleaseUnits | RestoreUnits] = deque()
        self.vacates: deque[tuple[int, wire.Vacate]] = deque()
        self.answers: list[wire.MemoryChanged | wire.CallFailed] = []
        self.is_owed = False  # as it is kept for a successor

    def run(self, actions: list[Action]) -> None:
        super().run(actions)
        for action in actions:
            if isinstance(action, ReleaseUnits | RestoreUnits):
                self.pending.append(action)
            elif isinstance(action, OweMemory):
                assert action.is_owed is not self.is_owed, "said when it changes"
                self.is_owed = action.is_owed
            elif isinstance(action, OfferSlabs):
                assert set(action.slabs) <= self.memory
                self.to_rank(action.connection, wire.MapSlabs(slabs=u32_bytes(action.slabs)))

    def _sent(self, action) -> None:
        message = action.message
        if isinstance(message, wire.Vacate):
            self.vacates.append((action.connection, message))
        elif isinstance(message, wire.Unmap):
            self.to_rank(action.connection, message)
        elif isinstance(message, wire.MemoryChanged | wire.CallFailed):
            self.answers.append(message)
        elif isinstance(message, wire.Attached) and action.connection in self.ranks:
            self.ranks[action.connection].slabs -= set(u32_list(message.absent_slabs))
        super()._sent(action)

    def to_rank(self, connection: int, message) -> None:
        if connection in self.ranks:
            assert self.ranks[connection].ready, "told before it said that it has mapped"
            self.ranks[connection].inbox.append(message)

    # -- processes --------------------------------------------------------------------------------

    def rank(self, connection: int, number: int, instance: str = "e", process: int = 0, **fields) -> None:
        """It maps what it is told is there; ready() says so."""
        self.ranks[connection] = RankProcess(connection, process or connection, set(range(self.num_slabs)))
        message = wire.Attach(
            kind="rank", instance=InstanceId(instance), description=GPU_DESCRIPTION, rank=number,
            device=f"cuda:{number:032x}", capacity_bytes=self.num_slabs * UNIT_BYTES, **fields,
        )  # fmt: skip
        self.run(self.pool.on_attach(connection, process or connection, message, self.now_ms))

    def ready(self, connection: int) -> None:
        self.ranks[connection].ready = True
        self.say(connection, wire.Mapped())

    def hear(self, connection: int) -> bool:
        """The rank does what it was told next."""
        rank = self.ranks[connection]
        if not rank.inbox:
            return False
        message = rank.inbox.popleft()
        slabs = set(u32_list(message.slabs))
        if isinstance(message, wire.Unmap):
            rank.slabs -= slabs
            self.say(connection, wire.Unmapped(slabs=message.slabs))
        else:
            assert slabs <= self.memory
            rank.slabs |= slabs
            self.say(connection, wire.Mapped(slabs=message.slabs))
        return True

    def two_ranks(self, first: int = 1, instance: str = "e") -> None:
        for number in (0, 1):
            self.rank(first + number, number, instance)
            self.ready(first + number)

    def pages_engine(self, connection: int, *, quota: int = 8, instance: str = "e", **fields) -> None:
        self.engine(
            connection, quota=quota, instance=InstanceId(instance), works_in_pages=True,
            **({"description": GPU_DESCRIPTION} | fields),
        )  # fmt: skip

    def vacate(self, keep: frozenset[int] = frozenset()) -> None:
        """The engine that was asked first unpins and gives back all but `keep`."""
        connection, asked = self.vacates.popleft()
        pages = list(zip(u32_list(asked.pages), u64_list(asked.epochs), strict=True))
        engine = self.pool.memory.engines.attached.get(connection)
        if engine is None:
            return
        let_go = [own for own in pages if own[0] not in keep]
        self.granted[connection] = [own for own in self.granted[connection] if own not in let_go]
        self.give_back(connection, [own for own in let_go if own[0] in engine.held])
        self.say(connection, wire.Unpin(**page_lists([o for o in let_go if o[0] in engine.pinned])))
        self.say(connection, wire.Vacated(number=asked.number))

    # -- memory -----------------------------------------------------------------------------------

    def press(self, num_bytes: int, connection: int = 99, wait_ms: int = 1000) -> None:
        call = wire.ReleaseMemory(call_id=7, num_bytes=num_bytes, wait_ms=wait_ms)
        self.pool.releases.on_call(connection, call, self.now_ms, 30_000)
        self.run(self.pool.flush())

    def regain(self, num_bytes: int = 0, connection: int = 99, wait_ms: int = 1000) -> None:
        call = wire.RegainMemory(call_id=8, num_bytes=num_bytes, wait_ms=wait_ms)
        self.pool.releases.on_call(connection, call, self.now_ms, 30_000)
        self.run(self.pool.flush())

    def system(self, *, fails: bool = False, has: int = 1_000) -> bool:
        """It answers what it was asked first. What it takes is mapped by nobody alive."""
        if not self.pending:
            return False
        action = self.pending.popleft()
        if isinstance(action, ReleaseUnits):
            for unit in action.units:
                assert not any(unit in rank.slabs for rank in self.ranks.values()), f"unit {unit} is mapped"
                assert all(self.state(page) is PageState.WITHDRAWN for page in self.pages_of(unit))
            if not fails:
                self.memory -= set(action.units)
            self.pool.releases.on_released(action.units, failed=fails)
        else:
            made = action.units[:has]
            assert not set(made) & self.memory
            self.memory |= set(made)
            self.pool.releases.on_restored(action.units, len(made))
        self.run(self.pool.flush())
        return True

    def pages_of(self, unit: int) -> range:
        count = max(1, self.pool.memory.pages_per_slab)
        return range(unit * count, (unit + 1) * count)

    def settle(self) -> None:
        """Everybody does what it was asked, until nothing is left to do."""
        busy = True
        while busy:
            busy = self.system()
            while self.vacates:
                self.vacate()
                busy = True
            for connection in list(self.ranks):
                while self.hear(connection):
                    busy = True

    def owned(self, connection: int) -> list[Owned]:
        return self.granted[connection]
