"""Workloads have the published statistics: KS distance of lengths at most 0.05, infinite-cache hits within a point,
index of dispersion within 10%. Where QUIRE_TRACES names a folder with the real files, they are compared with them too.
"""

import os
from functools import cache
from pathlib import Path
from statistics import NormalDist, mean

import pytest

from loadtest.workloads import arrivals, conversations, published, stats, trace_files
from loadtest.workloads.catalogue import Options, build
from loadtest.workloads.distributions import Bounded, Draws, Knots, Lognormal
from loadtest.workloads.request import Request

KS, HIT_POINTS, DISPERSION = 0.05, 0.01, 0.10
TRACES = Path(os.environ.get("QUIRE_TRACES", "does-not-exist"))
LONG = 200_000  # arrivals: an index of dispersion of 72 is not to be had from few


@cache
def workload(name: str, num_requests: int) -> tuple[Request, ...]:
    return tuple(build(name, Options(num_requests=num_requests, seed=11)))


def prompts(name: str, num_requests: int = 4_000) -> list[int]:
    return [one.prompt_tokens for one in workload(name, num_requests)]


def outputs(name: str, num_requests: int = 4_000) -> list[int]:
    return [one.output_tokens for one in workload(name, num_requests)]


def shares_below(values: list[int], points: tuple[float, ...]) -> list[float]:
    return [sum(value <= point for value in values) / len(values) for point in points]


@pytest.mark.parametrize(
    ("name", "kind", "quantiles"),
    [
        ("mooncake-conversation", "in", (6_909, 27_367, 85_401)),
        ("mooncake-conversation", "out", (350, 597, 1_120)),
        ("mooncake-synthetic", "in", (11_587, 38_615, 66_458)),
        ("mooncake-synthetic", "out", (69, 389, 769)),
        ("azure-code", "in", (1_469, 5_194, 7_436)),
        ("azure-code", "out", (13, 55, 252)),
        ("azure-conv", "in", (1_020, 2_735, 4_142)),
        ("azure-conv", "out", (129, 424, 601)),
        ("aqua", "in", (1_730, 5_696)),
        ("aqua", "out", (415, 834)),
    ],
)
def test_lengths_have_the_published_median_p90_and_p99(name, kind, quantiles):
    values = prompts(name) if kind == "in" else outputs(name)
    for share, wanted in zip(shares_below(values, quantiles), (0.5, 0.9, 0.99), strict=False):
        assert abs(share - wanted) <= KS


@pytest.mark.parametrize(
    ("name", "wanted_in", "wanted_out"),
    [
        ("mooncake-conversation", 12_035, 343),
        ("mooncake-synthetic", 15_325, 149),
        ("azure-code", 2_048, 28),
        ("azure-conv", 1_155, 211),
        ("arxiv-long", 29_000, 348),
    ],
)
def test_mean_lengths_are_the_published_ones(name, wanted_in, wanted_out):
    assert mean(prompts(name)) == pytest.approx(wanted_in, rel=0.06)
    assert mean(outputs(name)) == pytest.approx(wanted_out, rel=0.06)


def test_arxiv_prompts_stay_in_the_published_range():
    assert min(prompts("arxiv-long")) >= 22_000
    assert max(prompts("arxiv-long")) <= 45_000


def test_chats_have_the_published_turns_and_lengths_a_turn():
    requests = build("sharegpt", Options(num_requests=6_000, seed=4, think_ms=0))
    turns: dict[str, int] = {}
    for one in requests:
        turns[one.session] = turns.get(one.session, 0) + 1
    assert mean(turns.values()) == pytest.approx(5.75, rel=0.05)
    assert mean(count > 1 for count in turns.values()) == pytest.approx(0.73, abs=0.02)
    asked = [one.prompt[-1].num_tokens for one in requests]
    answered = [one.output_tokens for one in requests]
    assert mean(asked) == pytest.approx(161, rel=0.05)
    assert mean(answered) == pytest.approx(338, rel=0.05)
    assert stats.ks_to(asked, conversations.CHAT.asked) <= KS
    assert stats.ks_to(answered, conversations.CHAT.answered) <= KS


@pytest.mark.parametrize(
    ("name", "wanted"), [("mooncake-synthetic", 0.651), ("mooncake-conversation", 0.374)]
)
@pytest.mark.parametrize("seed", [1, 2])
def test_an_infinite_cache_hits_as_published(name, wanted, seed):
    requests = build(name, Options(num_requests=4_000, seed=seed))
    assert stats.infinite_cache_hit_ratio(requests) == pytest.approx(wanted, abs=HIT_POINTS)


def test_synthetic_prompts_share_all_or_nothing_and_conversations_their_first_block():
    requests = workload("mooncake-synthetic", 4_000)
    shares = [
        hits / one.prompt_tokens for hits, one in zip(stats.cached_tokens(requests), requests, strict=True)
    ]
    assert mean(share == 0 for share in shares) == pytest.approx(0.55, abs=0.03)
    assert mean(share > 0.5 for share in shares) == pytest.approx(0.44, abs=0.03)
    conversation = workload("mooncake-conversation", 4_000)
    cached = stats.cached_tokens(conversation)
    assert all(
        hits >= 512
        for hits, one in list(zip(cached, conversation, strict=True))[1:]
        if one.prompt_tokens >= 512
    )
    ratios = sorted(h / one.prompt_tokens for h, one in zip(cached, conversation, strict=True))
    for share, wanted in ((0.25, 0.07), (0.5, 0.36), (0.75, 0.71), (0.9, 0.95)):
        assert ratios[int(share * len(ratios))] == pytest.approx(wanted, abs=0.08)


@pytest.mark.parametrize(
    ("process", "window_ms", "wanted"),
    [
        (arrivals.Poisson(3.9), 10_000, 1.0),
        (published.mooncake_conversation_arrivals(3.4), 30_000, 1.0),
        (arrivals.Gamma(5, shape=0.25), 10_000, 4.0),
        (published.azure_conv_arrivals(5.5), 10_000, 3.9),
        (published.azure_code_arrivals(2.5), 10_000, 72),
        (published.azure_code_arrivals(0.5), 50_000, 72),  # a slower run has the same bursts
    ],
)
def test_counts_have_the_published_index_of_dispersion(process, window_ms, wanted):
    times_ms = arrivals.take(process, "dispersion", 3, num_requests=LONG)
    assert stats.index_of_dispersion(times_ms, window_ms) == pytest.approx(wanted, rel=DISPERSION)
    assert len(times_ms) / times_ms[-1] * 1000 == pytest.approx(process_rate(process), rel=0.05)


def process_rate(process) -> float:
    return getattr(process, "rate_per_s", 0) or process.inner.rate_per_s


def test_gaps_vary_as_published():
    conv = arrivals.take(published.azure_conv_arrivals(5.5), 1, num_requests=20_000)
    assert stats.gap_variation(conv) == pytest.approx(1.09, rel=0.07)
    assert stats.gap_variation(arrivals.take(arrivals.Poisson(1), 1, num_requests=20_000)) == pytest.approx(
        1, rel=0.03
    )
    assert stats.gap_variation(arrivals.take(published.azure_code_arrivals(2.5), 1, num_requests=20_000)) > 7


def test_on_off_and_open_ended_arrivals_are_refused():
    with pytest.raises(ValueError, match="no on/off process"):
        arrivals.OnOff(1, peak=2, dispersion=500, window_requests=10).switching_per_request()
    with pytest.raises(ValueError, match="how many requests"):
        arrivals.take(arrivals.Poisson(1), 1)
    with pytest.raises(ValueError, match="two whole windows"):
        stats.index_of_dispersion([1, 2, 3], 10)


def test_knots_go_through_what_is_stated_and_have_the_stated_mean_of_logarithms():
    import math

    stated = Knots.stated(1_469, 5_194, 7_436, mean_of_log=7.0)
    for share, value in ((0.5, 1_469), (0.9, 5_194), (0.99, 7_436)):
        assert stated.quantile(share) == pytest.approx(value)
    logs = [math.log(stated.quantile((step + 0.5) / 20_000)) for step in range(20_000)]
    assert mean(logs) == pytest.approx(7.0, abs=0.01)
    with pytest.raises(ValueError, match="grow"):
        Knots((0.5, 0.4), (1, 2))


def test_distances_are_those_of_the_textbook():
    assert stats.ks_between([1, 2, 3], [1, 2, 3]) == 0
    assert stats.ks_between([1, 2], [3, 4]) == 1
    assert stats.ks_between([1, 2, 3, 4], [3, 4, 5, 6]) == 0.5
    draws = Draws(1, "ks")
    normal = Lognormal(5, 1)
    assert stats.ks_to([draws.of(normal) for _ in range(2_000)], normal) < 0.02
    assert stats.ks_to([draws.of(Lognormal(5.3, 1)) for _ in range(2_000)], normal) > 0.08
    assert Bounded(0, 10, 3).quantile(1 - 1e-12) == pytest.approx(10, abs=0.01)
    assert Lognormal(0, 1).quantile(0.9) == pytest.approx(2.718 ** NormalDist().inv_cdf(0.9), rel=0.01)


def real(name: str) -> Path:
    path = TRACES / name
    if not path.is_file():
        pytest.skip(f"QUIRE_TRACES names no folder with {name}")
    return path


def test_the_synthetic_mooncake_file_and_its_likeness_agree():
    theirs = trace_files.read(real("mooncake_synthetic_trace.jsonl"))
    ours = build("mooncake-synthetic", Options(num_requests=len(theirs), seed=1))
    assert stats.ks_between([o.prompt_tokens for o in ours], [t.prompt_tokens for t in theirs]) <= KS
    assert stats.ks_between([o.output_tokens for o in ours], [t.output_tokens for t in theirs]) <= KS
    hits = [stats.infinite_cache_hit_ratio(one) for one in (ours, theirs)]
    assert hits[1] == pytest.approx(0.651, abs=0.001)
    assert abs(hits[0] - hits[1]) <= HIT_POINTS


def test_the_azure_conversation_file_and_its_likeness_agree():
    theirs = trace_files.read(real("azure2023_conv.csv"))
    ours = build("azure-conv", Options(num_requests=len(theirs), seed=1))
    assert stats.ks_between([o.prompt_tokens for o in ours], [t.prompt_tokens for t in theirs]) <= KS
    assert stats.ks_between([o.output_tokens for o in ours], [t.output_tokens for t in theirs]) <= KS
    assert stats.index_of_dispersion([t.arrival_ms for t in theirs], 10_000) == pytest.approx(3.9, rel=0.02)
