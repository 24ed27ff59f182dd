"""Spans with explicit parents, as W3C traceparent strings that travel in messages.

No context variables: a span's parent is an argument, because the work of one request hops between callbacks,
threads and processes. Without an exporter a span only passes its parent on (below 1 us); with one it is
an OpenTelemetry SDK span, batched and exported from a thread of its own (about 50 us of CPU).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shared.observe.span import Span

if TYPE_CHECKING:
    from shared.observe.sdk_tracing import Recorder

__all__ = ["Span", "setup", "shutdown", "start_span", "would_record"]

_UNSAMPLED = frozenset("02468ace")  # last digit of a traceparent whose sampled flag is off
_recorder: "Recorder | None" = None


def setup(service: str, instance: str, *, endpoint: str, directory: str, sample_ratio: float) -> None:
    """Once per process, before the first span; sets OpenTelemetry's global TracerProvider.

    Args:
        endpoint: base URL of an OTLP/HTTP collector, e.g. http://127.0.0.1:4318; "" for none.
        directory: folder of the local span store; "" for none. Without both, spans record nothing.
        sample_ratio: share of new traces that are recorded; a parent's decision is always followed.
    """
    global _recorder
    if endpoint or directory:
        from shared.observe.sdk_tracing import Recorder

        _recorder = Recorder(
            service, instance, endpoint=endpoint, directory=directory, sample_ratio=sample_ratio
        )


def would_record(parent: str) -> bool:
    """Whether a child of this traceparent may be recorded: else nobody has to prepare what it would say."""
    return _recorder is not None and not (parent and parent[-1] in _UNSAMPLED)


def start_span(
    name: str,
    *,
    parent: str = "",
    attributes: Mapping[str, Any] | None = None,
    start_ns: int | None = None,
) -> Span:
    """Begin a span. A parent that is not sampled makes an unrecorded child.

    Args:
        parent: a traceparent; "" for a new trace, and so counts a malformed one.
        start_ns: Unix time, if it began earlier.
    """
    if _recorder is None or not would_record(parent):
        return Span(parent)
    return _recorder.start(name, parent, attributes, start_ns)


def shutdown() -> None:
    """Export what is queued, waiting at most a few seconds, and stop. Spans made later record nothing."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None:
        recorder.shutdown()
