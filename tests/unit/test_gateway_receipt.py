"""Predicted against actual, by stage: in a receipt, and in metrics whoever asked for one."""

import msgspec
import pytest
from prometheus_client import REGISTRY

from services.gateway import tally
from services.gateway.call import NOTHING_FOUND, Call
from services.gateway.core.request_flow import Limits
from services.gateway.receipt import note_prediction, receipt_of, times
from shared.ids import InstanceId, RequestId
from shared.kv.block_hash import pack_tokens
from shared.observe.trace import start_span
from shared.wire.placement import Placed, Predicted, Target
from shared.wire.requests import SamplingSpec, StageReceipt

EXPECTED = Predicted(queue_ms=10.0, fetch_ms=0.0, compute_ms=20.0, transfer_ms=4.0, step_ms=2.0)
TARGET = Target(instance=InstanceId("p0"), epoch=1, role="prefill", endpoint="tcp://x:1")
MS = 1_000_000


def placed(**more):
    fields = {
        "request_id": RequestId("r"), "attempt": 1, "kind": "disaggregated", "prefill": TARGET, "decode": TARGET,
        "predicted": EXPECTED, "predicted_ttft_ms": 30.0,
    }  # fmt: skip
    return Placed(**(fields | more))


def ended(answer, **first):
    """A call that took, per stage, 5, 0.2, 40, 6 and 2 ms."""
    call = Call(
        RequestId("r"), sink=None, prompt=pack_tokens([1]), sampling=SamplingSpec(max_tokens=8), found=NOTHING_FOUND,
        session="", tenant="", span=start_span("x"), limits=Limits(), explain=False,
    )  # fmt: skip
    call.placed, call.placed_ns, call.first_ns = answer, 5 * MS, 50 * MS
    took = {"queue_ms": 5.0, "fetch_ms": 0.2, "compute_ms": 40.0, **first}
    call.receipts = [
        StageReceipt(instance=InstanceId("p0"), stage="prefill", **took),
        StageReceipt(instance=InstanceId("d0"), stage="decode", fetch_ms=6.0, step_ms=2.0),
    ]
    return call


def seen():
    """By stage, (observations, their sum)."""
    tally.settle()
    name = "quire_gateway_stage_prediction_ratio"
    return {
        stage: tuple(REGISTRY.get_sample_value(f"{name}_{end}", {"stage": stage}) for end in ("count", "sum"))
        for stage in ("queue_and_compute", "fetch", "transfer", "step")
    }


def added(call):
    before = seen()
    note_prediction(call)
    after = seen()
    return {
        stage: after[stage][1] - before[stage][1] for stage in after if after[stage][0] > before[stage][0]
    }


def test_each_stage_that_was_predicted_and_occurred_is_counted_without_a_receipt_being_asked_for():
    assert added(ended(placed())) == pytest.approx({"queue_and_compute": 1.5, "transfer": 1.5, "step": 1.0})


def test_a_prompt_that_was_expected_to_wait_and_was_computed_beside_others_was_predicted_right():
    """Of ten prompts at once the last was expected to wait for nine, and took as long in steps that computed all."""
    expected = Predicted(queue_ms=90.0, compute_ms=10.0)
    assert added(ended(placed(predicted=expected), queue_ms=0.1, compute_ms=99.9))[
        "queue_and_compute"
    ] == pytest.approx(1.0)


def test_a_wait_that_nobody_predicted_is_counted_against_a_millisecond():
    assert added(ended(placed(), fetch_ms=30.0))["fetch"] == pytest.approx(30.0)


def test_a_stage_that_does_not_occur_and_a_placement_without_a_model_count_nothing():
    assert "transfer" not in added(ended(placed(prefill=None)))
    assert added(ended(placed(predicted=None))) == {}


def test_a_call_that_went_on_behind_an_earlier_attempt_says_nothing_of_its_last_placement():
    """Its first token came before it: the time between was negative, and counted."""
    call = ended(placed())
    call.placed_ns = 60 * MS
    name = "quire_gateway_ttft_prediction_ratio_count"
    tally.settle()
    before = REGISTRY.get_sample_value(name)
    assert added(call) == {}
    assert REGISTRY.get_sample_value(name) == before
    assert times(call, call.placed)["ttft"]["actual_ms"] is None


def test_after_a_resumption_times_pair_a_placement_with_its_own_stages():
    call = ended(placed(prefill=None))
    call.receipts = [
        StageReceipt(instance=InstanceId("lost"), stage="colocated", queue_ms=7.0, compute_ms=99.0)
    ]
    call.placed_ns, call.num_earlier_receipts = 60 * MS, 1
    assert {stage["actual_ms"] for name, stage in times(call, call.placed).items() if name != "hold"} == {
        None
    }
    call.receipts.append(
        StageReceipt(
            instance=InstanceId("next"), stage="colocated", queue_ms=1.0, prefill_ms=3.0, step_ms=2.5
        )
    )
    found = times(call, call.placed)
    assert [found[name]["actual_ms"] for name in ("queue", "compute", "transfer", "step")] == [
        1.0,
        3.0,
        None,
        2.5,
    ]


def test_the_time_that_the_scheduler_held_a_request_is_among_a_receipts_times():
    call = ended(placed(held_ms=299.0, reason="It waited 299 ms for room in decode's pages."))
    assert receipt_of(call)["times"]["hold"] == {"predicted_ms": None, "actual_ms": 299.0}
    call.placed = msgspec.structs.replace(call.placed, held_ms=0.0)
    assert receipt_of(call)["times"]["hold"]["actual_ms"] == 0.0
