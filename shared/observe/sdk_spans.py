"""Spans that libraries make with the OpenTelemetry SDK: vLLM's. Imported only where it is (0.15 s of CPU)."""

from opentelemetry import trace as otel
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import StatusCode, format_span_id, format_trace_id

from shared.observe.recorder import Recorder
from shared.observe.span_record import SpanEvent, SpanRecord


def span_record(span: ReadableSpan, service: str, instance: str) -> SpanRecord:
    """A finished SDK span as a record of this service and instance."""
    context = span.get_span_context()
    assert context is not None
    assert span.start_time is not None
    assert span.end_time is not None
    return SpanRecord(
        trace_id=format_trace_id(context.trace_id),
        span_id=format_span_id(context.span_id),
        parent_id=format_span_id(span.parent.span_id) if span.parent else "",
        name=span.name,
        service=service,
        instance=instance,
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
        self._recorder.take(span_record(span, self._recorder.service, self._recorder.instance))


def take_sdk_spans(recorder: Recorder) -> None:
    """From now on spans that libraries make with OpenTelemetry's global provider are recorded too: vLLM's."""
    sampler = ParentBased(
        TraceIdRatioBased(recorder.sample_ratio)
    )  # what it does not sample never ends in a processor
    provider = TracerProvider(sampler=sampler, resource=Resource.get_empty(), shutdown_on_exit=False)
    provider.add_span_processor(_ToRecorder(recorder))
    otel.set_tracer_provider(provider)
