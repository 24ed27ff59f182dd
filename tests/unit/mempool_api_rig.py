"""Mempools behind the nine calls, without sockets: real page tables, indexes and tiers; bytes in a dictionary."""

from collections import defaultdict
from collections.abc import Iterable

from services.mempool.core.api import Api
from services.mempool.core.api_state import ApiLimits, CallPeer, Home, MovePages, Reply
from services.mempool.core.locations import Locations
from services.mempool.core.own_pages import OwnPages
from services.mempool.core.page_table import PageTable
from services.mempool.core.radix import Index
from services.mempool.core.tiers import CopyPages, CopyResult, TierLimits, Tiers
from shared.ids import Epoch, InstanceId, SpaceId
from shared.wire import mempool_api as wire
from shared.wire.mempool_api import AddressStretch, PageAddress, unpack_addresses
from tests.unit.mempool_harness import SEED

P, D, Q = InstanceId("prefill-0"), InstanceId("decode-0"), InstanceId("prefill-1")
STILL = TierLimits(begin_free_ratio=0, end_free_ratio=0)


class Net:
    """Pools and the bytes of all their pages."""

    def __init__(self) -> None:
        self.pools: dict[int, ApiRig] = {}
        self.bytes: dict[tuple[int, int, int], object] = {}  # (pool, space, page)
        self.cut = False  # calls between mempools are lost

    def pool_of(self, instance: InstanceId) -> int:
        return next(number for number, pool in self.pools.items() if instance in pool.api.homes)


class ApiRig:
    """One mempool. `hold`: copies wait until end_copies()."""

    def __init__(
        self, *instances: InstanceId, net: Net | None = None, pages: int = 16, **limits: object
    ) -> None:
        self.net = net or Net()
        self.number = len(self.net.pools)
        self.net.pools[self.number] = self
        self.api = Api(ApiLimits(**limits))
        self.spaces: dict[int, OwnPages] = {}
        self.sent: defaultdict[int, list[object]] = defaultdict(list)
        self.hold = False
        self.held: list[MovePages | CopyPages] = []
        self.results: dict[int, CopyResult] = {}
        self.now_ms = 0
        self._call_id = 0
        self._next_connection = 100
        self._links: dict[int, int] = {}  # pool -> its connection here
        for instance in instances:
            self.home(instance, pages)

    def home(self, instance: InstanceId, pages: int) -> None:
        made = []
        for _ in range(2):
            space = SpaceId(len(self.spaces) + 1)
            made.append(OwnPages(space, PageTable(pages, Epoch(1000)), Index()))
            self.spaces[space] = made[-1]
        hbm, dram = made
        places = Locations({hbm.space: hbm.index, dram.space: dram.index})
        self.api.add_home(Home(instance, places, hbm, dram, Tiers(hbm, dram, STILL), block_tokens=4))

    def link(self, other: "ApiRig") -> None:
        """Each knows the other's instances and calls it through a connection there."""
        for a, b in ((self, other), (other, self)):
            for instance in b.api.homes:
                a.api.add_peer(instance, b.number)
            b._links[a.number] = b.connect(InstanceId(f"mempool-{a.number}"), is_mempool=True)

    def connect(self, instance: InstanceId, **options) -> int:
        self._next_connection += 1
        self.api.connect(self._next_connection, instance, **options)
        return self._next_connection

    # -- calls --------------------------------------------------------------------------------------

    def start(self, connection: int, kind: type, **fields) -> int:
        self._call_id += 1
        call = kind(call_id=self._call_id, **fields)
        self.perform(self.api.on_call(connection, call, self.now_ms))
        return self._call_id

    def answer(self, connection: int, call_id: int) -> wire.ApiReply | None:
        found = [m for m in self.sent[connection] if getattr(m, "call_id", None) == call_id]
        assert len(found) <= 1, "answered twice"
        return found[0] if found else None

    def call(self, connection: int, kind: type, **fields):
        return self.answer(connection, self.start(connection, kind, **fields))

    def alloc(
        self, connection: int, count: int, instance: InstanceId = P, mem_type="hbm"
    ) -> list[PageAddress]:
        reply = self.call(connection, wire.AllocMem, num_blocks=count, mem_type=mem_type, instance=instance)
        assert isinstance(reply, wire.Addresses), reply
        return unpack_addresses(reply.addresses)

    def write(self, addresses: list[PageAddress], names: list[object]) -> None:
        for address, name in zip(addresses, names, strict=True):
            self.net.bytes[self.number, address.space, address.page] = name

    def read(self, addresses: list[PageAddress]) -> list[object]:
        return [self.net.bytes.get((self.number, a.space, a.page)) for a in addresses]

    def save(self, connection: int, hashes, instance: InstanceId = P, mem_type="hbm", **fields):
        """Allocate, fill and insert a prompt."""
        pages = self.alloc(connection, len(hashes), instance, mem_type)
        self.write(pages, hashes)
        fields = {"parent": SEED, "hashes": b"".join(hashes), "addresses": raw(pages)} | fields
        reply = self.call(connection, wire.InsertBlocks, **fields)
        assert isinstance(reply, wire.Addresses), reply
        return unpack_addresses(reply.addresses)

    def match(self, connection: int, hashes, instance: InstanceId = P, flags=0) -> list[PageAddress]:
        reply = self.call(
            connection, wire.MatchBlocks, hashes=b"".join(hashes), instance=instance, flags=flags
        )
        return unpack_addresses(reply.addresses)

    # -- what the shell would do --------------------------------------------------------------------

    def perform(self, actions) -> None:
        for action in actions:
            match action:
                case Reply():
                    self._reply(action)
                case CallPeer():
                    self._call_peer(action)
                case MovePages() | CopyPages():
                    self.held.append(action)
        if not self.hold:
            self.end_copies()

    def _reply(self, action: Reply) -> None:
        peer = next((pool for pool, link in self._links.items() if link == action.connection), None)
        if peer is None:
            self.sent[action.connection].append(action.message)
        elif not self.net.cut:
            rig = self.net.pools[peer]
            rig.perform(rig.api.on_peer_reply(action.message))

    def _call_peer(self, action: CallPeer) -> None:
        if not self.net.cut:
            rig = self.net.pools[self.api.peers[action.instance]]
            rig.perform(rig.api.on_call(rig._links[self.number], action.message, rig.now_ms))

    def end_copies(self, **result) -> None:
        while self.held:
            action = self.held.pop(0)
            outcome = CopyResult(**result)
            if isinstance(action, CopyPages):
                self._copy_tier(action)
                home = next(
                    h
                    for h in self.api.homes.values()
                    if h.tiers and h.tiers.fast.space in (action.source, action.target)
                )
                self.perform(
                    self.api.on_tiers(
                        home.tiers.fast.space, home.tiers.on_copied(action.copy_id, outcome, self.now_ms)
                    )
                )
            else:
                source_pool = self.net.pool_of(action.source)
                pairs = zip(singly(action.sources), singly(action.targets), strict=True)
                for source, target in pairs:
                    value = self.net.bytes.get((source_pool, source.space, source.page))
                    self.net.bytes[self.number, target.space, target.page] = value
                self.perform(self.api.on_moved(action.move_id, outcome))

    def _copy_tier(self, action: CopyPages) -> None:
        for source, target in zip(action.source_pages, action.target_pages, strict=True):
            self.net.bytes[self.number, action.target, target] = self.net.bytes[
                self.number, action.source, source
            ]

    def free_pages(self) -> int:
        return sum(space.num_free for space in self.spaces.values())

    def states(self, space: int = 1) -> dict[str, int]:
        return {name: n for name, n in self.spaces[space].table.by_state().items() if n}


def singly(stretches: Iterable[AddressStretch]) -> list[PageAddress]:
    return [address for stretch in stretches for address in stretch.addresses()]


def raw(addresses: list[PageAddress]) -> bytes:
    return b"".join(address.to_bytes() for address in addresses)
