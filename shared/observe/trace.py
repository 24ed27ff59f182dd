"""Spans with explicit parents, as W3C traceparent strings that travel in messages.

No context variables: a span's parent is an argument, because the work of one request hops between callbacks,
threads and processes. Without an exporter a span is two slots and a pass-through of its parent (measured
below 1 us); with one it is an OpenTelemetry SDK span, batched and exported from a thread of its own.
"""

import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from shared.observe.log import get_logger

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer

QUEUE_SPANS = 8_192  # waiting for export; later ones are dropped
EXPORT_TIMEOUT_S = 2.0
LOCAL_FLUSH_MS = 200
COLLECTOR_FLUSH_MS = 1_000
COMPLAINT_INTERVAL_S = 60.0
_UNSAMPLED = frozenset("02468ace")  # last digit of a traceparent whose sampled flag is off

_tracer: "Tracer | None" = None
_provider: "TracerProvider | None" = None


class Span:
    """One piece of a request's life. This base records nothing: it only carries the trace context on.

    As a context manager it ends on exit and records an exception that passes through.
    """

    __slots__ = ("_traceparent",)

    def __init__(self, traceparent: str = "") -> None:
        self._traceparent = traceparent

    @property
    def traceparent(self) -> str:
        """To hand to children, also in other processes: `00-<32 hex>-<16 hex>-<01 if recorded>`."""
        if not self._traceparent:
            # Not recorded, so the flag is 00: no service downstream records half of a trace.
            self._traceparent = f"00-{random.getrandbits(128) | 1:032x}-{random.getrandbits(64) | 1:016x}-00"
        return self._traceparent

    @property
    def recording(self) -> bool:
        """Whether attributes are kept; ask before computing an expensive one."""
        return False

    def set(self, key: str, value: Any) -> None:
        """Set an attribute: str, bool, int, float or a list of one of them."""

    def event(self, name: str, attributes: Mapping[str, Any] | None = None) -> None:
        """A point in time, e.g. "first_token"."""

    def fail(self, message: str) -> None:
        """Mark the span as an error."""

    def end(self, end_ns: int | None = None) -> None:
        """End now, or at `end_ns` (Unix time). Ending twice is harmless."""

    def __enter__(self) -> "Span":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(f"{kind.__name__ if kind else 'error'}: {error}")
        self.end()


class _RecordedSpan(Span):
    """A span of the OpenTelemetry SDK."""

    __slots__ = ("_span",)

    def __init__(self, span: Any) -> None:
        context = span.get_span_context()
        super().__init__(f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}")
        self._span = span

    @property
    def recording(self) -> bool:
        return self._span.is_recording()

    def set(self, key: str, value: Any) -> None:
        self._span.set_attribute(key, value)

    def event(self, name: str, attributes: Mapping[str, Any] | None = None) -> None:
        self._span.add_event(name, attributes)

    def fail(self, message: str) -> None:
        from opentelemetry.trace import StatusCode

        self._span.set_status(StatusCode.ERROR, message)

    def end(self, end_ns: int | None = None) -> None:
        if self._span.is_recording():
            self._span.end(end_ns)


def start_span(
    name: str,
    *,
    parent: str = "",
    attributes: Mapping[str, Any] | None = None,
    start_ns: int | None = None,
) -> Span:
    """Begin a span.

    Args:
        parent: a traceparent; "" for a new trace, and so counts a malformed one.
        start_ns: Unix time, if it began earlier.

    A parent that is not sampled makes an unrecorded child. Cost: below 1 us unrecorded, about 50 us of CPU
    recorded and exported.
    """
    if _tracer is None or (parent and parent[-1] in _UNSAMPLED):
        return Span(parent)
    context = _parent_context(parent)
    return _RecordedSpan(_tracer.start_span(name, context, attributes=attributes, start_time=start_ns))


def _parent_context(traceparent: str) -> Any:
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    parts = traceparent.split("-")
    if len(parts) != 4 or len(parts[1]) != 32 or len(parts[2]) != 16:
        return Context()
    try:
        trace_id, span_id, flags = int(parts[1], 16), int(parts[2], 16), int(parts[3], 16)
    except ValueError:
        return Context()
    remote = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
    return set_span_in_context(NonRecordingSpan(remote), Context()) if remote.is_valid else Context()


def setup(service: str, instance: str, *, endpoint: str, directory: str, sample_ratio: float) -> None:
    """Once per process, before the first span; sets the global TracerProvider.

    Args:
        endpoint: base URL of an OTLP/HTTP collector, e.g. http://127.0.0.1:4318; "" for none.
        directory: folder of the local span store; "" for none. Without both, spans record nothing.
        sample_ratio: share of new traces that are recorded; a parent's decision is always followed.
    """
    global _tracer, _provider
    if not endpoint and not directory:
        return
    from opentelemetry import trace as otel
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    resource = Resource({"service.name": f"quire-{service}", "service.instance.id": instance})
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(sample_ratio)), resource=resource, shutdown_on_exit=False
    )
    if endpoint:
        provider.add_span_processor(_batched(_collector(endpoint), COLLECTOR_FLUSH_MS))
    if directory:
        from shared.observe.span_store import JsonlSpanExporter

        provider.add_span_processor(_batched(JsonlSpanExporter(Path(directory), service), LOCAL_FLUSH_MS))
    otel.set_tracer_provider(provider)
    _provider = provider
    _tracer = provider.get_tracer("quire")


def shutdown() -> None:
    """Flush what is queued, waiting at most a few seconds, and stop. Spans made later record nothing."""
    global _tracer, _provider
    provider, _provider, _tracer = _provider, None, None
    if provider is not None:
        provider.force_flush(int(EXPORT_TIMEOUT_S * 1000))
        provider.shutdown()


def _batched(exporter: "SpanExporter", delay_ms: int) -> Any:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return BatchSpanProcessor(
        _quiet(exporter),
        max_queue_size=QUEUE_SPANS,
        schedule_delay_millis=delay_ms,
        max_export_batch_size=512,
        export_timeout_millis=int(EXPORT_TIMEOUT_S * 1000),
    )


def _collector(endpoint: str) -> "SpanExporter":
    import logging

    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    # Its own complaints come with every batch; _quiet says the same once a minute.
    logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter").setLevel(logging.CRITICAL)
    return OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces", timeout=EXPORT_TIMEOUT_S)


def _quiet(inner: "SpanExporter") -> "SpanExporter":
    """`inner`, whose failures cost the spans, never the service: one warning a minute."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class QuietExporter(SpanExporter):
        def __init__(self) -> None:
            self._num_lost = 0
            self._complain_at = 0.0

        def export(self, spans: "Sequence[ReadableSpan]") -> SpanExportResult:
            reason = "refused"
            try:
                result = inner.export(spans)
            except Exception as error:  # noqa: BLE001  any exporter's failure is the same to us: lost spans
                result, reason = SpanExportResult.FAILURE, f"{type(error).__name__}: {error}"
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
            inner.shutdown()

        def force_flush(self, timeout_millis: int = 30_000) -> bool:
            return inner.force_flush(timeout_millis)

    return QuietExporter()
