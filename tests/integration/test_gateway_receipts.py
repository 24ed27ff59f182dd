"""Receipts over HTTP: what the scheduler expected, what it took, and what else there was."""

import json
import re

import msgspec
import pytest

from shared.wire.placement import Alternative, Predicted
from shared.wire.requests import KvPlan, StageReceipt, TokenChunk, Tokens
from tests.integration.gateway_app import running
from tests.integration.gateway_rig import chat, disaggregate


@pytest.fixture
async def rig(model_dir):
    async with running(model_dir) as found:
        yield found


async def test_a_receipt_shows_sources_predictions_against_what_it_took_and_other_ways(rig):
    plan = KvPlan(reach="remote", source="p9", tokens=16, path="remote", source_mempool="tcp://x:1")
    other = Alternative("p9", "prefill", 16, 99.5, "queue 80.0 ms more")
    pair = disaggregate(rig.a, rig.b)

    def decide(place):
        expected = Predicted(
            queue_ms=1.0, fetch_ms=2.0, compute_ms=3.0, transfer_ms=4.0, step_ms=1.5, total_ms=50.0
        )
        return msgspec.structs.replace(
            pair(place),
            policy="cost",
            kv=plan,
            predicted=expected,
            predicted_ttft_ms=12.0,
            alternatives=[other],
        )

    rig.scheduler.decide = decide
    rig.say(" the fox")
    reply = await rig.client.post("/v1/chat/completions", json=chat(), headers={"x-quire-receipt": "True"})
    receipt = reply.json()["quire_receipt"]
    assert rig.a.generated[-1].kv == plan
    assert rig.b.generated[-1].kv is None
    assert receipt["tokens"] == {"engine": 8, "local": 8, "peer": 0, "dram": 0, "remote": 0, "computed": 0}
    assert receipt["kv"]["source"] == "p9"
    assert receipt["alternatives"] == [
        {
            "instance": "p9",
            "stage": "prefill",
            "hit_tokens": 16,
            "predicted_ms": 99.5,
            "why_not": "queue 80.0 ms more",
        }
    ]
    times = receipt["times"]
    assert {name: times[name]["predicted_ms"] for name in times} == {
        "hold": None, "queue": 1.0, "fetch": 2.0, "compute": 3.0, "transfer": 4.0, "step": 1.5, "ttft": 12.0,
    }  # fmt: skip
    assert times["ttft"]["actual_ms"] > 0
    metrics = (await rig.client.get("/metrics")).text
    assert "quire_gateway_ttft_prediction_ratio_count" in metrics
    counted = re.compile(r'stage_prediction_ratio_count\{stage="transfer"\} (\S+)')
    before = float(counted.search(metrics)[1])
    await rig.client.post("/v1/chat/completions", json=chat())
    assert float(counted.search((await rig.client.get("/metrics")).text)[1]) == before + 1, (
        "without a receipt"
    )


async def test_the_times_of_a_request_that_went_on_elsewhere_are_its_last_placements(rig):
    ids = rig.ids(" the fox")

    async def loses_it(worker, identity, gen, prompt):
        lost = StageReceipt(instance=worker.instance, stage="colocated", queue_ms=700.0, compute_ms=16.0)
        chunk = TokenChunk(gen.request_id, gen.attempt, 0, ids[:1], None, None, None, lost)
        worker.server.send(identity, Tokens(chunks=[chunk]))
        worker.failed(identity, gen, "peer.gone", retryable=True)

    async def goes_on(worker, identity, gen, prompt):
        worker.tokens(identity, gen, ids[1:], finish="stop")
        worker.finished(identity, gen, len(prompt), queue_ms=1.5, prefill_ms=2.5)

    rig.a.script, rig.b.script = loses_it, goes_on
    body = chat(stream=True, temperature=0)
    reply = await rig.client.post("/v1/chat/completions", json=body, headers={"x-quire-receipt": "1"})
    receipt = next(
        json.loads(line[6:])["quire_receipt"] for line in reply.text.splitlines() if "quire_receipt" in line
    )
    assert [stage["instance"] for stage in receipt["stages"]] == ["w-a", "w-b"]
    assert receipt["times"]["queue"]["actual_ms"] == 1.5
    assert receipt["times"]["compute"]["actual_ms"] == 2.5
    assert receipt["times"]["ttft"]["actual_ms"] is None


async def test_a_session_header_names_the_session(rig):
    rig.say("a")
    await rig.client.post("/v1/chat/completions", json=chat(user="u1"), headers={"x-quire-session": "s 1"})
    assert rig.scheduler.places[-1].session == "s 1"
