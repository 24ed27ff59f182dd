"""Page-locking gives way to copies, and is done all the same."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from services.mempool.mover_pinning import MOST_WAIT_S, Pinning
from shared.kernels.copy_pages.copies import CopyFailed


class Timer:
    def __init__(self, later: list[Any], entry: Any) -> None:
        self.later, self.entry = later, entry

    def cancel(self) -> None:
        if self.entry in self.later:
            self.later.remove(self.entry)


class Loop:
    """A loop whose time is the test's; and the background thread, which does at once what it is given."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.later: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []

    def call_soon_threadsafe(self, what: Callable[..., None], *arguments: Any) -> None:
        self.call_later(0.0, what, *arguments)

    def call_later(self, delay_s: float, what: Callable[..., None], *arguments: Any) -> "Timer":
        self.later.append((self.now_s + delay_s, what, arguments))
        return Timer(self.later, self.later[-1])

    def submit(self, what: Callable[..., None], *arguments: Any) -> None:
        what(*arguments)

    def run(self, until_s: float) -> None:
        while self.later and min(at_s for at_s, _, _ in self.later) <= until_s:
            first = min(self.later, key=lambda each: each[0])
            self.later.remove(first)
            at_s, what, arguments = first
            self.now_s = max(self.now_s, at_s)
            what(*arguments)
        self.now_s = until_s


class Rig:
    def __init__(self, chunks: int) -> None:
        self.loop, self.left, self.is_copying, self.refused_until_s = Loop(), chunks, False, 0.0
        self.pinning = Pinning(self.pin_some, lambda: self.is_copying, self.loop, self.loop)  # type: ignore[arg-type]

    def pin_some(self) -> float | None:
        if self.refused_until_s > self.loop.now_s:
            return self.refused_until_s - self.loop.now_s
        self.left -= self.left > 0
        return 0.0 if self.left > 0 else None


def test_without_copies_chunk_follows_chunk():
    rig = Rig(5)
    rig.pinning.begin()
    rig.loop.run(0.0)
    assert rig.left == 0
    assert not rig.loop.later


def test_a_chunk_waits_for_a_moment_without_copies():
    rig = Rig(2)
    rig.is_copying = True
    rig.pinning.begin()
    rig.loop.run(MOST_WAIT_S / 2)
    assert rig.left == 2
    rig.is_copying = False
    rig.loop.run(MOST_WAIT_S / 2 + 0.1)
    assert rig.left == 0
    assert rig.pinning.num_waits == 1


def test_where_copies_never_end_chunks_are_locked_one_after_the_other_all_the_same():
    rig = Rig(3)
    rig.is_copying = True
    rig.pinning.begin()
    rig.loop.run(3 * MOST_WAIT_S + 0.1)
    assert rig.left == 0


def test_what_the_driver_refused_is_locked_later():
    rig = Rig(3)
    rig.refused_until_s = 30.0
    for _ in range(3):  # spaces that are mapped meanwhile begin anew
        rig.pinning.begin()
    rig.loop.run(29.0)
    assert rig.left == 3
    rig.loop.run(30.0)
    assert rig.left == 0
    assert not rig.loop.later


@pytest.mark.parametrize("refused", [False, True])
def test_a_space_that_wakes_at_once_is_unlocking_until_the_thread_has_done_it_as_often_as_it_was_told(
    refused,
):
    loop, told, heard = Loop(), list[Any](), list[int]()

    def unpin(number: int) -> None:
        heard.append(number)
        if refused:
            raise CopyFailed("cuMemHostUnregister", "refused")

    thread = SimpleNamespace(submit=lambda *what: told.append(what))
    pinning = Pinning(lambda: None, bool, thread, loop, unpin, None, lambda: heard.append(0))  # type: ignore[arg-type]
    for _ in range(2):
        pinning.rest(7)
        pinning.rest(7)
        pinning.wake(7)
    assert len(told) == 2
    for what, *arguments in list(told):
        assert pinning.is_unlocking(7)
        with pytest.raises(CopyFailed) if refused else nullcontext():
            what(*arguments)
        assert pinning.is_unlocking(7), "the loop is told"
        loop.run(0.0)
    assert (pinning.is_unlocking(7), pinning.is_unlocking(8)) == (False, False)
    assert heard == [7, 7, 0]
