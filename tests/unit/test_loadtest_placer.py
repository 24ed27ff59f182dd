"""The placer's bench: mixes fill the cluster, metrics are the worst of the samples, the direct program is eq 6."""

from collections import Counter

import pytest
from msgspec.structs import replace

from loadtest.bench_placer import (
    GPUS,
    SERVERS,
    direct,
    lent_by_lot,
    metrics_from_samples,
    mix,
    place_twice,
    shuffled,
)
from shared.placer.place import place


@pytest.mark.parametrize("alike", [True, False])
def test_mixes_fill_every_gpu_with_groups_and_the_papers_shares(alike):
    models = [model for seed in range(30) for model in mix(seed, alike=alike).models]
    assert sum(model.tp for model in models) == 30 * SERVERS * GPUS
    names = Counter(model.model.rpartition("-")[0] for model in models)
    assert 0.06 < (names["audiogen"] + names["musicgen"]) / len(models) < 0.14
    assert {model.tp for model in models} == {1, 2, 4}
    sizes = {(model.model.rpartition("-")[0], model.tp, model.bytes_per_gpu) for model in models}
    assert (len(sizes) == len(names) + 1) == alike  # llama-70b is there with 2 and with 4 GPUs


def test_metrics_are_of_the_slowest_and_of_the_widest_gap():
    row = {"by": "placer", "equal": True, "needed_bytes": 10, "lent_bytes": 8, "lent_by_lot_bytes": 4}
    samples = [
        {**row, "seconds": [1.0, 2.0], "cpu_seconds": [0.5, 0.7], "objective_bytes": 100, "bound_bytes": 100},
        {
            **row,
            "seconds": [0.5, 0.5],
            "cpu_seconds": [0.4, 0.4],
            "objective_bytes": 100,
            "bound_bytes": 98,
            "equal": False,
        },
        {"by": "direct", "seconds": [5.0], "objective_bytes": 100, "bound_bytes": 40},
    ]
    found = metrics_from_samples(samples)
    assert found["seconds_128_gpus_s"] == 2.0
    assert found["cpu_seconds_128_gpus_s"] == 0.7
    assert found["optimality_gap_ratio"] == pytest.approx(0.02)
    assert found["direct_optimality_gap_ratio"] == pytest.approx(0.6)
    assert (found["proven_optimal_count"], found["equal_answers_ratio"], found["lent_ratio"]) == (
        1.0,
        0.5,
        0.8,
    )


def test_the_papers_program_and_the_placer_find_the_same_optimum_of_a_small_cluster():
    question = mix(3, alike=True, num_servers=2)
    row, answer = direct(question, 3, alike=True, limit_s=60), place(question, lambda: 0.0)
    assert row["objective_bytes"] == answer.objective_bytes == answer.bound_bytes


def test_a_sample_places_twice_and_lends_more_than_by_lot():
    question = replace(mix(1, alike=False, num_servers=3), time_limit_ms=60_000)  # no clock decides here
    row = place_twice(question, 1, alike=False)
    assert row["equal"]
    assert lent_by_lot(question, 1) <= row["lent_bytes"] <= row["needed_bytes"]
    assert sorted(m.model for m in shuffled(question, 5).models) == sorted(m.model for m in question.models)
