"""Recording spans with the OpenTelemetry SDK; imported only when an exporter is set (0.15 s of CPU)."""

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, SpanContext, StatusCode, TraceFlags, set_span_in_context

from shared.observe.log import get_logger
from shared.observe.span import Span
from shared.observe.span_store import JsonlSpanExporter

# Of one export: while a thread encodes it, the service's own thread waits for the interpreter now and then. A call over
# the network costs as much as 30 spans.
LOCAL_BATCH_SPANS, COLLECTOR_BATCH_SPANS = 64, 256
QUEUE_SPANS = 8_192  # waiting for export; later ones are dropped
EXPORT_TIMEOUT_S = 2.0  # of one batch, and of all that is queued at shutdown
LOCAL_FLUSH_MS = 200
COLLECTOR_FLUSH_MS = 1_000
COMPLAINT_INTERVAL_S = 60.0


class RecordedSpan(Span):
    """A span of the SDK."""

    __slots__ = ("_span",)

    def __init__(self, span: otel.Span) -> None:
        context = span.get_span_context()
        super().__init__(f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}")
        self._span = span

    @property
    def recording(self) -> bool:
        return self._span.is_recording()

    def set(self, key: str, value: Any) -> None:
        self._span.set_attribute(key, value)

    def event(self, name: str, attributes: Mapping[str, Any] | None = None, at_ns: int | None = None) -> None:
        self._span.add_event(name, attributes, at_ns)

    def fail(self, message: str) -> None:
        self._span.set_status(StatusCode.ERROR, message)

    def end(self, end_ns: int | None = None) -> None:
        if self._span.is_recording():
            self._span.end(end_ns)


def parent_context(traceparent: str) -> Context:
    """The context that a W3C traceparent names; an empty one for "" and for anything malformed."""
    parts = traceparent.split("-")
    if len(parts) != 4 or len(parts[1]) != 32 or len(parts[2]) != 16:
        return Context()
    try:
        trace_id, span_id, flags = int(parts[1], 16), int(parts[2], 16), int(parts[3], 16)
    except ValueError:
        return Context()
    remote = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
    return set_span_in_context(NonRecordingSpan(remote), Context()) if remote.is_valid else Context()


class QuietExporter(SpanExporter):
    """Another exporter, whose failures cost the spans, never the service: one warning a minute."""

    def __init__(self, inner: SpanExporter) -> None:
        self.give_up_at = float("inf")  # monotonic seconds
        self._inner = inner
        self._num_lost = 0
        self._complain_at = 0.0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result, reason = SpanExportResult.FAILURE, "refused"
        try:
            if time.monotonic() < self.give_up_at:
                result = self._inner.export(spans)
        except Exception as error:  # noqa: BLE001  any exporter's failure is the same to us: lost spans
            reason = f"{type(error).__name__}: {error}"
        if result is not SpanExportResult.SUCCESS:
            self._complain(len(spans), reason)
        return result

    def _complain(self, num_spans: int, reason: str) -> None:
        self._num_lost += num_spans
        if time.monotonic() >= self._complain_at:
            self._complain_at = time.monotonic() + COMPLAINT_INTERVAL_S
            get_logger("trace").warning("spans_lost", num_spans=self._num_lost, reason=reason)
            self._num_lost = 0

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)


class Recorder:
    """The process's tracer with its exporters. Arguments as of trace.setup()."""

    def __init__(
        self, service: str, instance: str, *, endpoint: str, directory: str, sample_ratio: float
    ) -> None:
        self._exporters: list[QuietExporter] = []
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            resource=Resource({"service.name": f"quire-{service}", "service.instance.id": instance}),
            shutdown_on_exit=False,
        )
        if endpoint:
            self._add(_collector(endpoint), COLLECTOR_FLUSH_MS, COLLECTOR_BATCH_SPANS)
        if directory:
            self._add(JsonlSpanExporter(Path(directory), service), LOCAL_FLUSH_MS, LOCAL_BATCH_SPANS)
        otel.set_tracer_provider(self._provider)
        self._tracer = self._provider.get_tracer("quire")

    def _add(self, exporter: SpanExporter, delay_ms: int, batch_spans: int) -> None:
        quiet = QuietExporter(exporter)
        self._exporters.append(quiet)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                quiet,
                max_queue_size=QUEUE_SPANS,
                schedule_delay_millis=delay_ms,
                max_export_batch_size=batch_spans,
                export_timeout_millis=int(EXPORT_TIMEOUT_S * 1000),
            )
        )

    def start(
        self, name: str, parent: str, attributes: Mapping[str, Any] | None, start_ns: int | None
    ) -> RecordedSpan:
        """As trace.start_span()."""
        context = parent_context(parent)
        return RecordedSpan(
            self._tracer.start_span(name, context, attributes=attributes, start_time=start_ns)
        )

    def shutdown(self) -> None:
        """Export what is queued and stop; at most two export timeouts."""
        for exporter in self._exporters:
            exporter.give_up_at = time.monotonic() + EXPORT_TIMEOUT_S
        self._provider.shutdown()


def _collector(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    # Its own complaints come with every batch; QuietExporter says the same once a minute.
    logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter").setLevel(logging.CRITICAL)
    return OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces", timeout=EXPORT_TIMEOUT_S)
