"""shared/observe: what a span records, what it costs, and what happens to spans that cannot be exported."""

import errno
import os
import re
import threading
import time
import timeit

import msgspec
import pytest
from opentelemetry import trace as otel
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared.observe import export_queue, recorder, span_store, trace
from shared.observe.export_queue import ExportQueue
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


def until(is_true, seconds: float = 10.0) -> bool:
    """Whether it came true in time."""
    end = time.monotonic() + seconds
    while not (found := is_true()) and time.monotonic() < end:
        time.sleep(0.002)
    return bool(found)


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


def record(name: str = "span") -> SpanRecord:
    return SpanRecord(trace_id="ab" * 16, span_id="cd" * 8, name=name, start_ns=1, end_ns=2)


class Exporter:
    """Keeps the sizes of batches; fails, or waits, when told to."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.fails = False

    def export(self, spans):
        self.may_go_on.wait(10.0)
        self.batches.append(len(spans))
        if self.fails:
            raise ConnectionError("no collector")

    def close(self):
        self.may_go_on.set()


@pytest.fixture
def told(monkeypatch):
    """Of each warning: its event, the number of spans and the reason."""
    found = []

    class Log:
        def warning(self, event, **fields):
            found.append((event, fields["num_spans"], fields["reason"]))

    monkeypatch.setattr(export_queue, "get_logger", lambda _name: Log())
    return found


def test_failed_exports_are_told_once_a_minute(told):
    exporter = Exporter()
    exporter.fails = True
    queue = ExportQueue(exporter, batch_spans=3, flush_s=60.0)
    for number in range(1, 4):
        for _ in range(3):
            queue.put(record())
        assert until(lambda number=number: len(exporter.batches) == number)
    assert until(lambda: told == [("spans_lost", 3, "ConnectionError: no collector")])
    assert until(lambda: queue._num_lost == 6), "the third has failed too"
    queue._complain_at = 0.0  # a minute later
    queue.put(record())
    queue.close()
    assert told[1:] == [("spans_lost", 7, "ConnectionError: no collector")]


def test_spans_beyond_what_a_queue_holds_are_dropped_and_told(told):
    exporter = Exporter()
    exporter.may_go_on.clear()
    queue = ExportQueue(exporter, batch_spans=8, flush_s=60.0)
    for _ in range(8):
        queue.put(record())
    assert until(lambda: not queue._records)  # they are being exported
    for _ in range(export_queue.QUEUE_SPANS + 5):
        queue.put(record())
    exporter.may_go_on.set()
    queue.close()
    assert sum(exporter.batches) == 8 + export_queue.QUEUE_SPANS
    assert told == [("spans_lost", 5, "queue_full")]


def test_a_span_waits_no_longer_than_the_flush_interval():
    exporter = Exporter()
    queue = ExportQueue(exporter, batch_spans=64, flush_s=0.02)
    queue.put(record())
    assert until(lambda: exporter.batches == [1])
    queue.close()


def test_batches_are_no_larger_than_told():
    exporter = Exporter()
    exporter.may_go_on.clear()
    queue = ExportQueue(exporter, batch_spans=64, flush_s=60.0)
    for _ in range(200):
        queue.put(record())
    exporter.may_go_on.set()
    queue.close()
    assert sum(exporter.batches) == 200
    assert max(exporter.batches) == 64


def test_a_span_that_came_just_before_the_end_is_exported():
    exporter = Exporter()
    queue = ExportQueue(exporter, batch_spans=64, flush_s=60.0)
    queue._thread = threading.current_thread()  # which has just looked for spans, and looks for the end now
    queue.put(record())
    queue._give_up_at = time.monotonic() + 10.0
    queue._run()
    assert exporter.batches == [1]


def test_closing_waits_no_longer_than_two_timeouts_for_an_exporter_that_stands_still(monkeypatch, told):
    monkeypatch.setattr(export_queue, "EXPORT_TIMEOUT_S", 0.05)
    exporter = Exporter()
    exporter.may_go_on.clear()
    queue = ExportQueue(exporter, batch_spans=2, flush_s=60.0)
    for _ in range(100):
        queue.put(record())
    begin = time.monotonic()
    queue.close()
    assert time.monotonic() - begin < 5.0


def test_a_forked_child_exports_what_it_records_and_nothing_of_its_parents():
    read, write = os.pipe()

    class ToPipe(Exporter):
        def export(self, spans):
            os.write(write, b"".join(f"{os.getpid() == parent}:{one.name},".encode() for one in spans))

    parent = os.getpid()
    queue = ExportQueue(ToPipe(), batch_spans=64, flush_s=60.0)
    queue.put(record("parents"))
    if (pid := os.fork()) == 0:
        queue.put(record("childs"))
        queue.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    queue.close()
    os.close(write)
    assert sorted(os.read(read, 1_000).decode().split(",")[:-1]) == ["False:childs", "True:parents"]
    os.close(read)


def test_a_span_keeps_its_first_events(store):
    span = trace.start_span("a")
    for number in range(recorder.MAX_EVENTS + 2):
        span.event(f"e{number}")
    span.end()
    (found,) = store()
    assert [event.name for event in found.events] == [f"e{n}" for n in range(recorder.MAX_EVENTS)]


def test_what_is_said_of_a_span_after_its_end_is_not_kept(store):
    span = trace.start_span("a")
    span.end()
    span.set("late", 1)
    span.event("late")
    span.fail("late")
    assert not span.recording
    (found,) = store()
    assert (found.attributes, found.events, found.error) == ({}, [], "")


def test_half_of_new_traces_are_recorded_at_ratio_one_half(tmp_path):
    trace.setup("test", "test-0", endpoint="", directory=str(tmp_path), sample_ratio=0.5)
    num = sum(trace.start_span("a").recording for _ in range(2_000))
    trace.shutdown()
    assert 800 < num < 1_200  # nine standard deviations


def test_spans_that_a_library_makes_with_the_sdk_reach_the_store_under_ours(tmp_path):
    trace.setup("test", "test-0", endpoint="", directory=str(tmp_path), sample_ratio=1.0, with_libraries=True)
    ours = trace.start_span("ours")
    context = TraceContextTextMapPropagator().extract({"traceparent": ours.traceparent})
    tracer = otel.get_tracer_provider().get_tracer("library")
    theirs = tracer.start_span("theirs", context, attributes={"n": 1})
    theirs.add_event("e", {"i": 2})
    theirs.end()
    unsampled = TraceContextTextMapPropagator().extract({"traceparent": UNSAMPLED})
    tracer.start_span("not sampled", unsampled).end()
    ours.end()
    trace.shutdown()
    lines = b"".join(path.read_bytes() for path in tmp_path.glob("spans-*.jsonl")).splitlines()
    first, second = (msgspec.json.decode(line, type=SpanRecord) for line in lines)
    assert (first.name, first.attributes) == ("theirs", {"n": 1})
    assert [(event.name, event.attributes) for event in first.events] == [("e", {"i": 2})]
    assert (first.trace_id, first.parent_id) == (second.trace_id, second.span_id)
    assert (first.service, first.instance) == (second.service, second.instance) == ("quire-test", "test-0")


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
    for number in range(100):
        exporter.export([record(f"span-{number}")])
    exporter.close()
    files = sorted(path.name for path in tmp_path.glob("spans-*"))
    assert files == [f"spans-test-{os.getpid()}.1.jsonl", f"spans-test-{os.getpid()}.jsonl"]
    assert all((tmp_path / name).stat().st_size <= 2_000 for name in files)
    last = (tmp_path / files[1]).read_bytes().splitlines()[-1]
    assert msgspec.json.decode(last, type=SpanRecord).name == "span-99"


@pytest.fixture
def export_one(tmp_path):
    """Exports a span; every export but the first rotates the file. Yields (export, exporter)."""
    exporter = span_store.JsonlSpanExporter(tmp_path, "test", max_file_bytes=1)
    yield lambda: exporter.export([record()]), exporter
    exporter.close()


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


def test_spans_of_a_process_whose_file_was_pruned_are_in_a_new_one(tmp_path):
    exporter = span_store.JsonlSpanExporter(tmp_path, "test")
    exporter.export([record("before")])
    exporter.path.unlink()
    exporter.export([record("behind")])
    exporter.export([record("last")])
    exporter.close()
    lines = exporter.path.read_bytes().splitlines()
    assert [msgspec.json.decode(line, type=SpanRecord).name for line in lines] == ["behind", "last"]


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
