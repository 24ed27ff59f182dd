"""bench_profile: metrics from samples, the same samples each time, and the figures that are drawn from them."""

import json

import pytest

from loadtest import bench_profile, verify_results
from loadtest.figures import aqua, sheet
from loadtest.results import check_metrics, load_result

FAST = ["--quick", "--seconds", "2", "--requests", "24", "--burst-s", "2", "--max-rate", "10"]


@pytest.mark.slow
def test_a_quick_run_writes_a_file_that_its_samples_prove_and_figures_are_drawn_from(tmp_path, capsys):
    assert bench_profile.main([*FAST, "--out", str(tmp_path)]) == 0
    path = tmp_path / "simulated-profile.json"
    assert verify_results.problems_of(path, root=tmp_path) == []
    found = load_result(path)
    metrics = found["metrics"]
    assert check_metrics(metrics) == []
    assert [row["case"] for row in found["samples"]] == ["h200_chunk8192", "h200_chunk8192_tight"]
    assert metrics["h200_chunk8192_stable_requests_per_s"] > 0
    assert metrics["h200_chunk8192_free_gb"] > metrics["h200_chunk8192_tight_free_gb"]
    assert {f"h200_chunk8192_tight_swap_{factor}x_gb" for factor in (2, 3, 5)} <= set(metrics)
    as_h200 = {**found, "samples": [*found["samples"], {**found["samples"][0], "case": "h200"}]}
    path.write_text(json.dumps(as_h200))
    for one in aqua.SHEETS:
        told = sheet.draw(one, sheet.Results(tmp_path), tmp_path / "drawn", ["svg"])
        assert (told == "drawn") == (set(one.needs) == {"simulated-profile"}), told
    assert "h200_chunk8192_tight" in capsys.readouterr().out
    for draw in (aqua.stable_and_next, aqua.profile, aqua.swap_need):
        assert "lacks the case" in str(draw({"samples": []}))
