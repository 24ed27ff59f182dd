"""Both background mappers over host memory, and the Python thread over a fake GPU."""

import functools
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from shared.vmm import mapper as mappers
from shared.vmm.cuda_pages import CudaPages
from shared.vmm.errors import MapperTimeout, VmmError
from shared.vmm.interface import OP_MMAP, OP_PAUSE, Op
from shared.vmm.mapper import NativeMapper, ThreadMapper, open_mapper
from shared.vmm.memfd_pages import MemfdPages
from tests.support.fake_vmm_driver import GRANULARITY_BYTES, FakeVmmDriver

PAGE = 4096
BAD = Op(OP_MMAP, 4096, 12345, 3, 0x11, -1, 0)


@pytest.fixture
def window():
    pages = MemfdPages(64, PAGE)
    made = pages.window(64)
    yield made
    made.close()
    pages.close()


@pytest.fixture(params=[NativeMapper, ThreadMapper])
def mapper(request, window):
    made = request.param(window)
    yield made
    made.close()


def test_ops_are_executed_in_order(mapper, window):
    for _ in range(50):
        mapper.submit(window.plan_map(0, [5, 9, 1]))
        mapper.submit(window.plan_unmap(0, 3))
    mapper.submit(window.plan_map(0, [7, 8]))
    ticket = mapper.submit(window.plan_map(10, [8, 7]))
    mapper.wait(ticket)
    assert mapper.done == mapper.submitted == ticket
    view = window.as_memoryview()
    view[0] = 7
    view[PAGE] = 8
    assert (view[10 * PAGE], view[11 * PAGE]) == (8, 7)


def test_run_comes_after_everything_before_it(mapper, window):
    mapper.submit(window.plan_map(0, range(63, -1, -1)))
    mapper.run(window.plan_unmap(0, 64))
    mapper.run(window.plan_map(0, range(64)))
    window.as_memoryview()[:] = bytes(64 * PAGE)
    assert mapper.done == mapper.submitted


def test_pauses_lie_between_the_ops_around_them(mapper, window):
    pause = Op(OP_PAUSE, 20_000, 0)
    begin_s = time.monotonic()
    first = mapper.submit(window.plan_map(0, [5]))
    mapper.wait(mapper.submit([pause, *window.plan_unmap(0), pause, pause]))
    assert time.monotonic() - begin_s >= 0.06
    assert mapper.done == mapper.submitted == first + 4


def test_a_signal_in_a_pause_fails_nothing(mapper, window):
    came = []
    before = signal.signal(signal.SIGUSR1, lambda *_: came.append(1))
    try:
        ticket = mapper.submit([Op(OP_PAUSE, 500_000, 0), *window.plan_map(0, [5])])
        time.sleep(0.1)  # it has begun
        signal.pthread_kill(mapper._thread.ident, signal.SIGUSR1)
        mapper.wait(ticket)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert came


def test_a_full_ring_makes_the_submitter_wait(mapper, window, monkeypatch):
    ops = [*window.plan_map(0, [1]), *window.plan_unmap(0)] * 100
    ops = (ops * (mappers.RING_ROWS // len(ops) + 2))[: mappers.RING_ROWS + 100]
    mapper.wait(mapper.submit(ops))
    assert mapper.done == len(ops)


@pytest.mark.parametrize("kind", [NativeMapper, ThreadMapper])
def test_a_ring_that_stays_full_takes_no_more(kind, window, monkeypatch):
    monkeypatch.setattr(mappers, "RING_ROWS", 4)
    mapper = kind(window)
    wait, mapper.wait = mapper.wait, functools.partial(mapper.wait, timeout_s=0.01)
    monkeypatch.setattr(mappers, "WAIT_TIMEOUT_S", 0.01)
    mapper.submit([Op(OP_PAUSE, 50_000, 0)] * 2)

    def submit_on():
        while mapper.submitted < 10:
            mapper.submit([Op(OP_PAUSE, 1, 0)])

    with pytest.raises(MapperTimeout):
        submit_on()
    assert mapper.submitted in (4, 5), "the first may have left the ring"
    wait(mapper.submitted)
    monkeypatch.undo()
    mapper.close()


def test_a_refused_call_is_told_to_the_next_that_asks(mapper):
    ticket = mapper.submit([BAD])
    with pytest.raises(VmmError, match="background"):
        mapper.wait(ticket)
    with pytest.raises(VmmError, match="background"):
        mapper.submit([BAD])


def test_closing_executes_what_was_submitted_and_refuses_more(mapper, window):
    mapper.submit(window.plan_map(0, range(63, -1, -1)))
    mapper.close()
    mapper.close()
    window.as_memoryview()[:] = bytes(64 * PAGE)
    with pytest.raises(VmmError, match="closed"):
        mapper.submit([])


def test_closing_executes_what_was_submitted_while_the_thread_was_at_work(mapper, window):
    mapper.submit([Op(OP_PAUSE, 60_000, 0)])
    time.sleep(0.02)  # it has begun
    ticket = mapper.submit([*window.plan_map(0, [1]), *window.plan_map(5, [2])])
    mapper.close()
    assert mapper.done == ticket == 3
    view = window.as_memoryview()
    view[0] = view[5 * PAGE] = 7


def test_whoever_waits_for_a_late_mapper_is_told_that_it_is_late_and_not_that_it_was_refused(
    mapper, window, monkeypatch
):
    ticket = mapper.submit([Op(OP_PAUSE, 100_000, 0), *window.plan_map(0, [1])])
    with pytest.raises(MapperTimeout, match="is not executed after"):
        mapper.wait(ticket, 0.01)
    monkeypatch.setattr(mappers, "WAIT_TIMEOUT_S", 0.01)
    with pytest.raises(MapperTimeout, match="still at work"):
        mapper.close()
    monkeypatch.undo()
    mapper.close()
    assert mapper.done == ticket


def test_many_batches_from_a_busy_thread_all_arrive(mapper, window):
    stop = threading.Event()

    def burn():
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=burn)
    thread.start()
    for _ in range(300):
        mapper.submit([*window.plan_map(3, [3, 1]), *window.plan_unmap(3, 2)])
    mapper.wait(mapper.submitted)
    stop.set()
    thread.join()
    assert mapper.done == mapper.submitted


def test_a_refusal_while_a_submitter_waits_for_room_is_told_to_it(monkeypatch):
    began, refuses = threading.Event(), threading.Event()

    def refused(_ops):
        began.set()
        refuses.wait()
        raise VmmError("mmap: refused")

    monkeypatch.setattr(mappers, "RING_ROWS", 2)
    mapper = ThreadMapper(SimpleNamespace(prepare_thread=lambda: None, apply=refused, entry_points=dict))
    mapper.submit([BAD])
    began.wait()
    mapper.submit([BAD, BAD])
    threading.Timer(0.02, refuses.set).start()
    with pytest.raises(VmmError, match="refused"):
        mapper.submit([BAD])
    assert mapper.submitted == 3
    mapper.close()


def test_a_window_without_native_calls_gets_a_thread():
    driver = FakeVmmDriver()
    window = CudaPages(driver, 4, GRANULARITY_BYTES).window(4)
    mapper = open_mapper(window)
    assert isinstance(mapper, ThreadMapper)
    mapper.wait(mapper.submit(window.plan_map(0, [2, 1])))
    assert len(driver.mapped) == 2
    mapper.close()
    window.close()
    driver.close()
