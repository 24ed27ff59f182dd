"""Recording spans; imported only when an exporter is set.

Quire makes its spans itself: one of the OpenTelemetry SDK costs the thread that serves requests about 20 us, and is
written by interpreted code in another thread, which the first one then waits for (docs/decisions/0041). Spans that
vLLM makes with the SDK come through sdk_spans.py.
"""

import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.observe.export_queue import ExportQueue
from shared.observe.span import Span
from shared.observe.span_record import SpanEvent, SpanRecord
from shared.observe.span_store import JsonlSpanExporter

LOCAL_BATCH_SPANS, COLLECTOR_BATCH_SPANS = 64, 256  # a call over the network costs as much as 30 spans
LOCAL_FLUSH_S, COLLECTOR_FLUSH_S = 0.2, 1.0
MAX_EVENTS = 128  # of a span, as of the SDK's; later ones are left out
_HEX = frozenset("0123456789abcdef")


class RecordedSpan(Span):
    """A span that is kept. Attributes are not copied: a list given must not be changed later."""

    __slots__ = ("_attributes", "_error", "_events", "_name", "_parent_id", "_recorder", "_start_ns")

    def __init__(
        self,
        recorder: "Recorder",
        name: str,
        trace_id: str,
        parent_id: str,
        attributes: Mapping[str, Any] | None,
        start_ns: int | None,
    ) -> None:
        super().__init__(f"00-{trace_id}-{random.getrandbits(64) | 1:016x}-01")
        self._recorder: Recorder | None = recorder  # None: it has ended
        self._name = name
        self._parent_id = parent_id
        self._attributes: dict[str, Any] = dict(attributes) if attributes else {}
        self._events: list[SpanEvent] = []
        self._error = ""
        self._start_ns = time.time_ns() if start_ns is None else start_ns

    @property
    def recording(self) -> bool:
        return self._recorder is not None

    def set(self, key: str, value: Any) -> None:
        if self._recorder is not None:
            self._attributes[key] = value

    def event(self, name: str, attributes: Mapping[str, Any] | None = None, at_ns: int | None = None) -> None:
        if self._recorder is not None and len(self._events) < MAX_EVENTS:
            time_ns = time.time_ns() if at_ns is None else at_ns
            self._events.append(
                SpanEvent(name=name, time_ns=time_ns, attributes=dict(attributes) if attributes else {})
            )

    def fail(self, message: str) -> None:
        if self._recorder is not None:
            self._error = message or "error"

    def end(self, end_ns: int | None = None) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.take(
                SpanRecord(
                    trace_id=self._traceparent[3:35],
                    span_id=self._traceparent[36:52],
                    parent_id=self._parent_id,
                    name=self._name,
                    service=recorder.service,
                    instance=recorder.instance,
                    start_ns=self._start_ns,
                    end_ns=time.time_ns() if end_ns is None else end_ns,
                    attributes=self._attributes,
                    events=self._events,
                    error=self._error,
                )
            )


def parent_ids(traceparent: str) -> tuple[str, str]:
    """Trace and span that a W3C traceparent names; ("", "") for "" and for anything malformed."""
    if len(traceparent) != 55 or traceparent[2] != "-" or traceparent[35] != "-" or traceparent[52] != "-":
        return "", ""
    trace_id, span_id = traceparent[3:35], traceparent[36:52]
    if not _HEX.issuperset(trace_id) or not _HEX.issuperset(span_id):
        return "", ""
    return ("", "") if trace_id.count("0") == 32 or span_id.count("0") == 16 else (trace_id, span_id)


class Recorder:
    """The process's spans on their way to its exporters. Arguments as of trace.setup()."""

    def __init__(
        self, service: str, instance: str, *, endpoint: str, directory: str, sample_ratio: float
    ) -> None:
        self.service, self.instance = f"quire-{service}", instance
        self.sample_ratio = sample_ratio
        self._queues: list[ExportQueue] = []
        if endpoint:
            from shared.observe.otlp import CollectorExporter

            exporter = CollectorExporter(endpoint, self.service, instance)
            self._queues.append(
                ExportQueue(exporter, batch_spans=COLLECTOR_BATCH_SPANS, flush_s=COLLECTOR_FLUSH_S)
            )
        if directory:
            store = JsonlSpanExporter(Path(directory), service)
            self._queues.append(ExportQueue(store, batch_spans=LOCAL_BATCH_SPANS, flush_s=LOCAL_FLUSH_S))

    def start(
        self, name: str, parent: str, attributes: Mapping[str, Any] | None, start_ns: int | None
    ) -> Span:
        """As trace.start_span(), for a parent that is sampled or none."""
        trace_id, parent_id = parent_ids(parent)
        if not trace_id:
            if random.random() >= self.sample_ratio:
                return Span()
            trace_id = f"{random.getrandbits(128) | 1:032x}"
        return RecordedSpan(self, name, trace_id, parent_id, attributes, start_ns)

    def take(self, record: SpanRecord) -> None:
        """A finished span."""
        for queue in self._queues:
            queue.put(record)

    def shutdown(self) -> None:
        """Export what is queued and stop; at most two export timeouts an exporter."""
        for queue in self._queues:
            queue.close()
