"""A finished span as the local store keeps it and `quire trace` reads it. Knows nothing of OpenTelemetry."""

from typing import Any

from msgspec import Struct

REQUEST_ID = "quire.request_id"  # attribute on every span of a request


class SpanEvent(Struct, frozen=True, kw_only=True):
    """A point in time inside a span. time_ns: Unix time."""

    name: str
    time_ns: int
    attributes: dict[str, Any] = {}


class SpanRecord(Struct, frozen=True, kw_only=True):
    """Ids are lower-case hex; parent_id "" for a root. start_ns, end_ns: Unix time. error "" for none."""

    trace_id: str
    span_id: str
    parent_id: str = ""
    name: str
    service: str = ""
    instance: str = ""
    start_ns: int
    end_ns: int
    attributes: dict[str, Any] = {}
    events: list[SpanEvent] = []
    error: str = ""
