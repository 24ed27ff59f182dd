"""Copies by several threads, and what is measured at start."""

import ctypes
import threading

import numpy as np
import pytest

from shared.kernels.copy_pages import calibrate
from shared.kernels.copy_pages.copies import Copies, CopyUnavailable, Direction
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
