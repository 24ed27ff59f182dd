"""The profiler: labels, the file, requests, and profiles of simulated and made-up systems."""

import json
import math
from pathlib import Path

import pytest

from loadtest.figures import profile_plots
from loadtest.outcomes import Outcome
from loadtest.profiler import simulated
from loadtest.profiler.core.demand import fair_demand, peak_tokens
from loadtest.profiler.core.profile import (
    Measured,
    Profile,
    Settings,
    Slo,
    decode,
    encode,
    judge,
    label,
    nearest_rank,
)
from loadtest.profiler.core.search import SearchLimits
from loadtest.profiler.requests import WARM, Lengths, of_trace, of_workload
from loadtest.profiler.runner import Observed, Profiler, Spans, served
from shared.errors import InvalidRequest, SettingsError

pytestmark = pytest.mark.slow

GB = 10**9
SMALL = Lengths("small", [(100, 20), (300, 40)])


def settings(**more):
    return Settings(**{"seconds": 20.0, "least_requests": 20, "burst_s": 10.0, **more})


def test_a_run_that_would_be_endless_is_refused_and_says_which_option_is_too_long():
    with pytest.raises(SettingsError, match=r"--seconds 7200: at 200 requests/s more than 1,000,000"):
        SMALL.at_rate(200.0, 7200.0, 20, 1)
    with pytest.raises(SettingsError, match=r"--burst-s 3600: at 5 x 60 requests/s more than 1,000,000"):
        SMALL.burst(60.0, 5.0, 3600.0, 1)


class Line:
    """Holds so many requests at once and serves each in service_ms; the others wait for memory."""

    model, tp, words, is_calibrated, num_instances = "line", 1, "made up", True, 1

    def __init__(self, *, slots, service_ms, pool_tokens, bytes_per_token=1_000_000, fails=()):
        self._slots, self._service_ms, self._fails = slots, service_ms, set(fails)
        self.bytes_per_token = float(bytes_per_token)
        self.pool_bytes = pool_tokens * bytes_per_token
        self.num_runs = 0

    def run(self, requests):
        self.num_runs += 1
        free = [0.0] * self._slots
        out, full = [], Spans()
        held = 0
        for one in requests:
            begin = max(one.arrival_ms, min(free))
            free[free.index(min(free))] = begin + self._service_ms
            if begin > one.arrival_ms:
                previous = full.spans[-1][1] if full.spans else 0.0
                if begin > max(previous, one.arrival_ms):
                    full.note(max(previous, one.arrival_ms), begin, holds=True)
            held = max(held, min(self._slots, sum(at > one.arrival_ms for at in free)))
            failed = one.request_id in self._fails
            out.append(
                Outcome(
                    one.request_id,
                    one.session,
                    0,
                    sent_ms=one.arrival_ms,
                    ttft_ms=begin - one.arrival_ms + 10,
                    jct_ms=begin - one.arrival_ms + self._service_ms,
                    tpot_ms=5.0,
                    prompt_tokens=one.prompt_tokens,
                    output_tokens=0 if failed else one.output_tokens,
                    error="broke" if failed else "",
                )
            )
        peak = min(self.pool_bytes, round(held * 300 * self.bytes_per_token))
        return Observed(out, [(5.0, 1000.0)], peak, full.spans)


def profiled(line, **more):
    limits = SearchLimits(0.5, 1.0, 4.0, 8.0)
    return Profiler(line, SMALL, settings(**more), limits).profile()


# -- labels and the file ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "need", "told"),
    [
        (11 * GB, 0, ("producer", 11 * GB)),
        (11 * GB, 3 * GB, ("producer", 11 * GB)),
        (10 * GB, 0, ("neutral", 0)),
        (2 * GB, 0, ("neutral", 0)),
        (2 * GB, 6 * GB, ("consumer", -6 * GB)),
        (0, 1, ("consumer", -1)),
    ],
)
def test_more_free_than_the_threshold_lends_and_what_bursts_need_is_borrowed(free, need, told):
    assert label(free, need, 10 * GB) == told


def test_a_profile_is_read_as_it_was_written_and_one_that_cannot_be_is_refused():
    found = Profile(
        model="m", tp=2, role="consumer", bytes_per_gpu=-5, stable_rate_per_s=2.5, pool_bytes=9, peak_kv_bytes=8,
        free_bytes=1, swap_bytes={"2": 5},
    )  # fmt: skip
    data = encode(found)
    assert decode(data) == found
    assert json.loads(data) | {"model": "m", "tp": 2, "role": "consumer", "bytes_per_gpu": -5} == json.loads(
        data
    )
    for change in (
        {"role": "producer"},
        {"role": "lender"},
        {"bytes_per_gpu": 5},
        {"tp": 0},
        {"format": "quire-profile/9"},
        {"model": 3},
    ):
        with pytest.raises(SettingsError, match="the profile"):
            decode(json.dumps({**json.loads(data), **change}).encode())
    with pytest.raises(SettingsError, match="no profile"):
        decode(b"[]")


def test_the_slo_is_kept_at_its_shares_and_never_by_requests_that_fail():
    def measured(**more):
        base = {
            "rate_per_s": 1,
            "seed": 1,
            "num_requests": 9,
            "num_failed": 0,
            "ttft_p50_ms": 1,
            "peak_kv_bytes": 1,
        }
        return Measured(**{**base, "ttft_ms": 900, "tbt_ms": 99, **more})

    assert judge(measured(), Slo())
    assert not judge(measured(ttft_ms=1001), Slo())
    assert not judge(measured(tbt_ms=101), Slo())
    assert not judge(measured(ttft_ms=-1), Slo())
    weighted = [(3.0, 1.0), (1.0, 98.0), (2.0, 1.0)]
    assert [nearest_rank(weighted, share) for share in (0.5, 0.98, 0.99, 1.0)] == [1.0, 1.0, 2.0, 3.0]
    assert nearest_rank([], 0.5) == 0.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"slo": {"ttft_ms": 0}},
        {"slo": {"ttft_share": 1.5}},
        {"bursts": (2.0, 1.0)},
        {"bursts": (float("inf"),)},
        {"need_factor": 4.0},
        {"threshold_bytes": -1},
        {"burst_s": 0},
        {"least_requests": 0},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(SettingsError):
        Settings(**{key: Slo(**value) if key == "slo" else value for key, value in wrong.items()})


def test_rates_that_make_no_sense_are_refused():
    for wrong in (
        {"step": 0.0},
        {"low": 11.0},
        {"high": 500.0},
        {"repeats": 2},
        {"max_runs": 0},
        {"step": 2.0},
        {"most": math.inf},
        {"most": math.nan},
        {"most": 1e308},
        {"high": math.inf, "most": math.inf},
    ):
        with pytest.raises(SettingsError):
            SearchLimits(**wrong)


# -- profiles --------------------------------------------------------------------------------------


def test_what_holds_more_than_it_needs_lends_it_and_its_bursts_need_nothing():
    found = profiled(Line(slots=1000, service_ms=1000, pool_tokens=40_000), slo=Slo(ttft_ms=1000))
    assert (found.stable_rate_per_s, found.role) == (8.0, "producer")
    assert "highest rate that is tried" in found.reason
    assert found.bytes_per_gpu == found.free_bytes == found.pool_bytes - found.peak_kv_bytes
    assert set(found.swap_bytes) == {"2", "3", "5"}


def test_what_is_full_in_a_burst_borrows_and_longer_bursts_need_more():
    found = profiled(Line(slots=8, service_ms=2000, pool_tokens=2400))
    assert 1.5 <= found.stable_rate_per_s <= 4.0
    assert found.settled
    assert (found.role, found.bytes_per_gpu) == ("consumer", -found.swap_bytes["2"])
    assert 0 < found.swap_bytes["2"] < found.swap_bytes["3"] < found.swap_bytes["5"]
    assert {one["rate_per_s"] for one in found.runs} >= {
        found.stable_rate_per_s,
        found.stable_rate_per_s + 0.5,
    }
    assert sorted(found.series, key=float) == [f"{found.stable_rate_per_s + more:g}" for more in (0, 0.5)]


def test_without_a_need_and_little_free_it_is_neutral():
    found = profiled(Line(slots=8, service_ms=2000, pool_tokens=40_000, bytes_per_token=100_000))
    assert (found.role, found.bytes_per_gpu) == ("neutral", 0)
    assert set(found.swap_bytes.values()) == {0}


def test_where_no_rate_is_kept_nothing_is_lent_and_no_burst_is_run():
    line = Line(slots=1, service_ms=60_000, pool_tokens=100_000)
    found = profiled(line)
    assert (found.stable_rate_per_s, found.role, found.free_bytes) == (0.0, "neutral", 0)
    assert "no rate" in found.reason
    assert line.num_runs == len(found.runs)
    assert not found.bursts


def test_failed_requests_count_against_the_rate():
    found = profiled(Line(slots=1000, service_ms=100, pool_tokens=99, fails=range(1000)))
    assert found.stable_rate_per_s == 0
    assert found.runs[0]["ttft_ms"] == -1


def test_the_simulated_engine_is_profiled_the_same_way_each_time_and_memory_decides_the_role():
    machine = simulated.machine_of("h200", "llama-8b", 1, chunk_tokens=512)
    lengths = of_workload("sharegpt", context_tokens=2048)

    def one(memory_tokens):
        kept = type(machine)(machine.prices, memory_tokens, machine.calibrated, machine.words)
        runner = simulated.SimulatedRunner(kept, model="llama-8b", tp=1, chunk_tokens=512)
        limits = SearchLimits(8.0, 8.0, 16.0, 32.0, repeats=1)
        asked = settings(seconds=4.0, bursts=(2.0,), burst_s=4.0)
        return Profiler(runner, lengths, asked, limits).profile()

    rich, poor = one(machine.memory_tokens), one(60_000)
    assert rich.role == "producer"
    assert rich.bytes_per_gpu == rich.free_bytes > 50 * GB
    assert rich.swap_bytes["2"] == 0  # the chunk is the bound: nobody ever waits for memory
    assert poor.role == "consumer"
    assert poor.swap_bytes["2"] > 0
    assert 0 < poor.stable_rate_per_s <= rich.stable_rate_per_s
    assert one(60_000) == poor


@pytest.mark.parametrize(
    ("rate", "memory_tokens", "seed"), [(6, 60_000, 1), (8, 100_000, 2), (12, 100_000, 1)]
)
def test_a_bursts_demand_is_about_what_the_engine_would_hold_if_memory_were_unlimited(
    rate, memory_tokens, seed
):
    machine = simulated.machine_of("h200", "llama-8b", 1, chunk_tokens=8192)
    requests = of_workload("sharegpt", context_tokens=2048).burst(rate, 3.0, 10.0, seed)

    def run(tokens):
        kept = type(machine)(machine.prices, tokens, True, "")
        runner = simulated.SimulatedRunner(kept, model="m", tp=1, chunk_tokens=8192)
        return runner, runner.run(requests)

    runner, full = run(memory_tokens)
    _, ample = run(10_000_000)
    demand = peak_tokens(fair_demand(served(full.outcomes), full.full)) * runner.bytes_per_token
    assert full.full
    assert not ample.full
    assert 0.85 < demand / ample.peak_kv_bytes < 1.15
    assert demand > 2 * full.peak_kv_bytes


def test_a_simulated_engine_without_room_for_a_request_says_so():
    machine = simulated.machine_of("h200", "llama-8b", 1, chunk_tokens=512)
    small = type(machine)(machine.prices, 200, True, "")
    runner = simulated.SimulatedRunner(small, model="m", tp=1, chunk_tokens=512)
    with pytest.raises(InvalidRequest, match="has no room"):
        runner.run(SMALL.at_rate(1.0, 10, 5, 1))


def test_measured_costs_are_taken_where_gpu_and_shape_are_those_that_were_measured(tmp_path):
    assert simulated.machine_of("h200", "llama-8b", 1, chunk_tokens=512).calibrated
    for gpu, model, tp in (("h100", "llama-8b", 1), ("h200", "llama-70b", 2), ("h200", "llama-8b", 2)):
        assert not simulated.machine_of(gpu, model, tp, chunk_tokens=512).calibrated
    assert not simulated.machine_of("h200", "llama-8b", 1, chunk_tokens=512, results=tmp_path).calibrated


def test_requests_come_at_the_rate_with_tokens_of_their_own_and_bursts_are_as_the_papers():
    one, other = SMALL.at_rate(5.0, 60, 10, 1), SMALL.at_rate(5.0, 60, 10, 2)
    assert 200 < len(one) < 400
    contents = {part.content for request in [*one, *other] for part in request.prompt}
    assert len(contents) == len(one) + len(other)
    assert len(SMALL.at_rate(0.1, 10, 30, 1)) == 30
    burst = SMALL.burst(5.0, 3.0, 20.0, 1)
    warm_ms = burst[WARM - 1].arrival_ms
    assert 200 < sum(request.arrival_ms > warm_ms for request in burst) < 400
    assert burst[-1].arrival_ms <= warm_ms + 20_000
    assert of_workload("sharegpt", context_tokens=512).longest_tokens() <= 512
    with pytest.raises(SettingsError, match="no workload"):
        of_workload("nothing")
    with pytest.raises(SettingsError, match="cannot be read"):
        of_trace(Path("none.jsonl"))


def test_a_profile_needs_no_times_of_lengths(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("input_tokens,output_tokens\n7,3\n9,2\n")
    assert list(of_trace(path).pairs) == [(7, 3), (9, 2)]


def test_what_follows_is_one_span():
    spans = Spans()
    for begin, end, holds in ((0, 1, False), (1, 2, True), (2, 5, True), (5, 6, False), (6, 7, True)):
        spans.note(begin, end, holds=holds)
    assert spans.spans == [(1, 5), (6, 7)]


def test_plots_are_drawn_of_what_a_profile_has_and_the_same_each_time(tmp_path):
    found = json.loads(encode(profiled(Line(slots=8, service_ms=2000, pool_tokens=2400))))
    first = profile_plots.draw_all(found, tmp_path / "a")
    assert [path.stem for path in first] == ["profile-requests", "profile-rates", "profile-bursts"]
    again = profile_plots.draw_all({**found, "runs": [], "series": {}}, tmp_path / "b")
    assert [path.read_bytes() for path in again] == [first[-1].read_bytes()]
    point = {"batch": 1, "items_per_s": 2.0, "used_bytes": 1, "free_bytes": GB}
    of_batches = {**found, "runs": [], "series": {}, "bursts": [], "batches": [point, {**point, "batch": 2}]}
    assert [path.stem for path in profile_plots.draw_all(of_batches, tmp_path / "c")] == ["profile-batches"]
