"""Pauses between requests cost a simulation no time and change nothing, and a run keeps to the time that it has."""

import math
import re
from dataclasses import replace

import pytest

from loadtest.reports.summary import Slo
from loadtest.simulator import reports
from loadtest.simulator.advise import Advisor, Question
from loadtest.simulator.cluster import Simulation, simulate
from loadtest.simulator.hardware import from_data_sheet
from loadtest.simulator.links import Rate, gb_per_s
from loadtest.simulator.spec import ClusterSpec, Death, roles_of
from services.scheduler.core.predict import CostSettings
from tests.support.simulated import BLOCK_TOKENS, PRICES, conversations, plain

MACHINE = from_data_sheet("h200", "llama-8b")
SPEC = ClusterSpec(
    roles_of(2, 2), block_tokens=BLOCK_TOKENS, memory_tokens=6_000, remote=gb_per_s(0.01), noise=0.1
)


def with_pauses(seed):
    """Every fifth request comes so much later, and all behind it."""
    later_ms, out = 0.0, []
    for number, request in enumerate(conversations(seed)):
        later_ms += (number % 5 == 0) * (11_000.3, 40_000.0, 90_000.77)[number % 3]
        out.append(replace(request, arrival_ms=request.arrival_ms + later_ms))
    return out


def test_an_hour_without_requests_costs_no_more_than_a_minute():
    spec = ClusterSpec(roles_of(0, 0, 4), block_tokens=BLOCK_TOKENS)
    minute, hour = (
        simulate(spec, PRICES, [plain(n, n * pause_ms, 100, 20) for n in range(3)])
        for pause_ms in (60_000, 3_600_000)
    )
    assert hour.num_events < 1.5 * minute.num_events
    assert hour.end_ms > 7_200_000
    times = [[one.ttft_ms for one in found.outcomes] for found in (minute, hour)]
    assert times[0] == pytest.approx(times[1])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("deaths", [(), (Death(30_000.0, 1), Death(300_000.0, 2))])
def test_behind_a_pause_everything_goes_on_as_if_every_report_had_been_heard(seed, deaths, monkeypatch):
    requests, spec = with_pauses(seed), replace(SPEC, seed=seed, deaths=deaths)
    found = simulate(spec, PRICES, requests)
    monkeypatch.setattr(reports, "IDLE_MS", math.inf)
    heard = simulate(spec, PRICES, requests)
    assert found.num_events < 0.8 * heard.num_events
    assert replace(found, num_events=0) == replace(heard, num_events=0)


def test_nothing_is_passed_over_while_a_request_waits(monkeypatch):
    # decode has room for three, whose KV is long on its way; the fourth is held for 5 s, as reports find
    spec = ClusterSpec(
        roles_of(1, 1), block_tokens=16, memory_tokens=640, cost=CostSettings(disaggregation="always"),
        remote=Rate(0.0, 1.0),
    )  # fmt: skip
    requests = [plain(n, n * 5.0, 160, 120) for n in range(4)]
    found = simulate(spec, PRICES, requests)
    assert any("It waited 5" in one.reason for one in found.outcomes)
    monkeypatch.setattr(reports, "IDLE_MS", math.inf)
    assert simulate(spec, PRICES, requests).outcomes == found.outcomes


def test_a_run_ends_when_its_time_does_though_no_request_has_ended():
    looks = iter(range(50))
    spec = ClusterSpec(roles_of(0, 0, 1), memory_tokens=1 << 21)
    requests = [plain(0, 0.0, 100, 1_000_000)]
    found = Simulation(spec, PRICES, requests, is_late=lambda: next(looks, None) is None).run()
    assert found.outcomes == []
    assert found.end_ms < 5_000


def test_a_trace_that_is_no_load_at_its_highest_rate_is_said_to_be_too_sparse():
    for gap_ms in (43_200_000.0, 1e11):
        requests = [plain(n, n * gap_ms, 100, 20) for n in range(3)]
        advice = Advisor(Question(requests, MACHINE, 2, Slo(2_000, 50)), lambda: 0.0, 1.0).advise()
        assert re.match(r"Undecided: 2 colocated sustain at least (0\.0|\de-)", advice.sentence)
        assert not advice.decided
        assert "too sparse to tell them apart: 1,024 times its own rate" in advice.sentence
        assert 0 < advice.trace_rate_per_s < 1e-4
        assert "0.00 " not in advice.sentence
