"""bench_handoff: figures come from samples, NixlConnector stands beside Quire where it ran."""

from loadtest import bench_handoff, handoff_nixl
from loadtest.results import check_metrics


def sample(system: str, handoff_ms: float) -> dict:
    times = {"handoff_ms": handoff_ms, "recompute_ms": 100.0, "ttft_ms": 150.0, "gap_ms": 8.0}
    own = {"fetch_ms": 4.0, "pulled_bytes": 1_200_000_000, "disaggregated": True}
    return {"system": system, "prompt_tokens": 4096, **times, **(own if system == "quire" else {})}


def test_both_ways_are_medians_of_their_own_samples():
    samples = [sample("quire", 30.0), sample("quire", 40.0), sample("nixl", 60.0), sample("nixl", 80.0)]
    found = bench_handoff.metrics_from_samples(samples)
    assert (found["4k_handoff_ms"], found["4k_nixl_handoff_ms"]) == (30.0, 60.0)
    assert found["4k_handoff_of_nixl_ratio"] == 0.5
    assert found["4k_pulled_gb_per_s"] == 300.0
    assert check_metrics(found) == []


def test_without_nixl_there_are_no_figures_of_it():
    assert not any("nixl" in name for name in bench_handoff.metrics_from_samples([sample("quire", 30.0)]))


def test_a_package_stands_for_nixl_where_only_the_wheel_of_one_cuda_is_there(tmp_path, monkeypatch):
    present = {"nixl": False, "nixl_cu13": True}
    monkeypatch.setattr(handoff_nixl.importlib.util, "find_spec", lambda name: present[name] or None)
    found = handoff_nixl.nixl_path(tmp_path)
    assert (tmp_path / "nixl-path" / "nixl" / "__init__.py").read_text() == handoff_nixl.ALIAS
    assert found[0] == str(tmp_path / "nixl-path")
