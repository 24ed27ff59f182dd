"""Records to an OTLP/HTTP collector, as JSON (opentelemetry.io/docs/specs/otlp, "JSON Protobuf Encoding")."""

import http.client
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import SplitResult, urlsplit

import msgspec

from shared.errors import SettingsError
from shared.observe.config import HEADERS, collector_headers, resource_attributes
from shared.observe.export_queue import EXPORT_TIMEOUT_S
from shared.observe.span_record import SpanEvent, SpanRecord

PATH = "/v1/traces"
# The thread that serves requests waits for the interpreter while spans are made ready: 160 us at a time, not 1.3 ms.
SPANS_AT_A_TIME, PAUSE_S = 32, 0.0002
_INTERNAL, _ERROR = 1, 2  # enumerations SpanKind and StatusCode
_encoder = msgspec.json.Encoder()


class CollectorExporter:
    """One connection, kept. All spans are of this service and instance. Costs 5 us a span and 200 us a call.

    Headers and further attributes are what OpenTelemetry's variables say (config.py).
    Raises: SettingsError for an endpoint that is no http or https URL, and for such a variable.
    """

    def __init__(self, endpoint: str, service: str, instance: str) -> None:
        url, port = _split(endpoint)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(url.hostname or "", port, timeout=EXPORT_TIMEOUT_S)
        self._path = url.path.rstrip("/") + PATH
        self._headers = {**collector_headers(), "Content-Type": "application/json"}
        self._resource = {**resource_attributes(), "service.name": service, "service.instance.id": instance}

    def export(self, spans: Sequence[SpanRecord]) -> None:
        """Raises: ConnectionError when the collector did not take them; OSError, http.client.HTTPException."""
        body = encoded(spans, self._resource)
        is_kept = self._connection.sock is not None
        try:
            status = self._post(body)
        except ConnectionError:
            if not is_kept:
                raise
            status = self._post(body)  # the collector had closed a connection that was idle
        if status >= 300:
            raise ConnectionError(f"the collector answered with status {status}")

    def _post(self, body: bytes) -> int:
        try:
            self._connection.request("POST", self._path, body, self._headers)
            response = self._connection.getresponse()
            response.read()
        except BaseException:
            self._connection.close()  # the next request begins with a new one
            raise
        return response.status

    def close(self) -> None:
        self._connection.close()


def check_no_secret(name: str, endpoint: str) -> None:
    """Raises: SettingsError, which does not repeat it, where a password or a key may be in it: command lines, logs and
    `quire status` show it, and it would not be sent.
    """
    if any(mark in endpoint for mark in "@?#"):
        raise SettingsError(
            f"{name}: want no user, password, query or fragment, which would be seen and not sent; a collector's key "
            f"goes into {HEADERS[-1]}"
        )


def _split(endpoint: str) -> tuple[SplitResult, int | None]:
    """Its parts and its port. Raises: SettingsError."""
    check_no_secret("setting trace_endpoint", endpoint)
    try:
        url = urlsplit(endpoint)
        if url.scheme in ("http", "https") and url.hostname:
            return url, url.port
    except ValueError:  # a port that is no number, half of an IPv6 address
        pass
    raise SettingsError(
        f"setting trace_endpoint: {endpoint!r} is no URL of a collector, such as http://127.0.0.1:4318"
    )


def encoded(spans: Sequence[SpanRecord], resource: Mapping[str, str]) -> bytes:
    """An ExportTraceServiceRequest. Attributes of types that OTLP does not have are text; None is left out."""
    parts = []
    for begin in range(0, len(spans), SPANS_AT_A_TIME):
        if begin:
            time.sleep(PAUSE_S)
        parts += [_encoder.encode(_span(span)) for span in spans[begin : begin + SPANS_AT_A_TIME]]
    scope = {"scope": {"name": "quire"}, "spans": msgspec.Raw(b"[" + b",".join(parts) + b"]")}
    return _encoder.encode(
        {"resourceSpans": [{"resource": {"attributes": _attributes(resource)}, "scopeSpans": [scope]}]}
    )


def _span(record: SpanRecord) -> dict[str, Any]:
    found: dict[str, Any] = {
        "traceId": record.trace_id,
        "spanId": record.span_id,
        "parentSpanId": record.parent_id,
        "name": record.name,
        "kind": _INTERNAL,
        "startTimeUnixNano": str(record.start_ns),  # 64-bit numbers are text
        "endTimeUnixNano": str(record.end_ns),
        "attributes": _attributes(record.attributes),
    }
    if record.events:
        found["events"] = [_event(one) for one in record.events]
    if record.error:
        found["status"] = {"code": _ERROR, "message": record.error}
    return found


def _event(event: SpanEvent) -> dict[str, Any]:
    return {
        "timeUnixNano": str(event.time_ns),
        "name": event.name,
        "attributes": _attributes(event.attributes),
    }


def _attributes(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in given.items() if value is not None]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float) and math.isfinite(value):
        return {"doubleValue": value}
    if isinstance(value, list | tuple):
        return {"arrayValue": {"values": [_value(one) for one in value]}}
    return {"stringValue": str(value)}
