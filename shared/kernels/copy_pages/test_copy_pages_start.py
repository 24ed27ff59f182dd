"""Copies by several threads, and what is measured at start."""

import ctypes
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from shared.kernels.copy_pages import calibrate, cpu_copier
from shared.kernels.copy_pages.copies import Copies, CopyFailed, CopyQueueFull, CopyUnavailable, Direction
from shared.kernels.copy_pages.cpu_copier import CpuCopier
from shared.kernels.copy_pages.driver import CudaDriver
from shared.kernels.copy_pages.plan import Method
from shared.kernels.copy_pages.recording_driver import RecordingDriver
from shared.kernels.copy_pages.reference import copy_pages_reference
from shared.kernels.copy_pages.test_copy_pages_copiers import LIMITS, PATIENCE_S, Memory, scattered


def test_a_quick_set_waits_for_a_slow_one_of_its_stream():
    """The first set is slow (many odd pieces, one part, one thread); the second one reads what it writes."""
    piece, count = 503, 3000
    memory = Memory(piece * count)
    places = np.arange(count) * piece
    third = ctypes.create_string_buffer(memory.half)
    copier = CpuCopier(threads=2)
    slow = Copies.of(memory.base + places[::-1], memory.base + memory.half + places, piece)
    whole = Copies.of([memory.base + memory.half], [ctypes.addressof(third)], memory.half)
    copier.submit(slow, stream=1)
    copier.submit(whole, stream=1).wait(PATIENCE_S)
    assert third.raw[: memory.half] == memory.bytes[memory.half :].tobytes()
    copier.close()


def test_two_threads_may_share_a_copier():
    copier = CpuCopier(threads=2, limits=LIMITS)
    memories = [Memory(256 << 10, seed) for seed in range(4)]
    wants = []

    def work(memory: Memory, number: int) -> None:
        for round_ in range(10):
            copier.submit(memory.absolute(scattered(memory.half, 1024, 100, round_)), stream=number).wait(
                PATIENCE_S
            )

    for memory in memories:
        want = bytearray(memory.bytes.tobytes())
        for round_ in range(10):
            copy_pages_reference(want, scattered(memory.half, 1024, 100, round_))
        wants.append(bytes(want))
    threads = [threading.Thread(target=work, args=(memory, n)) for n, memory in enumerate(memories)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    copier.close()
    assert [memory.bytes.tobytes() for memory in memories] == wants


@pytest.fixture
def slow_move(monkeypatch):
    """Each move waits until it is let go, or fails where it is told so."""
    go, failing = threading.Event(), []

    def move(*columns):
        assert go.wait(PATIENCE_S)
        if failing:
            raise failing.pop()
        moved(*columns)

    moved = cpu_copier.move
    monkeypatch.setattr(cpu_copier, "move", move)
    return go, failing


def first_bytes(memory: Memory, number: int) -> Copies:
    return memory.absolute(Copies.of([0], [memory.half + 8 * number], 8))


def test_a_set_behind_one_that_takes_longer_than_the_default_is_done(slow_move, monkeypatch):
    monkeypatch.setattr(cpu_copier, "DEFAULT_TIMEOUT_S", 0.01)
    copier, memory = CpuCopier(threads=2), Memory(4096)
    tickets = [copier.submit(first_bytes(memory, n), stream=7) for n in range(2)]
    time.sleep(0.05)
    assert not any(ticket.done() for ticket in tickets)
    slow_move[0].set()
    tickets[1].wait(PATIENCE_S)
    assert all(ticket.done() for ticket in tickets)
    assert np.array_equal(memory.bytes[:8], memory.bytes[memory.half + 8 : memory.half + 16])
    copier.close(PATIENCE_S)


def test_a_set_that_could_not_be_moved_says_so_to_who_asks_and_to_who_waits(slow_move):
    go, failing = slow_move
    failing.append(MemoryError())
    go.set()
    copier, memory = CpuCopier(threads=2), Memory(4096)
    ticket = copier.submit(first_bytes(memory, 0))
    for ask in (lambda: ticket.wait(PATIENCE_S), ticket.done):
        with pytest.raises(CopyFailed, match="MemoryError"):
            ask()
    copier.submit(first_bytes(memory, 0)).wait(PATIENCE_S)
    copier.close(PATIENCE_S)


def test_the_bound_of_sets_in_flight_counts_those_of_one_stream_too(slow_move):
    copier, memory = CpuCopier(threads=1, max_pending=2), Memory(4096)
    for number in range(2):
        copier.submit(first_bytes(memory, number), stream=7)
    with pytest.raises(CopyQueueFull):
        copier.submit(first_bytes(memory, 2), stream=7)
    slow_move[0].set()
    copier.close(PATIENCE_S)


# Measuring at start


EFFORT = calibrate.Effort(sizes=(4096, 65536), lanes=(1, 2), caps=(8, 64), repeats=1, arena_bytes=1 << 20)


def test_costs_are_measured_once_and_read_from_the_file_after_that(tmp_path):
    driver = RecordingDriver()
    first = calibrate.load_or_measure(driver, tmp_path, effort=EFFORT)
    assert driver.memory == {}
    assert driver.events == {}
    num_calls = len(driver.calls)
    assert calibrate.load_or_measure(driver, tmp_path, effort=EFFORT) == first
    assert len(driver.calls) == num_calls
    assert first.max_descriptors in (8, 64)
    copier = calibrate.open_copier(driver, tmp_path, effort=EFFORT)
    assert copier.limits.max_descriptors == first.max_descriptors
    assert copier.chooser == first
    methods = {way[1:] for way in first.lines}
    assert methods == {
        (Method.LOOP, 1), *((method, lanes) for method in (Method.BATCH, Method.KERNEL) for lanes in (1, 2))
    }  # fmt: skip
    calibrate.cache_path(tmp_path, driver.key).write_text("not a table")
    calibrate.load_or_measure(driver, tmp_path, effort=EFFORT)
    assert len(driver.calls) > num_calls


def test_two_ranks_that_measure_at_once_do_not_take_each_others_file(tmp_path, monkeypatch):
    driver, write = RecordingDriver(), Path.write_text

    def slowly(path, text):
        """Another process's whole turn comes between this one's writing and its renaming."""
        write(path, text)
        if os.getpid() == mine:
            with monkeypatch.context() as other:
                other.setattr(os, "getpid", lambda: mine + 1)
                calibrate.load_or_measure(RecordingDriver(), tmp_path, effort=EFFORT)

    mine = os.getpid()
    monkeypatch.setattr(Path, "write_text", slowly)
    table = calibrate.load_or_measure(driver, tmp_path, effort=EFFORT)
    assert calibrate.load_or_measure(driver, tmp_path) == table
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_a_file_that_cannot_be_read_or_written_costs_a_measurement_and_is_said(tmp_path, caplog):
    driver = RecordingDriver()
    calibrate.cache_path(tmp_path, driver.key).mkdir()
    calibrate.load_or_measure(driver, tmp_path, effort=EFFORT)
    assert "is not read" in caplog.text
    assert "is not kept" in caplog.text


@pytest.mark.parametrize("nth", [1, 8])  # how many there are is the machine's speed
def test_a_measurement_that_fails_keeps_nothing(nth):
    driver = RecordingDriver()
    driver.fail_at["copy_batch"] = nth
    with pytest.raises(CopyFailed):
        calibrate.measure(driver, effort=EFFORT)
    assert (driver.memory, driver.events, driver.streams) == ({}, {}, {})


def test_a_peer_that_comes_later_is_measured_too(tmp_path):
    driver = RecordingDriver()
    calibrate.load_or_measure(driver, tmp_path, effort=EFFORT)
    memory = Memory(1 << 20)
    peer = calibrate.Arena(memory.base, memory.base + memory.half, memory.half)
    table = calibrate.load_or_measure(driver, tmp_path, peer=peer, effort=EFFORT)
    assert (Direction.PEER, Method.BATCH, 2) in table.lines


def test_a_host_without_that_gpu_is_told_so():
    with pytest.raises(CopyUnavailable) as error:
        CudaDriver(999)
    assert error.value.code == "copy.unavailable"
