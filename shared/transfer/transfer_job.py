"""One pull or push from its start to its end, and the future that it ends.

running -(poll True)-> done                              future: Moved
running -(deadline, peer lost, path failed)-> failed     future: the error; cancel() asked
failed  -(nothing can write any more)-> settled          on_settled
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from shared.transfer.errors import PeerLost, TransferError, TransferFailed, TransferTimeout
from shared.transfer.interface import Moved, PageCheck

if TYPE_CHECKING:
    from shared.transfer.link import BaseLink

SPIN_S = 0.005  # of a waiting caller: 1.5 GB on NVLink


class Attempt(Protocol):
    """One started copy, on the transport's thread."""

    def poll(self) -> bool:
        """True when every byte is in place. Raises: TransferError when it failed."""
        ...

    def cancel(self, *, peer_is_dead: bool) -> bool:
        """Ask it to stop; True once nothing of it can write its target any more. Asked again until it is True."""
        ...


class Transfer:
    """One pull or push: a Job of the transport's thread."""

    def __init__(
        self,
        link: "BaseLink",
        attempt: Attempt,
        *,
        target: str,
        pages: frozenset[int],
        num_bytes: int,
        deadline_s: float,
        begun_s: float,
        check: PageCheck | None,
        future: "Future[Moved]",
    ) -> None:
        self._link = link
        self._attempt = attempt
        self._target = target
        self._pages = pages
        self._num_bytes = num_bytes
        self._deadline_s = deadline_s
        self._begun_s = begun_s
        self._check = check
        self._future = future
        self._failed = False
        self._over = False
        self._lock = threading.Lock()  # the thread and, on paths that allow it, whoever waits for the future

    def is_failed(self) -> bool:
        """See transfer_thread.Job."""
        return self._failed

    def step(self, now_s: float) -> bool:
        """See transfer_thread.Job."""
        if not self._lock.acquire(blocking=False):
            return False  # somebody else is at it
        try:
            self._over = self._over or self._guarded_step(now_s)
            return self._over
        finally:
            self._lock.release()

    def _guarded_step(self, now_s: float) -> bool:
        try:
            return self._step(now_s)
        except Exception as error:  # noqa: BLE001  a waiter must hear of it, as of any end
            if self._future.done():
                return False  # it failed before, and has not settled
            self._failed = True
            self._link.transfer_held(self._target, self._pages)
            failure = TransferFailed(f"{self._link.path}: {error!r}")
            failure.quarantined = tuple(sorted(self._pages))
            self._future.set_exception(failure)
            return False

    def _step(self, now_s: float) -> bool:
        if self._failed:
            return self._try_settle()
        try:
            if self._attempt.poll():
                self._finish()
                return True
        except TransferError as error:
            return self._fail(error)
        except Exception as error:  # noqa: BLE001  one transfer's surprise must not end the thread of all
            return self._fail(TransferFailed(f"{self._link.path}: {error!r}"))
        if now_s >= self._deadline_s:
            waited_ms = round((now_s - self._begun_s) * 1000)
            return self._fail(
                TransferTimeout(f"{self._link.peer} by {self._link.path}: nothing after {waited_ms} ms")
            )
        if self._link.lost_reason is not None:
            return self._fail(PeerLost(f"{self._link.peer}: {self._link.lost_reason}"))
        return False

    def _finish(self) -> None:
        stale = tuple(self._check()) if self._check is not None else ()
        self._link.transfer_over(self, self._target, self._pages)
        if isinstance(self._future, DrivenFuture):
            self._future.rest = None  # nothing is left: whoever reads the result wakes no thread
        elapsed_us = round((time.monotonic() - self._begun_s) * 1e6)
        self._future.set_result(Moved(self._link.path, self._num_bytes, elapsed_us, stale))

    def _fail(self, error: TransferError) -> bool:
        self._failed = True
        if self._attempt.cancel(peer_is_dead=self._link.is_dead):
            self._link.transfer_over(self, self._target, self._pages)
            self._future.set_exception(error)
            return True
        error.quarantined = tuple(sorted(self._pages))
        self._link.transfer_held(self._target, self._pages)
        self._future.set_exception(error)
        return False

    def _try_settle(self) -> bool:
        if not self._attempt.cancel(peer_is_dead=self._link.is_dead):
            return False
        self._link.transfer_settled(self, self._target, self._pages)
        return True


class DrivenFuture(Future[Moved]):
    """Whoever waits for it polls the copy itself: two thread switches less, 0.1 ms, as long as 32 MiB on NVLink.

    `drive`: one step; True when the transfer needs no more, which may be after the future has ended (a failed one
    settles). `rest`: gives what is left to the transport's thread; None: that thread has it from the start.
    """

    drive: Callable[[float], bool] | None = None
    rest: Callable[[], None] | None = None

    def hand_over(self) -> None:
        """The caller drives no more. Harmless when the thread has it already."""
        rest, self.rest = self.rest, None
        if rest is not None:
            rest()

    def result(self, timeout: float | None = None) -> Moved:
        """See Future. Spins for at most SPIN_S, then waits for the thread."""
        drive, is_over = self.drive, False
        if drive is not None:
            begun_s = now_s = time.monotonic()
            until_s = begun_s + (SPIN_S if timeout is None else min(timeout, SPIN_S))
            while not self.done() and now_s < until_s:
                is_over = drive(now_s)
                now_s = time.monotonic()
        if not is_over:
            self.hand_over()
        return super().result(timeout)
