"""A worker's profile at its start: found, kept, read again; nothing stays behind and no trouble fails the worker."""

import asyncio
import json
import time

import msgspec
import pytest

from shared.costmodel.model import CostModel
from shared.costmodel.observation import Point
from shared.engine import calibration, profile_run
from shared.engine.calibration import calibrate
from shared.engine.interface import CacheEvent, EngineRequest, PromptStep
from shared.engine.profile_run import Profiler
from shared.engine.worker_config import WorkerSettings
from shared.ids import BlockHash
from shared.testing import mock_engine
from shared.testing.mock_engine import MockEngine
from shared.wire.cost import CostCoefficients
from shared.wire.requests import SamplingSpec
from tests.support.virtual_time import VirtualLoop

STEP_MS, TOKENS_PER_S = 5.0, 50_000.0
VOCABULARY = 500
PROFILES_S = 400  # all in good order, engines that start anew included
LEAST_SAMPLES = 10
CONFIG = {
    "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.fixture
def settings(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return WorkerSettings(
        instance="prefill-0", role="prefill", engine="mock", model_dir=str(folder), model_name="m",
        state_dir=str(tmp_path / "profiles"), mock_step_ms=STEP_MS, mock_prefill_tokens_per_s=TOKENS_PER_S,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """A busy machine's profile is kept too: how good one must be, and how late it may come, is not what these tests
    are about."""
    monkeypatch.setattr(calibration, "GPU_BUDGET_MS", 900.0)
    monkeypatch.setattr(calibration, "TIMEOUT_FACTOR", 60)
    monkeypatch.setattr(calibration, "KEEP_ERROR_RATIO", 1e9)
    monkeypatch.setattr(calibration, "USELESS_ERROR_RATIO", 1e9)


async def started(settings, known=False):
    engine = MockEngine(settings)
    if not known:
        engine.known_cost = None
    await engine.start()
    return engine


def is_its_speed(model):
    """Whether the model is near what the mock engine was told."""
    prefills = [
        model.prefill_ms(tokens) == pytest.approx(STEP_MS + 1e3 * tokens / TOKENS_PER_S, rel=0.1)
        for tokens in (100, 700, 1500)
    ]
    return all(prefills) and model.decode_step_ms(4, 2000) == pytest.approx(STEP_MS, rel=0.1)


def test_a_profile_finds_the_speed_and_the_next_start_reads_it(settings, tmp_path, monkeypatch):
    async def run():
        engine = await started(settings)
        found = await calibrate(engine, settings, VOCABULARY)
        assert found is not None
        assert is_its_speed(CostModel(found)), found
        assert found.calibration_ms > 0
        engine.generate = None  # it must not be asked again
        assert await calibrate(engine, settings, VOCABULARY) == found
        await engine.close()
        [kept] = (tmp_path / "profiles").glob("*.json")
        kept.write_text("{}")
        again = await started(settings)
        assert (await calibrate(again, settings, VOCABULARY)).num_samples > 0
        await again.close()

    with asyncio.Runner(
        loop_factory=VirtualLoop
    ) as runner:  # a busy machine's engine is not as fast as it pretends
        for module in (calibration, profile_run, mock_engine):
            monkeypatch.setattr(module, "time", runner.get_loop())
        runner.run(run())


async def test_what_a_profile_asked_is_in_no_cache_and_was_told_to_nobody(settings):
    engine = await started(settings)
    events: list[CacheEvent] = []
    engine.on_cache_event(events.append)
    assert await calibrate(engine, settings, VOCABULARY) is not None
    assert [event.kind for event in events] == ["cleared"]
    assert not engine._cache
    assert engine.load().num_running == engine.load().num_waiting == 0
    await engine.close()


async def test_repeated_prefixes_are_measured_as_cached(settings):
    engine = await started(settings)
    profiler = Profiler(engine, VOCABULARY, seed=1)
    await profiler.run(Point(((512, 0),)))
    [seen] = await profiler.run(Point(((512, 448),)))
    assert seen.prompts == ((512, 448),)
    batch, decode = await profiler.run(Point(((64, 0),) * 3, output_tokens=8, behind=True))
    assert (batch.kind, len(batch.prompts)) == ("batch", 3)
    assert (decode.num_decodes, decode.context_tokens) == (3, 3 * 68)
    assert decode.ms > 0.8 * STEP_MS
    await engine.close()


async def test_an_engine_that_knows_its_cost_and_a_worker_that_must_not_ask_are_left_alone(settings):
    known = await started(settings, known=True)
    assert (await calibrate(known, settings, VOCABULARY)).step_overhead_ms == STEP_MS
    asked = await started(settings)
    asked.generate = None

    assert await calibrate(asked, msgspec.structs.replace(settings, calibrate="off"), VOCABULARY) is None
    await known.close()
    await asked.close()


@pytest.mark.parametrize("trouble", ["dies", "hangs", "no sizes", "no folder"])
async def test_no_trouble_fails_the_worker(settings, trouble, monkeypatch, tmp_path):

    monkeypatch.setattr(calibration, "TIMEOUT_FACTOR", 0.5)
    if trouble == "dies":
        settings = msgspec.structs.replace(settings, mock_die_after_tokens=20)
    elif trouble == "hangs":
        settings = msgspec.structs.replace(settings, mock_hang_after_tokens=20)
    elif trouble == "no folder":
        (tmp_path / "profiles").write_text("a file")
    engine = await started(settings)
    if trouble == "no sizes":
        (tmp_path / "model" / "config.json").write_text("{}")
    async with asyncio.timeout(60):
        assert await calibrate(engine, settings, VOCABULARY) is None
    await engine.close()


async def test_workers_of_one_kind_profile_one_after_the_other(settings):
    first, second = await started(settings), await started(settings)
    one, other = await asyncio.gather(
        calibrate(first, settings, VOCABULARY), calibrate(second, settings, VOCABULARY)
    )
    assert one == other
    await first.close()
    await second.close()


async def test_steps_of_decodes_alone_are_told(settings):
    engine, steps = await started(settings), []
    engine.on_step(steps.append)
    request = EngineRequest(
        engine_request_id="r", stage="colocated", prompt_token_ids=list(range(10, 50)),
        sampling=SamplingSpec(max_tokens=6, ignore_eos=True), chain_seed=BlockHash(b"\x01" * 32),
    )  # fmt: skip
    async for _ in engine.generate(request):
        pass
    assert [step.num_requests for step in steps] == [1] * 5
    await engine.close()


async def test_a_prompt_that_comes_beside_a_decode_is_told_with_what_it_computed(settings):
    engine, steps, decodes = await started(settings), [], asyncio.Event()

    def note(step):
        steps.append(step)
        decodes.set()

    engine.on_step(note)

    async def generate(name, tokens, max_tokens):
        request = EngineRequest(
            engine_request_id=name, stage="colocated", prompt_token_ids=tokens,
            sampling=SamplingSpec(max_tokens=max_tokens, ignore_eos=True), chain_seed=BlockHash(b"\x01" * 32),
        )  # fmt: skip
        async for _ in engine.generate(request):
            pass

    decoding = asyncio.create_task(generate("first", list(range(10, 50)), 400))
    await decodes.wait()
    await generate("second", list(range(500, 1100)), 2)
    decoding.cancel()
    (told,) = [step for step in steps if isinstance(step, PromptStep)]
    assert (told.new_tokens, told.past_tokens, told.num_decodes) == (600, 0, 1)
    assert 40 < told.context_tokens <= 440
    assert told.ms >= STEP_MS
    await engine.close()


@pytest.mark.engine
@pytest.mark.timeout(900)  # the cluster starts in it
def test_real_engines_profiled_themselves_and_left_no_page_lease_or_entry(live_cluster):
    pool = live_cluster.pool_at_start
    states = pool["pages_by_state"]
    assert states["sealed"] == states["leased"] == states["quarantined"] == 0
    assert pool["num_indexed"] == pool["num_pinned"] == pool["num_leases"] == pool["num_handoffs"] == 0
    until_s = time.monotonic() + PROFILES_S
    while True:
        shown = json.loads(live_cluster.quire("model", "show", "--json", check=False).stdout)
        busy = [name for name, cost in shown.items() if was_profiled_on_a_busy_machine(cost)]
        if shown and not busy:
            break
        assert time.monotonic() < until_s, shown
        for name in busy:  # a suite that killed it kept the machine busy when it started again
            live_cluster.wait_replaced(name, live_cluster.kill(name))
    for cost in shown.values():
        model = CostModel(msgspec.convert(cost["coefficients"], CostCoefficients))
        assert model.coefficients.device == "cpu"
        assert model.coefficients.num_samples >= LEAST_SAMPLES
        assert tells_short_from_long(model)


def tells_short_from_long(model: CostModel) -> bool:
    """And what is cached from what is not."""
    whole_ms = model.prefill_ms(2048)
    return 1.0 < model.prefill_ms(64) < whole_ms < 10_000 and model.prefill_ms(2048, 1536) < 0.8 * whole_ms


def was_profiled_on_a_busy_machine(cost) -> bool:
    """It has none, or a short one, or one that its worker itself would not keep for its next start."""
    if not cost.get("coefficients"):
        return True
    found = msgspec.convert(cost["coefficients"], CostCoefficients)
    if found.num_samples < LEAST_SAMPLES:  # its time was over
        return True
    is_poor = found.median_error_ratio > calibration.KEEP_ERROR_RATIO
    return is_poor and not tells_short_from_long(CostModel(found))
