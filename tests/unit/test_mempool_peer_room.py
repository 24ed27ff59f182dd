"""Pulls from another host beyond what one path takes at once: they wait for room, in order and within their time."""

import asyncio
from concurrent.futures import Future

from services.mempool.core.actions import PullRemote
from services.mempool.mover_regions import HostRegion
from services.mempool.peer_cuts import HostSpace, RankPull
from services.mempool.peer_paths import ReaderPath
from shared.transfer.errors import TransferQueueFull, TransferTimeout
from shared.transfer.interface import MAX_IN_FLIGHT

RANKS = 8
AT_ONCE = MAX_IN_FLIGHT // RANKS  # pulls of a page on every rank


class End:
    """A path's, with the link's bound: what has failed and may still write counts until it has settled."""

    def __init__(self) -> None:
        self.running: list[tuple[RankPull, Future]] = []
        self.num_settling = 0

    def pull(self, pull: RankPull, _timeout_ms: int) -> Future:
        if len(self.running) + self.num_settling >= MAX_IN_FLIGHT:
            raise TransferQueueFull("too many")
        future: Future = Future()
        self.running.append((pull, future))
        return future

    def lost(self, _reason: str) -> None:
        pass


class Rig:
    """A path into pages of RANKS ranks; what it tells is in `ended` (number, failed) and `settled`."""

    def __init__(self) -> None:
        self.ended: list[tuple[int, bool]] = []
        self.settled: list[int] = []
        self.heard = asyncio.Event()  # of an end
        self.end = End()
        ranks = [HostRegion(-1, 0, 4096, 64) for _ in range(RANKS)]
        self.path = ReaderPath(
            1, HostSpace("c", "f", None, ranks), self._pulled,
            lambda _space, pages: self.settled.extend(pages), lambda _: None,
        )  # fmt: skip

    def _pulled(self, number: int, failed: bool, _doubtful: object) -> None:
        self.ended.append((number, failed))
        self.heard.set()

    def pull(self, number: int, timeout_ms: int = 60_000) -> None:
        self.path.pull(PullRemote(number, "a", 0, [number], 0, [number], timeout_ms))

    def open(self) -> None:
        self.path.opened(self.end)

    async def finish(self, num: int, fail: bool = False) -> None:
        """The oldest pulls, on every rank."""
        over, self.end.running = self.end.running[: num * RANKS], self.end.running[num * RANKS :]
        for pull, future in over:
            if fail:
                self.end.num_settling += 1
                future.set_exception(TransferTimeout("late", quarantined=tuple(pull.what[1])))
            else:
                future.set_result(None)
        for _ in range(4):
            await asyncio.sleep(0)

    async def settle(self, page: int) -> None:
        for rank in range(RANKS):
            self.end.num_settling -= 1
            self.path.settled(f"0.{rank}", (page,))
        for _ in range(4):
            await asyncio.sleep(0)


async def test_pulls_beyond_what_a_path_takes_at_once_wait_for_others_to_end():
    rig = Rig()
    for number in range(AT_ONCE):  # half of them before the path is there
        rig.pull(number)
    rig.open()
    for number in range(AT_ONCE, 2 * AT_ONCE + 2):
        rig.pull(number)
    assert len(rig.end.running) == MAX_IN_FLIGHT
    await rig.finish(1)
    assert len(rig.end.running) == MAX_IN_FLIGHT
    await rig.finish(AT_ONCE)
    await rig.finish(AT_ONCE)
    assert len(rig.end.running) == RANKS
    await rig.finish(1)
    assert rig.ended == [(number, False) for number in range(2 * AT_ONCE + 2)]
    assert rig.path.num_pulls == 0


async def test_a_pull_that_failed_keeps_its_place_until_it_has_settled():
    rig = Rig()
    rig.open()
    for number in range(AT_ONCE + 1):
        rig.pull(number)
    await rig.finish(1, fail=True)
    assert rig.ended == [(0, True)]
    assert len(rig.end.running) == MAX_IN_FLIGHT - RANKS, "the link would have refused it"
    await rig.settle(0)
    assert rig.settled == [0]
    assert len(rig.end.running) == MAX_IN_FLIGHT
    await rig.finish(AT_ONCE)
    assert rig.ended[1:] == [(number, False) for number in range(1, AT_ONCE + 1)]


async def test_a_pull_that_finds_no_room_ends_in_its_time():
    rig = Rig()
    rig.open()
    for number in range(AT_ONCE):
        rig.pull(number)
    rig.pull(50, timeout_ms=1)
    rig.pull(51)
    await rig.heard.wait()
    assert rig.ended == [(50, True)]
    await rig.finish(AT_ONCE)
    await rig.finish(1)
    assert rig.ended[-1] == (51, False)


async def test_pulls_that_wait_for_room_end_with_their_path():
    rig = Rig()
    rig.open()
    for number in range(AT_ONCE + 2):
        rig.pull(number)
    rig.path.lost("the link is lost")
    assert rig.ended == [(AT_ONCE, True), (AT_ONCE + 1, True)]
    assert len(rig.end.running) == MAX_IN_FLIGHT
