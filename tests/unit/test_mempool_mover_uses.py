"""Copies that have ended and may still run: their spaces are in use, and stay page-locked."""

import asyncio
from types import SimpleNamespace

import pytest

from services.mempool.core.actions import ReleaseUnits
from services.mempool.mover_copies import Copy, Space
from services.mempool.mover_uses import Uses
from services.mempool.spaces import Spaces
from shared.ids import Epoch

SOURCE, TARGET = 1, 2


def ended_copy(**job) -> tuple[Uses, Copy, list[int]]:
    """A copy that was answered, two ranks of whose page 3 may still be written; and what is told to be over."""
    over: list[int] = []
    spaces = {number: Space(number, ()) for number in (SOURCE, TARGET)}
    uses = Uses(spaces, over.append)
    copy = Copy(1, TARGET, [3, 4], [(SOURCE, [5, 6])], lambda _: None, 0.0, 0.0)
    copy.job = SimpleNamespace(**job)
    copy.in_doubt = {(0, 3), (1, 3)}
    uses.begin(copy)
    uses.end(copy)
    return uses, copy, over


def test_a_copy_in_doubt_uses_its_spaces_until_every_page_has_settled_on_every_rank():
    uses, _, over = ended_copy(ended=True)
    uses.settle(TARGET, 0, [3, 4])
    uses.settle(SOURCE, 1, [3])
    assert uses.in_doubt(SOURCE)
    assert uses.in_doubt(TARGET)
    assert over == []
    uses.settle(TARGET, 1, [3])
    assert sorted(over) == [SOURCE, TARGET]
    assert not uses.in_doubt(SOURCE)


def test_a_thread_that_hangs_uses_them_though_all_that_was_begun_has_settled():
    uses, copy, over = ended_copy(ended=False)
    for rank in (0, 1):
        uses.settle(TARGET, rank, [3])
    assert over == []
    copy.job.ended = True
    uses.settle(TARGET, 0, [])
    assert sorted(over) == [SOURCE, TARGET]


@pytest.mark.parametrize("in_doubt", [True, False])
def test_host_memory_that_a_failed_copy_may_still_read_stays_page_locked(in_doubt):
    spaces = Spaces(SimpleNamespace(), Epoch(1), lambda *_: None, lambda *_: None)
    done, rests, punched = [], [], []
    spaces.memories[0] = spaces._metas[0] = SimpleNamespace(pages_per_slab=0)
    spaces._mover = SimpleNamespace(
        uses=SimpleNamespace(in_doubt=lambda number: in_doubt and number == 0),
        pinning=SimpleNamespace(rest=rests.append), is_pinned=lambda number: number not in rests,
    )  # fmt: skip
    spaces._system = SimpleNamespace(punch=lambda _memory, _number, units, _on_done: punched.extend(units))
    spaces.release(ReleaseUnits([4, 5], 0, unlocks=True), done.append, may_punch=True)
    assert (done, rests, punched) == (([True], [], []) if in_doubt else ([], [0], [4, 5]))


async def test_gpu_memory_that_a_failed_copy_may_still_read_goes_when_that_is_over(monkeypatch):
    monkeypatch.setattr("services.mempool.spaces.LOOK_AGAIN_S", 0)
    doubted, done = {0}, []
    spaces = Spaces(
        SimpleNamespace(slabs_changed=lambda *_, **__: 0), Epoch(1), lambda *_: None, lambda *_: None
    )
    spaces.memories[0] = spaces._metas[0] = SimpleNamespace(pages_per_slab=1)
    spaces._mover = SimpleNamespace(uses=SimpleNamespace(in_doubt=doubted.__contains__))
    spaces._system = SimpleNamespace(release=lambda *what: what[-1](False))
    spaces.release(ReleaseUnits([4], 0), done.append, may_punch=True)
    for expected in ([], [False]):
        await asyncio.sleep(0.01)
        assert done == expected
        doubted.clear()
