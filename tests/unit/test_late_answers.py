"""Answers of the nine calls that come when their caller has just given up, and calls that were never sent."""

import asyncio
import time

import pytest

from shared.errors import Overloaded, PeerTimeout
from shared.ids import Epoch, InstanceId, PageId, SpaceId
from shared.kv.block_hash import chain_seed
from shared.mempool.api import MemPoolApi
from shared.wire import mempool_api as wire
from shared.wire.mempool_api import InsertFlags, MatchFlags, Medium, PageAddress, instance_key

P, D = InstanceId("prefill-0"), InstanceId("decode-0")
TOKENS = list(range(12))


def pages(instance: InstanceId, *numbers: int) -> list[PageAddress]:
    return [
        PageAddress(instance_key(instance), Medium.HBM, SpaceId(1), PageId(n), Epoch(1000 + n))
        for n in numbers
    ]


class Link:
    """A connection whose other end answers when a test does."""

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.refuses: Exception | None = None

    async def connect(self) -> None:
        pass

    def peer_lives(self) -> bool:
        return True

    def send(self, message: object) -> int:
        if self.refuses is not None:
            raise self.refuses
        self.sent.append(message)
        return 0

    def close(self) -> None:
        pass

    @property
    def freed(self) -> list[PageAddress]:
        raw = [message.addresses for message in self.sent if isinstance(message, wire.FreeMem)]
        return wire.unpack_addresses(b"".join(raw))


class Caller:
    def __init__(self, api: MemPoolApi, link: Link) -> None:
        self.api, self.link = api, link

    def answer(self, reply: type, **fields) -> None:
        """The last call's, as if its bytes had just been read."""
        self.api._on_message(0, reply(call_id=self.link.sent[-1].call_id, **fields), [], [])


@pytest.fixture
async def caller(tmp_path):
    api, link = (
        MemPoolApi(tmp_path / "no.sock", P, seed=chain_seed("f", ""), block_tokens=4, pool_socket=tmp_path / "no"),
        Link(),
    )  # fmt: skip
    api._link = link
    await api.connect()
    yield Caller(api, link)
    api.close()


CALLS = {
    "alloc": lambda api: api.alloc_mem(3),
    "match": lambda api: api.match(TOKENS, MatchFlags.PIN),
    "insert": lambda api: api.insert(TOKENS, pages(P, 7, 8, 9), InsertFlags.PIN),
    "swap_in": lambda api: api.swap_in(pages(P, 7, 8, 9)),
}


@pytest.mark.parametrize("order", ["answer first", "cancelled first"])
@pytest.mark.parametrize("name", CALLS)
async def test_what_a_call_got_in_the_turn_of_its_cancellation_goes_back(caller, name, order):
    task = asyncio.create_task(CALLS[name](caller.api))
    await asyncio.sleep(0)  # it has been sent
    if order == "cancelled first":
        task.cancel()
    caller.answer(wire.Addresses, addresses=wire.pack_list(pages(P, 1, 2, 3)))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert caller.link.freed == pages(P, 1, 2, 3)


async def test_an_answer_in_the_turn_of_the_deadline_is_the_answer(caller, monkeypatch):
    monkeypatch.setattr("shared.mempool.api.SWAP_TIMEOUT_MS", 20)
    task = asyncio.create_task(caller.api.swap_in(pages(P, 7)))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(
        lambda: caller.answer(wire.Addresses, addresses=wire.pack_list(pages(P, 1)))
    )
    time.sleep(0.05)  # noqa: ASYNC251  the loop stands still; then it finds the answer and the deadline at once
    assert await task == pages(P, 1)
    assert caller.link.freed == []


async def test_what_comes_after_the_deadline_goes_back_and_what_gives_nothing_does_not(caller, monkeypatch):
    monkeypatch.setattr("shared.mempool.api.SWAP_TIMEOUT_MS", 5)
    with pytest.raises(PeerTimeout):
        await caller.api.swap_in(pages(P, 7))
    caller.answer(wire.Addresses, addresses=wire.pack_list(pages(P, 1)))
    assert caller.link.freed == pages(P, 1)
    for call in (lambda: caller.api.swap_out(1), lambda: caller.api.match(TOKENS)):
        task = asyncio.create_task(call())
        await asyncio.sleep(0)
        caller.answer(wire.Addresses, addresses=wire.pack_list(pages(P, 2)))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert caller.link.freed == pages(P, 1), "a caller that never held page 2 must not free it"


async def test_a_mempool_that_does_not_read_keeps_the_others_of_one_reading(caller):
    """_on_message must not raise: the messages behind it in the same bytes would be lost."""
    task = asyncio.create_task(caller.api.alloc_mem(1))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    caller.link.refuses = Overloaded("does not read")
    caller.answer(wire.Addresses, addresses=wire.pack_list(pages(P, 1)))


async def test_pages_of_a_transfer_that_was_never_sent_are_copied_here_again(caller):
    held = caller.api.direct.held
    held.allocated(targets := pages(D, 4, 5))
    held.pinned(sources := pages(P, 1, 2))
    caller.link.refuses = Overloaded("does not read")
    with pytest.raises(Overloaded):
        await caller.api.transfer(D, sources, targets, private=b"x")  # which is the mempool's to do
    assert not any(columns.mediated.any() for columns in held._columns.values())
    assert not caller.api.direct._unsettled
