"""Whole pages between GPUs: over how many streams they are shared out, and what stays of a set that is over."""

import numpy as np
import pytest

from shared.kernels.copy_pages.copier import MAX_PENDING
from shared.kernels.copy_pages.copies import CopyFailed, CopyQueueFull
from shared.transfer.page_stream import PageStream


class Driver:
    """Notes how many pages each call copies."""

    has_batch = True
    has_page_kernel = True

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.numbers = iter(range(1, 10_000))
        self.made = 0
        self.answer: bool | CopyFailed = True  # of passed()

    def make_current(self) -> None: ...

    def create_stream(self) -> int:
        return next(self.numbers)

    def create_event(self) -> int:
        self.made += 1
        return next(self.numbers)

    def passed(self, event: int) -> bool:
        if isinstance(self.answer, CopyFailed):
            raise self.answer
        return self.answer

    def record(self, event: int, stream: int) -> None: ...

    def copy_whole(self, sources, targets, page_bytes, ctas, stream) -> None:
        self.calls.append((sources.size, ctas))

    def copy_batch(self, targets, sources, sizes, order, stream) -> None:
        self.calls.append(targets.size)


@pytest.mark.parametrize(
    ("least", "pages", "mib", "calls"),
    [
        (0, 8, 8, [8]),
        (0, 16, 8, [8, 8]),
        (8 << 20, 8, 8, [2, 2, 2, 2]),
        (8 << 20, 1, 64, [1]),
        (8 << 20, 3, 8, [1, 1, 1]),
        (8 << 20, 8, 2, [4, 4]),
        (8 << 20, 1, 1, [1]),
    ],
)
def test_a_lane_is_taken_for_so_many_pages_or_bytes(least, pages, mib, calls):
    driver = Driver()
    stream = PageStream(driver, lanes=4, min_lane_bytes=least)
    at = np.arange(pages, dtype=np.uint64) * np.uint64(mib << 20)
    stream.submit(at, at + np.uint64(1 << 40), mib << 20)
    assert driver.calls == calls


def submitted(stream: PageStream, pages: int = 32):
    at = np.arange(pages, dtype=np.uint64) * np.uint64(8 << 20)
    return stream.submit(at, at + np.uint64(1 << 40), 8 << 20)


def test_sets_that_are_over_leave_nothing_behind_whether_their_bytes_arrived_or_not():
    driver = Driver()
    stream = PageStream(driver, lanes=4)
    for number in range(2 * MAX_PENDING):
        ticket = submitted(stream)
        driver.answer = False
        assert not ticket.done()
        driver.answer = CopyFailed("cuEventQuery", "700") if number % 2 else True
        if number % 2:
            for _ in range(2):  # it stays failed: bytes that did not arrive never count as there
                with pytest.raises(CopyFailed):
                    ticket.done()
            driver.answer = True
            with pytest.raises(CopyFailed):
                ticket.done()
        else:
            assert ticket.done()
            assert ticket.done()
    assert driver.made == 4


def test_so_many_sets_are_in_flight_at_once_and_no_more():
    driver = Driver()
    stream = PageStream(driver, lanes=4)
    tickets = [submitted(stream) for _ in range(MAX_PENDING)]
    driver.answer = False
    assert not any(ticket.done() for ticket in tickets)
    driver.answer = True
    with pytest.raises(CopyQueueFull):
        submitted(stream)
    assert tickets[0].done()
    submitted(stream)
    with pytest.raises(CopyQueueFull):
        submitted(stream)


@pytest.mark.parametrize(
    ("size", "shift", "pages", "has_kernel", "calls"),
    [
        (8 << 20, 0, 4, True, [(4, 16)]),
        (8 << 20, 0, 5, True, [5]),  # larger than kernel_bytes
        (8 << 20, 0, 4, False, [4]),
        (4096 + 8, 0, 4, True, [4]),  # vectors of 16 bytes
        (4096, 8, 4, True, [4]),
        (4096, 0, 0, True, []),
    ],
)
def test_a_kernel_copies_aligned_pages_of_sets_up_to_its_size(size, shift, pages, has_kernel, calls):
    driver = Driver()
    driver.has_page_kernel = has_kernel
    stream = PageStream(driver, lanes=4, ctas=16, kernel_bytes=32 << 20)
    at = np.arange(pages, dtype=np.uint64) * np.uint64(size) + np.uint64(shift)
    ticket = stream.submit(at, at + np.uint64(1 << 40), size)
    assert driver.calls == calls
    assert ticket.done()


def test_a_kernel_that_may_run_when_its_event_cannot_be_recorded_is_waited_for():
    driver = Driver()
    stream = PageStream(driver, lanes=4, ctas=16, kernel_bytes=1 << 40)
    failing = iter([True])

    def record(event: int, stream: int) -> None:
        if next(failing, False):
            raise CopyFailed("cuEventRecord", "1")

    driver.record = record
    with pytest.raises(CopyFailed) as failed:
        submitted(stream)
    assert not failed.value.running
    assert submitted(stream).done()
