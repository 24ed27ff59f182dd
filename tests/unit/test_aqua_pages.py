"""The library's book of a tensor's pages, and loop threads."""

import asyncio
import threading

import pytest

from shared.aqua.errors import TensorLost
from shared.aqua.loop_thread import LoopThread
from shared.aqua.pages import Directory, Pages
from shared.errors import PeerTimeout
from shared.ids import Epoch, PageId, SpaceId
from shared.wire.mempool_api import Evacuated, Medium, PageAddress


def address(page: int, medium: Medium = Medium.LEASED) -> PageAddress:
    return PageAddress(1, medium, SpaceId(2), PageId(page), Epoch(9))


def two() -> tuple[Directory, Pages]:
    book, pages = (
        Directory(),
        Pages([address(0), address(1)], [address(7, Medium.DRAM), address(8, Medium.DRAM)]),
    )
    book.add(pages)
    return book, pages


def test_a_tensor_is_where_its_slowest_page_is():
    book, pages = two()
    assert pages.location == "peer"
    assert book.hear(Evacuated(addresses=address(1).to_bytes())) == (1, 0)
    assert pages.location == "dram"
    assert pages.current() == [address(0), address(8, Medium.DRAM)]
    assert pages.all() == [address(0), address(7, Medium.DRAM), address(8, Medium.DRAM)]


def test_what_is_said_twice_or_of_nobody_changes_nothing():
    book, pages = two()
    told = Evacuated(addresses=address(1).to_bytes() + address(5).to_bytes())
    assert book.hear(told) == (1, 0)
    assert book.hear(told) == (0, 0)
    book.remove(pages)
    assert book.hear(Evacuated(addresses=address(0).to_bytes())) == (0, 0)
    assert pages.lent == [address(0), None]


def test_lost_bytes_are_said_to_be_lost():
    book, pages = two()
    assert book.hear(Evacuated(addresses=b"", lost=address(0).to_bytes())) == (0, 1)
    with pytest.raises(TensorLost):
        pages.current()


def test_a_loop_thread_answers_raises_and_gives_up_in_time():
    loop = LoopThread("t")

    async def which() -> str:
        return threading.current_thread().name

    async def fails() -> None:
        raise TimeoutError("its own")

    assert loop.call(which(), 60) == "t"
    with pytest.raises(TimeoutError, match="its own"):
        loop.call(fails(), 60)
    with pytest.raises(PeerTimeout):
        loop.call(asyncio.Event().wait(), 0.01)
    loop.close()
    loop.close()
