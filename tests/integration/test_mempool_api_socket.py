"""MemPoolApi and the deciding code over a real unix socket: what a caller writes is what it finds, errors are typed."""

import asyncio

import pytest

from shared.errors import (
    InstanceUnknown,
    InvalidRequest,
    NoReceiver,
    NotHeld,
    OutOfPages,
    PeerGone,
    PeerTimeout,
)
from shared.ids import InstanceId
from shared.kv.block_hash import chain_seed
from shared.mempool.api import MemPoolApi
from shared.transport.unix_channel import UnixConnection, UnixServer
from shared.wire import mempool_api as wire
from shared.wire.mempool_api import MatchFlags, Medium, TransferFlags
from tests.unit.mempool_api_rig import ApiRig, D, P

TOKENS = list(range(100, 118))  # four full blocks of 4, and a tail of two
SEED = chain_seed("f", "tenant")


class Served:
    """A rig whose callers are sockets."""

    def __init__(self, path) -> None:
        self.rig = ApiRig(P, D)
        self.silent = False
        self.numbers: dict[UnixConnection, int] = {}
        self.server = UnixServer(
            path,
            into=wire.TO_MEMPOOL_API,
            out=wire.FROM_MEMPOOL_API,
            on_message=self.on_message,
            on_disconnect=self.on_disconnect,
        )

    def on_message(self, connection, _seq, message, _raw) -> None:
        if isinstance(message, wire.ApiHello):
            self.numbers[connection] = self.rig.connect(message.instance, receives=message.receives)
        else:
            self.rig.perform(self.rig.api.on_call(self.numbers[connection], message, 0))
        self.flush()

    def flush(self) -> None:
        if not self.silent:
            for connection, number in self.numbers.items():
                for message in self.rig.sent.pop(number, ()):
                    connection.send(message)

    def on_disconnect(self, connection, _error) -> None:
        self.rig.perform(self.rig.api.disconnect(self.numbers.pop(connection, -1)))


@pytest.fixture
async def served(tmp_path):
    served = Served(tmp_path / "api.sock")
    await served.server.start()
    yield served
    served.server.close()


async def open_api(served: Served, instance: InstanceId = P, **options) -> MemPoolApi:
    api = MemPoolApi(served.server.path, instance, seed=SEED, block_tokens=4, **options)
    await api.connect()
    return api


async def until(holds) -> None:
    for _ in range(30_000):
        if holds():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come about in time")


async def save(served: Served, api: MemPoolApi, tokens=TOKENS):
    pages = await api.alloc_mem(-(-len(tokens) // 4))
    served.rig.write(pages, [tuple(tokens[i : i + 4]) for i in range(0, len(tokens), 4)])
    return await api.insert(tokens, pages)


async def test_nine_calls_from_tokens_to_bytes(served):
    got: list[wire.Delivered] = []
    api, other = await open_api(served), await open_api(served, D, on_delivered=got.append)
    placed = await save(served, api)
    assert len(placed) == 5
    assert await api.match(TOKENS) == placed
    assert await api.match([*TOKENS[:8], 7, 7, 7, 7]) == placed[:2]
    out = await api.swap_out(2)
    assert {a.medium for a in out} == {Medium.DRAM}
    held = await api.match(TOKENS, MatchFlags.PIN)
    cold = [a for a in held if a.medium == Medium.DRAM]
    warm = await api.swap_in(cold)
    assert {a.medium for a in warm} == {Medium.HBM}
    held = [*held[: -len(warm)], *warm]
    sent = await api.transfer(D, held, flags=TransferFlags.MIXED, private=b"request 7")
    assert served.rig.read(sent)[0] == (100, 101, 102, 103)
    assert [d.private for d in got] == [b"request 7"]
    assert await other.free_mem(sent) == 5
    there = await api.transfer_with_insert(D, TOKENS, held)
    assert await other.match(TOKENS) == there
    assert served.rig.read(there)[-1] == (116, 117)
    assert await api.free_mem(held) == 5
    assert await api.delete(TOKENS) == 7, "five pages in HBM, and what is left in DRAM of two"
    assert await other.delete(TOKENS) == 5
    assert served.rig.free_pages() == 64
    api.close()
    other.close()


async def test_later_blocks_of_a_prompt_are_inserted_and_sent_by_themselves(served):
    api, other = await open_api(served), await open_api(served, D)
    pages = await api.alloc_mem(2)
    await api.insert(TOKENS[:8], pages)
    more = await api.alloc_mem(3)
    await api.insert(TOKENS, more, wire.InsertFlags.PIN, first_block=2)
    assert await api.match(TOKENS) == [*pages, *more]
    await api.transfer_with_insert(D, TOKENS, more, first_block=2)
    assert await other.match(TOKENS) == [], "its beginning is not there"
    held = await api.match(TOKENS[:8], MatchFlags.PIN)
    await api.transfer_with_insert(D, TOKENS[:8], held)
    assert len(await other.match(TOKENS)) == 5
    api.close()
    other.close()


async def test_failures_are_typed_errors(served):
    api = await open_api(served)
    with pytest.raises(OutOfPages):
        await api.alloc_mem(30)
    with pytest.raises(InstanceUnknown):
        await api.alloc_mem(1, "hbm", InstanceId("elsewhere"))
    with pytest.raises(InvalidRequest):
        await api.insert(TOKENS, [])
    placed = await save(served, api)
    with pytest.raises(NotHeld):
        await api.transfer(D, placed)
    own = await api.alloc_mem(1)
    with pytest.raises(NoReceiver):
        await api.transfer(D, own, private=b"x")
    api.close()


async def test_what_an_abandoned_call_gets_goes_back(served):
    api = await open_api(served)
    served.silent = True
    task = asyncio.create_task(api.alloc_mem(3))
    await until(lambda: served.rig.free_pages() < 64)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    served.silent = False
    assert await api.match(TOKENS) == []
    await until(lambda: served.rig.free_pages() == 64)
    api.close()


async def test_no_answer_and_no_mempool_are_told_apart(served, monkeypatch):
    monkeypatch.setattr("shared.mempool.api.ANSWER_MARGIN_MS", 20)
    api, _receiver = await open_api(served), await open_api(served, D, on_delivered=lambda _: None)
    own = await api.alloc_mem(1)
    served.rig.hold = True
    with pytest.raises(PeerTimeout):
        await api.transfer(D, own, timeout_ms=10)
    task = asyncio.create_task(api.transfer(D, own))
    await asyncio.sleep(0.01)
    served.server.close()
    with pytest.raises(PeerGone):
        await task
    with pytest.raises(PeerGone):
        await api.match(TOKENS)
    _receiver.close()


async def test_a_connection_that_ends_frees_what_it_held(served):
    api = await open_api(served)
    await save(served, api)
    await api.alloc_mem(3)
    await api.match(TOKENS, MatchFlags.PIN)
    api.close()
    await until(lambda: served.rig.free_pages() == 64 - 5)
    assert served.rig.spaces[1].index.num_pinned == 0
