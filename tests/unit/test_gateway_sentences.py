"""What a client reads of an attempt that was lost are sentences, whatever the process that said it wrote."""

import pytest

from services.gateway.core.request_flow import Fail, Limits, RequestFlow
from services.gateway.core.retry_budget import RetryBudget
from shared.ids import Epoch, InstanceId, RequestId
from shared.wire.placement import Placed, Target

TARGET = Target(instance=InstanceId("d"), epoch=Epoch(1), role="decode", endpoint="tcp://d")


def placed_flow(budget=None):
    flow = RequestFlow(Limits(), budget)
    flow.start(now_ms=0)
    flow.on_placed(Placed(request_id=RequestId("r"), attempt=1, kind="colocated", decode=TARGET), now_ms=1)
    return flow


@pytest.mark.parametrize("said", ["the engine died", "The engine died."])
def test_what_a_worker_said_ends_where_the_next_sentence_begins(said):
    budget = RetryBudget(share=0.0, floor_per_s=0.0, burst=0.0)
    [fail] = [
        action
        for action in placed_flow(budget).on_failed(1, "peer.gone", said, True, now_ms=2, source=None)
        if isinstance(action, Fail)
    ]
    assert fail.message == f"{said.removesuffix('.')}. No retry is left in the budget."


def test_the_reason_why_there_is_no_placement_has_one_full_stop():
    flow = placed_flow()
    flow.on_instance_down(InstanceId("d"), now_ms=2)
    late_ms = 2 + Limits().placement_deadline_ms
    [fail] = flow.on_not_asked(now_ms=late_ms)
    assert isinstance(fail, Fail)
    assert fail.message == "No placement: the scheduler is not reachable."
    flow = placed_flow()
    flow.on_failed(1, "peer.gone", "The first is gone.", True, now_ms=2, source=None)
    flow.on_placed(
        Placed(request_id=RequestId("r"), attempt=2, kind="colocated", decode=TARGET), now_ms=late_ms - 1
    )
    [*_, fail] = flow.on_failed(2, "peer.gone", "The second is gone.", True, now_ms=late_ms, source=None)
    assert isinstance(fail, Fail)
    assert fail.message == "No placement: The second is gone."
