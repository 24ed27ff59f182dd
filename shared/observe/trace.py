"""Spans with explicit parents, as W3C traceparent strings that travel in messages.

No context variables: a span's parent is an argument, because the work of one request hops between callbacks,
threads and processes. Without an exporter a span only passes its parent on (below 1 us); with one it is
kept (about 3 us), batched and exported from a thread of its own (1 us to a file, 5 us to a collector).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shared.observe.span import Span

if TYPE_CHECKING:
    from shared.observe.recorder import Recorder

__all__ = ["Span", "setup", "shutdown", "start_span", "would_record"]

_UNSAMPLED = frozenset("02468ace")  # last digit of a traceparent whose sampled flag is off
_recorder: "Recorder | None" = None


def setup(
    service: str,
    instance: str,
    *,
    endpoint: str,
    directory: str,
    sample_ratio: float,
    with_libraries: bool = False,
) -> None:
    """Once per process, before the first span.

    Args:
        endpoint: base URL of an OTLP/HTTP collector, e.g. http://127.0.0.1:4318; "" for none.
        directory: folder of the local span store; "" for none. Without both, spans record nothing.
        sample_ratio: share of new traces that are recorded; a parent's decision is always followed.
        with_libraries: sets OpenTelemetry's global TracerProvider, for libraries whose spans are to be recorded too.
    """
    global _recorder
    if endpoint or directory:
        from shared.observe.recorder import Recorder

        _recorder = Recorder(
            service, instance, endpoint=endpoint, directory=directory, sample_ratio=sample_ratio
        )
        if with_libraries:
            from shared.observe.sdk_spans import take_sdk_spans

            take_sdk_spans(_recorder)


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
