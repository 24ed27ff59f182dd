"""shared/observe/timeline.py: a request's spans are found and drawn as a tree."""

import io
import json
import urllib.error

import msgspec
import pytest

from shared import http_get
from shared.errors import PeerGone, PeerProtocolError
from shared.observe import timeline
from shared.observe.span_owner import owners
from shared.observe.span_record import REQUEST_ID, SpanEvent, SpanRecord
from shared.observe.stages import stages_of

MS = 1_000_000


def span(name, start_ms, end_ms, *, parent="", trace="a" * 32, **more):
    more.setdefault("instance", "gateway-0")
    return SpanRecord(
        trace_id=trace,
        span_id=name.ljust(16, "0"),
        parent_id=parent and parent.ljust(16, "0"),
        name=name,
        start_ns=start_ms * MS,
        end_ns=end_ms * MS,
        **more,
    )


@pytest.fixture
def request_spans():
    return [
        span("receive", 1_000, 1_100, attributes={REQUEST_ID: "chatcmpl-1", "model": "demo"}),
        span("decode", 1_050, 1_100, parent="receive", instance="decode-0",
             events=[SpanEvent(name="first_token", time_ns=1_060 * MS)]),
        span("tokenize", 1_000, 1_010, parent="receive", attributes={"tokens": 5}),
        span("encode", 1_002, 1_004, parent="tokenize", error="it broke"),
    ]  # fmt: skip


def write(path, spans):
    path.write_bytes(b"".join(msgspec.json.encode(item) + b"\n" for item in spans))


def test_all_spans_of_the_request_are_found_over_all_files(tmp_path, request_spans):
    other = span("receive", 1, 2, trace="b" * 32, attributes={REQUEST_ID: "chatcmpl-2"})
    write(tmp_path / "spans-gateway-1.jsonl", [other, *request_spans[:1], *request_spans[2:]])
    write(tmp_path / "spans-decode-2.1.jsonl", request_spans[1:2])
    found = timeline.read_local(tmp_path, "chatcmpl-1")
    assert {item.name for item in found} == {"receive", "decode", "tokenize", "encode"}
    assert {item.trace_id for item in found} == {"a" * 32}
    assert timeline.read_local(tmp_path, "b" * 32) == [other]


def test_an_id_that_only_begins_the_same_is_another_request(tmp_path, request_spans):
    write(tmp_path / "spans-gateway-1.jsonl", request_spans)
    assert timeline.read_local(tmp_path, "chatcmpl-") == []
    assert timeline.read_local(tmp_path / "missing", "chatcmpl-1") == []


def test_of_requests_that_a_client_sent_in_one_trace_the_one_that_was_asked_for_is_shown(tmp_path):
    """An agent's session, say. The mempool's spans have no request's id; a span may be written before its parent."""
    spans = []
    for number in range(1_000):
        ids, begin = {REQUEST_ID: f"chatcmpl-{number}"}, number * 1_000
        spans += [
            span(f"m{number}", begin + 2, begin + 3, parent=f"p{number}", instance="mempool-0"),
            span(f"p{number}", begin + 1, begin + 5, parent=f"r{number}", attributes=ids),
            msgspec.structs.replace(
                span(f"r{number}", begin, begin + 9, parent="client", attributes=ids), name="gateway.receive"
            ),
        ]
        spans += [span(f"{each}d{number}", begin + 2, begin + 3, parent=f"m{number}") for each in range(9)]
    spans.append(span("lost", 7, 8, parent="unknown"))
    write(tmp_path / "spans-gateway-1.jsonl", spans)
    found = timeline.read_local(tmp_path, "chatcmpl-997")
    assert {item.name.rstrip("0123456789") or item.name for item in found} >= {"m", "p", "gateway.receive"}
    assert len(found) == 12
    assert all(997_000 * MS <= item.start_ns < 998_000 * MS for item in found)
    everything = timeline.read_local(tmp_path, "a" * 32)
    assert len(everything) == timeline.MAX_SPANS
    assert "of more than 10,000 spans the first ones" in timeline.render(everything)


def test_a_request_whose_own_span_is_not_written_yet_is_another_one_too(tmp_path):
    """It is written when the request ends; some of its spans have its id, the mempool's do not."""
    done = msgspec.structs.replace(
        span("old", 0, 100, parent="client", attributes={REQUEST_ID: "old"}), name="gateway.receive"
    )
    of_it = [done, span("schedule", 1, 2, parent="old"), span("copy", 5, 6, parent="schedule")]
    running = [
        span("place", 10_005, 10_006, parent="new", attributes={REQUEST_ID: "new"}),
        span("decide", 10_005, 10_006, parent="new"), span("look", 10_005, 10_006, parent="decide"),
    ]  # fmt: skip
    write(tmp_path / "spans-gateway-1.jsonl", [*of_it, *running])
    assert timeline.read_local(tmp_path, "old") == of_it
    assert {item.name for item in timeline.read_local(tmp_path, "new")} == {"place", "decide", "look"}
    stages, num, _ = stages_of(timeline.read_local(tmp_path, "a" * 32))
    assert (num, {s.name for s in stages}) == (1, {"gateway.receive", "schedule", "copy"})


def test_what_hangs_on_a_span_that_was_lost_is_shown_where_its_trace_has_no_other_request(tmp_path):
    spans = [
        span("receive", 0, 100, attributes={REQUEST_ID: "r"}), span("copy", 5, 6, parent="lost"),
    ]  # fmt: skip
    write(tmp_path / "spans-gateway-1.jsonl", spans)
    assert timeline.read_local(tmp_path, "r") == spans


def test_spans_that_point_at_each_other_belong_to_nobody():
    links = [("a", "b", False), ("b", "a", False), ("c", "c", False), ("d", "r", False), ("r", "r", True)]
    assert owners([*links, ("e", "f", False), ("f", "gone", False)]) == {
        "d": "r", "r": "r", "e": "gone", "f": "gone"
    }  # fmt: skip


def test_a_line_half_written_is_skipped(tmp_path, request_spans):
    path = tmp_path / "spans-gateway-1.jsonl"
    write(path, request_spans)
    with path.open("ab") as out:
        out.write(msgspec.json.encode(request_spans[0])[:-9])
    assert len(timeline.read_local(tmp_path, "chatcmpl-1")) == 4


def test_the_tree_shows_offsets_durations_processes_events_and_errors(request_spans):
    text = timeline.render(sorted(request_spans, key=lambda item: item.start_ns))
    rows = [line.split("  |")[0].split() for line in text.splitlines()[2:]]
    assert rows == [
        ["0.00", "100.00", "receive", "gateway-0"],
        ["0.00", "10.00", "tokenize", "gateway-0"],
        ["2.00", "2.00", "encode", "gateway-0"],
        ["!", "it", "broke"],
        ["50.00", "50.00", "decode", "decode-0"],
        ["60.00", "*", "first_token"],
    ]
    assert "4 spans in 2 processes, 100.0 ms" in text
    assert "model=demo" in text
    assert "chatcmpl-1" not in text  # the caller knows it
    bars = {line.split()[2]: line.split("|")[1] for line in text.splitlines() if "|" in line}
    assert bars["receive"] == "#" * timeline.BAR_COLUMNS
    assert bars["decode"] == " " * (timeline.BAR_COLUMNS // 2) + "#" * (timeline.BAR_COLUMNS // 2)


def test_a_span_whose_parent_is_missing_is_drawn_as_a_root():
    text = timeline.render([span("orphan", 5, 6, parent="lost"), span("self", 6, 7, parent="self")])
    assert "orphan" in text
    assert "self" in text


def test_control_characters_of_a_prompt_do_not_reach_the_terminal(request_spans):
    evil = span("evil", 1, 2, attributes={"prompt": "\x1b[2J\nx" + "y" * 500}, error="\x1b]0;title\x07")
    text = timeline.render([evil])
    assert "\x1b" not in text
    assert "\x07" not in text
    assert max(map(len, text.splitlines())) < 250


def test_no_spans_are_said_so():
    assert timeline.render([]) == "no spans\n"


JAEGER = {
    "data": [
        {
            "traceID": "a" * 32,
            "spans": [
                {
                    "traceID": "a" * 32,
                    "spanID": "1" * 16,
                    "operationName": "gateway.receive",
                    "references": [],
                    "startTime": 1_000_000,
                    "duration": 2_500,
                    "tags": [{"key": REQUEST_ID, "type": "string", "value": "r"}],
                    "logs": [{"timestamp": 1_001_000, "fields": [{"key": "event", "value": "first_token"}]}],
                    "processID": "p1",
                },
                {
                    "traceID": "a" * 32,
                    "spanID": "2" * 16,
                    "operationName": "tokenize",
                    "references": [{"refType": "CHILD_OF", "traceID": "a" * 32, "spanID": "1" * 16}],
                    "startTime": 1_000_100,
                    "duration": 5,
                    "tags": [
                        {"key": "error", "type": "bool", "value": True},
                        {"key": "otel.status_description", "type": "string", "value": "bad"},
                    ],
                    "processID": "p1",
                },
            ],
            "processes": {
                "p1": {
                    "serviceName": "quire-gateway",
                    "tags": [{"key": "service.instance.id", "type": "string", "value": "gateway-0"}],
                }
            },
        }
    ]
}


def test_jaegers_answer_is_read(monkeypatch):
    urls = []

    def open_url(url, *, timeout_s):
        urls.append(url)
        return io.BytesIO(json.dumps(JAEGER).encode())

    monkeypatch.setattr(http_get, "open_url", open_url)
    root, child = timeline.read_jaeger("http://127.0.0.1:16686/", "r")
    assert "/api/traces?service=quire-gateway&tags=%7B%22quire.request_id%22%3A%22r%22%7D" in urls[0]
    assert (root.name, root.instance, root.end_ns - root.start_ns) == (
        "gateway.receive",
        "gateway-0",
        2_500_000,
    )
    assert root.events[0].name == "first_token"
    assert (child.parent_id, child.error) == (root.span_id, "bad")


def test_an_answer_that_is_not_jaegers_and_no_answer_are_told_apart(monkeypatch):
    for body in (b"<html>", b"[]", b'{"data": [{}]}', b'{"data": [{"spans": [{}], "processes": {}}]}'):
        monkeypatch.setattr(http_get, "open_url", lambda *_, body=body, **__: io.BytesIO(body))
        with pytest.raises(PeerProtocolError):
            timeline.read_jaeger("http://127.0.0.1:1", "r")

    def refuse(*_, **__):
        raise urllib.error.URLError("refused")

    monkeypatch.setattr(http_get, "open_url", refuse)
    with pytest.raises(PeerGone):
        timeline.read_jaeger("http://127.0.0.1:1", "r")
    with pytest.raises(PeerGone, match="http address"):
        timeline.read_jaeger("file:///etc/passwd", "r")
