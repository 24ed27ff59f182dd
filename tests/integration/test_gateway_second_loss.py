"""An answer that loses one worker after another, each after a while of good work, goes on every time."""

import asyncio

import pytest

from tests.integration.gateway_app import running
from tests.integration.gateway_rig import FakeWorker, answer_tokens, chat, colocate, make_model_dir, until

DEADLINE_S = 0.5
TEXT = "the quick brown fox jumps over the lazy dog " * 6


@pytest.mark.parametrize("streams", [True, False])
async def test_an_answer_outlives_a_second_loss_later_than_the_placement_deadline(tmp_path, streams):
    async with running(make_model_dir(tmp_path), placement_deadline_ms=int(DEADLINE_S * 1000)) as rig:
        third = FakeWorker("w-c")
        await third.start()
        rig.scheduler.decide = colocate(rig.a, rig.b, third)
        for worker in (rig.a, rig.b, third):
            worker.script = answer_tokens(rig.ids(TEXT), gap_s=0.05)
        body = chat(stream=streams, temperature=0)
        reply = asyncio.create_task(rig.client.post("/v1/chat/completions", json=body))
        for worker, lives_s in ((rig.a, 0.2), (rig.b, 2 * DEADLINE_S)):
            await until(lambda worker=worker: worker.generated)
            await asyncio.sleep(lives_s)
            worker.die()
        found = await reply
        await third.stop()
        assert found.status_code == 200
        assert "error" not in found.text
        assert len(third.generated) == 1
