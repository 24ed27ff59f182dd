"""Ctrl-C at any line of AQUA's library leaves no page behind, and no tensor half way."""

import asyncio
import gc
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch

from shared.aqua import consumer as consumer_module
from shared.aqua.consumer import Aqua
from shared.aqua.interrupts import InterruptsWait
from shared.aqua.tensor import AquaTensor
from shared.errors import OutOfPages
from tests.support.aqua_parts import PAGE_BYTES, SETTINGS, Parts

FOLDER = str(Path(consumer_module.__file__).parent)


@pytest.fixture
def parts(monkeypatch):
    return Parts(monkeypatch)


@pytest.fixture
def handler():
    """Ctrl-C is a KeyboardInterrupt, whatever runs the tests; as it was behind the test."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler, "it is back"


class InterruptAt:
    """For one `with`: Ctrl-C once, in front of the n-th line of the library that runs. `came`: it did; `where`."""

    def __init__(self, n):
        self.left, self.came, self.where = n, False, ""

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self._enter)
        return self

    def _enter(self, frame, event, _):
        return self._line if frame.f_code.co_filename.startswith(FOLDER) else None

    def _line(self, frame, event, _):
        if event == "line" and not self.came:
            self.left -= 1
            if not self.left:
                self.came = True
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGINT)
        return self._line

    def __exit__(self, *_):
        sys.settrace(self.before)


def use(aqua, parts, kept):
    """Every way that a tensor goes: made, used, lost and replaced, promoted, evacuated, closed or collected.
    `kept`: gets one that lives on."""
    parts.most["leased"] = 0
    data = torch.zeros(2 * PAGE_BYTES, dtype=torch.uint8)
    made = AquaTensor.from_tensor(data, aqua)
    kept.append(made)
    made.to_compute()
    made._placed.away.is_lost = True
    made.offload(changed=False)
    AquaTensor.from_tensor(data, aqua)
    parts.most["leased"] = 2
    aqua.step()
    if made._placed.away.lent[0] is not None:
        parts.evacuate(made._placed.away.lent[0])
    with made.compute(changed=False):
        pass
    made.close()
    aqua.step()


def check(aqua, parts, where):
    """Pages that are allocated, places that are taken and mapped are those of tensors."""
    aqua._hear()
    tensors = aqua._tensors
    pages = [page for placed in tensors for page in [*placed.local, *placed.away.all()]]
    assert len(set(pages)) == len(pages), where
    assert set(pages) == set(parts.held), where
    assert parts.taken == {p.first + i for p in tensors for i in range(p.num_pages)}, where
    assert parts.mapped == {p.first + i for p in tensors if p.local for i in range(p.num_pages)}, where
    lent = {page.to_bytes() for placed in tensors for page in placed.away.borrowed()}
    assert set(aqua._directory._owner) == lent, where


@pytest.mark.filterwarnings(
    "ignore:coroutine", "ignore::pytest.PytestUnraisableExceptionWarning"
)  # not begun yet
def test_an_interrupt_at_any_line_loses_no_page_and_leaves_no_tensor_half_way(parts, handler):
    at, came = 1, True
    with Aqua(SETTINGS) as aqua:
        aqua._borrower = type("Borrower", (), {"give_back": lambda _: asyncio.sleep(0)})()
        while came:
            aqua._try_at, kept = 0.0, []
            try:
                with InterruptAt(at) as interrupt:
                    use(aqua, parts, kept)
            except KeyboardInterrupt:
                pass
            came = interrupt.came
            gc.collect(0)
            check(aqua, parts, interrupt.where)
            aqua.step()
            for placed in list(aqua._tensors):
                aqua.store(placed, changed=True)
            check(aqua, parts, interrupt.where)
            for placed in list(aqua._tensors):
                aqua.drop(placed)
            assert not parts.held, interrupt.where
            at += 1
    assert at > 200, "lines were seen"


def test_an_interrupt_waits_for_the_end_of_the_outermost_block_and_comes_once(handler):
    done = []

    def work():
        with InterruptsWait():
            with InterruptsWait():
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
                done.append("inner")
            done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["inner", "outer"]
    with InterruptsWait():
        done.append("next")


def test_an_interrupt_is_heard_where_the_block_raises(handler):
    def work():
        with InterruptsWait():
            signal.raise_signal(signal.SIGINT)
            raise OutOfPages("of the block")

    with pytest.raises(KeyboardInterrupt) as raised:
        work()
    assert isinstance(raised.value.__context__, OutOfPages)


def test_an_interrupt_goes_to_the_programs_own_handler(handler):
    heard = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with InterruptsWait():
            signal.raise_signal(signal.SIGINT)
            assert not heard
        assert heard == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_and_handlers_that_are_not_pythons_are_left_alone(handler):
    seen = []

    def look():
        with InterruptsWait():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    look()
    assert seen[1] == signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)
