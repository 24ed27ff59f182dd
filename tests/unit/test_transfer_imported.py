"""Imported pages with a driver that moves ordinary memory: the quick way for whole pages, the split with staging."""

import time
from concurrent.futures import Future

import numpy as np
import pytest

from shared.kernels.copy_pages.cpu_copier import CpuCopier
from shared.kernels.copy_pages.cuda_copier import CudaCopier
from shared.kernels.copy_pages.recording_driver import RecordingDriver
from shared.transfer.errors import PathUnavailable, TransferFailed, TransferRefused, TransferTimeout
from shared.transfer.imported import ImportedTransport
from shared.transfer.interface import MappedPages, Moved, PathName, Peer, Region, RegionKind
from shared.transfer.page_stream import PageStream
from shared.transfer.pieces import Pieces

PAGE, NUM = 256, 96
PATIENCE_S = 60  # for what is no matter of time


class Rig:
    def __init__(self, *, eager=True, present=None, staged=None, lanes=4, callers_drive=False) -> None:
        self.driver = RecordingDriver(eager=eager)
        self.theirs = np.random.default_rng(1).integers(0, 256, (NUM, PAGE), np.uint8)
        self.mine = np.zeros((NUM, PAGE), np.uint8)
        copier, stream = CudaCopier(self.driver), self.driver.create_stream()
        self.page_stream = PageStream(self.driver, lanes=lanes)
        common = (copier, stream, callers_drive)
        self.puller = self.transport("puller", "mine", self.mine, 0, *common, staged, self.page_stream)
        owner = self.transport("owner", "theirs", self.theirs, 1, *common, None, None)
        mapped = {"theirs": MappedPages(self.theirs.ctypes.data, device=1, present=present)}
        self.link = self.puller.connect(Peer(owner.describe(), mapped=mapped))
        self.ends = [self.puller, owner]

    @staticmethod
    def transport(instance, name, memory, device, copier, stream, callers_drive, staged, page_stream):
        end = ImportedTransport(
            instance, lambda source, target: (copier, stream), staged=staged, page_stream=page_stream,
            callers_drive=callers_drive,
        )  # fmt: skip
        end.register(
            Region(name, RegionKind.CUDA_PAGES, memory.ctypes.data, PAGE, NUM, name, device, f"u{device}")
        )
        return end

    def pull(self, source, target, timeout_ms=PATIENCE_S * 1000, **more):
        return self.link.pull("theirs", source, "mine", target, timeout_ms=timeout_ms, **more)


@pytest.fixture
def rig():
    made = []

    def make(**how):
        made.append(Rig(**how))
        return made[-1]

    yield make
    for each in made:
        each.driver.run()
        for end in each.ends:
            end.close()


def test_whole_pages_go_in_one_batch_a_lane(rig):
    it = rig()
    source, target = np.random.default_rng(2).permutation(NUM)[:64].tolist(), list(range(10, 74))
    moved = it.pull(source, target, check=lambda: [5]).result(PATIENCE_S)
    assert (moved.path, moved.num_bytes, moved.stale) == (PathName.IMPORTED, 64 * PAGE, (5,))
    assert np.array_equal(it.mine[target], it.theirs[source])
    assert not it.mine[:10].any()
    assert it.driver.names().count("copy_batch") == 4
    assert not it.link.quarantined()


def test_a_wait_is_not_needed_for_a_pull_to_end(rig):
    it = rig()
    ended: Future[Moved] = Future()
    it.pull([1], [2]).add_done_callback(lambda future: ended.set_result(future.result()))
    assert ended.result(PATIENCE_S).num_bytes == PAGE


def test_what_cannot_be_meant_is_refused_before_anything_starts(rig):
    it = rig()
    for source, target in (
        ([NUM], [0]),
        ([0], [NUM]),
        ([-1], [0]),
        ([0, 1], [3, 3]),
        ([0, 1], [3]),
        ([], []),
    ):
        with pytest.raises(TransferRefused):
            it.pull(source, target)
    assert "copy_batch" not in it.driver.names()


def test_a_copy_that_stands_still_keeps_its_pages_after_the_deadline(rig):
    it = rig(eager=False)
    future = it.pull([1, 2], [3, 4], timeout_ms=30)
    with pytest.raises(TransferTimeout) as caught:
        future.result(PATIENCE_S)
    assert caught.value.quarantined == (3, 4)
    with pytest.raises(TransferRefused, match="quarantined"):
        it.pull([1], [3])


def test_a_refused_driver_call_frees_the_pages(rig):
    it = rig()
    it.driver.fail_at["copy_batch"] = 1
    with pytest.raises(TransferFailed, match="copy_batch"):
        it.pull([1, 2], [3, 4]).result(PATIENCE_S)
    assert not it.link.quarantined()
    assert it.pull([1, 2], [3, 4]).result(PATIENCE_S).num_bytes == 2 * PAGE


class Staged:
    """A staged link that records what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[Pieces] = []
        self.future: Future[Moved] = Future()

    def pull_pieces(self, source, target, pieces, *, timeout_ms, check=None):
        self.asked.append(pieces)
        return self.future


def test_pages_that_are_not_imported_go_by_the_staged_path(rig):
    staged = Staged()
    it = rig(present=frozenset(range(10)), staged=staged)
    future = it.pull([1, 20, 2, 30], [5, 6, 7, 8], check=lambda: [3])
    assert (staged.asked[0].source_offsets // PAGE).tolist() == [20, 30]
    assert (staged.asked[0].target_offsets // PAGE).tolist() == [6, 8]
    assert not future.done()
    staged.future.set_result(Moved(PathName.STAGED, 2 * PAGE, 1))
    assert future.result(PATIENCE_S).num_bytes == 4 * PAGE
    assert future.result(PATIENCE_S).stale == (3,)
    assert np.array_equal(it.mine[[5, 7]], it.theirs[[1, 2]])
    assert it.pull([1, 2], [1, 2]).result(PATIENCE_S).num_bytes == 2 * PAGE
    assert len(staged.asked) == 1


def test_without_a_staged_path_they_are_refused(rig):
    with pytest.raises(TransferRefused, match="not imported"):
        rig(present=frozenset([1])).pull([2], [1])


def test_nothing_imported_is_no_path():
    end = ImportedTransport("a", lambda source, target: (CpuCopier(), 0))
    with pytest.raises(PathUnavailable):
        end.connect(Peer(end.describe()))
    end.close()


def woken(it, monkeypatch) -> list:
    """What is posted to the transport's thread from now on."""
    posted, post = [], it.puller._thread.post
    monkeypatch.setattr(
        it.puller._thread, "post", lambda action, **how: posted.append(action) or post(action, **how)
    )
    return posted


def test_a_pull_that_its_caller_drives_wakes_no_thread(rig, monkeypatch):
    it = rig(callers_drive=True)
    posted = woken(it, monkeypatch)
    future = it.pull([1, 3], [2, 4])
    seen = []
    future.add_done_callback(lambda future: seen.append(future.result()))
    assert future.drive(time.monotonic())
    assert [moved.num_bytes for moved in seen] == [2 * PAGE]
    assert future.result().num_bytes == 2 * PAGE
    assert it.pull([5], [6]).result(PATIENCE_S).num_bytes == PAGE
    assert not posted
    assert np.array_equal(it.mine[[2, 4, 6]], it.theirs[[1, 3, 5]])


def test_a_pull_that_is_handed_over_ends_without_its_caller(rig, monkeypatch):
    it = rig(callers_drive=True, eager=False)
    posted = woken(it, monkeypatch)
    future = it.pull([1], [2])
    assert not future.drive(time.monotonic())
    assert not posted
    future.hand_over()
    future.hand_over()
    assert len(posted) == 1
    it.driver.run()
    assert Future.result(future, PATIENCE_S).num_bytes == PAGE


def test_whoever_waits_too_long_to_drive_hands_over(rig, monkeypatch):
    it = rig(callers_drive=True, eager=False)
    posted = woken(it, monkeypatch)
    future = it.pull([1], [2])
    with pytest.raises(TimeoutError):
        future.result(0.001)
    assert len(posted) == 1
    it.driver.run()
    assert future.result(PATIENCE_S).num_bytes == PAGE


def test_a_driven_pull_that_fails_settles_on_the_thread(rig):
    it = rig(callers_drive=True, eager=False)
    future = it.pull([1], [2], timeout_ms=1)
    assert not future.drive(time.monotonic() + 1), "it may still write"
    assert isinstance(future.exception(), TransferTimeout)
    assert it.link.quarantined() == {"mine": frozenset({2})}
    future.hand_over()
    it.driver.run()
    until_s = time.monotonic() + PATIENCE_S
    while it.link.quarantined() and time.monotonic() < until_s:
        time.sleep(0.001)
    assert not it.link.quarantined()


def test_both_parts_of_a_split_pull_end_though_nobody_can_drive_them(rig):
    staged = StagedDouble()
    it = rig(callers_drive=True, present=frozenset(range(4)), staged=staged)
    future = it.pull([1, 9], [2, 3])
    assert future.result(PATIENCE_S).num_bytes == 2 * PAGE


class StagedDouble:
    """A staged link that is done at once."""

    def pull_pieces(self, source, target, pieces, *, timeout_ms):
        done: Future[Moved] = Future()
        done.set_result(Moved(PathName.STAGED, pieces.num_bytes, 1))
        return done
