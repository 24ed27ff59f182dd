"""Finished spans on their way to an exporter, in a thread that nobody waits for."""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from shared.observe.log import get_logger
from shared.observe.span_record import SpanRecord

QUEUE_SPANS = 8_192  # waiting for export; later ones are dropped
EXPORT_TIMEOUT_S = 2.0  # of one batch, and of all that is queued at shutdown
COMPLAINT_INTERVAL_S = 60.0


class SpanExporter(Protocol):
    """Where finished spans go. Called by one thread."""

    def export(self, spans: Sequence[SpanRecord]) -> None:
        """May block for EXPORT_TIMEOUT_S. Raises: anything; the spans are lost then."""
        ...

    def close(self) -> None:
        """Nothing is exported later."""
        ...


class ExportQueue:
    """Spans of one exporter: put() by any thread, exported in batches by the queue's own.

    Failures cost the spans, never the service: one warning a minute. A forked child begins with an empty queue and a
    thread of its own.

    Args:
        batch_spans: of one export. While it is encoded the service's own thread waits for the interpreter.
        flush_s: spans wait no longer for a batch to be full.
    """

    def __init__(self, exporter: SpanExporter, *, batch_spans: int, flush_s: float) -> None:
        self._exporter = exporter
        self._batch_spans = batch_spans
        self._flush_s = flush_s
        self._num_dropped = self._num_lost = 0  # by the threads that put; by the exporter's
        self._complain_at = 0.0
        self._give_up_at = float("inf")  # monotonic seconds
        self.forget()
        _queues.add(self)

    def forget(self) -> None:
        """What is queued, and the thread: this process is a child, which has neither."""
        self._records: deque[SpanRecord] = deque()
        self._wake = threading.Event()
        self._start_lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, record: SpanRecord) -> None:
        """Queue it; dropped where QUEUE_SPANS wait. Costs 0.2 us, and a switch of threads for every batch."""
        records = self._records
        if len(records) >= QUEUE_SPANS:
            self._num_dropped += 1
            return
        records.append(record)
        if len(records) == self._batch_spans:
            self._wake.set()
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        with self._start_lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="quire-spans", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Export what is queued, for EXPORT_TIMEOUT_S and one export at most, and stop."""
        self._give_up_at = time.monotonic() + EXPORT_TIMEOUT_S
        self._wake.set()
        if self._thread is not None:
            self._thread.join(2 * EXPORT_TIMEOUT_S)
        self._exporter.close()

    def _run(self) -> None:
        while self._give_up_at == float("inf"):
            self._wake.wait(self._flush_s)
            self._wake.clear()
            self._drain()
        self._drain()  # what came between the last time and close()

    def _drain(self) -> None:
        while self._records:
            num = min(len(self._records), self._batch_spans)
            self._export([self._records.popleft() for _ in range(num)])

    def _export(self, batch: list[SpanRecord]) -> None:
        reason = "queue_full"
        dropped, self._num_dropped = self._num_dropped, 0
        try:
            if time.monotonic() >= self._give_up_at:
                raise TimeoutError("not exported in time at the end")
            self._exporter.export(batch)
        except Exception as error:  # noqa: BLE001  any exporter's failure is the same to us: lost spans
            reason = f"{type(error).__name__}: {error}"
            dropped += len(batch)
        self._num_lost += dropped
        if self._num_lost and time.monotonic() >= self._complain_at:
            self._complain_at = time.monotonic() + COMPLAINT_INTERVAL_S
            get_logger("trace").warning("spans_lost", num_spans=self._num_lost, reason=reason)
            self._num_lost = 0


_queues: "weakref.WeakSet[ExportQueue]" = weakref.WeakSet()


def _forget_all() -> None:
    for queue in list(_queues):
        queue.forget()


os.register_at_fork(after_in_child=_forget_all)
