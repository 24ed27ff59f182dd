"""Background mapping: ops go into a ring, a thread executes them in order (vAttention 6.1.1).

`NativeMapper`'s thread never takes the GIL: it runs in machine code that numba made (native_calls.py), so that neither
the calls nor the waits of the mapper stop Python, and Python never stops the mapper. `ThreadMapper` is a Python thread
that gives up the GIL during each call and competes for it between calls; it needs nothing. loadtest/mapper_stall.py
measures both.
"""

import ctypes
import os
import select
import threading
import time
from array import array
from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import numpy as np

from shared.vmm.errors import MapperTimeout, VmmError, VmmUnavailable
from shared.vmm.interface import OP_PAUSE, Op

RING_ROWS = 1 << 14  # ops that may wait; a submitter waits for room beyond that
MAPPER_THREAD = "quire-mapper"
WAIT_TIMEOUT_S = 30.0


class Mapper(Protocol):
    """Executes a window's ops in the order of submission. Tickets count ops: they only grow."""

    def submit(self, ops: Sequence[Op]) -> int:
        """The ticket that is done when all of these are executed. Waits only when the ring is full.

        Raises: VmmError when an earlier op failed, MapperTimeout when the ring stays full (the window is not what its
            books say: give it up); VmmError when closed.
        """
        ...

    def run(self, ops: Sequence[Op]) -> None:
        """Execute these after all earlier ones, and return then: in this thread when nothing is waiting."""
        ...

    @property
    def submitted(self) -> int:
        """The last ticket given."""
        ...

    @property
    def done(self) -> int:
        """All tickets up to this one are executed."""
        ...

    def wait(self, ticket: int, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        """Raises: VmmError when an op failed, and none behind it is done; MapperTimeout: all of them may still be."""
        ...

    def close(self) -> None:
        """Execute what was submitted, then stop: `done` changes no more. Idempotent.

        Raises: MapperTimeout when it is still at work after WAIT_TIMEOUT_S: close again, or end the process.
        """
        ...


class Calls(Protocol):
    """Of a window, what a mapper needs: see PageWindow."""

    def entry_points(self) -> dict[int, int]: ...

    def prepare_thread(self) -> None: ...

    def apply(self, ops: Sequence[Op]) -> None: ...


class NativeMapper:
    """See Mapper. Cost: submit() about 5 us a batch and 0.5 us an op.

    Raises: VmmUnavailable without numba, or when the window has no C functions to call.
    """

    def __init__(self, window: Calls) -> None:
        from shared.vmm import native_calls  # compiles: only for who maps in the background

        entries = window.entry_points()
        if not entries:
            raise VmmUnavailable("this window's calls have no addresses")
        self._native = native_calls
        self._window = window
        self._ring = np.zeros((RING_ROWS, native_calls.COLUMNS), np.int64)
        self._control = np.zeros(40, np.int64)
        self._buffer = np.zeros(2, np.int64)
        self._functions = np.zeros(OP_PAUSE + 1, np.int64)
        self._functions[OP_PAUSE] = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value or 0
        for code, address in entries.items():
            self._functions[code] = address
        self._head = 0
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._done_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._fds = [self._wake_fd, self._done_fd]  # that are open
        self._poll = select.poll()
        self._poll.register(self._done_fd, select.POLLIN)
        self._closed = False
        self._failure = ""  # of the thread, outside its ops
        self._warm_up()
        self._thread = threading.Thread(target=self._serve, name=MAPPER_THREAD, daemon=True)
        self._thread.start()

    def _word(self, index: int) -> int:
        return int(self._control.ctypes.data) + 8 * index

    def _warm_up(self) -> None:
        """Compile now: a compiler at work in the thread would hold the GIL."""
        self._native.publish(self._word(self._native.STOP), 1)
        self._drain()
        self._native.publish(self._word(self._native.STOP), 0)
        self._native.observe(self._word(self._native.DONE))

    def _drain(self) -> None:
        libc = ctypes.CDLL(None)
        read, write = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in (libc.read, libc.write))
        self._result = self._native.drain_forever(
            self._ring, self._word(0), self._functions, read, write,
            self._wake_fd, self._done_fd, int(self._buffer.ctypes.data),
        )  # fmt: skip

    def _serve(self) -> None:
        try:
            self._window.prepare_thread()
        except Exception as error:  # noqa: BLE001  whatever it was, no op is executed: who waits hears of it
            self._failure = f"the mapper's thread has not begun: {error}"
            os.eventfd_write(self._done_fd, 1)  # never read: all who wait are woken
            return
        self._drain()

    @property
    def submitted(self) -> int:
        """See Mapper."""
        return self._head

    @property
    def done(self) -> int:
        """See Mapper. Cost: about 0.3 us."""
        return self._native.observe(self._word(self._native.DONE))

    def submit(self, ops: Sequence[Op]) -> int:
        """See Mapper."""
        self._check()
        for start in range(0, len(ops), RING_ROWS):
            self._put(ops[start : start + RING_ROWS])
        return self._head

    def _put(self, ops: Sequence[Op]) -> None:
        end = self._head + len(ops)
        if end - self.done > RING_ROWS:
            self.wait(end - RING_ROWS)
        rows = (np.arange(self._head, end)) & (RING_ROWS - 1)
        self._ring[rows, : len(Op._fields)] = np.array(array("q", chain.from_iterable(ops))).reshape(
            len(ops), -1
        )
        self._head = end
        self._native.publish(self._word(self._native.HEAD), end)
        os.eventfd_write(self._wake_fd, 1)

    def run(self, ops: Sequence[Op]) -> None:
        """See Mapper."""
        self._check()
        if self.done == self._head:
            self._window.apply(ops)
        else:
            self.wait(self.submit(ops))

    def wait(self, ticket: int, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        """See Mapper. Cost: the thread's wake-up, about 20 us, when it is not done already."""
        deadline = time.monotonic() + timeout_s
        while self.done < ticket:
            self._check()
            left_ms = (deadline - time.monotonic()) * 1000
            if left_ms <= 0:
                raise MapperTimeout(f"op {ticket} is not executed after {timeout_s} s; {self.done} are")
            if self._poll.poll(left_ms) and not self._failure:
                os.eventfd_read(self._done_fd)

    def _check(self) -> None:
        if self._failure:
            raise VmmError(self._failure)
        if self._closed:
            raise VmmError("the mapper is closed")
        failed = self._native.observe(self._word(self._native.FAILED))
        if failed:
            op = self._ring[(failed - 1) & (RING_ROWS - 1)]
            raise VmmError(
                f"op {failed - 1} (code {op[0]}, {op[2]} B at {op[1]:#x}) failed in the background"
            )

    def close(self) -> None:
        """See Mapper."""
        if not self._closed:
            self._closed = True
            self._native.publish(self._word(self._native.STOP), 1)
            os.eventfd_write(self._wake_fd, 1)
        _join(self._thread)
        for fd in self._fds:
            os.close(fd)
        self._fds = []


class ThreadMapper:
    """See Mapper: without numba."""

    def __init__(self, window: Calls) -> None:
        self._window = window
        self._ops: deque[Op] = deque()
        self._changed = threading.Condition()
        self._submitted = self._done = 0
        self._failure = ""
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=MAPPER_THREAD, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self._window.prepare_thread()
            self._execute()
        except Exception as error:  # noqa: BLE001  whatever it was, no later op is executed: who waits hears of it
            with self._changed:
                self._failure = f"op {self._done} failed in the background: {error}"
                self._changed.notify_all()

    def _execute(self) -> None:
        while True:
            with self._changed:
                while not self._ops and not self._closed:
                    self._changed.wait()
                if not self._ops:
                    return
                op = self._ops.popleft()
            if op.code == OP_PAUSE:
                time.sleep(op.address / 1e6)
            else:
                self._window.apply([op])
            with self._changed:
                self._done += 1
                self._changed.notify_all()

    @property
    def submitted(self) -> int:
        """See Mapper."""
        return self._submitted

    @property
    def done(self) -> int:
        """See Mapper."""
        return self._done

    def submit(self, ops: Sequence[Op]) -> int:
        """See Mapper."""
        with self._changed:
            self._check()
            has_room = self._changed.wait_for(
                lambda: self._failure or len(self._ops) < RING_ROWS, WAIT_TIMEOUT_S
            )
            self._check()
            if not has_room:
                raise MapperTimeout(
                    f"{len(self._ops)} ops still wait after {WAIT_TIMEOUT_S} s: no more are taken"
                )
            self._ops.extend(ops)
            self._submitted += len(ops)
            self._changed.notify_all()
            return self._submitted

    def run(self, ops: Sequence[Op]) -> None:
        """See Mapper."""
        with self._changed:
            self._check()
            idle = self._done == self._submitted
        if idle:
            self._window.apply(ops)
        else:
            self.wait(self.submit(ops))

    def wait(self, ticket: int, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        """See Mapper."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._done >= ticket, timeout_s)
            if self._done < ticket:
                self._check()
                raise MapperTimeout(f"op {ticket} is not executed after {timeout_s} s; {self._done} are")

    def _check(self) -> None:
        if self._failure:
            raise VmmError(self._failure)
        if self._closed:
            raise VmmError("the mapper is closed")

    def close(self) -> None:
        """See Mapper."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        _join(self._thread)


def _join(thread: threading.Thread) -> None:
    """Raises: MapperTimeout: it has not ended, and uses still what it was given."""
    thread.join(WAIT_TIMEOUT_S)
    if thread.is_alive():
        raise MapperTimeout(f"the mapper is still at work {WAIT_TIMEOUT_S} s after it was closed")


def open_mapper(window: Calls, *, native: bool = True) -> Mapper:
    """The native one where it can be, else a Python thread."""
    if native:
        try:
            return NativeMapper(window)
        except VmmUnavailable:
            pass  # the thread does the same, with the GIL between calls
    return ThreadMapper(window)
