"""One copy from its first pull to its last, on the mover's thread and the transports': rounds of pulls, one result."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from services.mempool.mover_layers import Feed
from services.mempool.mover_paths import Parts, Paths, Pull
from services.mempool.mover_thread import PullThread
from shared.transfer.errors import TransferError, TransferTimeout
from shared.transfer.interface import Moved
from shared.transfer.transfer_job import DrivenFuture


class Job:
    """run() once, on the mover's thread.

    `on_end` is called once, on any thread: no pull of the job is running as far as anybody knows. From then on the
    public fields do not change.
    """

    def __init__(
        self,
        paths: Paths,
        thread: PullThread,
        target: int,
        targets: Sequence[int],
        parts: Parts,
        deadline_s: float,
        on_end: Callable[[], None],
        feed: Feed | None = None,
        *,
        raw: bool = False,
    ) -> None:
        """`feed`: the copy goes layer by layer. `raw`: see Mover.copy."""
        self._raw = raw
        self._paths = paths
        self._thread = thread
        self._target = target
        self._targets = targets
        self._parts = parts
        self._deadline_s = deadline_s
        self._on_end = on_end
        self._feed = feed
        self._lock = threading.Lock()
        self._num_left = 0
        self._rounds: list[list[Pull]] = []
        self.ended = False
        self.moved: list[Moved] = []
        self.error: BaseException | None = None  # the first
        self.held: list[tuple[str, tuple[int, ...]]] = []  # region, pages that may still be written

    def run(self) -> None:
        """Plan, then the first round. Every later one when all of the one before have ended well."""
        if self._feed is not None:
            self._next_layers(self._feed)
            return
        try:
            self._rounds = self._paths.rounds(self._target, self._targets, self._parts, raw=self._raw)
        except Exception as error:  # noqa: BLE001  one copy's surprise must not end the thread of all
            self.error = error
            self._end()
            return
        self._next_round()

    def stop_waiting(self) -> None:
        """For layers that are not written yet: it ends as at its deadline. Any thread."""
        if self._feed is not None:
            self._deadline_s = 0.0

    def _next_layers(self, feed: Feed) -> None:
        """As soon as some are written. One round at a time: a page is in one transfer at a time."""
        if not feed.is_ready():
            self._thread.when(
                lambda: feed.is_ready() or time.monotonic() >= self._deadline_s, self._layers_or_end
            )
            return
        try:
            span = feed.take()
            self._start(
                self._paths.layer_round(self._target, self._targets, self._parts, feed.layer_bytes, span)
            )
        except Exception as error:  # noqa: BLE001  as in run()
            self.error = error
            self._end()

    def _layers_or_end(self) -> None:
        assert self._feed is not None
        if time.monotonic() < self._deadline_s:
            self._next_layers(self._feed)
            return
        self.error = TransferTimeout("the deadline passed before the next layer was written")
        self._end()

    def _next_round(self) -> None:
        self._start(self._rounds.pop(0))

    def _start(self, pulls: list[Pull]) -> None:
        self._num_left = len(pulls)
        for pull in pulls:
            left_ms = int((self._deadline_s - time.monotonic()) * 1000)
            try:
                if left_ms <= 0:
                    raise TransferTimeout("the deadline passed before the copy could start")
                future = pull.start(left_ms)
            except Exception as error:  # noqa: BLE001  as in run()
                self._one_ended(pull, None, error)
                continue
            future.add_done_callback(lambda future, pull=pull: self._pulled(pull, future))
            if isinstance(future, DrivenFuture):
                self._thread.watch(future)

    def _pulled(self, pull: Pull, future: "Future[Moved]") -> None:
        error = future.exception()
        self._one_ended(pull, None if error is not None else future.result(), error)

    def _one_ended(self, pull: Pull, moved: Moved | None, error: BaseException | None) -> None:
        with self._lock:
            if moved is not None:
                self.moved.append(moved)
            if error is not None:
                self.error = self.error or error
                if isinstance(error, TransferError) and error.quarantined:
                    self.held.append((pull.target, error.quarantined))
            self._num_left -= 1
            if self._num_left:
                return
            feed = self._feed
            if feed is not None:
                feed.arrived()
            is_last = (not self._rounds if feed is None else feed.is_done) or self.error is not None
        if is_last:
            self._end()
        elif feed is not None:
            self._thread.post(self._layers_or_end)
        else:
            self._thread.post(self._next_round)

    def _end(self) -> None:
        self.ended = True
        self._on_end()
