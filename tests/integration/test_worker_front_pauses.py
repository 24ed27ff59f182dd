"""A worker's front, or its gateway, that did not run for a while, as on a machine that is busy or was asleep."""

import asyncio
import json
import time

import pytest

from shared.testing.scripted_gateway import ScriptedGateway
from shared.wire.requests import Failed, Finished
from tests.integration.test_worker_front import EPOCH, running, until


@pytest.fixture
def model_dir(tmp_path):
    config = {"vocab_size": 1000, "eos_token_id": 2, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


async def test_a_front_that_stood_still_gives_up_no_gateway_before_it_has_heard_it(model_dir, monkeypatch):
    monkeypatch.setattr("shared.engine.worker_front.ALIVE_TIMEOUT_MS", 1_000)
    monkeypatch.setattr("shared.engine.worker_front.SWEEP_INTERVAL_MS", 30)
    async with running(model_dir, mock_step_ms=5.0) as (rig, gateway):
        gateway.alive()
        gateway.generate("r", [1, 2, 3], max_tokens=4000)
        await gateway.has_tokens("r")
        time.sleep(1.2)  # noqa: ASYNC251  the whole process, longer than a gateway may be silent
        await asyncio.sleep(0)  # its timers are due before anything is read
        gateway.alive()
        await asyncio.sleep(0.2)
        assert rig.front.num_inflight == 1
        gateway.abort("r")


async def test_a_gateway_that_falls_silent_loses_its_requests_and_is_told(model_dir, monkeypatch):
    monkeypatch.setattr("shared.engine.worker_front.ALIVE_TIMEOUT_MS", 1_000)
    monkeypatch.setattr("shared.engine.worker_front.SWEEP_INTERVAL_MS", 30)
    async with running(model_dir, mock_step_ms=5.0) as (rig, gateway):
        async with ScriptedGateway(gateway.link.endpoint, EPOCH) as old:  # one that never says Alive
            old.generate("old", [7, 8], max_tokens=400)
            gateway.alive()
            gateway.generate("r", [1, 2, 3], max_tokens=4000)
            await gateway.has_tokens("r")
            for _ in range(12):
                await asyncio.sleep(0.1)
                gateway.alive()
            assert rig.front.num_inflight >= 1, "alive and not given up"
            assert isinstance(await old.end_of("old"), Finished)
            await until(lambda: not rig.front.num_inflight)
        end = await gateway.end_of("r")  # it may only have stood still: its stream would wait for good
        assert isinstance(end, Failed)
        assert (end.code, end.retryable) == ("peer.gone", True)
        assert rig.front.num_gateways == 0
