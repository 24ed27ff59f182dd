"""bench_swap: metrics are the worst of both directions, and its sets of copies are what PR 38460 describes."""

import json

import numpy as np
import pytest

from loadtest import results
from loadtest.bench_swap import metrics_from_samples
from loadtest.results import check_metrics
from loadtest.swap_rig import SHAPES, blocks_of, pages_of, run_cases
from shared.kernels.copy_pages.copies import Direction, check, ordered

WAYS = (Direction.DEVICE_TO_HOST, Direction.HOST_TO_DEVICE)


def row(section, case, direction, *wall_us, name="set", num_bytes=1_000_000):
    return {
        "section": section,
        "set": name,
        "direction": direction,
        "case": case,
        "bytes": num_bytes,
        "wall_us": list(wall_us),
    }


def test_ratios_and_rates_are_medians_and_the_worst_direction_counts():
    samples = [
        row("pages", "plain copy", "down", 19, 20, 90),
        row("pages", "auto", "down", 20, 20, 20),
        row("pages", "plain copy", "up", 20),
        row("pages", "auto", "up", 25),
        row("pieces", "auto", "up", 40),
        row("pieces", "loop", "up", 100),
        row("pieces", "vllm", "up", 44),
    ]
    found = metrics_from_samples(samples)
    assert found["page_share_of_copy_ratio"] == pytest.approx(0.8)
    assert found["page_gb_per_s"] == pytest.approx(40)
    assert found["batch_32k_gb_per_s"] == pytest.approx(25)
    assert found["loop_32k_gb_per_s"] == pytest.approx(10)
    assert found["batch_32k_of_vllm_ratio"] == pytest.approx(1.1)
    assert check_metrics(found) == []


def test_what_was_not_measured_has_no_metric():
    found = metrics_from_samples([row("pieces", "loop", "up", 100)])
    assert set(found) == {"loop_32k_gb_per_s"}


@pytest.mark.parametrize("direction", WAYS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_shape_moves_its_bytes_in_independent_copies(shape, direction):
    device, host = 1 << 40, 1 << 30
    blocks = blocks_of(shape, device, host, direction)
    pages = pages_of(shape.page_bytes, shape.blocks, device, host, direction)
    for copies in (blocks, pages):
        check(ordered(copies))
        assert copies.num_bytes == shape.num_bytes
        targets = copies.targets if direction is Direction.HOST_TO_DEVICE else copies.sources
        assert np.all(targets >= device)
    assert len(blocks) == shape.tensors * shape.blocks


def test_cases_run_in_turns_after_one_warm_up():
    seen = []
    times = run_cases({name: lambda name=name: (seen.append(name), 2.0)[1:] * 2 for name in "ab"}, 2)
    assert "".join(seen) == "ab" * 3
    assert times["a"] == {"wall_us": [2.0, 2.0], "submit_us": [2.0, 2.0]}


@pytest.mark.parametrize("there", [("", True), ("another", True)])
def test_a_copy_of_the_files_names_its_commit_whatever_repository_it_lies_in(tmp_path, monkeypatch, there):
    monkeypatch.setattr(results, "commit_of", lambda root: there)
    path = results.write_result(
        "h200-swap",
        claim="c",
        command="x",
        settings={},
        metrics={},
        samples=[],
        folder=tmp_path,
        commit="abc",
    )
    written = json.loads(path.read_text())
    assert (written["commit"], written["dirty"]) == ("abc", False)
