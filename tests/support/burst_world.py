"""A burst in virtual time: the real core of the mempool with host memory and a loan, links of a stated rate, messages
that take a moment. Stands for page_world.World behind SimLink; bytes are not kept (test_mempool_swaps_model.py does).
"""

import hashlib
import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from operator import itemgetter

from msgspec.structs import replace

from services.mempool.core.actions import Action, CopyPages, Disconnect, PoolLimits, Send
from services.mempool.core.entry import Entry
from services.mempool.core.mempool import Mempool
from services.mempool.core.pool import Pool
from shared.ids import BlockHash, Epoch, InstanceId, LeaseId, SpaceId
from shared.kv.layout import EngineDescription
from shared.wire import lending as market
from shared.wire import mempool as wire
from shared.wire import mempool_lending as calls
from tests.support.page_world import WORLDS, SimLink
from tests.unit.mempool_harness import SEED

BLOCK_TOKENS = 32
PAGE_BYTES = 4 << 20
DESCRIPTION = EngineDescription(
    model="m", fingerprint="f", dtype="float32", layout="layers-blocks", backend="none",
    block_tokens=BLOCK_TOKENS, block_bytes=PAGE_BYTES,
)  # fmt: skip
BOOT = Epoch(1_000_000)
LENDER, SELLER, FRONT = 1_000_001, 1_000_002, 1_000_003


@dataclass(frozen=True, slots=True)
class Links:
    """Bytes per second each way, and from ordering a copy to hearing of its end besides."""

    peer_bytes_per_s: float = 150e9
    dram_bytes_per_s: float = 50e9
    copy_s: float = 1e-3
    message_s: float = 2e-4


class BurstWorld:
    """Args: lent_pages: to the one engine, 0: none; dram_pages: of host memory, full of others' blocks."""

    def __init__(
        self, name: str, num_pages: int, *, lent_pages: int, dram_pages: int, links: Links | None = None,
        in_flight_pages: int = 256, **limits: object,
    ) -> None:  # fmt: skip
        self.num_pages, self.lent_pages = num_pages, lent_pages
        self.links_of = links or Links()
        most = max(num_pages, lent_pages)
        self.core = Mempool(
            PoolLimits(
                capacity_bytes=most * PAGE_BYTES, kept_share=0.99, dram_bytes=dram_pages * PAGE_BYTES,
                dram_for_host=True, out_in_flight_bytes=in_flight_pages * PAGE_BYTES, idle_punch_ms=0, **limits,
            ),
            BOOT,
        )  # fmt: skip
        self.now_s = 0.0
        self.mempool = self  # as World
        self.pool = self.core
        self.links: dict[int, SimLink] = {}
        self.processes: set[int] = set()
        self.to_pool = defaultdict(lambda: _Wire(self))
        self.to_peer: defaultdict[int, deque[wire.FromMempool]] = defaultdict(deque)
        self.watch: list[Callable[[], None]] = []
        self.sent: defaultdict[int, list[wire.FromMempool]] = defaultdict(list)
        self._numbers = count(1)
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._route_free_s: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.moved: Counter[tuple[str, str]] = Counter()  # pages, by kinds of source and target
        self.copies: Counter[tuple[str, str]] = Counter()
        self.waited_s = 0.0  # the engine for pages
        # of a copy on a route that begins then, besides
        self.late_s: Callable[[tuple[str, str], float], float] = lambda _route, _now_s: 0.0
        WORLDS[name] = self  # pyright: ignore[reportArgumentType]

    # -- as World ----------------------------------------------------------------------------------

    def number(self) -> int:
        return next(self._numbers)

    @property
    def now_ms(self) -> int:
        return int(self.now_s * 1000)

    def look(self) -> None:
        """Nothing."""

    def run(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    self._send(action)
                case CopyPages():
                    self._copy(action)
                case Disconnect():
                    raise AssertionError(action)

    def _send(self, action: Send) -> None:
        connection, message = action.connection, action.message
        self.to_peer[connection].append(message)
        self.sent[connection] = [*self.sent[connection][-7:], message]
        self.at(self.now_s + self.links_of.message_s, lambda: self._deliver(connection))

    def _deliver(self, connection: int) -> None:
        outbox, link = self.to_peer[connection], self.links.get(connection)
        if link is not None and outbox:  # the answer to its Attach was taken at once
            link.deliver(outbox.popleft())

    # -- time ---------------------------------------------------------------------------------------

    def at(self, when_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), what))

    def advance_to(self, when_s: float, until: Callable[[], bool] | None = None) -> None:
        """Everything up to then, or until something is so."""
        while self._events and self._events[0][0] <= when_s:
            at_s, _, what = heapq.heappop(self._events)
            self.now_s = max(self.now_s, at_s)
            what()
            if until is not None and until():
                return
        self.now_s = max(self.now_s, when_s)

    def _tick(self) -> None:
        self.run(self.core.tick(self.now_ms))
        self.at(self.now_s + 0.01, self._tick)

    # -- copies -------------------------------------------------------------------------------------

    def kind(self, number: int) -> str:
        pool = self.core.pools[number]
        if pool.is_dram:
            return "dram"
        return "peer" if number == self.producer else "engine"

    def _copy(self, action: CopyPages) -> None:
        done_s = self.now_s
        routes = set()
        for space, pages in Counter(map(itemgetter(0), action.sources)).items():
            route = self.kind(space), self.kind(action.space)
            rate = self.links_of.dram_bytes_per_s if "dram" in route else self.links_of.peer_bytes_per_s
            self.moved[route] += pages
            routes.add(route)
            self.copies[route] += 1
            end_s = max(self._route_free_s[route], self.now_s) + pages * PAGE_BYTES / rate
            self._route_free_s[route] = end_s
            done_s = max(done_s, end_s)
        done_s += max(self.late_s(route, self.now_s) for route in routes)
        self.at(
            done_s + self.links_of.copy_s, lambda: self.run(self.core.on_copied(action.copy_id, self.now_ms))
        )

    # -- who is there -------------------------------------------------------------------------------

    producer = -1

    def say(self, connection: int, message: wire.ToMempool) -> None:
        self.run(self.core.on_message(connection, message, self.now_ms))

    def rank(self, instance: InstanceId, process: int) -> None:
        """The engine's, before it attaches: its space is made."""
        attach = wire.Attach(
            kind="rank", instance=instance, description=DESCRIPTION, device="cpu:0",
            capacity_bytes=self.num_pages * PAGE_BYTES,
        )  # fmt: skip
        self.run(self.core.on_attach(2_000_000 + process, process, attach, 0))
        self.run(self.core.on_attach(FRONT, 0, wire.Attach(kind="client", instance=instance), 0))
        if self.lent_pages:
            self._lend(instance)
        self._tick()

    def _lend(self, consumer: InstanceId) -> None:
        lender = InstanceId("lender")
        other = replace(DESCRIPTION, model="lender")
        for kind, connection in (("rank", LENDER + 10), ("engine", LENDER)):
            self.run(
                self.core.on_attach(
                    connection, LENDER,
                    wire.Attach(
                        kind=kind, instance=lender, description=other, device="cpu:1", works_in_pages=True,
                        capacity_bytes=self.lent_pages * PAGE_BYTES,
                    ), 0,
                )
            )  # fmt: skip
        self.run(self.core.on_attach(SELLER, 0, wire.Attach(kind="client", instance=lender), 0))
        self.producer = self.core.space_of(lender)
        size = self.lent_pages * PAGE_BYTES
        offer = market.Offer(
            offer_id="o", producer=lender, producer_epoch=Epoch(1), mempool=InstanceId("m"), boot_generation=BOOT,
            space=SpaceId(self.producer), length_bytes=size,
        )  # fmt: skip
        self.say(SELLER, calls.PresentOffer(call_id=1, offer=offer))
        grant = market.Grant(
            lease_id=LeaseId("l"), offer_id="o", consumer=consumer, purpose="overflow", mempool=InstanceId("m"),
            address="", boot_generation=BOOT, space=SpaceId(self.producer), length_bytes=size,
            token=market.Token(1, 1), present_ms=1000, ttl_ms=120_000, consumer_ttl_ms=60_000,
        )  # fmt: skip
        self.say(FRONT, calls.PresentGrant(call_id=2, grant=grant))
        done = [m for m in self.sent[FRONT] if isinstance(m, calls.LendingDone)]
        assert done, self.sent[FRONT]
        assert done[-1].num_bytes == size, done
        self._renew()

    def _renew(self) -> None:
        self.say(FRONT, calls.RenewLoan(call_id=3, lease_id=LeaseId("l"), ttl_ms=120_000))
        self.at(self.now_s + 20.0, self._renew)

    def space(self, kind: str) -> Pool:
        """The engine's, the loan or host memory."""
        for pool in self.core.pools.values():
            if pool.is_loan and kind == "loan":
                return pool
            if (
                kind == "dram"
                and pool.is_dram
                and pool.memory.content_key == self.core.pools[0].memory.content_key
            ):
                return pool
        return self.core.pools[0]

    def fill(self, kind: str, num_pages: int) -> None:
        """With blocks of requests that ended long ago, which nobody asks for again."""
        pool = self.space(kind)
        pages = pool.claim_now(num_pages)
        for first in range(0, len(pages), 64):
            parent, entries = SEED, []
            for page in pages[first : first + 64]:
                own = BlockHash(hashlib.sha256(f"{kind} {page}".encode()).digest())
                entries.append(Entry(own, parent, page, BLOCK_TOKENS))
                parent = own
            pool.take_in(entries)
        self.run(pool.flush())

    def counters(self) -> dict[str, int]:
        return dict(self.core.status().counters)


class _Wire:
    """Messages of one engine on their way."""

    def __init__(self, world: BurstWorld) -> None:
        self._world = world
        self._connection = -1

    def append(self, message: wire.ToMempool) -> None:
        world = self._world
        connection = self.connection
        world.at(world.now_s + world.links_of.message_s, lambda: world.say(connection, message))

    @property
    def connection(self) -> int:
        if self._connection < 0:
            self._connection = next(c for c, each in self._world.to_pool.items() if each is self)
        return self._connection
