"""The life of a transfer on any path: deadlines, failures, quarantine, bounds. The path itself is a fake."""

import asyncio
import threading
import time
from concurrent.futures import Future

import pytest

from shared.transfer.describe import EndDescription, RegionDescription
from shared.transfer.errors import (
    LinkTooSlow,
    PeerLost,
    TransferFailed,
    TransferQueueFull,
    TransferRefused,
    TransferTimeout,
)
from shared.transfer.imported import joined
from shared.transfer.interface import MAX_IN_FLIGHT, Moved, PathName, Region, RegionKind
from shared.transfer.link import BaseLink
from shared.transfer.quarantine import Quarantine
from shared.transfer.self_test import SelfTest, SelfTestCache, measure, require
from shared.transfer.transfer_thread import TransferThread
from tests.support.quickest import ever

PAGE = 4096


class FakeAttempt:
    def __init__(self) -> None:
        self.done = False
        self.error: Exception | None = None
        self.still_writes = False
        self.cancels: list[bool] = []

    def poll(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.done

    def cancel(self, *, peer_is_dead: bool) -> bool:
        self.cancels.append(peer_is_dead)
        return peer_is_dead or not self.still_writes


class FakeLink(BaseLink):
    path = PathName.NIXL

    def __init__(self, **common):
        super().__init__(**common)
        self.attempts: list[FakeAttempt] = []
        self.refuse: Exception | None = None
        self.cuts = 0
        self.finish_at_once = False
        self.still_writes = False  # what every attempt begins with

    def _begin(self, source, target, pieces, deadline_s):
        if self.refuse is not None:
            raise self.refuse
        attempt = FakeAttempt()
        attempt.done, attempt.still_writes = self.finish_at_once, self.still_writes
        self.attempts.append(attempt)
        return attempt

    def _disconnect(self):
        self.cuts += 1


@pytest.fixture
def rig():
    thread = TransferThread("test")
    settled, lost, unmapped = [], [], []
    region = RegionDescription(
        name="theirs", kind=RegionKind.HOST, page_bytes=PAGE, num_pages=300, memory_key="t"
    )
    link = FakeLink(
        thread=thread,
        regions={"mine": Region("mine", RegionKind.HOST, 4096, PAGE, 600, "m")},
        peer=EndDescription(instance="peer", boot_id="b", regions=(region,)),
        reason="a test",
        quarantine=Quarantine(),
        on_settled=lambda region, pages: settled.append((region, pages)),
        on_lost=lambda instance, reason: lost.append((instance, reason)),
        unmap=lambda: unmapped.append(True),
    )
    link.settled, link.losses, link.unmapped = settled, lost, unmapped
    yield link
    thread.close()


def pull(link, pages=(1, 2), timeout_ms=60_000, **more) -> "Future[Moved]":
    return link.pull("theirs", list(pages), "mine", list(pages), timeout_ms=timeout_ms, **more)


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)


def attempt_of(link, number=0) -> FakeAttempt:
    until(lambda: len(link.attempts) > number)
    return link.attempts[number]


def test_a_finished_transfer_gives_its_pages_back(rig):
    future = pull(rig)
    attempt_of(rig).done = True
    assert future.result(30) == Moved(PathName.NIXL, 2 * PAGE, future.result().elapsed_us)
    rig.finish_at_once = True
    assert pull(rig).result(30).num_bytes == 2 * PAGE


def test_at_the_deadline_pages_that_may_still_be_written_are_quarantined_until_they_settle(rig):
    rig.still_writes = True
    future = pull(rig, timeout_ms=30)
    with pytest.raises(TransferTimeout) as caught:
        future.result(30)
    assert caught.value.quarantined == (1, 2)
    assert rig.quarantined() == {"mine": frozenset({1, 2})}
    with pytest.raises(TransferRefused, match="quarantined"):
        pull(rig, [2, 3])
    assert not pull(rig, [3]).done()  # others go on, and 3 was not kept by the refusal
    rig.attempts[0].still_writes = False
    until(lambda: rig.settled == [("mine", (1, 2))])
    assert rig.quarantined() == {}


def test_at_the_deadline_pages_that_nothing_writes_are_free_at_once(rig):
    future = pull(rig, timeout_ms=20)
    with pytest.raises(TransferTimeout) as caught:
        future.result(30)
    assert caught.value.quarantined == ()
    assert rig.quarantined() == {}
    assert not rig.settled


def test_a_lost_peer_fails_everything_and_its_proven_death_settles_it(rig):
    futures = [pull(rig, [page]) for page in range(3)]
    until(lambda: len(rig.attempts) == 3)
    for attempt in rig.attempts:
        attempt.still_writes = True
    rig.peer_lost("no heartbeat")
    for future in futures:
        with pytest.raises(PeerLost, match="no heartbeat"):
            future.result(30)
    until(lambda: rig.losses == [("peer", "no heartbeat")])
    assert rig.quarantined() == {"mine": frozenset(range(3))}
    with pytest.raises(PeerLost):
        pull(rig, [9])
    assert rig.cuts == 0
    rig.peer_dead()
    until(lambda: rig.quarantined() == {})
    assert rig.cuts == 1  # the path is cut before a page is free
    assert rig.losses == [("peer", "no heartbeat")]
    until(lambda: rig.unmapped == [True])


def test_memory_is_unmapped_only_after_the_last_copy(rig):
    future = pull(rig)
    attempt_of(rig).still_writes = True
    rig.close()
    with pytest.raises(PeerLost):
        future.result(30)
    assert not rig.unmapped
    rig.attempts[0].still_writes = False
    until(lambda: rig.unmapped == [True])


def test_a_path_that_refuses_or_breaks_fails_its_transfer_alone(rig):
    rig.refuse = TransferFailed("no route")
    with pytest.raises(TransferFailed, match="no route"):
        pull(rig).result(30)
    rig.refuse = ValueError("a bug")
    with pytest.raises(TransferFailed, match="a bug"):
        pull(rig).result(30)
    rig.refuse = None
    future, other = pull(rig), pull(rig, [7])
    attempt_of(rig).error = RuntimeError("surprise")
    with pytest.raises(TransferFailed, match="surprise"):
        future.result(30)
    attempt_of(rig, 1).done = True
    other.result(30)


def test_a_check_that_breaks_fails_its_transfer_and_frees_the_pages(rig):
    rig.finish_at_once = True

    def broken():
        raise KeyError("table")

    with pytest.raises(TransferFailed, match="table"):
        pull(rig, check=broken).result(30)
    assert pull(rig, check=lambda: [1]).result(30).stale == (1,)


def test_transfers_in_flight_are_bounded(rig):
    futures = [pull(rig, [page]) for page in range(MAX_IN_FLIGHT)]
    with pytest.raises(TransferQueueFull):
        pull(rig, [MAX_IN_FLIGHT])
    until(lambda: len(rig.attempts) == MAX_IN_FLIGHT)
    for attempt in rig.attempts:
        attempt.done = True
    for future in futures:
        future.result(30)
    rig.finish_at_once = True
    pull(rig, [MAX_IN_FLIGHT]).result(30)


async def test_an_idle_thread_sleeps(rig):
    rig.finish_at_once = True
    pull(rig).result(30)

    async def sleeps() -> bool:
        """Time in which the machine stood still may be told as this process's."""
        before = time.process_time()
        await asyncio.sleep(0.2)
        return time.process_time() - before < 0.1

    assert await ever(sleeps)
    assert threading.active_count() < 50


def test_joined_futures_end_once_all_have_and_keep_every_quarantined_page():
    parts = [Future(), Future()]
    stale_calls = []
    whole = joined(parts, lambda: stale_calls.append(1) or [3])
    parts[0].set_result(Moved(PathName.IMPORTED, 10, 5))
    assert not whole.done()
    assert not stale_calls
    parts[1].set_result(Moved(PathName.STAGED, 7, 9))
    assert whole.result(1) == Moved(PathName.IMPORTED, 17, 9, (3,))
    parts = [Future(), Future()]
    whole = joined(parts, None)
    parts[1].set_exception(TransferTimeout("late", quarantined=[4]))
    assert not whole.done()
    parts[0].set_exception(TransferFailed("broke", quarantined=[1]))
    assert whole.exception(1).quarantined == (1, 4)


def test_the_self_test_fails_loudly_under_the_floor_and_is_cached(rig, tmp_path):
    rig.finish_at_once = True
    found = measure(rig, "theirs", [1, 2], "mine", [1, 2], 1000)
    assert found.gb_per_s > 0
    assert found.num_bytes == 2 * PAGE
    assert require(found, 0.0) is found
    with pytest.raises(LinkTooSlow, match="floor_gb_per_s"):
        require(found, 1e9)
    assert require(SelfTest("alias", 0.0, 0.0, 0), 5.0)  # nothing moves: no floor
    file = tmp_path / "links.json"
    cache = SelfTestCache(file)
    assert cache.get("a") is None
    cache.put("a", found)
    assert SelfTestCache(file).get("a") == found
    file.write_text("[1]")
    assert SelfTestCache(file).get("a") is None
