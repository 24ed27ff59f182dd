"""shared/observe/trace.py and span_store.py: what a span records and what it costs when nothing records."""

import errno
import os
import re
import time
import timeit

import msgspec
import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from shared.observe import sdk_tracing, span_store, trace
from shared.observe.span_record import SpanRecord
from tests.support.quickest import slowness

TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
UNSAMPLED = PARENT[:-2] + "00"


@pytest.fixture
def store(tmp_path):
    trace.setup("test", "test-0", endpoint="", directory=str(tmp_path), sample_ratio=1.0)

    def read() -> list[SpanRecord]:
        trace.shutdown()
        lines = b"".join(path.read_bytes() for path in tmp_path.glob("spans-*.jsonl")).splitlines()
        return [msgspec.json.decode(line, type=SpanRecord) for line in lines]

    yield read
    trace.shutdown()


def test_without_exporter_a_span_passes_its_parent_on():
    span = trace.start_span("a", parent=PARENT)
    assert span.traceparent == PARENT
    assert not span.recording


def test_without_exporter_a_root_still_has_a_valid_unsampled_traceparent():
    span = trace.start_span("a")
    assert TRACEPARENT.match(span.traceparent)
    assert span.traceparent.endswith("-00")
    assert span.traceparent == span.traceparent
    assert span.traceparent != trace.start_span("a").traceparent


def test_an_unrecorded_span_costs_less_than_3_us():
    def one() -> None:
        trace.start_span("a", parent=PARENT, attributes=None).end()

    assert min(timeit.repeat(one, number=50, repeat=400)) / 50 < 3e-6 * slowness()


def test_parent_and_child_reach_the_store_with_service_instance_attributes_and_events(store):
    with (
        trace.start_span("gateway.receive", attributes={"quire.request_id": "r"}) as root,
        trace.start_span("tokenize", parent=root.traceparent) as child,
    ):
        child.set("tokens", 12)
        child.event("first_token", {"index": 0})
    tokenize, receive = store()
    assert (receive.name, receive.service, receive.instance) == ("gateway.receive", "quire-test", "test-0")
    assert receive.attributes == {"quire.request_id": "r"}
    assert tokenize.trace_id == receive.trace_id
    assert (tokenize.parent_id, receive.parent_id) == (receive.span_id, "")
    assert tokenize.attributes == {"tokens": 12}
    assert [(event.name, event.attributes) for event in tokenize.events] == [("first_token", {"index": 0})]
    assert receive.start_ns <= tokenize.start_ns <= tokenize.end_ns <= receive.end_ns


def test_a_remote_parent_is_continued(store):
    trace.start_span("a", parent=PARENT).end()
    (span,) = store()
    assert (span.trace_id, span.parent_id) == (PARENT[3:35], PARENT[36:52])


def test_the_parents_decision_not_to_sample_is_followed(store):
    span = trace.start_span("a", parent=UNSAMPLED)
    span.end()
    assert span.traceparent == UNSAMPLED
    assert store() == []


@pytest.mark.parametrize(
    "parent", ["x", "00-zz-yy-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "-" * 55, "é1"]
)
def test_a_malformed_parent_starts_a_new_trace(store, parent):
    span = trace.start_span("a", parent=parent)
    assert TRACEPARENT.match(span.traceparent)
    span.end()
    (record,) = store()
    assert record.parent_id == ""


def test_an_exception_marks_the_span_and_passes(store):
    with pytest.raises(KeyError), trace.start_span("a"):
        raise KeyError("gone")
    (span,) = store()
    assert span.error == "KeyError: 'gone'"


def test_given_times_are_kept_and_ending_twice_is_harmless(store):
    span = trace.start_span("a", start_ns=1_000)
    span.end(2_000)
    span.end(3_000)
    (record,) = store()
    assert (record.start_ns, record.end_ns) == (1_000, 2_000)


def test_ratio_zero_records_no_root_but_follows_a_sampled_parent(tmp_path):
    trace.setup("test", "test-0", endpoint="", directory=str(tmp_path), sample_ratio=0.0)
    root = trace.start_span("a")
    assert not root.recording
    assert root.traceparent[-1] in "02"
    assert not trace.start_span("c", parent=root.traceparent).recording
    assert trace.start_span("b", parent=PARENT).recording
    trace.shutdown()


def test_after_shutdown_spans_record_nothing(store):
    store()
    assert not trace.start_span("a").recording


class Broken(SpanExporter):
    def export(self, spans):
        raise ConnectionError("no collector")

    def shutdown(self):
        pass


def test_failed_exports_are_told_once_a_minute(monkeypatch):
    told = []

    class Log:
        def warning(self, event, **fields):
            told.append((event, fields["num_spans"]))

    monkeypatch.setattr(sdk_tracing, "get_logger", lambda _name: Log())
    exporter = sdk_tracing.QuietExporter(Broken())
    results = [exporter.export([object()] * 3) for _ in range(5)]
    assert results == [SpanExportResult.FAILURE] * 5
    assert told == [("spans_lost", 3)]
    later = time.monotonic() + 61
    monkeypatch.setattr(time, "monotonic", lambda: later)
    exporter.export([object()])
    assert told[1:] == [("spans_lost", 13)]


def test_an_unreachable_collector_never_blocks_the_caller():
    trace.setup("test", "test-0", endpoint="http://127.0.0.1:9", directory="", sample_ratio=1.0)
    begin = time.monotonic()
    for _ in range(2_000):
        trace.start_span("a").end()
    assert time.monotonic() - begin < 10.0
    begin = time.monotonic()
    trace.shutdown()
    assert time.monotonic() - begin < 20.0


def test_a_full_file_is_rotated_once_and_never_more_than_two_remain(tmp_path):
    exporter = span_store.JsonlSpanExporter(tmp_path, "test", max_file_bytes=2_000)
    trace.setup("test", "test-0", endpoint="", directory=str(tmp_path / "unused"), sample_ratio=1.0)
    for number in range(100):
        span = trace.start_span(f"span-{number}")
        span.end()
        exporter.export([span._span])
    trace.shutdown()
    exporter.shutdown()
    files = sorted(path.name for path in tmp_path.glob("spans-*"))
    assert files == [f"spans-test-{os.getpid()}.1.jsonl", f"spans-test-{os.getpid()}.jsonl"]
    assert all((tmp_path / name).stat().st_size <= 2_000 for name in files)
    last = (tmp_path / files[1]).read_bytes().splitlines()[-1]
    assert msgspec.json.decode(last, type=SpanRecord).name == "span-99"


@pytest.fixture
def export_one(tmp_path):
    """Exports a span; every export but the first rotates the file. Yields (export, exporter)."""
    exporter = span_store.JsonlSpanExporter(tmp_path, "test", max_file_bytes=1)
    trace.setup("test", "test-0", endpoint="", directory=str(tmp_path / "unused"), sample_ratio=1.0)
    span = trace.start_span("span")
    span.end()
    yield lambda: exporter.export([span._span]), exporter
    trace.shutdown()
    exporter.shutdown()


def test_a_file_that_could_not_be_opened_is_opened_at_the_next_export_and_no_other_is_written_to(
    export_one, tmp_path, monkeypatch
):
    export, exporter = export_one
    export()
    with monkeypatch.context() as patched:

        def full(*_args):
            raise OSError(errno.ENOSPC, "No space left on device")

        patched.setattr(os, "open", full)
        with pytest.raises(OSError, match="No space"):
            export()
    with (tmp_path / "another").open("wb") as another:  # it may get the number of the file that was closed
        export()
        assert os.fstat(another.fileno()).st_size == 0
    assert exporter.path.stat().st_size > 0


def test_a_file_that_another_process_pruned_is_made_anew_when_it_would_be_full(export_one):
    export, exporter = export_one
    export()
    exporter.path.unlink()
    export()
    assert exporter.path.stat().st_size > 0


def test_a_folder_of_old_files_is_pruned(tmp_path):
    for number in range(span_store.MAX_FOLDER_FILES + 10):
        path = tmp_path / f"spans-old-{number}.jsonl"
        path.touch()
        os.utime(path, (number, number))
    span_store.JsonlSpanExporter(tmp_path, "test")
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left) == span_store.MAX_FOLDER_FILES
    assert "spans-old-9.jsonl" not in left
    assert "spans-old-10.jsonl" in left
