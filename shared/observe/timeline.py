"""One request's trace, from the local span store or from Jaeger, as a text timeline (`quire trace`)."""

import urllib.parse
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from shared import http_get
from shared.errors import PeerGone, PeerProtocolError
from shared.observe.span_owner import REQUEST, owners
from shared.observe.span_record import REQUEST_ID, SpanEvent, SpanRecord

MAX_SPANS = 10_000  # that are shown, the first ones
MAX_TRACE_SPANS = 500_000  # of all requests of its traces, that are looked at
MAX_REPLY_BYTES = 64 << 20
BAR_COLUMNS = 28
MAX_VALUE_CHARS = 60
_HIDDEN = {REQUEST_ID, "internal.span.format", "span.kind", "otel.scope.name", "otel.status_code", "error"}
_decoder = msgspec.json.Decoder(SpanRecord)
Key = tuple[str, str]  # trace and span id


def read_local(directory: Path, request_id: str) -> list[SpanRecord]:
    """All spans of the request, or of everything in a trace where `request_id` is its id. [] when there are none.

    Cost: two passes over the store's files; only lines that contain an id are decoded.
    """
    trace_ids = {request_id} if len(request_id) == 32 else set()
    for span in _local_spans(directory, [request_id]):
        if span.attributes.get(REQUEST_ID) == request_id:
            trace_ids.add(span.trace_id)
    spans = (span for span in _local_spans(directory, trace_ids) if span.trace_id in trace_ids)
    return _of_request(spans, request_id)


def _local_spans(directory: Path, needles: Iterable[str]) -> Iterator[SpanRecord]:
    """Every span whose line contains one of the needles."""
    sought = [needle.encode() for needle in needles]
    for path in sorted(directory.glob("spans-*.jsonl")):
        try:
            with path.open("rb") as lines:
                for line in lines:
                    if any(needle in line for needle in sought):
                        try:
                            yield _decoder.decode(line)
                        except (
                            msgspec.MsgspecError,
                            UnicodeDecodeError,
                        ):  # a line that its process is still writing
                            continue
        except FileNotFoundError:  # rotated away while we read
            continue


def local_spans(directory: Path, *, containing: str = "{") -> Iterator[SpanRecord]:
    """Every span of the store whose line contains that, in no order."""
    return _local_spans(directory, (containing,))


def _of_request(spans: Iterable[SpanRecord], request_id: str) -> list[SpanRecord]:
    """Those of the request, which its client may have sent in one trace with others; the first MAX_SPANS, each once."""
    by_key: dict[Key, SpanRecord] = {}
    for span in spans:
        by_key[_key(span)] = span
        if len(by_key) >= MAX_TRACE_SPANS:
            break
    found = list(by_key.values())
    named = [span for span in found if span.attributes.get(REQUEST_ID) == request_id]
    owner_of = owners((_key(s), (s.trace_id, s.parent_id), s.name == REQUEST) for s in found)
    known = {owner_of.get(_key(s)) for s in found if s.name == REQUEST or REQUEST_ID in s.attributes}
    if named and len(known) > 1:
        wanted = {owner_of.get(_key(span)) for span in named}
        found = [span for span in found if owner_of.get(_key(span)) in wanted]
    return sorted(found, key=lambda span: (span.start_ns, -span.end_ns))[:MAX_SPANS]


def _key(span: SpanRecord) -> Key:
    return span.trace_id, span.span_id


def read_jaeger(
    base_url: str, request_id: str, *, service: str = "quire-gateway", timeout_s: float = 5.0
) -> list[SpanRecord]:
    """The same from Jaeger's query API, e.g. base_url http://127.0.0.1:16686.

    Raises: PeerGone when it cannot be reached; PeerProtocolError on an answer that is not Jaeger's.
    """
    tags = msgspec.json.encode({REQUEST_ID: request_id}).decode()
    query = urllib.parse.urlencode({"service": service, "tags": tags, "limit": 20, "lookback": "48h"})
    body = _get(f"{base_url.rstrip('/')}/api/traces?{query}", timeout_s)
    try:
        traces = msgspec.json.decode(body)["data"] or []
        return _of_request((span for trace in traces for span in _jaeger_spans(trace)), request_id)
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        raise PeerProtocolError(f"{base_url} did not answer as Jaeger does: {error!r}") from error


def _get(url: str, timeout_s: float) -> bytes:
    if not url.startswith(("http://", "https://")):
        raise PeerGone(f"{url!r} is not an http address")
    try:
        with http_get.open_url(url, timeout_s=timeout_s) as reply:
            return reply.read(MAX_REPLY_BYTES)
    except http_get.NO_ANSWER as error:
        raise PeerGone(f"{url.partition('?')[0]}: {error}") from error


def _jaeger_spans(trace: dict[str, Any]) -> Iterator[SpanRecord]:
    processes = trace["processes"]
    for span in trace["spans"]:
        process = processes[span["processID"]]
        tags = _tags(span["tags"])
        parents = [ref["spanID"] for ref in span.get("references") or [] if ref["refType"] == "CHILD_OF"]
        start_ns = int(span["startTime"]) * 1000
        yield SpanRecord(
            trace_id=span["traceID"],
            span_id=span["spanID"],
            parent_id=parents[0] if parents else "",
            name=span["operationName"],
            service=process["serviceName"],
            instance=str(_tags(process.get("tags") or []).get("service.instance.id", "")),
            start_ns=start_ns,
            end_ns=start_ns + int(span["duration"]) * 1000,
            attributes=tags,
            events=[_jaeger_event(log) for log in span.get("logs") or []],
            error=str(tags.get("otel.status_description", "error")) if tags.get("error") else "",
        )


def _jaeger_event(log: dict[str, Any]) -> SpanEvent:
    fields = _tags(log["fields"])
    return SpanEvent(
        name=str(fields.pop("event", "event")), time_ns=int(log["timestamp"]) * 1000, attributes=fields
    )


def _tags(tags: list[dict[str, Any]]) -> dict[str, Any]:
    return {tag["key"]: tag["value"] for tag in tags}


def render(spans: list[SpanRecord]) -> str:
    """The trace as a tree: start and length in ms, process, bar, attributes; events and errors below."""
    if not spans:
        return "no spans\n"
    begin = min(span.start_ns for span in spans)
    length_ns = max(1, max(span.end_ns for span in spans) - begin)
    rows = list(_rows(spans))
    name_columns = max(len(_label(span, depth)) for span, depth in rows)
    place_columns = max(len(_place(span)) for span in spans)
    lines = [_headline(spans, length_ns)]
    for span, depth in rows:
        head = f"{_ms(span.start_ns - begin)} {_ms(span.end_ns - span.start_ns)}"
        label, place = _label(span, depth).ljust(name_columns), _place(span).ljust(place_columns)
        bar = _bar(span.start_ns - begin, span.end_ns - begin, length_ns)
        lines.append(f"{head}  {label}  {place}  |{bar}|  {_values(span.attributes)}")
        for event in span.events:
            text = f"{'  ' * depth}  * {event.name}"
            lines.append(f"{_ms(event.time_ns - begin)} {'':>10}  {text}  {_values(event.attributes)}")
        if span.error:
            lines.append(f"{'':>10} {'':>10}  {'  ' * depth}  ! {_clean(span.error)}")
    return "".join(line.rstrip() + "\n" for line in lines)


def _headline(spans: list[SpanRecord], length_ns: int) -> str:
    traces = " ".join(sorted({span.trace_id for span in spans}))
    places = len({_place(span) for span in spans})
    title = f"trace {traces}: {len(spans)} spans in {places} processes, {length_ns / 1e6:.1f} ms"
    if len(spans) >= MAX_SPANS:
        title += f"; of more than {MAX_SPANS:,} spans the first ones"
    return f"{title}\n{'start ms':>10} {'took ms':>10}  span"


def _rows(spans: list[SpanRecord]) -> Iterator[tuple[SpanRecord, int]]:
    """Depth first, children by start. A span whose parent is not here counts as a root."""
    known = {span.span_id for span in spans}
    children: dict[str, list[SpanRecord]] = defaultdict(list)
    for span in spans:
        is_child = span.parent_id in known and span.parent_id != span.span_id
        children[span.parent_id if is_child else ""].append(span)
    stack = [(span, 0) for span in reversed(children.pop("", []))]
    while stack:
        span, depth = stack.pop()
        yield span, depth
        stack += [(child, depth + 1) for child in reversed(children.pop(span.span_id, []))]


def _label(span: SpanRecord, depth: int) -> str:
    return "  " * depth + span.name


def _place(span: SpanRecord) -> str:
    return span.instance or span.service


def _ms(ns: int) -> str:
    return f"{ns / 1e6:10.2f}"


def _bar(start_ns: int, end_ns: int, length_ns: int) -> str:
    first = min(BAR_COLUMNS - 1, start_ns * BAR_COLUMNS // length_ns)
    last = max(first + 1, min(BAR_COLUMNS, -(-end_ns * BAR_COLUMNS // length_ns)))
    return " " * first + "#" * (last - first) + " " * (BAR_COLUMNS - last)


def _values(attributes: dict[str, Any]) -> str:
    shown = []
    for key, value in attributes.items():
        if key not in _HIDDEN:
            text = f"{value:.2f}" if isinstance(value, float) else str(value)
            short = text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 3] + "..."
            shown.append(f"{key.removeprefix('quire.')}={short}")
    return _clean(" ".join(shown))


def _clean(text: str) -> str:
    """Text of a client or a model, safe to print on a terminal."""
    return "".join(char if char.isprintable() else " " for char in text)
