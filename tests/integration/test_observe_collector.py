"""Spans reach an OTLP/HTTP collector as protobuf, with the service's name and the request's id."""

import http.server
import threading

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from shared.observe import trace


@pytest.fixture
def collector():
    received = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append((self.path, self.headers["content-type"], body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", received
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_collector_gets_every_span_of_a_trace(collector, tmp_path):
    endpoint, received = collector
    trace.setup("gateway", "gateway-0", endpoint=endpoint + "/", directory=str(tmp_path), sample_ratio=1.0)
    with trace.start_span("gateway.receive", attributes={"quire.request_id": "chatcmpl-1"}) as root:
        for number in range(700):  # more than one batch
            trace.start_span(f"child-{number}", parent=root.traceparent).end()
    trace.shutdown()
    assert {(path, kind) for path, kind, _ in received} == {("/v1/traces", "application/x-protobuf")}
    spans, services = [], set()
    for _, _, body in received:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            services |= {(a.key, a.value.string_value) for a in resource.resource.attributes}
            spans += [span for scope in resource.scope_spans for span in scope.spans]
    assert {("service.name", "quire-gateway"), ("service.instance.id", "gateway-0")} <= services
    assert len(spans) == 701
    assert len({span.trace_id for span in spans}) == 1
    (receive,) = [span for span in spans if not span.parent_span_id]
    assert {a.key: a.value.string_value for a in receive.attributes} == {"quire.request_id": "chatcmpl-1"}
    assert {span.parent_span_id for span in spans if span is not receive} == {receive.span_id}
    assert len(list(tmp_path.glob("spans-gateway-*.jsonl"))) == 1  # both at once are allowed
