"""The mock engine's manners: it dies as an engine dies, ends where an engine ends, and draws where one draws."""

import asyncio
import json

import pytest

from shared.background_task import LOST_TASK
from shared.engine.interface import EngineRequest
from shared.engine.worker_config import WorkerSettings
from shared.errors import PeerGone
from shared.kv.block_hash import chain_seed
from shared.testing.mock_engine import MockEngine
from shared.wire.requests import GREEDY_BELOW, SamplingSpec


@pytest.fixture
def model_dir(tmp_path):
    config = {"vocab_size": 1000, "eos_token_id": 2, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def engine_of(model_dir, **settings):
    return MockEngine(
        WorkerSettings(engine="mock", model_dir=model_dir, model_name="m", mock_step_ms=0.01, **settings)
    )


async def answer(engine, prompt, **sampling):
    """All deltas."""
    request = EngineRequest(
        engine_request_id="r",
        stage="colocated",
        prompt_token_ids=prompt,
        sampling=SamplingSpec(**{"max_tokens": 8, "temperature": 0.0} | sampling),
        chain_seed=chain_seed("f", ""),
    )
    async with asyncio.timeout(10):
        return [delta async for delta in engine.generate(request)]


@pytest.mark.parametrize("broken", ["_look_up", "_store"])
async def test_a_mock_whose_steps_end_by_a_bug_is_dead_and_ends_its_requests(model_dir, monkeypatch, broken):
    told = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context[LOST_TASK]))

    def bug(*_):
        raise KeyError("our bug")

    monkeypatch.setattr(MockEngine, broken, bug)
    engine = engine_of(model_dir)
    await engine.start()
    with pytest.raises(PeerGone, match="our bug"):
        await answer(engine, [1, 2, 3])
    assert not engine.alive
    await asyncio.sleep(0)
    assert told == ["mock-engine"], "whoever runs the worker hears of it"
    await engine.close()


async def test_a_listener_of_steps_that_raises_is_logged_once_and_ends_nothing(model_dir, capsys):
    engine = engine_of(model_dir)

    def bug(_step):
        raise KeyError("the listener's bug")

    engine.on_step(bug)
    await engine.start()
    deltas = await answer(engine, [1, 2, 3])
    assert sum(len(delta.token_ids) for delta in deltas) == 8
    assert engine.alive
    assert capsys.readouterr().out.count("component=mock_engine") == 1
    await engine.close()


async def test_an_answer_ends_where_the_context_does(model_dir):
    engine = engine_of(model_dir, max_model_len=10)
    await engine.start()
    deltas = await answer(engine, [3, 4, 5, 6, 7, 8], max_tokens=100)
    assert sum(len(delta.token_ids) for delta in deltas) == 4
    assert [delta.finish_reason for delta in deltas] == [None, None, None, "length"]
    stopped = await answer(engine, [3, 4, 5, 6, 7, 8], max_tokens=100, stop_token_ids=deltas[3].token_ids)
    assert stopped[-1].finish_reason == "stop", "as in vLLM, which looks for stop tokens first"
    await engine.close()


async def test_a_temperature_that_is_greedy_for_an_engine_takes_no_seed(model_dir):
    engine = engine_of(model_dir)
    await engine.start()
    tokens = {}
    for temperature in (0.0, GREEDY_BELOW / 10, GREEDY_BELOW):
        deltas = await answer(engine, [3, 4, 5], temperature=temperature, seed=7)
        tokens[temperature] = [token for delta in deltas for token in delta.token_ids]
    assert tokens[GREEDY_BELOW / 10] == tokens[0.0] == engine.vocabulary.tokens([3, 4, 5], 8)
    assert tokens[GREEDY_BELOW] == engine.vocabulary.tokens([3, 4, 5], 8, seed=7)
    await engine.close()
