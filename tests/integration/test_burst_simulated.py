"""bench_burst_simulated: what it says of simulated and of measured bursts comes from its samples, alike."""

import pytest

from loadtest.bench_burst import metrics_from_samples as on_gpus
from loadtest.bench_burst_simulated import MEASURED, main, measured, metrics_from_samples
from loadtest.registry import RESULTS
from loadtest.results import check_metrics, load_result


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    assert main(["--seeds", "1", "--burst-s", "15", "--stable-s", "2", "--out", str(folder)]) == 0
    return load_result(folder / "simulated-burst.json")


def test_metrics_come_from_the_samples_and_have_units(found):
    assert found["metrics"] == metrics_from_samples(found["samples"])
    assert check_metrics(found["metrics"]) == []


def test_even_a_quarter_of_the_burst_has_its_first_tokens_sooner_and_nothing_is_computed_twice(found):
    metrics = found["metrics"]
    assert metrics["ttft_p90_gain_ratio"] > 2
    assert metrics["cfs_peer_swapped_out_gb"] > 0
    assert metrics["cfs_peer_recomputed_tokens"] == metrics["cfs_dram_recomputed_tokens"] == 0
    assert metrics["uncontended_ratio"] == 1.0


def test_of_the_gpus_it_says_what_their_own_result_says(found):
    whole = load_result(RESULTS / f"{MEASURED}.json")
    rows = [*measured([1, 2, 3]), *(row for row in found["samples"] if row["kind"] == "simulated")]
    theirs, ours = on_gpus(whole["samples"]), metrics_from_samples(rows)
    for name in ("ttft_p90_gain_ratio", "rct_ratio", "dram_rct_ratio", "uncontended_ratio"):
        assert ours[f"measured_{name}"] == pytest.approx(theirs[name])
    assert ours["measured_fcfs_ttft_p90_ms"] == theirs["burst_fcfs_ttft_p90_ms"]
