"""Spans reach an OTLP/HTTP collector as JSON, with the service's name and the request's id."""

import base64
import http.server
import json
import threading

import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from shared.errors import SettingsError
from shared.observe import trace
from shared.observe.otlp import CollectorExporter
from shared.observe.span_record import SpanEvent, SpanRecord


class Collector:
    """What it was asked; answers `status`, and closes the connection when told so."""

    def __init__(self):
        self.received = []
        self.headers = {}
        self.status = 200
        self.closes = False
        self.num_connections = 0
        self.url = ""


@pytest.fixture
def collector():
    found = Collector()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self):
            super().setup()
            found.num_connections += 1

        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            closes = found.closes
            found.received.append((self.path, self.headers["content-type"], body))
            found.headers = dict(self.headers.items())
            self.send_response(found.status)
            self.send_header("content-length", "0")
            self.end_headers()
            self.close_connection = closes  # without saying so

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_port}"
    yield found
    server.shutdown()
    server.server_close()
    thread.join()


def parsed(body):
    """By OTLP's own schema, unknown fields refused; ids, which OTLP has as hex and not as base64, as there."""
    request = json.loads(body)
    for resource in request["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for key in ("traceId", "spanId", "parentSpanId"):
                    span[key] = base64.b64encode(bytes.fromhex(span[key])).decode()
    return json_format.ParseDict(request, ExportTraceServiceRequest())


def record(**more):
    return SpanRecord(trace_id="ab" * 16, span_id="cd" * 8, name="span", start_ns=1, end_ns=2, **more)


def test_a_collector_gets_every_span_of_a_trace(collector, tmp_path):
    endpoint = collector.url + "/"
    trace.setup("gateway", "gateway-0", endpoint=endpoint, directory=str(tmp_path), sample_ratio=1.0)
    with trace.start_span("gateway.receive", attributes={"quire.request_id": "chatcmpl-1"}) as root:
        for number in range(700):  # more than one batch
            trace.start_span(f"child-{number}", parent=root.traceparent).end()
    trace.shutdown()
    assert {(path, kind) for path, kind, _ in collector.received} == {("/v1/traces", "application/json")}
    spans, services = [], set()
    for _, _, body in collector.received:
        for resource in parsed(body).resource_spans:
            services |= {(a.key, a.value.string_value) for a in resource.resource.attributes}
            spans += [span for scope in resource.scope_spans for span in scope.spans]
    assert services == {("service.name", "quire-gateway"), ("service.instance.id", "gateway-0")}
    assert len(spans) == 701
    assert {span.trace_id.hex() for span in spans} == {root.traceparent[3:35]}
    (receive,) = [span for span in spans if not span.parent_span_id]
    assert receive.span_id.hex() == root.traceparent[36:52]
    assert {a.key: a.value.string_value for a in receive.attributes} == {"quire.request_id": "chatcmpl-1"}
    assert {span.parent_span_id for span in spans if span is not receive} == {receive.span_id}
    assert len(list(tmp_path.glob("spans-gateway-*.jsonl"))) == 1  # both at once are allowed


def export_one(collector):
    """A span, by an exporter of its own."""
    exporter = CollectorExporter(collector.url, "quire-x", "x-0")
    exporter.export([record()])
    exporter.close()


def test_every_kind_of_attribute_times_events_and_errors_arrive(collector):
    given = {
        "s": "x",
        "t": True,
        "i": -(2**62),
        "f": 0.5,
        "nan": float("nan"),
        "l": ["a", 2],
        "n": None,
        "o": {1},
    }
    exporter = CollectorExporter(collector.url, "quire-x", "x-0")
    event = SpanEvent(name="first", time_ns=2**60, attributes={"k": 1})
    exporter.export([record(attributes=given, events=[event], error="broke")])
    exporter.close()
    ((_, _, body),) = collector.received
    (span,) = parsed(body).resource_spans[0].scope_spans[0].spans
    values = {a.key: a.value for a in span.attributes}
    assert set(values) == set(given) - {"n"}
    assert (values["s"].string_value, values["t"].bool_value) == ("x", True)
    assert (values["i"].int_value, values["f"].double_value) == (-(2**62), 0.5)
    assert (values["nan"].WhichOneof("value"), values["o"].string_value) == ("string_value", "{1}")
    assert [one.WhichOneof("value") for one in values["l"].array_value.values] == [
        "string_value",
        "int_value",
    ]
    assert (span.start_time_unix_nano, span.end_time_unix_nano) == (1, 2)
    assert [(e.name, e.time_unix_nano, e.attributes[0].value.int_value) for e in span.events] == [
        ("first", 2**60, 1)
    ]
    assert (span.status.code, span.status.message) == (2, "broke")


def test_a_connection_is_kept_and_one_that_the_collector_closed_is_made_again(collector):
    exporter = CollectorExporter(collector.url, "quire-x", "x-0")
    exporter.export([record()])
    collector.closes = True
    exporter.export([record()])
    assert collector.num_connections == 1
    collector.closes = False
    exporter.export([record()])
    exporter.close()
    assert collector.num_connections == 2
    assert len(collector.received) == 3


def test_a_refusal_is_told_and_the_next_batch_is_taken(collector):
    exporter = CollectorExporter(collector.url, "quire-x", "x-0")
    collector.status = 503
    with pytest.raises(ConnectionError, match="status 503"):
        exporter.export([record()])
    collector.status = 200
    exporter.export([record()])
    exporter.close()


@pytest.mark.parametrize(
    "endpoint",
    ["127.0.0.1:4318", "ftp://here", "http://", "collector", "http://a:b", "http://[::1"],
    ids=range(6),
)
def test_an_endpoint_that_is_no_url_is_refused(endpoint):
    with pytest.raises(SettingsError, match="no URL of a collector"):
        CollectorExporter(endpoint, "quire-x", "x-0")


def test_a_collector_gets_the_headers_and_attributes_that_opentelemetrys_variables_name(
    collector, monkeypatch
):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-api-key=a%20b, authorization=Bearer%20t%3D ,")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=prod,service.name=not-ours")
    export_one(collector)
    assert collector.headers["x-api-key"] == "a b"
    assert collector.headers["authorization"] == "Bearer t="
    assert collector.headers["Content-Type"] == "application/json"
    (resource,) = parsed(collector.received[0][2]).resource_spans
    assert {a.key: a.value.string_value for a in resource.resource.attributes} == {
        "deployment.environment": "prod", "service.name": "quire-x", "service.instance.id": "x-0",
    }  # fmt: skip


def test_headers_for_traces_come_before_those_for_all(collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-api-key=all")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "x-api-key=traces")
    export_one(collector)
    assert collector.headers["x-api-key"] == "traces"


@pytest.mark.parametrize(
    "text",
    [
        "secret",
        "=secret",
        "a b=secret",
        "a=secret%0d%0ax: y",
        "a=secret%C3%A9",
        "content-type=secret",
        "é=secret",
    ],
)
def test_headers_that_cannot_be_sent_are_refused_and_no_value_is_said(collector, monkeypatch, text):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", text)
    with pytest.raises(SettingsError, match="OTEL_EXPORTER_OTLP_HEADERS") as caught:
        CollectorExporter(collector.url, "quire-x", "x-0")
    assert "secret" not in str(caught.value)
