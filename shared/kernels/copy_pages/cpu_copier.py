"""Copies between host pages by the CPU: merged runs, memmove without the GIL, one thread or several."""

import contextlib
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait

from shared.kernels.copy_pages.copier import DEFAULT_TIMEOUT_S, MAX_PENDING
from shared.kernels.copy_pages.copies import (
    Copies,
    CopyFailed,
    CopyQueueFull,
    CopyTimeout,
    Direction,
    Order,
)
from shared.kernels.copy_pages.host_memory import move
from shared.kernels.copy_pages.plan import Always, Choice, Limits, Method, Plan, plan_copies, share_out

MIN_PART_BYTES = 1 << 20  # less is not worth another thread


class CpuTicket:
    """See copier.Ticket."""

    def __init__(self, plan: Plan, parts: tuple["Future[None]", ...]) -> None:
        self.plan = plan
        self.parts = parts

    @property
    def over(self) -> bool:
        """Done, or failed."""
        return all(part.done() for part in self.parts)

    def done(self) -> bool:
        """See copier.Ticket."""
        if not self.over:
            return False
        for part in self.parts:
            if (error := part.exception()) is not None:
                raise CopyFailed("memmove", repr(error)) from error
        return True

    def wait(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """See copier.Ticket."""
        if wait(self.parts, timeout_s).not_done:
            raise CopyTimeout(f"a set of copies is still running after {timeout_s} s")
        self.done()


class CpuCopier:
    """A full provider for hosts without a GPU. Streams are numbers of the caller's; see copier.Copier."""

    def __init__(
        self, *, threads: int = 0, limits: Limits | None = None, max_pending: int = MAX_PENDING
    ) -> None:
        """`threads` 0 copies inside submit(); more copy behind it, large sets on all of them."""
        self.limits = limits or Limits()
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="copy-pages") if threads else None
        self._max_pending = max_pending
        self._lock = threading.Lock()
        self._pending: dict[CpuTicket, int] = {}  # with its stream: sets in flight, in order

    def submit(
        self,
        copies: Copies,
        direction: Direction = Direction.HOST_TO_HOST,
        *,
        stream: int = 0,
        order: Order = Order.STREAM,
        staging: bool = False,
        kernels: bool = False,
    ) -> CpuTicket:
        """See copier.Copier. Host memory needs no staging, nor kernels; DURING_CALL copies inside the call."""
        method = Choice(Method.LOOP, max(1, self._threads))
        plan = plan_copies(copies, direction, Always(method), limits=self.limits)
        with self._lock:
            self._pending = {ticket: key for ticket, key in self._pending.items() if not ticket.over}
            if len(self._pending) >= self._max_pending:
                raise CopyQueueFull(f"{self._max_pending} sets of copies are in flight")
            before = next((one for one in reversed(self._pending) if self._pending[one] == stream), None)
            if self._pool is not None:
                ticket = CpuTicket(plan, tuple(self._start(self._pool, plan, before)))
                self._pending[ticket] = stream
            else:
                ticket = CpuTicket(plan, ())
        if self._pool is None:
            move(plan.runs.targets, plan.runs.sources, plan.runs.sizes)
        elif order is Order.DURING_CALL:
            ticket.wait()
        return ticket

    def _start(self, pool: ThreadPoolExecutor, plan: Plan, before: CpuTicket | None) -> list["Future[None]"]:
        """Parts of about equal bytes. A part waits for the stream's set before; that was queued earlier, so it
        has a thread already or is done, and waiting inside the pool cannot lock up."""
        earlier = before.parts if before is not None else ()
        num_parts = max(1, min(self._threads, plan.runs.num_bytes // MIN_PART_BYTES))
        calls = share_out(plan.runs.sizes, num_parts, max(1, len(plan.runs)))
        parts = [plan.runs.take(slice(call.first, call.last)) for call in calls]
        return [pool.submit(_move_after, earlier, part) for part in parts or [plan.runs]]

    def close(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """See copier.Copier."""
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            pending = list(self._pending)
        for ticket in pending:
            with contextlib.suppress(CopyFailed):  # told to who asks the ticket
                ticket.wait(max(0.0, deadline_s - time.monotonic()))
        if self._pool is not None:
            self._pool.shutdown()


def _move_after(earlier: tuple["Future[None]", ...], runs: Copies) -> None:
    for part in earlier:
        part.result()  # without a bound: who waits for the set has one
    move(runs.targets, runs.sources, runs.sizes)
