"""Outcomes, summaries and reports of runs, from made-up runs of known figures."""

import json
import math
import re

import numpy as np
import pytest

from loadtest import report
from loadtest.outcomes import Outcome, Run, read_run, sources_of, take_receipt, write_run
from loadtest.reports import plots, render, summary
from loadtest.reports.summary import Slo, bootstrap, nearest_rank, summarise
from loadtest.sse import read_pieces
from loadtest.workloads.shelf import NothingLeft, Shelf

RECEIPT = {
    "placement": "disaggregated",
    "policy": "prompt_tree",
    "reason": "prefill-1 holds 96 prompt tokens",
    "predicted_ttft_ms": 12.5,
    "times": {"hold": {"predicted_ms": None, "actual_ms": 0.0}, "fetch": {"predicted_ms": 2.2, "actual_ms": 6.4}},
    "stages": [
        {"instance": "prefill-1", "prompt_tokens": 128, "tokens_engine": 32, "tokens_pool": 64, "tokens_peer": 24,
         "tokens_remote": 8, "tokens_computed": 32, "queue_ms": 1.5, "compute_ms": 7.25, "bytes_moved": 100},
        {"instance": "decode-0", "tokens_pool": 128, "bytes_moved": 11},
    ],
}  # fmt: skip


def run(name: str = "a", slow: float = 1.0, failures: int = 0) -> Run:
    outcomes = []
    for number in range(200):
        one = Outcome(number, f"s-{number}", 0, due_ms=number * 100.0, sent_ms=number * 100.0 + 1, lag_ms=1.0)
        one.ttft_ms, one.tpot_ms, one.jct_ms = slow * (number + 1), slow * 2.0, slow * (number + 101)
        one.prompt_tokens, one.output_tokens = 100, 10
        take_receipt(one, RECEIPT)
        if number < failures:
            one.error = "status 503"
        outcomes.append(one)
    return Run({"name": name, "workload": "made-up", "rate_per_s": 10, "seed": 1, "model": "m"}, outcomes)


def test_a_receipt_counts_every_prompt_token_once():
    outcome = Outcome(0, "s", 0)
    take_receipt(outcome, RECEIPT)
    assert outcome.sources == {"engine": 32, "pool": 32, "peer": 24, "remote": 8, "computed": 32}
    assert sum(outcome.sources.values()) == 128
    assert outcome.instances == ["prefill-1", "decode-0"]
    assert outcome.bytes_moved == 111
    assert outcome.stages == {"queue_ms": 1.5, "fetch_ms": 0.0, "compute_ms": 7.25}
    assert outcome.times == {"hold": [None, 0.0], "fetch": [2.2, 6.4]}
    take_receipt(outcome, None)
    assert outcome.policy == "prompt_tree"
    assert sources_of({}) == {}


def test_runs_come_back_from_their_file(tmp_path):
    before = run()
    write_run(tmp_path / "run.jsonl", before)
    after = read_run(tmp_path / "run.jsonl")
    assert after.outcomes == before.outcomes
    assert after.name == "a"
    (tmp_path / "other.jsonl").write_text('{"timestamp": 0}\n')
    with pytest.raises(ValueError, match="not the head"):
        read_run(tmp_path / "other.jsonl")
    (tmp_path / "broken.jsonl").write_text('{"format": "quire-run/1"}\n{"turn": 1}\n')
    with pytest.raises(ValueError, match=r"broken\.jsonl:2"):
        read_run(tmp_path / "broken.jsonl")


@pytest.mark.parametrize(
    ("head", "row", "line"),
    [
        ({}, {"ttft_ms": "soon"}, 2),
        ({}, {"output_tokens": None}, 2),
        ({}, {"sources": [1]}, 2),
        ({}, {"times": {"fetch": 1}}, 2),
        ({"hit_bound": "most"}, {}, 1),
        ({"machine": ["a CPU"]}, {}, 1),
        ({"machine": {"gpu": 8}}, {}, 1),
    ],
)
def test_a_value_of_another_type_in_a_runs_file_is_refused_by_file_and_line(
    tmp_path, capsys, head, row, line
):
    good = {"request_id": 0, "session": "s", "turn": 0, "of_a_later_version": []}
    text = [json.dumps({"format": "quire-run/1", **head}), json.dumps({**good, **row})]
    (tmp_path / "odd.jsonl").write_text("\n".join(text))
    assert report.main([str(tmp_path / "odd.jsonl"), "--out", str(tmp_path / "report")]) == 2
    assert f"odd.jsonl:{line}: " in capsys.readouterr().err


def test_percentiles_goodput_and_hits_are_those_of_the_requests():
    found = summarise(run(failures=10), Slo(ttft_ms=100, tpot_ms=50))
    assert found.num_failed == 10
    assert found.times["ttft_ms"]["p50"].value == 105  # of 11 ... 200
    assert found.times["ttft_ms"]["p99"].value == 199
    assert found.slo_share.value == pytest.approx(90 / 200)
    assert found.goodput.value == pytest.approx(90 / 200 * 199 / 19.9)  # so many gaps in so many seconds
    assert found.requests_per_s == pytest.approx(190 / found.seconds)
    assert found.hit.value == pytest.approx(96 / 128)
    assert found.sources["computed"] == pytest.approx(0.25)
    assert found.predicted["p50"].value == pytest.approx(
        1 - 12.5 / 105, abs=0.01
    )  # 12.5 ms was said each time
    for times in found.times.values():
        assert all(one.low <= one.value <= one.high for one in times.values())


def steady(number: int, answered: int) -> Run:
    """One a second, 500 ms each; later ones fail."""
    rows = [Outcome(n, f"s{n}", 0, due_ms=n * 1000.0, sent_ms=n * 1000.0) for n in range(number)]
    for one in rows[:answered]:
        one.ttft_ms, one.jct_ms, one.tpot_ms, one.output_tokens = 50.0, 500.0, 5.0, 10
    return Run({"hit_bound": 0.5}, rows)


@pytest.mark.parametrize("number", [2, 3, 10])
def test_goodput_is_not_above_the_rate_that_was_offered(number):
    assert summarise(steady(number, number), Slo()).goodput.value == pytest.approx(1.0)


def test_a_server_that_stops_answering_does_not_look_as_fast_as_before():
    found = summarise(steady(1000, 100), Slo())
    assert found.seconds == pytest.approx(999.0)
    assert found.requests_per_s == pytest.approx(100 / 999)
    assert found.output_tokens_per_s == pytest.approx(1000 / 999)
    assert found.goodput.value == pytest.approx(0.1)


def test_goodput_of_users_that_wait_for_answers_is_that_of_the_runs_seconds():
    """Eight users: their first requests come at once, and their gaps are no rate."""
    rows = [Outcome(n, f"s{n}", 0, due_ms=1.0 * (n % 8), sent_ms=1.0 * (n % 8)) for n in range(8)]
    for one in rows:
        one.ttft_ms, one.jct_ms, one.tpot_ms, one.output_tokens = 50.0, 4_000.0 - one.sent_ms, 5.0, 10
    found = summarise(Run({"client": "locust"}, rows), Slo())
    assert found.goodput.value == pytest.approx(2.0)
    assert found.goodput.low < 2.0 == pytest.approx(found.goodput.high)
    open_loop = summarise(Run({}, rows), Slo())
    assert open_loop.goodput.value == pytest.approx(1000.0), "seven gaps of a millisecond"


def test_what_the_end_of_a_run_cut_off_is_counted_apart_and_misses_the_slo_only_where_it_was_late_already():
    whole = steady(5, 5)
    early, late, slow = (
        Outcome(5, "e", 0, sent_ms=4_900.0, jct_ms=100.0, cut_off=True),
        Outcome(6, "l", 0, sent_ms=1_000.0, jct_ms=4_000.0, cut_off=True),
        Outcome(7, "s", 0, sent_ms=1_000.0, jct_ms=4_000.0, ttft_ms=100.0, output_tokens=3, cut_off=True),
    )
    found = summarise(Run({}, [*whole.outcomes, early, late, slow]), Slo(ttft_ms=2_000))
    assert (found.num_requests, found.num_failed, found.num_cut_off) == (8, 0, 3)
    assert found.slo_share.value == pytest.approx(5 / 6)
    assert "3 cut off" in summary.one_line(found)
    rows = dict(render.tables([whole], [found]))["Overview (SLO: TTFT 2000 ms, TPOT 100 ms)"]
    assert rows[1][rows[0].index("cut off")] == "3"


def test_a_share_of_few_requests_is_not_said_to_be_certain():
    for answered, low, high in ((5, 0.5655, 1.0), (0, 0.0, 0.4345), (4, 0.3755, 0.9638)):
        share = summarise(steady(5, answered), Slo()).slo_share
        assert (share.value, share.low, share.high) == pytest.approx((answered / 5, low, high), abs=1e-4)


def test_every_column_of_a_report_has_a_heading():
    made = [steady(5, 5), run()]
    found = [summarise(one, Slo()) for one in made]
    for title, rows in render.tables(made, found):
        assert {len(row) for row in rows} == {len(rows[0])}, title


@pytest.mark.slow
def test_a_warm_up_is_left_out_and_the_bound_of_hits_is_shown_of_whole_runs_alone(tmp_path):
    whole = run()
    whole.head["hit_bound"] = 0.829
    late = summary.between(whole, 10, 15)
    assert [one.request_id for one in late.outcomes] == list(range(100, 150))
    found = render.write_report([late], tmp_path, Slo())
    assert (found[0].num_requests, found[0].hit_bound) == (50, None)
    assert "82.9%" not in (tmp_path / "report.md").read_text(), "others than these 50 had a part in it"
    render.write_report([summary.between(whole, 0, math.inf)], tmp_path, Slo())
    assert "82.9%" in (tmp_path / "report.md").read_text()


def test_a_bootstrap_interval_covers_the_true_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(5)
    covered = 0
    for seed in range(100):
        one = bootstrap(rng.exponential(10, size=80), lambda v: v.mean(axis=-1), seed=seed, resamples=200)
        covered += one.low <= 10 <= one.high
    assert covered >= 86
    assert nearest_rank(np.array([[3.0, 1.0, 2.0]]), 0.5).tolist() == [2.0]
    with pytest.raises(ValueError, match="no values"):
        bootstrap(np.array([]), lambda v: v)


@pytest.mark.slow
def test_a_run_without_answers_and_one_without_receipts_are_reported_too(tmp_path):
    bare = run("bare")
    for one in bare.outcomes:
        one.sources, one.cached_tokens = {}, 40
    dead = run("dead", failures=200)
    found = render.write_report([bare, dead], tmp_path, Slo())
    assert found[0].hit.value == pytest.approx(0.4)
    assert found[1].num_failed == 200
    assert found[1].times == {}
    assert "dead" in (tmp_path / "report.md").read_text()


@pytest.mark.slow
def test_a_report_stands_alone_shows_all_runs_and_is_the_same_each_time(tmp_path, capsys):
    runs = [run("fast"), run("slow <1>", slow=3.0)]
    runs[1].head["client_verdict"] = "it was late"
    for number, one in enumerate(runs):
        write_run(tmp_path / f"{number}.jsonl", one)
    paths = [str(tmp_path / "0.jsonl"), str(tmp_path / "1.jsonl")]
    assert report.main([*paths, "--out", str(tmp_path / "report")]) == 0
    page = (tmp_path / "report" / "report.html").read_text()
    assert page.count("<svg") == 3
    assert not re.search(r"(src|href)=[\"']?(?!#)", page.replace('xlink:href="#', ""))
    assert "slow &lt;1&gt;" in page
    assert "the client was the bottleneck: it was late" in page
    text = (tmp_path / "report" / "report.md").read_text()
    for word in ("TTFT", "TPOT", "JCT", "Hit rates by tier", "fast", "p99", "predicted TTFT"):
        assert word in text
    assert report.main([*paths, "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "report.html").read_text() == page
    assert report.main([str(tmp_path / "none.jsonl")]) == 2
    assert "fast" in capsys.readouterr().out
    assert summary.one_line(summarise(runs[0], Slo())).startswith("fast: 200 requests")


def test_requests_in_flight_are_all_that_were_sent_whatever_became_of_them():
    lasting = {"sent_ms": 1_000.0, "jct_ms": 2_000.0}
    rows = [
        Outcome(0, "whole", 0, ttft_ms=50.0, output_tokens=3, **lasting),
        Outcome(1, "failed", 0, error="status 503", **lasting),
        Outcome(2, "cut", 0, cut_off=True, **lasting),
        Outcome(3, "skipped", 0, skipped=True, error="the turn before it failed"),
    ]
    figure = plots.timeline([Run({}, rows)])
    axes, twin = figure.axes
    (shaded,) = twin.collections
    assert max(y for _, y in shaded.get_paths()[0].vertices) == 3
    assert len(axes.collections[0].get_offsets()) == 1, "dots are of whole answers"
    plots.svg(figure, "x")
    rows[1].jct_ms = 600_000.0
    assert summarise(Run({}, rows), Slo()).seconds == pytest.approx(2.0), "until the last answer's end"


@pytest.mark.slow
def test_runs_of_one_name_and_names_like_formulas_are_shown_apart_and_as_they_are(tmp_path):
    runs = [run("cost"), run("cost", slow=2.0), run("cost$^$x"), run("cost (2)")]
    told = render.told_apart(runs)
    assert [one.name for one in told] == ["cost", "cost (2)", "cost$^$x", "cost (2) (2)"]
    summaries = [summarise(one, Slo()) for one in told[:3]]
    axes = plots.sources(summaries).axes[0]
    assert {(bar.get_y(), bar.get_height()) for bar in axes.patches} == {(y - 0.4, 0.8) for y in range(3)}
    assert [label.get_text() for label in axes.get_yticklabels()][2] == r"cost\$^\$x"
    render.write_report(runs[:3], tmp_path, Slo())
    assert "cost (2)" in (tmp_path / "report.md").read_text()


def test_events_have_the_time_of_the_piece_that_ended_them():
    body = b'data: {"choices": [{"text": "a", "token_ids": [5]}]}\n\n'
    last = b'data: {"choices": [], "quire_receipt": {"policy": "cost"}}\n\ndata: [DONE]\n\n'
    pieces = [(10.0, body[:20]), (11.0, body[20:] + body[:9]), (12.5, body[9:]), (13.0, last)]
    times = read_pieces(pieces, 9.0)
    assert (times.ttft_ms, times.last_ms) == (2_000, 3_500)
    assert times.token_ids == [5, 5]
    assert times.receipt == {"policy": "cost"}


def test_a_shelf_gives_whole_sessions_without_end():
    shelf = Shelf.of_workload("sharegpt", 1)
    for _ in range(150):
        session = shelf.take()
        assert [one.turn for one in session] == list(range(len(session)))
        assert len({one.session for one in session}) == 1


def test_a_shelf_of_a_workload_is_told_the_workloads_options():
    first = Shelf.of_workload("loogle", 1, {"document_tokens": 50}, factor=0.5).take()[0]
    longer = Shelf.of_workload("loogle", 1, {"document_tokens": 500}).take()[0]
    assert first.prompt_tokens < 60 < 500 < longer.prompt_tokens
    with pytest.raises(ValueError, match="no use for share_ratio"):
        Shelf.of_workload("react", 1, {"share_ratio": 2})


def test_a_shelf_of_a_workload_without_a_request_is_refused_and_does_not_look_for_one_for_ever():
    with pytest.raises(ValueError, match="the workload loogle has no request with these options"):
        Shelf.of_workload("loogle", 1, {"num_sessions": 0})


@pytest.mark.parametrize("name", ["trace.jsonl", "lengths.csv"])
def test_a_shelf_of_a_trace_gives_each_session_once(tmp_path, name):
    path = tmp_path / name
    lines = {
        "trace.jsonl": [
            '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}',
            '{"timestamp": 9, "input_length": 1200, "output_length": 5, "hash_ids": [1, 2, 3]}',
            '{"timestamp": 9, "input_length": 100, "output_length": 7, "hash_ids": [9]}',
        ],
        "lengths.csv": ["ContextTokens,GeneratedTokens", "600,5", "1200,5", "100,7"],
    }
    path.write_text("\n".join(lines[name]) + "\n")
    shelf = Shelf.of_trace(path, factor=0.1, context_tokens=100)
    taken = []
    while len(taken) < 3:
        taken += shelf.take()
    with pytest.raises(NothingLeft):
        shelf.take()
    assert len(taken) == 3
    assert {one.output_tokens for one in taken} == {1}
    assert max(one.prompt_tokens for one in taken) <= 100 - 1
