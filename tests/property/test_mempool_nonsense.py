"""Well-typed messages of every kind, from everybody, in any order and with any values: none ends the mempool.

An exception that is no PeerProtocolError would (services/mempool/shell.py). What is sent is mostly about what is there:
pages, epochs, leases, hashes, calls; now and then about nothing, or out of bounds. After each event the pages of all
states sum to the memory. A failure names the seed: `example(SEED)` in a shell repeats it.
"""

import random
from collections import Counter, deque
from typing import Any, get_args

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect as shapes

from services.mempool.core.actions import (
    CopyPages,
    CreateMemory,
    Disconnect,
    EndSpace,
    KillProcess,
    MapFarPages,
    PoolLimits,
    ReleaseUnits,
    RestoreUnits,
    Send,
)
from services.mempool.core.mempool import Mempool
from shared.errors import PeerProtocolError
from shared.ids import Epoch, InstanceId
from shared.kv.layout import LENDER, TENSORS
from shared.kv.page import PageState
from shared.kv.words import u32_bytes, u32_list, u64_bytes, u64_list
from shared.wire import mempool as wire
from shared.wire.lending import Grant, Offer, Token
from shared.wire.mempool_far import FarMapped, UnmapFar
from shared.wire.mempool_lending import PresentGrant, PresentOffer
from shared.wire.mempool_swap import SwapCall
from tests.support.examples import examples
from tests.unit.mempool_harness import BOOT, DESCRIPTION, PAGE_BYTES, chain

NUM_STEPS = 150
KINDS = [k for k in get_args(wire.ToMempool) if k is not wire.Attach]
FROM_ENGINES = (
    wire.NeedPages, wire.GiveBack, wire.Detach, wire.Writing, wire.Sealed, wire.Unpin, wire.StepLayers,
    wire.LayersSealed, wire.HandoffReady, wire.Vacated, *get_args(SwapCall),
)  # fmt: skip
FROM_RANKS = (wire.Unmapped, wire.Mapped, wire.SlabsCall, wire.LayerWordsCall, FarMapped)
NAMES = ["i0", "i1", "i2", "x"]
CHAINS = [chain(*[f"{name}{i}" for i in range(5)]) for name in "ab"]
HASHES = [h for links in CHAINS for h in links]
ODD = [0, 1, 2, 3, 7, 8, -1, 2**31, 2**32 - 1, 2**53]


class Nonsense:
    """One mempool, its peers (two engines with ranks and clients, in spaces of their own), and what they say."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.is_small = self.rng.random() < 0.5  # whoever comes with a name of its own needs another's space
        limits = PoolLimits(
            max_spaces=7 if self.is_small else 64,
            capacity_bytes=8 * PAGE_BYTES, dram_bytes=4 * PAGE_BYTES, dram_for_host=True, idle_punch_ms=100,
            pull_patience_ms=50, offer_patience_ms=50, space_idle_ms=1_000, max_blocks_per_call=64,
            transfer_mode=self.rng.choice(["by-request-agg", "by-layer"]),
        )  # fmt: skip
        self.core = Mempool(limits, BOOT)
        self.now_ms = 0
        self.peers: dict[int, tuple[str, str, int]] = {}  # connection -> kind, instance, process
        self.num_pages: dict[int, int] = {}  # by space
        self.pages: list[tuple[int, int]] = [(0, int(BOOT))]  # that somebody was told of, with epochs
        self.words: set[str] = {"l", "o", "h"}  # ids of leases, offers, hand-offs that were said
        self.copies: list[CopyPages] = []
        self.asked: list[tuple[int, int]] = []  # of ranks: (connection, number)
        self.last = 0
        self.num_refused = 0
        self.ended: set[int] = set()
        self.system: list[ReleaseUnits | RestoreUnits] = []

    # -- events -----------------------------------------------------------------------------------------

    def attach(self) -> None:
        self.last += 1
        connection, number = self.last, self.rng.randrange(3)
        kind = self.rng.choice(["rank", "engine", "engine", "client"])
        instance = InstanceId(f"i{number}")
        description, device = DESCRIPTION, f"cpu:{number}"
        if self.is_small and self.rng.random() < 0.3:
            instance = InstanceId(f"aqua-{self.rng.randrange(6)}")
            backend = self.rng.choice([LENDER, TENSORS, "none"])
            description = msgspec.structs.replace(DESCRIPTION, fingerprint=instance, backend=backend)
            device = f"cpu:{instance}"
        mine = [p for k, i, p in self.peers.values() if i == instance and k != "client"]
        process = self.rng.choice(mine) if mine and kind != "client" else 1_000 + connection
        message = wire.Attach(
            kind=kind, instance=instance, device=device, description=description if kind != "client" else None,
            works_in_pages=self.rng.random() < 0.95, quota_pages=self.rng.choice([4, 4, 8, *ODD]),
            far_places=self.rng.choice([0, 4]), lets_go=self.rng.random() < 0.2,
        )  # fmt: skip
        self.peers[connection] = (kind, instance, process)
        self.do(connection, lambda: self.core.on_attach(connection, process, message, self.now_ms))

    def say(self) -> None:
        if not self.peers:
            return
        kind = self.rng.choice(KINDS)
        wants = "rank" if kind in FROM_RANKS else "engine" if kind in FROM_ENGINES else "client"
        some = [c for c, (of, *_) in self.peers.items() if of == wants or self.rng.random() < 0.03]
        if not some:
            return
        connection = self.rng.choice(some)
        message = self.made(kind)
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=wire.ToMempool)
        self.do(connection, lambda: self.core.on_message(connection, again, self.now_ms))

    def seal(self) -> None:
        """What engines do all day, so that the other messages find something."""
        connection = self.rng.choice([c for c, (k, *_) in self.peers.items() if k == "engine"] or [0])
        pool = self.core.pools.get(self.core._members.get(connection, -1))
        engine = pool.memory.engines.attached.get(connection) if pool and pool.memory else None
        if engine is None or not engine.held:
            return
        links = self.rng.choice(CHAINS)
        at = self.rng.randrange(len(links))
        page = min(engine.held)
        epoch = pool.memory.table.epochs[page]
        self.pages.append((page, epoch))
        owned = {"pages": u32_bytes([page]), "epochs": u64_bytes([epoch])}
        sealed = wire.Sealed(
            **owned,
            hashes=links[at],
            parents=links[at - 1] if at else b"\0" * 32,
            valid_tokens=u32_bytes([4]),
        )
        for message in (wire.Writing(**owned), sealed):
            self.do(
                connection, lambda message=message: self.core.on_message(connection, message, self.now_ms)
            )

    def lend(self) -> None:
        """One space to the other, now and then back."""
        client = next((c for c, (k, *_) in self.peers.items() if k == "client"), None)
        if client is None:
            return
        self.last += 1
        producer, consumer = self.rng.sample(["i0", "i1", "i2"], 2)
        space = self.core.space_number(InstanceId(producer)) or 0
        where = {"mempool": "m", "boot_generation": BOOT, "space": space, "length_bytes": 2 * PAGE_BYTES}
        offer = Offer(offer_id="o1", producer=InstanceId(producer), producer_epoch=Epoch(1), **where)
        grant = Grant(
            lease_id=f"l{self.last}", offer_id="o1", consumer=InstanceId(consumer), purpose="overflow", address="",
            token=Token(1, self.last), present_ms=1_000, ttl_ms=1_000, consumer_ttl_ms=500, **where,
        )  # fmt: skip
        self.words.add(grant.lease_id)
        for message in (PresentOffer(call_id=1, offer=offer), PresentGrant(call_id=2, grant=grant)):
            self.do(client, lambda message=message: self.core.on_message(client, message, self.now_ms))

    def copied(self) -> None:
        if self.copies:
            copy = self.copies.pop(self.rng.randrange(len(self.copies)))
            failed = self.rng.random() < 0.3
            doubt = list(copy.targets[:1]) if failed and self.rng.random() < 0.5 else []
            self.do(0, lambda: self.core.on_copied(copy.copy_id, self.now_ms, failed=failed, in_doubt=doubt))
            if doubt:
                self.do(0, lambda: self.core.on_settled(copy.space, doubt, self.now_ms))

    def mapped(self) -> None:
        if self.asked:
            connection, number = self.asked.pop(0)
            message = FarMapped(number=number, is_ok=self.rng.random() < 0.8)
            if connection in self.peers:
                self.do(connection, lambda: self.core.on_message(connection, message, self.now_ms))

    def newcomers(self) -> None:
        """Processes of other names, which end at once."""
        for _ in range(3 if self.is_small else 0):
            self.attach()
            if (
                (peer := self.peers.get(self.last)) is not None
                and peer[0] != "client"
                and self.rng.random() < 0.8
            ):
                self.die(peer[2])

    def answered(self) -> None:
        """The system does what it was asked for, or not."""
        while self.system:
            asked, failed = self.system.pop(0), self.rng.random() < 0.2
            if isinstance(asked, ReleaseUnits):
                self.do(
                    0,
                    lambda a=asked, f=failed: self.core.on_released(a.space, a.units, self.now_ms, failed=f),
                )
            else:
                most = 0 if failed else len(asked.units)
                self.do(0, lambda a=asked, n=most: self.core.on_restored(a.space, a.units, n, self.now_ms))

    def wait(self) -> None:
        self.now_ms += self.rng.choice([1, 60, 300, 1_500])
        self.do(0, lambda: self.core.tick(self.now_ms))

    def leave(self) -> None:
        if self.peers:
            self.close(self.rng.choice(list(self.peers)))

    def close(self, connection: int) -> None:
        if (peer := self.peers.pop(connection, None)) is None:
            return
        self.do(connection, lambda: self.core.on_closed(connection, self.now_ms))
        if peer[0] != "client" and self.rng.random() < 0.7:
            self.die(peer[2])

    def die(self, process: int) -> None:
        for connection in [c for c, (k, _, p) in self.peers.items() if p == process and k != "client"]:
            del self.peers[connection]
            self.do(connection, lambda c=connection: self.core.on_closed(c, self.now_ms))
        self.do(0, lambda: self.core.on_process_dead(process, self.now_ms))

    # -- what comes of them -----------------------------------------------------------------------------

    def do(self, connection: int, event: Any) -> None:
        try:
            actions = deque(event())
        except PeerProtocolError:
            self.num_refused += 1
            self.close(connection)
            return
        ended, killed = [], []
        for action in actions:
            is_told = isinstance(action, Send) and not action.with_memory  # a refusal is of no space
            assert is_told or getattr(action, "space", -1) not in self.ended, action
            assert self.ended.isdisjoint(number for number, _ in getattr(action, "sources", ())), action
            match action:
                case CreateMemory():
                    assert action.space not in self.num_pages, "no number is another space's"
                    self.num_pages[action.space] = action.num_pages
                case EndSpace():
                    self.ended.add(action.space)
                case ReleaseUnits() | RestoreUnits():
                    self.system.append(action)
                case CopyPages():
                    self.copies.append(action)
                case MapFarPages():
                    self.asked.append((action.connection, action.number))
                case KillProcess():
                    killed.append(action.process)
                case Disconnect():
                    ended.append(action.connection)
                case Send():
                    self.hear(action.connection, action.message)
        for one in ended:
            self.close(one)
        for one in killed:
            self.die(one)

    def hear(self, connection: int, message: Any) -> None:
        if isinstance(message, UnmapFar):
            self.asked.append((connection, message.number))
        pages, epochs = getattr(message, "pages", b""), getattr(message, "epochs", b"")
        if pages and epochs and len(pages) * 2 == len(epochs):
            self.pages += zip(u32_list(pages), u64_list(epochs), strict=True)
            del self.pages[:-40]
        if lease := getattr(message, "lease_id", ""):
            self.words.add(lease)

    def check(self) -> None:
        for number, pool in self.core.pools.items():
            if pool.memory is not None and number in self.num_pages:
                table = pool.memory.table
                counts = Counter(PageState(state) for state in table.states)
                assert counts.total() == self.num_pages[number], (number, counts)
                assert {s: n for s, n in enumerate(table.counts) if n} == counts, (
                    number,
                    table.counts,
                    counts,
                )

    # -- messages ---------------------------------------------------------------------------------------

    def made(self, kind: type) -> Any:
        """Of lists of pages and epochs the lengths mostly agree."""
        found = {f.name: self.value(f.name, f.type) for f in shapes.type_info(kind).fields}
        if {"pages", "epochs"} <= set(found) and self.rng.random() < 0.98:
            some = self.rng.choices(self.pages, k=self.rng.randrange(4))
            found["pages"] = u32_bytes(page for page, _ in some)
            found["epochs"] = u64_bytes(epoch for _, epoch in some)
            count = len(some)
            for name, each in (("hashes", HASHES), ("parents", HASHES)):
                if name in found and self.rng.random() < 0.95:
                    found[name] = b"".join(self.rng.choices(each, k=count))
            if "valid_tokens" in found and self.rng.random() < 0.95:
                found["valid_tokens"] = u32_bytes(self.rng.choice([4, 4, 2, 0, 9]) for _ in range(count))
        return kind(**found)

    def value(self, name: str, shape: Any) -> Any:
        match shape:
            case shapes.BoolType():
                return self.rng.random() < 0.5
            case shapes.FloatType():
                return self.rng.choice([0.0, -1.0, 1e300, float("nan"), float("inf"), 0.5])
            case shapes.LiteralType():
                return self.rng.choice(shape.values)
            case shapes.IntType():
                return self.number(name)
            case shapes.StrType():
                return self.text(name)
            case shapes.BytesType():
                return self.raw(name)
            case shapes.UnionType():
                return self.value(name, self.rng.choice(shape.types))
        return self.compound(name, shape)

    def compound(self, name: str, shape: Any) -> Any:
        match shape:
            case shapes.StructType():
                return self.made(shape.cls)
            case shapes.ListType() | shapes.VarTupleType():
                return [self.value(name, shape.item_type) for _ in range(self.rng.randrange(3))]
            case shapes.DictType():
                return {}
            case shapes.CustomType() | shapes.NoneType():
                return None
        raise AssertionError(f"{name}: no value of {shape}")

    def number(self, name: str) -> int:
        if "generation" in name:
            return self.rng.choice([int(BOOT), int(BOOT), *ODD])
        if "space" in name:
            return self.rng.choice([0, 0, 1, 2, *ODD])
        if name.endswith("_bytes"):
            return self.rng.choice([*ODD, PAGE_BYTES, 2 * PAGE_BYTES, 4 * PAGE_BYTES, 3 * PAGE_BYTES])
        return self.rng.choice([*ODD, 1, 2, 5_000, self.rng.randrange(200)])

    def text(self, name: str) -> str:
        if name in ("instance", "consumer", "producer"):
            return self.rng.choice(NAMES)
        if name == "offer_id":
            return self.rng.choice(["o1", "o2"])
        return self.rng.choice([*sorted(self.words), "", f"n{self.rng.randrange(4)}"])

    def raw(self, name: str) -> bytes:
        whole = b"".join(self.rng.choice(CHAINS)[: self.rng.randrange(6)])
        if "hash" not in name and "parent" not in name:
            whole = u32_bytes(
                self.rng.choice([0, 1, 3, 7, 8, 2**32 - 1]) for _ in range(self.rng.randrange(4))
            )
        return whole if self.rng.random() < 0.98 else whole[:-1]


STEPS = [
    "attach",
    "say",
    "say",
    "say",
    "say",
    "say",
    "seal",
    "seal",
    "copied",
    "mapped",
    "wait",
    "leave",
    "lend",
    "newcomers",
    "answered",
]
WEIGHTS = [1, 3, 3, 3, 3, 3, 6, 6, 3, 3, 1, 0.3, 1, 1.5, 1.5]


def example(seed: int) -> Nonsense:
    """One mempool's life."""
    run = Nonsense(seed)
    for _ in range(10):
        run.attach()
    for step in run.rng.choices(STEPS, weights=WEIGHTS, k=NUM_STEPS):
        getattr(run, step)()
        run.check()
    return run


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 2**32))
def test_no_message_that_is_well_typed_ends_the_mempool_or_loses_a_page(seed):
    example(seed)
