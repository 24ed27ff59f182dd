"""What bench_weave.py makes of its samples, which engines it begins, and how it goes on after it was cut short."""

import time

import pytest

from loadtest import bench_weave as bench
from loadtest import weave_engine, weave_fork
from loadtest.results import check_metrics
from loadtest.weave_jobs import NO_FLASHINFER, Job, Kept, impossible, jobs_of


def steps(shape: str, ranks: int, tokens: int, **modes: float) -> list[dict]:
    common = {"kind": "step", "shape": shape, "ranks": ranks, "layers": 4, "tokens": tokens, "woven": 0}
    return [
        {**common, "mode": mode.replace("_", "-"), "ms": ms * factor, "engine": "", "round": number}
        for mode, ms in modes.items()
        for number, factor in enumerate((0.9, 1.0, 2.0))
    ]


SAMPLES = [
    *steps("70b", 4, 1024, stock=1.0, full=2.0, fuse=0.9, stock_alone=0.8),  # short: no part of the gain
    *steps("70b", 4, 4096, stock=10.0, stock_fused=9.0, full=7.5, fuse=8.0, stock_alone=7.0),
    *steps("70b", 4, 8192, stock=20.0, stock_fused=21.0, full=16.0, fuse=18.0, stock_alone=16.0),
    *steps("70b", 8, 4096, stock=10.0, full=8.0, fuse=9.0),
    *steps("8b", 2, 4096, stock=10.0, full=10.0, fuse=10.0, stock_alone=9.0),
    {
        "kind": "failed",
        "engine": "stock-fused",
        "shape": "8b",
        "ranks": 2,
        "layers": 4,
        "why": "exit status 1",
    },
]


def test_the_gain_is_that_over_the_better_stock_and_of_the_most_ranks():
    metrics = bench.metrics_from_samples(SAMPLES)
    assert check_metrics(metrics) == []
    assert metrics["70b_tp4_gain_ratio"] == pytest.approx((9.0 / 7.5 + 20.0 / 16.0) / 2)
    assert metrics["prefill_gain_ratio"] == metrics["70b_tp8_gain_ratio"] == pytest.approx(1.25)
    assert metrics["prefill_gain_ranks_count"] == 8
    assert metrics["failed_count"] == 1


def test_communication_is_won_back_in_part_whole_or_more_than_whole():
    metrics = bench.metrics_from_samples([s for s in SAMPLES if s["ranks"] != 8])
    assert metrics["communication_recovered_ratio"] == pytest.approx((1.5 / 2.0 + 4.0 / 4.0) / 2)
    assert metrics["8b_tp2_recovered_ratio"] == 0.0


def test_without_the_counterfactual_of_the_most_ranks_nothing_is_said_of_communication():
    assert "communication_recovered_ratio" not in bench.metrics_from_samples(SAMPLES)


def test_the_table_has_a_line_for_each_length_and_a_hole_for_what_is_missing():
    lines = bench.table(SAMPLES)
    assert len(lines) == 1 + 5
    assert lines[-1].split()[-1] == "1.000"
    assert "-" in lines[-1].split()


def test_groups_are_shapes_ranks_and_layers():
    assert bench.groups_of("70b:4:1,8b:2:32") == [("70b", 4, 1), ("8b", 2, 32)]
    with pytest.raises(ValueError, match="13b"):
        bench.groups_of("13b:2:4")


def test_serving_is_said_by_chunk():
    samples = [
        {"kind": "serving", "shape": "70b", "ranks": 4, "layers": 16, "step_tokens": 2048, "tokens": 1000, "mode": mode,
         "s": s}
        for mode, s in (("full", 1.0), ("full", 3.0), ("full", 2.0), ("fuse", 2.2), ("stock", 2.5))
    ]  # fmt: skip
    metrics = bench.metrics_from_samples(samples)
    assert check_metrics(metrics) == []
    assert metrics["70b_16_layers_tp4_serving_2048_full_tokens_per_s"] == 500
    assert metrics["70b_16_layers_tp4_serving_gain_2048_ratio"] == pytest.approx(1.25)


def test_what_serving_gains_is_over_the_better_stock_too():
    head = {"kind": "serving", "shape": "8b", "ranks": 2, "layers": 16, "step_tokens": 2048, "tokens": 1000}

    def gain(**seconds: float) -> float:
        samples = [{**head, "mode": mode.replace("_", "-"), "s": s} for mode, s in seconds.items()]
        metrics = bench.metrics_from_samples(samples)
        assert check_metrics(metrics) == []
        return metrics["8b_16_layers_tp2_serving_gain_2048_ratio"]

    assert gain(full=1.0, stock=1.2, stock_fused=1.1) == pytest.approx(1.1)
    assert gain(full=1.0, stock=1.1, stock_fused=1.2) == pytest.approx(1.1)
    assert gain(full=1.0, stock_fused=1.2) == pytest.approx(1.2)


def test_served_lengths_are_sharegpts():
    lengths = weave_engine.sharegpt_lengths(4_000, 1)
    prompts, answers = (sorted(values) for values in zip(*lengths, strict=True))
    assert abs(prompts[2_000] / 1730 - 1) < 0.1
    assert abs(answers[2_000] / 415 - 1) < 0.1
    assert abs(answers[3_600] / 834 - 1) < 0.1
    assert lengths == weave_engine.sharegpt_lengths(4_000, 1)


def test_loads_of_one_length_have_metrics_of_their_own():
    head = {"kind": "serving", "shape": "8b", "ranks": 2, "layers": 16, "step_tokens": 2048, "tokens": 1000}
    samples = [
        {**head, "workload": "2048x128", "mode": mode, "s": s} for mode, s in (("full", 1.0), ("stock", 1.1))
    ]
    metrics = bench.metrics_from_samples(samples)
    assert check_metrics(metrics) == []
    assert metrics["8b_16_layers_tp2_serving_gain_2048x128_2048_ratio"] == pytest.approx(1.1)


def test_the_ffn_is_said_as_times_its_whole():
    times = {"whole": [10.0, 11.0, 12.0], "equal": [13.2], "smart": [11.0]}
    metrics = bench.metrics_from_samples(
        [{"kind": "ffn", "shape": "70b", "ranks": 8, "tokens": 1024, "us": times}]
    )
    assert check_metrics(metrics) == []
    assert metrics["70b_tp8_ffn_1024_equal_ratio"] == pytest.approx(1.2)
    assert metrics["70b_tp8_ffn_1024_smart_ratio"] == 1.0


def options(*words: str):
    return bench.parsed(["--groups", "8b:2:4", *words])


def test_an_engine_has_room_for_every_chunk_prompt_and_request():
    words = ["weave", "model", "out", "--tp", "2", "--tokens", "", "--serve", "3", "--chunks", "1024,16384"]
    found = weave_engine.parsed([*words, "--workloads", "sharegpt,8000x100"])
    assert weave_engine.loads(found) == [("sharegpt", 1024), ("sharegpt", 16384), ("8000x100", 2048)]
    assert weave_engine.longest_request(found) == 16384
    assert weave_engine.lengths_of("8000x100", found) == [(8000, 100)] * 3
    found = weave_engine.parsed([*words, "--workloads", "sharegpt,18000x100"])
    assert weave_engine.longest_request(found) == 18100


def test_an_engine_serves_only_where_its_answers_are_counted():
    found = options()
    jobs = {job.engine: bench.words_of(job, "model", found, 60.0)[1] for job in jobs_of(found)}
    assert [name for name, words in jobs.items() if "--serve" in words] == ["weave", "stock", "stock-fused"]
    for engine in bench.ENGINES:
        assert weave_engine.parsed(jobs[engine]).kind == engine
    (only,) = jobs_of(options("--parts", "ffn"))
    assert only.engine == "ffn"


def test_what_cannot_be_had_here_is_not_begun_and_says_why(monkeypatch):
    assert "4 GPUs are needed, 2 are here" in impossible(Job("weave", "70b", 4, 4), 2, "cuda")
    monkeypatch.setattr("loadtest.weave_jobs.find_spec", lambda name: None)
    assert impossible(Job("stock-fused", "8b", 2, 4), 2, "cuda") == NO_FLASHINFER
    assert not impossible(Job("stock", "8b", 2, 4), 2, "cuda") + impossible(
        Job("ffn", "70b", 8, 4), 1, "cuda"
    )


def test_a_run_that_was_cut_short_goes_on_with_what_is_missing(tmp_path):
    path, head = tmp_path / "kept.json", {"commit": "c", "gpu": ["H200"], "settings": {"sizes": (1, 2)}}
    whole, cut = Job("weave", "8b", 2, 4), Job("stock", "8b", 2, 4)
    kept = Kept(path, head)
    kept.add(whole, [{"kind": "step", "ms": 1.0}], is_done=True)
    kept.add(cut, [{"kind": "failed", "why": "took too long"}], is_done=False)
    again = Kept(path, head)
    assert again.done == [whole.name]
    again.add(cut, [{"kind": "step", "ms": 2.0}], is_done=True)
    assert Kept(path, head).plain() == [{"kind": "step", "ms": 1.0}, {"kind": "step", "ms": 2.0}]
    with pytest.raises(ValueError, match="another measurement"):
        Kept(path, head | {"commit": "d"})


def test_an_engine_that_fails_or_takes_too_long_is_gone_when_that_is_said(tmp_path, monkeypatch):
    job = {
        "words": ["no-such-engine", "m", "out", "--tp", "2"],
        "log": str(tmp_path / "log"),
        "limit_s": 60.0,
    }
    assert weave_fork.run(job)["status"] == 1
    monkeypatch.setattr(weave_fork.weave_engine, "main", lambda words: time.sleep(600))
    assert weave_fork.run({**job, "limit_s": 0.2})["status"] is None
    monkeypatch.setattr(weave_fork.weave_engine, "main", lambda words: 0)
    assert weave_fork.run(job)["status"] == 0
