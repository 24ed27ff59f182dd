"""`quire profile --simulate --cost FILE`: prices of the parallelism that was asked for, as corrected since, and bytes
of one GPU, also where another one has its KV heads, too."""

import json

import msgspec
import pytest

from deploy.local import cmd_profile
from loadtest.profiler.core.profile import Profile
from loadtest.profiler.simulated import SimulatedRunner
from loadtest.simulator.hardware import MODELS, from_data_sheet, weights_gb
from loadtest.workloads.request import Request, Segment

SHEET = from_data_sheet("h200", "llama-8b")


def cost_file(tmp_path, *, factor=1.0):
    """As `quire model show --json` prints it."""
    path = tmp_path / "cost.json"
    coefficients = msgspec.to_builtins(msgspec.structs.replace(SHEET.prices.coefficients, device="d"))
    corrections = {kind: {"factor": factor, "num_observed": 500} for kind in ("prefill", "decode")}
    path.write_text(json.dumps({"decode-0": {"coefficients": coefficients, "corrections": corrections}}))
    return str(path)


def runner_of(cost, *, tp=1):
    return cmd_profile._simulated("llama-8b", "h200", tp, cost, 0, 512, "fcfs", 200.0)[0]


def served(runner):
    (outcome,) = runner.run([Request(0, 0.0, "s", 0, (Segment(1, 2_000),), 50)]).outcomes
    return outcome


def test_prices_are_of_the_parallelism_that_is_asked_for(tmp_path):
    cost = cost_file(tmp_path)
    one, two = runner_of(cost), runner_of(cost, tp=2)
    assert served(two).ttft_ms < 0.8 * served(one).ttft_ms
    assert (one.is_calibrated, two.is_calibrated) == (True, False)
    assert two.words.endswith("scaled from TP 1 to 2")
    assert two.tp == 2


def test_corrections_that_the_output_names_are_applied(tmp_path):
    right, slow = runner_of(cost_file(tmp_path)), runner_of(cost_file(tmp_path, factor=3.0))
    assert "corrected as measured since: prefill x 3" in slow.words
    assert served(slow).ttft_ms > 2.5 * served(right).ttft_ms
    assert served(slow).tpot_ms == pytest.approx(3 * served(right).tpot_ms)


@pytest.mark.parametrize(
    ("source", "says"), [("from the data sheet", "a data sheet's"), ("scaled from TP 1 to 2", "another TP's")]
)
def test_whose_costs_they_are_is_said_where_they_are_not_calibrated(capsys, source, says):
    found = Profile(
        model="m", tp=2, role="neutral", bytes_per_gpu=0, stable_rate_per_s=1.0, pool_bytes=0, peak_kv_bytes=0,
        free_bytes=0, source=source, calibrated=False,
    )  # fmt: skip
    cmd_profile._show(found)
    assert f"The costs are {says}" in capsys.readouterr().out


@pytest.mark.parametrize(("tp", "times"), [(1, 1), (4, 1), (8, 1), (16, 2)])
def test_bytes_of_a_gpu_count_kv_heads_that_several_gpus_hold(tp, times):
    shape = MODELS["llama-8b"]
    machine = from_data_sheet("h200", "llama-8b", tp=tp)
    runner = SimulatedRunner(machine, model="llama-8b", tp=tp, chunk_tokens=512)
    head_bytes = 2 * shape.num_layers * shape.head_dim * shape.dtype_bytes
    assert runner.bytes_per_token == times * shape.num_kv_heads * head_bytes / tp
    assert runner.pool_bytes == pytest.approx(0.9 * 141e9 - weights_gb(shape) * 1e9 / tp, rel=1e-5)
