"""Where Quire's spans meet the OpenTelemetry SDK: spans that libraries make with it, and what a collector gets.

Imported only by processes that have one of the two (0.15 s of CPU).
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry import trace as otel
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags, format_span_id, format_trace_id

from shared.observe.export_queue import EXPORT_TIMEOUT_S
from shared.observe.recorder import Recorder
from shared.observe.span_record import SpanEvent, SpanRecord

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope("quire")
_OK = Status(StatusCode.UNSET)


class CollectorExporter:
    """To an OTLP/HTTP collector, as protobuf. All spans are of this service and instance. Costs 22 us a span."""

    def __init__(self, endpoint: str, service: str, instance: str) -> None:
        # Its own complaints come with every batch; the queue says the same once a minute.
        logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter").setLevel(logging.CRITICAL)
        self._resource = Resource({"service.name": service, "service.instance.id": instance})
        self._inner = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces", timeout=EXPORT_TIMEOUT_S)

    def export(self, spans: Sequence[SpanRecord]) -> None:
        """Raises: ConnectionError when the collector did not take them; OSError."""
        sent = self._inner.export([readable(span, self._resource) for span in spans])
        if sent is not SpanExportResult.SUCCESS:
            raise ConnectionError("the collector did not take them")

    def close(self) -> None:
        self._inner.shutdown()


def readable(record: SpanRecord, resource: Resource) -> ReadableSpan:
    """A record as the SDK's exporters take it. Attributes of types that OTLP does not have become text."""
    trace_id = int(record.trace_id, 16)
    parent = None
    if record.parent_id:
        parent = SpanContext(trace_id, int(record.parent_id, 16), is_remote=True, trace_flags=_SAMPLED)
    return ReadableSpan(
        name=record.name,
        context=SpanContext(trace_id, int(record.span_id, 16), is_remote=False, trace_flags=_SAMPLED),
        parent=parent,
        resource=resource,
        attributes=_attributes(record.attributes),
        events=[Event(one.name, _attributes(one.attributes), one.time_ns) for one in record.events],
        status=Status(StatusCode.ERROR, record.error) if record.error else _OK,
        start_time=record.start_ns,
        end_time=record.end_ns,
        instrumentation_scope=_SCOPE,
    )


def _attributes(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value if isinstance(value, str | bool | int | float | list | tuple) else str(value)
        for key, value in given.items()
        if value is not None
    }


def span_record(span: ReadableSpan) -> SpanRecord:
    """A finished SDK span as a record."""
    context = span.get_span_context()
    assert context is not None
    assert span.start_time is not None
    assert span.end_time is not None
    resource = span.resource.attributes
    return SpanRecord(
        trace_id=format_trace_id(context.trace_id),
        span_id=format_span_id(context.span_id),
        parent_id=format_span_id(span.parent.span_id) if span.parent else "",
        name=span.name,
        service=str(resource.get("service.name", "")),
        instance=str(resource.get("service.instance.id", "")),
        start_ns=span.start_time,
        end_ns=span.end_time,
        attributes=dict(span.attributes or {}),
        events=[
            SpanEvent(name=e.name, time_ns=e.timestamp, attributes=dict(e.attributes or {}))
            for e in span.events
        ],
        error=(span.status.description or "error") if span.status.status_code is StatusCode.ERROR else "",
    )


class _ToRecorder(SpanProcessor):
    """Finished spans go where Quire's own go."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            self._recorder.take(span_record(span))


def take_sdk_spans(recorder: Recorder) -> None:
    """From now on spans that libraries make with OpenTelemetry's global provider are recorded too: vLLM's."""
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(recorder.sample_ratio)),
        resource=Resource({"service.name": recorder.service, "service.instance.id": recorder.instance}),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(_ToRecorder(recorder))
    otel.set_tracer_provider(provider)
