"""Whole pages between GPUs: over how many streams they are shared out, and what stays of a set that is over."""

import threading

import numpy as np
import pytest

from shared.kernels.copy_pages.copier import MAX_PENDING
from shared.kernels.copy_pages.copies import CopyFailed, CopyQueueFull
from shared.transfer import page_stream
from shared.transfer.page_stream import PageStream


class Driver:
    """Notes how many pages each call copies."""

    has_batch = True

    def __init__(self) -> None:
        self.calls: list[int] = []
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


class SlowDriver(Driver):
    """Events pass when a test says so; notes which were asked for, and how often a context was bound."""

    def __init__(self) -> None:
        super().__init__()
        self.over: set[int] = set()
        self.bad: set[int] = set()
        self.asked: list[int] = []
        self.bound = 0

    def make_current(self) -> None:
        self.bound += 1

    def passed(self, event: int) -> bool:
        self.asked.append(event)
        if event in self.bad:
            raise CopyFailed("cuEventQuery", "700")
        return event in self.over


def three_sets(**how):
    driver = SlowDriver()
    stream = PageStream(driver, lanes=1, **how)
    tickets = [submitted(stream, 4) for _ in range(3)]
    return driver, tickets, [ticket.events[0] for ticket in tickets]


def test_as_long_as_the_first_set_runs_the_driver_is_asked_about_that_one_alone(monkeypatch):
    monkeypatch.setattr(page_stream, "ASKED_S", 60.0)
    driver, tickets, events = three_sets(keeps_context=True)
    bound = driver.bound
    for _ in range(5):
        assert not any(ticket.done() for ticket in tickets)
    assert set(driver.asked) == {events[0]}
    assert len(driver.asked) == 5
    assert driver.bound == bound + 1, "a context is bound once on each thread"
    driver.over.update(events)
    assert [ticket.done() for ticket in tickets] == [True] * 3


def test_a_set_behind_one_that_nobody_asks_for_any_more_is_seen_to_end(monkeypatch):
    monkeypatch.setattr(page_stream, "ASKED_S", 0.0)
    driver, tickets, events = three_sets()
    driver.over.update(events[1:])
    assert not tickets[2].done(), "it is not over before the first, with which it shares lanes"
    driver.over.add(events[0])
    while not tickets[2].done():
        assert len(driver.asked) < 10
    assert tickets[0].events == tickets[1].events == []
    assert [ticket.before for ticket in tickets] == [None] * 3, "each would keep those before it"


def test_a_set_behind_one_that_failed_has_an_end_of_its_own(monkeypatch):
    monkeypatch.setattr(page_stream, "ASKED_S", 0.0)
    driver, tickets, events = three_sets()
    driver.bad.add(events[0])
    driver.over.add(events[1])
    while not tickets[1].done():
        assert len(driver.asked) < 10
    with pytest.raises(CopyFailed):
        tickets[0].done()
    assert not tickets[2].done()


@pytest.mark.parametrize(("keeps_context", "times"), [(True, 1), (False, 3)])
def test_a_thread_that_gives_its_context_back_is_given_one_each_time_it_asks(keeps_context, times):
    driver, tickets, _ = three_sets(keeps_context=keeps_context)
    tickets[0].done()
    bound = driver.bound
    thread = threading.Thread(target=lambda: [tickets[0].done() for _ in range(3)])
    thread.start()
    thread.join()
    assert driver.bound == bound + times
