"""shared/observe/stages.py and `quire stages`: where the time of all requests went."""

import json
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from deploy.local.cli import app
from shared.observe import stages as observed
from shared.observe.span_record import SpanEvent, SpanRecord
from shared.observe.stages import MAX_SPANS, read_stages, render, stages_of

MS = 1_000_000


def span(trace, name, begin_ms, took_ms, *, parent="x", service="gateway", at=0, **more):
    begin = at + int(begin_ms * MS)
    return SpanRecord(
        trace_id=trace, span_id=f"{trace}{name}", parent_id=parent, name=name, service=f"quire-{service}",
        start_ns=begin, end_ns=begin + int(took_ms * MS), **more,
    )  # fmt: skip


def request(trace, prefill_ms, *, at=0):
    first = [SpanEvent(name="decode.first_token", time_ns=at + int((prefill_ms + 3) * MS))]
    return [
        span(trace, "decode", prefill_ms + 2, 50, service="decode", at=at),
        span(trace, "gateway.receive", 0, prefill_ms + 52, parent="", events=first, at=at),
        span(trace, "prefill", 2, prefill_ms, service="prefill", at=at),
    ]


def test_stages_are_in_the_order_in_which_they_begin_with_median_mean_and_p99():
    times = [10.0] * 98 + [30.0, 500.0]
    stages, num, _ = stages_of(s for i, ms in enumerate(times) for s in request(f"t{i}", ms, at=i * 10**12))
    assert num == 100
    assert [(s.service, s.name) for s in stages] == [
        ("gateway", "gateway.receive"), ("gateway", "first token"), ("prefill", "prefill"), ("decode", "decode"),
    ]  # fmt: skip
    prefill = stages[2]
    assert (prefill.count, prefill.errors, prefill.starts_p50_ms) == (100, 0, 2.0)
    assert (prefill.took_p50_ms, prefill.took_p99_ms) == (10.0, 30.0)
    assert prefill.took_mean_ms == pytest.approx(sum(times) / 100)
    assert stages[1].took_p50_ms == 13.0, "from the request's begin"


def test_what_belongs_to_no_request_that_is_here_does_not_count():
    profile = span("t3", "llm_request", 0, 900, parent="", service="decode")  # of a worker that starts
    stages, num, _ = stages_of([span("t1", "prefill", 0, 5), profile, *request("t2", 1.0)])
    assert num == 1
    assert all(s.count == 1 and s.name != "llm_request" for s in stages)
    assert stages_of([]) == ([], 0, False)


def test_requests_that_a_client_sent_in_one_trace_are_counted_and_begin_each_by_itself():
    spans = []
    for number in range(3):
        one = [
            msgspec.structs.replace(
                each, trace_id="session", span_id=f"{number}{each.name}",
                parent_id=f"{number}gateway.receive" if each.name != "gateway.receive" else "its client's",
            )
            for each in request("t", 10.0, at=number * 60_000 * MS)
        ]  # fmt: skip
        spans += one
    stages, num, _ = stages_of([*reversed(spans), span("session", "lost", 5, 5, parent="nobody's")])
    assert num == 3
    assert [(s.name, s.count, s.starts_p50_ms) for s in stages] == [
        ("gateway.receive", 3, 0.0), ("first token", 3, 0.0), ("prefill", 3, 2.0), ("decode", 3, 12.0),
    ]  # fmt: skip


def test_errors_are_counted_and_shown():
    spans = [
        span("t1", "gateway.receive", 0, 5, parent="client"),
        span("t1", "prefill", 1, 1, error="it broke"),
    ]
    stages, num, _ = stages_of(spans)
    text = render(stages, num)
    assert "1 failed" in text
    assert text.splitlines()[0].startswith("1 requests")


@given(st.lists(st.floats(0.0, 1e4), min_size=1, max_size=200))
def test_quantiles_are_values_that_were_seen_and_in_order(times):
    stages, *_ = stages_of(span(f"t{i}", "gateway.receive", 0, ms, parent="") for i, ms in enumerate(times))
    (one,) = stages
    taken = [round(int(ms * MS) / 1e6, 3) for ms in times]
    assert min(taken) <= one.took_p50_ms <= one.took_p99_ms <= max(taken)
    assert {one.took_p50_ms, one.took_p99_ms} <= set(taken)
    assert sum(t <= one.took_p50_ms for t in taken) >= len(taken) / 2


def write(folder, spans):
    (folder / "spans-gateway-1.jsonl").write_bytes(b"".join(msgspec.json.encode(s) + b"\n" for s in spans))


def test_only_requests_of_the_last_seconds_are_read(tmp_path):
    now = time.time_ns()
    write(tmp_path, [*request("old", 5.0, at=now - 3_600 * 10**9), *request("new", 7.0, at=now - 10**9)])
    (tmp_path / "spans-decode-2.jsonl").write_bytes(b'{"half a li')
    stages, num, _ = read_stages(tmp_path, since_ns=now - 60 * 10**9)
    assert num == 1
    assert next(s for s in stages if s.name == "prefill").took_p50_ms == 7.0
    assert read_stages(tmp_path)[1] == 2
    assert read_stages(tmp_path / "missing") == ([], 0, False)


def test_requests_are_found_behind_more_spans_than_are_looked_at_and_the_answer_says_so(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(observed, "MAX_SPANS", 5)
    now = time.time_ns()
    others = [span("of-no-request", "admit", 0, 1, service="coordinator", at=now) for _ in range(20)]
    lines = [msgspec.json.encode(one) + b"\n" for one in others]
    (tmp_path / "spans-coordinator-1.jsonl").write_bytes(b"".join(lines))  # whose name comes first
    write(tmp_path, request("t1", 5.0, at=now))
    stages, num, is_cut = read_stages(tmp_path)
    assert ({s.name for s in stages}, num) == ({"gateway.receive", "first token", "prefill", "decode"}, 1)
    assert not is_cut

    write(tmp_path, [s for i in range(3) for s in request(f"t{i}", 5.0, at=now)])
    shown = CliRunner().invoke(app, ["stages", "--dir", str(tmp_path)])
    assert shown.output.startswith("more than 5 spans: give a shorter --last")
    assert "3 requests" in shown.output
    as_json = CliRunner().invoke(app, ["stages", "--dir", str(tmp_path), "--json"])
    assert json.loads(as_json.output)["warning"] == "more than 5 spans: give a shorter --last"


@pytest.mark.slow
def test_memory_is_bounded():
    endless = (span("t1", "gateway.receive", 0, 1, parent="") for _ in range(10**12))
    stages, _, is_cut = stages_of(endless)
    assert (stages[0].count, is_cut) == (MAX_SPANS, True)


def test_the_command_prints_a_table_or_json_and_says_when_there_is_nothing(tmp_path):
    write(tmp_path, request("t1", 5.0, at=time.time_ns() - 10**9))
    shown = CliRunner().invoke(app, ["stages", "--dir", str(tmp_path)])
    assert shown.exit_code == 0
    assert "prefill/prefill" in shown.output
    as_json = CliRunner().invoke(app, ["stages", "--dir", str(tmp_path), "--json"])
    found = json.loads(as_json.output)
    assert (found["num_requests"], found["warning"]) == (1, "")
    nothing = CliRunner().invoke(app, ["stages", "--dir", str(tmp_path), "--last", "0.001"])
    assert nothing.exit_code == 1
    assert CliRunner().invoke(app, ["stages", "--last", "-1"]).exit_code == 2
