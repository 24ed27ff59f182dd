"""copy_pages and its benchmark through cuda.bindings and the driver's C interface, over a libcuda without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.verify_results import problems_of
from tests.support.build_libcuda import environment_with

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).resolve().parents[2]
SMALL_BENCH = """
import sys
import loadtest.bench_swap as bench
bench.SET_BYTES, bench.PIECES, bench.ROUNDS, bench.PAGEABLE_BYTES = 32 << 20, 256, 2, 16 << 20
bench.SHAPES = bench.SHAPES[3:5]
sys.exit(bench.main(["--no-vllm", "--out", sys.argv[1]]))
"""
ONE_FAILS = SMALL_BENCH.replace("sys.exit(", "bench.Bench.memfd = lambda self: 1 / 0\nsys.exit(")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return environment_with("fake_libcuda.c", tmp_path_factory.mktemp("libcuda"))


def run_bench(script, folder, environment):
    command = [sys.executable, "-c", script, str(folder)]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )


def test_the_benchmark_runs_through_the_c_interface_and_its_file_verifies(environment, tmp_path):
    done = run_bench(SMALL_BENCH, tmp_path, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    path = tmp_path / "h200-swap.json"
    result = json.loads(path.read_text())
    assert {"page_share_of_copy_ratio", "page_gb_per_s", "batch_32k_gb_per_s", "loop_32k_gb_per_s"} <= set(
        result["metrics"]
    )
    recomputed = [text for text in problems_of(path) if "measure again" not in text]
    assert recomputed == []


def test_a_section_that_fails_leaves_the_others_their_figures(environment, tmp_path):
    done = run_bench(ONE_FAILS, tmp_path, environment)
    assert done.returncode == 1
    assert "FAILED: ZeroDivisionError" in done.stdout
    metrics = json.loads((tmp_path / "h200-swap.json").read_text())["metrics"]
    assert "page_gb_per_s" in metrics
    assert "memfd_share_of_pinned_ratio" not in metrics
