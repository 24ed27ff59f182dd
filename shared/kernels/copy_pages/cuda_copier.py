"""Copies by CUDA's copy engines: batches over one or more streams, loops, single copies, staging; and by a kernel.

A batch over several lanes forks from the caller's stream and joins it again with events, so that to the caller it
is work of that one stream. The ticket's event is recorded on the caller's stream behind all of it.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterable

import numpy as np

from shared.kernels.copy_pages.copier import DEFAULT_TIMEOUT_S, MAX_PENDING
from shared.kernels.copy_pages.copies import (
    U64,
    Copies,
    CopyFailed,
    CopyQueueFull,
    CopyTimeout,
    Direction,
    InvalidCopies,
    Order,
)
from shared.kernels.copy_pages.driver import CopyDriver
from shared.kernels.copy_pages.kernel_rows import COLUMNS, launch
from shared.kernels.copy_pages.plan import (
    Always,
    Call,
    Choice,
    Chooser,
    Limits,
    Method,
    Plan,
    plan_copies,
)
from shared.kernels.copy_pages.staging import StagedCopy, StagingSlots

SPINS = 200  # polls without sleep: about 0.2 ms, the length of a small swap
POLL_S = 0.0001
LEGACY_STREAMS = (0, 1)  # no stream, CU_STREAM_LEGACY: cuMemcpyBatchAsync refuses them
NUM_SLOTS = 4
NUM_TABLES = 8  # sets that kernels copy, in flight at once


def wait_until(ticket: "Ticket", timeout_s: float) -> None:
    """Poll: a CUDA event has no wait with a deadline. Raises: CopyTimeout."""
    deadline_s = time.monotonic() + timeout_s
    polls = 0
    while not ticket.done():
        polls += 1
        if time.monotonic() >= deadline_s:
            raise CopyTimeout(f"a set of copies is still running after {timeout_s} s")
        if polls > SPINS:
            time.sleep(POLL_S)


class Ticket:
    """See copier.Ticket."""

    def __init__(
        self, copier: "CudaCopier", plan: Plan, event: int, stream: int, staged: StagedCopy | None
    ) -> None:
        self.plan = plan
        self._copier = copier
        self._event = event  # 0 once it went back to the copier
        self._stream = stream
        self._staged = staged
        self.failure: CopyFailed | None = None

    def done(self) -> bool:
        """See copier.Ticket."""
        return self._copier.poll(self)

    def wait(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """See copier.Ticket."""
        wait_until(self, timeout_s)

    def advance(self, driver: CopyDriver) -> int:
        """The event to give back when this call finds the set over, else 0. The copier holds its lock."""
        try:
            if self._event == 0 or not self._is_staged(driver) or not driver.passed(self._event):
                return 0
        except CopyFailed as error:
            if self.failure is not None:
                self.failure.running = True  # nobody can say when it ends
            self.failure = self.failure or error
        if self._staged is not None and self.failure is not None:
            self._staged.abandon(settled=not self.failure.running)
        event, self._event = self._event, 0
        return event

    def _is_staged(self, driver: CopyDriver) -> bool:
        """Whether the rest is the event's to say. After a failure it is: it goes behind what runs of the set already.

        Raises: CopyFailed: it cannot.
        """
        if self._staged is None or self.failure is not None:
            return True
        try:
            return self._staged.done()
        except CopyFailed as error:
            self.failure = error
            driver.record(self._event, self._stream)
            return True

    @property
    def over(self) -> bool:
        """Whether the event has been given back: done, or failed."""
        return self._event == 0


class CudaCopier:
    """One GPU's copier; any thread may use it. See copier.Copier."""

    def __init__(
        self,
        driver: CopyDriver,
        *,
        chooser: Chooser | None = None,
        limits: Limits | None = None,
        boundaries: Iterable[int] = (),
        num_slots: int = NUM_SLOTS,
        max_pending: int = MAX_PENDING,
    ) -> None:
        """The driver stays the caller's: it may serve several copiers, and is closed after them.

        Args:
            chooser: a measured cost table (calibrate.load_or_measure); without one, batches in one lane.
            boundaries: addresses that no copy may cross; see plan.merge.
            num_slots: staging slots of limits.slot_bytes pinned memory each, allocated on first use.
        """
        self.driver = driver
        self.limits = limits or Limits()
        batch = Choice(Method.BATCH if driver.has_batch else Method.LOOP)
        self.chooser: Chooser = chooser or Always(batch)
        self._boundaries: U64 = np.unique(np.fromiter(boundaries, np.uint64))
        self._lock = threading.Lock()
        self._max_pending = max_pending
        self._pending: deque[Ticket] = deque()
        self._events: list[int] = []
        self._lanes: list[tuple[int, int]] = []  # (stream, event that joins it), lanes 1 and up
        self._fork = 0
        self._slots = StagingSlots(driver, num_slots, self.limits.slot_bytes)
        self._tables = StagingSlots(driver, NUM_TABLES, COLUMNS * 8 * self.limits.max_kernel_rows)

    def add_boundaries(self, addresses: Iterable[int]) -> None:
        """More addresses that no copy may cross, for memory registered later."""
        more = np.fromiter(addresses, np.uint64)
        with self._lock:
            self._boundaries = np.union1d(self._boundaries, more)

    def submit(
        self,
        copies: Copies,
        direction: Direction,
        *,
        stream: int,
        order: Order = Order.STREAM,
        staging: bool = False,
        kernels: bool = False,
        chooser: Chooser | None = None,
        merging: bool = True,
    ) -> Ticket:
        """See copier.Copier. `chooser` and `merging` override, for measurements."""
        if stream in LEGACY_STREAMS:
            raise InvalidCopies("give a stream of your own: batches cannot go on the legacy default stream")
        if direction is Direction.HOST_TO_HOST:
            raise InvalidCopies("host to host is CpuCopier's")
        # Staged copies to the host read the device in several turns, the last ones after this call.
        staging = staging and not (order is Order.DURING_CALL and direction is Direction.DEVICE_TO_HOST)
        chooser = chooser or self.chooser
        kernels = kernels and order is not Order.DURING_CALL and self.driver.has_kernel
        plan = self._plan(copies, direction, chooser, staging, merging, kernels)
        with self._lock:
            self.driver.make_current()
            self._reap()
            if len(self._pending) >= self._max_pending:
                raise CopyQueueFull(f"{self._max_pending} sets of copies are in flight")
            if plan.choice.method is Method.STAGED and self._slots.all_lent:
                plan = self._plan(copies, direction, chooser, False, merging, kernels)
            if plan.choice.method is Method.KERNEL and not self._tables.is_free:
                plan = self._plan(copies, direction, chooser, staging, merging, False)
            return self._start(plan, order, stream)

    def _plan(
        self,
        copies: Copies,
        direction: Direction,
        chooser: Chooser,
        staging: bool,
        merging: bool,
        kernels: bool,
    ) -> Plan:
        return plan_copies(
            copies,
            direction,
            chooser,
            limits=self.limits,
            boundaries=self._boundaries,
            staging=staging,
            merging=merging,
            kernels=kernels,
        )

    def poll(self, ticket: Ticket) -> bool:
        """Whether the ticket's set is done. Raises: CopyFailed, again each time, when it failed."""
        with self._lock:
            if not ticket.over:
                self.driver.make_current()
                if event := ticket.advance(self.driver):
                    self._events.append(event)
                    self._pending.remove(ticket)
            if ticket.over and ticket.failure is not None:
                raise ticket.failure
            return ticket.over

    @property
    def num_pending(self) -> int:
        """Sets in flight whose end nobody has seen yet."""
        return len(self._pending)

    def close(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """See copier.Copier."""
        deadline_s = time.monotonic() + timeout_s
        for ticket in list(self._pending):
            with contextlib.suppress(CopyFailed):  # told to who asks the ticket
                ticket.wait(max(0.0, deadline_s - time.monotonic()))
        with self._lock:
            self.driver.make_current()
            self._slots.close()
            self._tables.close()
            for event in [*self._events, *([self._fork] if self._fork else [])]:
                self.driver.destroy_event(event)
            for lane, event in self._lanes:
                self.driver.destroy_event(event)
                self.driver.destroy_stream(lane)
            self._events, self._lanes, self._fork = [], [], 0

    def _reap(self) -> None:
        """Take events back from sets that are done, oldest first."""
        while self._pending and (event := self._pending[0].advance(self.driver)):
            self._events.append(event)
            self._pending.popleft()

    def _start(self, plan: Plan, order: Order, stream: int) -> Ticket:
        event = self._events.pop() if self._events else self.driver.create_event()
        staged = None
        try:
            if plan.choice.method is Method.STAGED:
                staged = StagedCopy(self.driver, self._slots, plan, order, stream)
                staged.start()
            elif plan.choice.method is Method.KERNEL:
                launch(self.driver, self._tables, plan, stream)
            elif plan.choice.method is Method.BATCH:
                self._start_batch(plan, order, stream)
            else:
                for source, target, size in plan.runs.rows():
                    self._one(source, target, size, order, stream)
            self.driver.record(event, stream)
            if order is Order.DURING_CALL and not self.driver.has_batch and not self._passes(event):
                raise CopyFailed("cuEventQuery", "the sources were not read by the deadline")
        except CopyFailed as error:
            error.running = not self._settled(plan, event, stream)
            if staged is not None:
                staged.abandon(settled=not error.running)
            elif plan.choice.method is Method.KERNEL and error.running:
                self._tables.keep()
            raise
        ticket = Ticket(self, plan, event, stream, staged)
        self._pending.append(ticket)
        return ticket

    def _one(self, source: int, target: int, size: int, order: Order, stream: int) -> None:
        """A plain copy reads in stream order: too late for DURING_CALL, which a batch of one keeps."""
        if order is Order.DURING_CALL and self.driver.has_batch:
            targets, sources, sizes = np.array([[target], [source], [size]], np.uint64)
            self.driver.copy_batch(targets, sources, sizes, order, stream)
        else:
            self.driver.copy(target, source, size, stream)

    def _start_batch(self, plan: Plan, order: Order, stream: int) -> None:
        lanes = plan.lanes
        self._open_lanes(lanes)
        if lanes > 1:
            self.driver.record(self._fork, stream)
            for lane, _ in self._lanes[: lanes - 1]:
                self.driver.wait_event(lane, self._fork)
        for call in plan.calls:
            self._batch_call(plan.runs, call, order, stream)
        for lane, joined in self._lanes[: lanes - 1]:
            self.driver.record(joined, lane)
            self.driver.wait_event(stream, joined)

    def _batch_call(self, runs: Copies, call: Call, order: Order, stream: int) -> None:
        part = runs.take(slice(call.first, call.last))
        lane = stream if call.lane == 0 else self._lanes[call.lane - 1][0]
        self.driver.copy_batch(part.targets, part.sources, part.sizes, order, lane)

    def _open_lanes(self, lanes: int) -> None:
        if lanes > 1 and not self._fork:
            self._fork = self.driver.create_event()
        while len(self._lanes) < lanes - 1:
            self._lanes.append((self.driver.create_stream(), self.driver.create_event()))

    def _settled(self, plan: Plan, event: int, stream: int) -> bool:
        """After a failure: wait until nothing of the set runs. False when that cannot be known."""
        streams = [stream, *(lane for lane, _ in self._lanes[: plan.lanes - 1])]
        try:
            for each in streams:
                self.driver.record(event, each)
                if not self._passes(event):
                    return False
        except CopyFailed:
            return False
        self._events.append(event)
        return True

    def _passes(self, event: int) -> bool:
        """Whether the event passes by the default deadline."""
        deadline_s = time.monotonic() + DEFAULT_TIMEOUT_S
        while not self.driver.passed(event):
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(POLL_S)
        return True
