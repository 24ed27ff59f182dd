"""One thread per transport: starts transfers, polls them, holds their deadlines.

NIXL must be driven by one thread and blocks in it while it copies; copy engines and memcpy threads want polling.
So all paths hand their transfers to this thread. Idle it sleeps on a condition and costs nothing.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from shared.observe.log import get_logger

T = TypeVar("T")

SPIN_S = 0.0002  # polls without sleep after a start: one small block takes 12 us by memcpy
MIN_NAP_S = 0.00002
MAX_NAP_S = 0.0005
PROGRESS_NAP_S = 0.00005
SLOW_NAP_S = 0.01  # when all that is left has failed already and only has to settle
IDLE_S = 0.05
JOIN_S = 5.0

log = get_logger("transfer")


class Job(Protocol):
    """Something that the thread drives. Every method runs on the thread, and none of them raises."""

    def step(self, now_s: float) -> bool:
        """Go on; True when the job needs no more steps."""
        ...

    def is_failed(self) -> bool:
        """Whether its future has ended and only its pages have to settle."""
        ...


class TransferThread:
    """Owns its thread until close(), whatever is raised on it."""

    def __init__(
        self,
        name: str,
        *,
        progress: Callable[[], None] | None = None,
        on_error: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        """`progress`: NIXL's own; called in every round, and IDLE_S apart when there is nothing to do, because
        UCX connects and disconnects only with both sides' help; never again after it has raised. `on_error`: on the
        thread, with what a progress, an action or a job raised: what was under way may never end."""
        self._progress = progress
        self._on_error = on_error
        self._idle_s = IDLE_S if progress is not None else None
        self._changed = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._jobs: list[Job] = []
        self._attend_until_s = 0.0
        self._closing = False
        self._spin_wanted = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, action: Callable[[], None], *, calm: bool = False) -> None:
        """Run it on the thread, soon. Actions do not raise; those of a closed thread are dropped.

        `calm`: somebody else polls meanwhile, so the thread need not spin.
        """
        with self._changed:
            self._inbox.append(action)
            self._spin_wanted = self._spin_wanted or not calm
            self._changed.notify()

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Run it on the thread; the future has what it returns or raises."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001  handed on to whoever waits for the future
                future.set_exception(error)

        if self.on_thread:
            run()
        else:
            self.post(run)
        return future

    @property
    def on_thread(self) -> bool:
        """Whether the caller is the thread itself."""
        return threading.current_thread() is self._thread

    def add(self, job: Job) -> None:
        """On the thread only: drive this job from now on."""
        self._jobs.append(job)

    def attend(self, seconds: float) -> None:
        """Keep calling `progress` for so long: a peer is writing here and needs this side's help (UCX over TCP)."""
        with self._changed:
            self._attend_until_s = max(self._attend_until_s, time.monotonic() + seconds)
            self._changed.notify()

    def close(self) -> None:
        """Run what was posted, then end. Jobs that have not settled are forgotten."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if not self.on_thread:
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        busy_since_s = 0.0
        while True:
            with self._changed:
                if not self._has_work():
                    self._changed.wait_for(self._has_work, self._idle_s)
                actions = list(self._inbox)
                self._inbox.clear()
                spin, self._spin_wanted = self._spin_wanted, False
                if self._closing and not actions:
                    return
            for action in actions:
                try:
                    action()
                except Exception as error:  # noqa: BLE001  see _raised
                    self._raised(error)
            if spin:
                busy_since_s = time.monotonic()
            self._make_progress()
            finished = self._step_jobs()
            if finished:
                busy_since_s = time.monotonic()
            if self._jobs or self._attending():
                self._nap(time.monotonic() - busy_since_s)

    def _has_work(self) -> bool:
        return bool(self._inbox or self._jobs or self._closing or self._attending())

    def _attending(self) -> bool:
        return time.monotonic() < self._attend_until_s

    def _make_progress(self) -> None:
        if self._progress is None:
            return
        try:
            self._progress()
        except Exception as error:  # noqa: BLE001  see _raised
            self._progress = None
            self._raised(error)

    def _step_jobs(self) -> bool:
        now_s = time.monotonic()
        jobs, self._jobs = self._jobs, []
        num_over = 0
        for job in jobs:
            try:
                is_over = job.step(now_s)
            except Exception as error:  # noqa: BLE001  see _raised
                is_over = True
                self._raised(error)
            num_over += is_over
            if not is_over:
                self._jobs.append(job)
        return num_over > 0

    def _raised(self, error: Exception) -> None:
        """It ends neither the thread nor the other transfers, but for those that on_error() fails."""
        log.error("transfer_thread_error", thread=self._thread.name, exc_info=error)
        try:
            self._on_error(error)
        except Exception as another:
            log.error("transfer_thread_error", thread=self._thread.name, exc_info=another)

    def _nap(self, busy_s: float) -> None:
        """Sleep a little, unless something began just now: a twentieth of the time waited, so that waking up late
        costs at most that much. UCX over TCP receives only while it is polled, hence the shorter bound there."""
        if busy_s < SPIN_S:
            time.sleep(0)
            return
        slow = bool(self._jobs) and all(job.is_failed() for job in self._jobs) and not self._attending()
        longest_s = MAX_NAP_S if self._progress is None else PROGRESS_NAP_S
        with self._changed:
            if not self._inbox and not self._closing:
                self._changed.wait(SLOW_NAP_S if slow else min(longest_s, max(MIN_NAP_S, busy_s / 20)))
