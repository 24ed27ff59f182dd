"""`quire advise`: the rate of a stretch whose requests all come at once is its trace's, which may have none."""

import json
import math

import pytest
from typer.testing import CliRunner

from deploy.local.cli import app
from loadtest.reports.summary import Slo
from loadtest.simulator.advise import Advisor, Question
from loadtest.simulator.hardware import from_data_sheet
from loadtest.simulator.request import mean_rate_per_s
from shared.errors import InvalidRequest
from tests.support.simulated import plain

MACHINE = from_data_sheet("h200", "llama-8b")
# 40 at once, then one every 10 s
TICK = [plain(n, 10_000.0 * max(0, n - 39), 3_000, 5) for n in range(80)]


def advised(requests, most=40):
    question = Question(requests, MACHINE, 2, Slo(0.01, 50), most_requests=most)
    return Advisor(question, lambda: 0.0, 1.0).advise()


def test_a_stretch_at_one_instant_has_the_rate_of_its_trace_and_is_a_burst_of_it():
    advice = advised(TICK)
    assert (
        advice.trace_rate_per_s == advice.whole_rate_per_s == pytest.approx(mean_rate_per_s(TICK), abs=1e-4)
    )
    assert advice.is_burst
    assert not advised(TICK, most=80).is_burst


def test_a_trace_that_comes_all_at_once_is_said_to_have_no_rate():
    closer = [[plain(0, 0.0, 100, 5), plain(1, at_ms, 100, 5)] for at_ms in (5e-324, 1e-305, 1e-12)]
    for requests in (TICK[:1], TICK[:40], *closer):
        with pytest.raises(InvalidRequest, match="no rate: all of its requests come at one time"):
            advised(requests)


def test_layouts_that_sustain_all_that_was_tried_are_undecided_and_what_ended_it_is_named():
    trace = [plain(n, 250.0 * n, 800, 20) for n in range(12)]  # 4/s
    top_per_s = 2 ** (118 / 16)  # 166/s: more would take runs of over 8,000 requests

    def compared(colocated, split):
        advisor = Advisor(Question(trace, MACHINE, 2, Slo(4_000, 50)), lambda: 0.0, 1.0)
        advisor._holds = lambda layout, rate_per_s, _link: (
            rate_per_s <= (split if layout.is_split else colocated)
        )
        return advisor.advise()

    for colocated in (math.inf, top_per_s / 1.02):  # the other one may do more than the 1.04x that was seen
        advice = compared(colocated, math.inf)
        assert (advice.decided, advice.disaggregate) == (False, False)
        assert advice.sentence.startswith("Undecided: 2 colocated sustain ")
        assert (
            "(1 prefill to 1 decode) at least 166.00, all that was tried. A run at more would have over 8,000"
            in (advice.sentence)
        )
    for split in (top_per_s / 1.02, 1.0):
        advice = compared(math.inf, split)
        assert (advice.decided, advice.disaggregate) == (True, False)
        assert advice.sentence.startswith("Keep them colocated: 2 colocated sustain at least 166.00 ")
    advice = compared(top_per_s / 1.1, math.inf)
    assert (advice.decided, advice.disaggregate) == (True, True)
    assert "at least 1.1" in advice.sentence


def test_the_command_says_that_the_one_tick_is_a_burst(tmp_path):
    path = tmp_path / "t.csv"
    rows = "".join(f"{one.arrival_ms:.0f},3000,5\n" for one in TICK)
    path.write_text("timestamp,input_tokens,output_tokens\n" + rows)
    words = ["advise", str(path), "--gpus", "2", "--slo-ttft-ms", "0.01", "--requests", "40"]
    told = " ".join(CliRunner().invoke(app, words).stdout.split())
    assert "40 requests at 0.20/s" in told
    assert "The stretch is a burst of a trace with 0.20 requests/s" in told
    assert json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["is_burst"]
