"""What a transfer costs grows with its pages by array operations alone: counted, not timed."""

import asyncio
import gc
import random
import sys

import pytest

from services.mempool.core.actions import ApiSend, CopyPages, PoolLimits
from services.mempool.core.mempool import Mempool
from shared.errors import PeerProtocolError
from shared.ids import Epoch, InstanceId, PageId, SpaceId
from shared.mempool.api import MemPoolApi
from shared.wire import mempool as pool_wire
from shared.wire import mempool_api as wire
from shared.wire.mempool_api import Medium, PageAddress
from tests.unit.mempool_harness import BOOT, DESCRIPTION, PAGE_BYTES, SEED, chain

SOURCE, TARGET, CALLER = InstanceId("source"), InstanceId("target"), 1
NUM_PAGES = 1_024


class Counted:
    """Calls of functions written in Python while it is open, without the collector's: hypothesis listens to it."""

    def __enter__(self) -> "Counted":
        gc.disable()
        self.num_calls = 0
        sys.setprofile(self._count)
        return self

    def _count(self, _frame, event, _arg) -> None:
        self.num_calls += event == "call"

    def __exit__(self, *_) -> None:
        sys.setprofile(None)
        gc.enable()
        self.num_calls -= 1  # of this method


class Pool:
    """A mempool of two workers' spaces, and a caller of the first; copies are done at once."""

    def __init__(self) -> None:
        self.core = Mempool(PoolLimits(capacity_bytes=NUM_PAGES * PAGE_BYTES, idle_punch_ms=0), BOOT)
        for number, name in enumerate((SOURCE, TARGET)):
            for kind in ("rank", "engine"):
                attach = pool_wire.Attach(
                    kind=kind, instance=name, description=DESCRIPTION, device=f"cpu:{number}", quota_pages=0
                )
                connection = 100 * (number + 1) + (kind == "engine")
                self.core.on_attach(connection, number + 1, attach, 0)
        self.core.api.connect(CALLER, wire.ApiHello(instance=SOURCE), None)
        self.call_id = 0

    def ask(self, kind, **fields):
        self.call_id += 1
        self.core.api.on_call(CALLER, kind(call_id=self.call_id, **fields), 0)
        actions = self.core.after_api(0)
        for copy in [each for each in actions if isinstance(each, CopyPages)]:
            actions += self.core.on_copied(copy.copy_id, 0)
        (reply,) = [each.message for each in actions if isinstance(each, ApiSend)]
        assert isinstance(reply, wire.Addresses | wire.Counted), reply
        return reply

    def scattered(self, count: int, instance: InstanceId) -> list[PageAddress]:
        reply = self.ask(wire.AllocMem, num_blocks=count, mem_type="hbm", instance=instance)
        return random.Random(5).sample(wire.unpack_addresses(reply.addresses), count)

    def both_ends(self, count: int) -> tuple[bytes, bytes]:
        """Indexed and pinned pages of the source, and as many of the target."""
        own = wire.pack_list(self.scattered(count, SOURCE))
        hashes = b"".join(chain(*range(count)))
        named = self.ask(wire.InsertBlocks, parent=SEED, hashes=hashes, addresses=own, flags=1)
        return named.addresses, wire.pack_list(self.scattered(count, TARGET))


def transfer_calls(count: int, is_pinned: bool) -> int:
    pool = Pool()
    sources, targets = pool.both_ends(count)
    if not is_pinned:
        pool.ask(wire.FreeMem, addresses=sources)
        sources = wire.pack_list(pool.scattered(count, SOURCE))
    for _ in range(2):  # the second is like every later one
        with Counted() as counted:
            reply = pool.ask(wire.Transfer, target=TARGET, sources=sources, targets=targets)
        assert reply.addresses == targets
    return counted.num_calls


@pytest.mark.parametrize("is_pinned", [True, False], ids=["pinned sources", "the caller's own sources"])
def test_the_pool_calls_no_function_for_a_page(is_pinned):
    assert transfer_calls(256, is_pinned) == transfer_calls(8, is_pinned) < 400


def test_each_address_is_decoded_once_and_none_is_encoded(monkeypatch):
    pool = Pool()
    sources, targets = pool.both_ends(64)
    decoded, unpack = [], wire.unpack_stretches
    monkeypatch.setattr(wire, "unpack_stretches", lambda raw: decoded.append(raw) or unpack(raw))
    monkeypatch.setattr(wire, "pack_addresses", lambda *_: pytest.fail("an address was encoded"))
    reply = pool.ask(wire.Transfer, target=TARGET, sources=sources, targets=targets)
    assert reply.addresses == targets
    assert decoded == [sources, targets]


def test_the_caller_does_not_decode_the_targets_that_it_gave(monkeypatch, tmp_path):
    targets = [PageAddress(7, Medium.HBM, SpaceId(2), PageId(n), Epoch(n)) for n in range(8)]
    monkeypatch.setattr(wire, "unpack_stretches", lambda _: pytest.fail("decoded"))
    api = MemPoolApi(tmp_path / "no.sock", SOURCE, seed=SEED, block_tokens=4)
    reply = wire.Addresses(call_id=1, addresses=wire.pack_list(targets))

    async def answered(*_):
        return reply

    monkeypatch.setattr(api, "_call", answered)
    got = asyncio.run(api.transfer(TARGET, targets, targets))
    assert got == targets
    assert got is not targets


def test_addresses_of_several_spaces_come_back_as_they_were():
    rng = random.Random(3)
    addresses = [
        PageAddress(
            rng.choice((5, (1 << 64) - 1)), rng.choice(list(Medium)), SpaceId(rng.choice((0, 65_535))),
            PageId(rng.choice((0, 9, (1 << 32) - 1))), Epoch(rng.choice((0, (1 << 64) - 1))),
        )
        for _ in range(500)
    ]  # fmt: skip
    raw = b"".join(address.to_bytes() for address in addresses)
    stretches = wire.unpack_stretches(raw)
    assert wire.pack_list(addresses) == raw
    assert wire.unpack_addresses(raw) == addresses
    for count in (0, 1, 250, 500):
        rest = wire.behind(stretches, count)
        assert [address for stretch in rest for address in stretch.addresses()] == addresses[count:]
    assert wire.unpack_stretches(b"") == []
    with pytest.raises(PeerProtocolError):
        wire.unpack_stretches(raw[:-1])
    with pytest.raises(PeerProtocolError):
        wire.unpack_stretches(raw + bytes(24))


def test_copies_are_split_by_the_space_that_they_read():
    one = CopyPages(1, 4, [PageId(8), PageId(9)], [(2, PageId(5)), (2, PageId(3))], 10)
    assert one.by_source() == ([(2, (5, 3))], [8, 9])
    two = CopyPages(
        1, 4, [PageId(7), PageId(8), PageId(9)], [(2, PageId(5)), (3, PageId(3)), (2, PageId(1))], 10
    )
    assert two.by_source() == ([(2, [5, 1]), (3, [3])], [7, 9, 8])
