"""A worker's front in this process: real ZeroMQ, the mock engine, no other service."""

import asyncio
import dataclasses
import json
from contextlib import asynccontextmanager

import pytest

from shared.engine.interface import EngineLoad
from shared.engine.worker_attempt import AttemptContext
from shared.engine.worker_checks import WorkerLimits
from shared.engine.worker_config import WorkerSettings
from shared.engine.worker_front import WorkerFront
from shared.engine.worker_pages import PromptPages
from shared.errors import PeerTimeout
from shared.ids import Epoch, HandoffId, InstanceId, LeaseId
from shared.kv.block_hash import chain_seed, hash_blocks, hash_tail, pack_tokens
from shared.kv.words import u32_bytes, u64_bytes
from shared.testing.mock_engine import MockEngine
from shared.testing.mock_tokens import MockVocabulary
from shared.testing.scripted_gateway import ScriptedGateway
from shared.wire.handoff import HandoffState
from shared.wire.mempool import Acquired
from shared.wire.requests import Failed, Finished, Prefilled, SamplingSpec, Tokens

EPOCH = 7


@pytest.fixture
def model_dir(tmp_path):
    config = {"vocab_size": 1000, "eos_token_id": 2, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


class Rig:
    """A front, its engine and what it told its surroundings."""

    def __init__(self, model_dir, pages=None, **settings):
        values = {"mock_step_ms": 1.0, "block_tokens": 4, "instance": "decode-0"} | settings
        self.settings = WorkerSettings(engine="mock", model_dir=model_dir, model_name="m", **values)
        self.engine = MockEngine(self.settings)
        self.vocabulary = MockVocabulary.of_model(model_dir)
        self.changes = 0
        self.died: list[str] = []
        self.client = pages
        limits = WorkerLimits(1000, 4096, self.settings.max_inflight)
        self.front = WorkerFront("tcp://127.0.0.1:0", limits, self._changed)
        self.pages = PromptPages(pages, self.engine.description, self.settings)

    def _changed(self):
        self.changes += 1

    async def start(self):
        await self.engine.start()
        context = AttemptContext(
            instance=InstanceId("decode-0"),
            settings=self.settings,
            engine=self.engine,
            pages=self.pages,
            outbox=self.front.outbox,
            on_engine_died=self.died.append,
            on_invariant_broken=self.died.append,
        )
        self.front.epoch = Epoch(EPOCH)
        return await self.front.start(context)


@asynccontextmanager
async def running(model_dir, pages=None, **settings):
    rig = Rig(model_dir, pages, **settings)
    endpoint = await rig.start()
    try:
        async with ScriptedGateway(endpoint, EPOCH) as gateway:
            yield rig, gateway
    finally:
        rig.front.close()
        await rig.engine.close()


async def until(condition, timeout_s=30.0):
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  the condition is another object's state
            await asyncio.sleep(0.005)


class FakePages:
    """A mempool client that answers from a script."""

    memory_id = Epoch(1)
    peer_address = "tcp://10.0.0.5:8107"
    crosses_hosts = True
    boot_generation = Epoch(9)
    brought: dict[str, int] = {}

    def __init__(self, num_blocks=None, error=None):
        self.connected = True
        self.num_blocks = num_blocks
        self.error = error
        self.calls, self.sources = [], []
        self.released = []
        self.dropped = []

    async def acquire(self, hashes, *, handoff_id="", wait_ms=0, source_mempool="", **_):
        self.sources.append(source_mempool)
        self.own_space_only = _.get("own_space_only")
        self.calls.append((list(hashes), handoff_id, wait_ms))
        if self.error is not None:
            raise self.error
        n = len(hashes) if self.num_blocks is None else self.num_blocks
        return Acquired(
            call_id=1,
            lease_id=LeaseId("l1" if n else ""),
            fencing_token=Epoch(1),
            num_blocks=n,
            pages=u32_bytes(range(n)),
            epochs=u64_bytes([5] * n),
            **self.brought,
        )

    def release(self, lease_id):
        self.released.append(lease_id)

    def drop_handoff(self, handoff_id):
        self.dropped.append(handoff_id)


async def test_a_colocated_request_streams_the_oracles_tokens_and_finishes(model_dir):
    async with running(model_dir) as (rig, gateway):
        gateway.generate("r1", [1, 2, 3, 4, 5], max_tokens=20)
        end = await gateway.end_of("r1")
        assert isinstance(end, Finished)
        assert gateway.tokens["r1", 0] == rig.vocabulary.tokens([1, 2, 3, 4, 5], 20)
        assert gateway.finish_reasons["r1", 0] == "length"
        assert (end.receipt.prompt_tokens, end.receipt.tokens_computed) == (5, 5)
        assert rig.front.num_inflight == 0
        assert rig.changes == 2


async def test_prefill_then_decode_give_the_same_tokens_as_colocated(model_dir):
    async with running(model_dir) as (rig, gateway):
        spec = SamplingSpec(max_tokens=12, temperature=0.7, seed=3, n=2)
        gateway.generate("p", [9] * 10, stage="prefill", sampling=spec)
        prefilled = await gateway.end_of("p")
        assert isinstance(prefilled, Prefilled)
        assert prefilled.handoff is not None
        assert prefilled.handoff.valid_tokens == 0, "without a pool the other side must not wait for pages"
        assert prefilled.first.token_ids == rig.vocabulary.tokens([9] * 10, 1, seed=3)
        gateway.generate("d", [9] * 10, stage="decode", sampling=spec, handoff=prefilled.handoff)
        assert isinstance(await gateway.end_of("d"), Finished)
        for choice in (0, 1):
            assert gateway.tokens["d", choice] == rig.vocabulary.tokens([9] * 10, 12, choice=choice, seed=3)


async def test_there_is_no_handoff_when_the_first_token_ends_the_request(model_dir):
    async with running(model_dir, mock_eos_after_tokens=0) as (rig, gateway):
        gateway.generate("one", [1, 2], stage="prefill", max_tokens=1)
        first = await gateway.end_of("one")
        assert isinstance(first, Prefilled)
        assert first.handoff is None
        assert first.first.finish_reason == "length"
        stop = rig.vocabulary.tokens([1, 2], 1)[0]
        spec = SamplingSpec(max_tokens=9, temperature=0.0, stop_token_ids=[stop])
        gateway.generate("stop", [1, 2], stage="prefill", sampling=spec)
        stopped = await gateway.end_of("stop")
        assert isinstance(stopped, Prefilled)
        assert stopped.handoff is None
        assert (stopped.first.finish_reason, stopped.first.stop_token_id) == ("stop", stop)


async def test_one_engine_step_is_one_message_for_one_gateway(model_dir):
    async with running(model_dir, mock_step_ms=150.0) as (_, gateway):
        for i in range(16):
            gateway.generate(f"r{i}", [i + 3, 1, 2], max_tokens=5)
        for i in range(16):
            await gateway.end_of(f"r{i}")
        tokens = [m for m in gateway.messages if isinstance(m, Tokens)]
        assert sum(len(m.chunks) for m in tokens) == 80
        assert len(tokens) <= 7, "five steps, and two more for requests that came late"


async def test_an_aborted_request_says_nothing_more_and_leaves_the_engine(model_dir):
    async with running(model_dir, mock_step_ms=5.0) as (rig, gateway):
        gateway.generate("r", [1, 2, 3], max_tokens=4000)
        await gateway.has_tokens("r", 3)
        gateway.abort("r")
        gateway.abort("unknown")
        await until(lambda: not rig.front.num_inflight and not rig.engine.load().num_running)
        count = len(gateway.tokens["r", 0])
        await asyncio.sleep(0.05)
        assert len(gateway.tokens["r", 0]) <= count + 1
        assert "r" not in gateway.ends


async def test_a_request_past_its_deadline_fails_and_leaves_the_engine(model_dir):
    async with running(model_dir, mock_step_ms=5.0) as (rig, gateway):
        gateway.generate("r", [1, 2, 3], max_tokens=4000, deadline_ms=80)
        end = await gateway.end_of("r")
        assert isinstance(end, Failed)
        assert (end.code, end.retryable) == ("peer.timeout", False)
        assert rig.front.num_inflight == 0
        assert rig.engine.load() == EngineLoad()


async def test_bad_frames_stale_epochs_and_refused_parameters_fail_once_each(model_dir):
    async with running(model_dir) as (_, gateway):
        gateway.generate("odd", [], raw=[b"abc"])
        gateway.generate("none", [], raw=[])
        gateway.generate("two", [], raw=[b"abcd", b"abcd"])
        gateway.generate("vocabulary", [1000])
        gateway.generate("long", [1] * 4096)
        gateway.generate("stale", [1], epoch=EPOCH - 1)
        gateway.generate("logprobs", [1], sampling=SamplingSpec(max_tokens=1, logprobs=1000))
        expected = {
            "odd": "invalid_request",
            "none": "invalid_request",
            "two": "invalid_request",
            "vocabulary": "invalid_request",
            "long": "context_length_exceeded",
            "stale": "epoch.stale",
            "logprobs": "invalid_request",
        }
        for request_id, code in expected.items():
            end = await gateway.end_of(request_id)
            assert isinstance(end, Failed)
            assert (end.code, end.retryable) == (code, code == "epoch.stale")
        gateway.generate("fine", [1])
        assert isinstance(await gateway.end_of("fine"), Finished)


async def test_a_repeated_generate_is_answered_once(model_dir):
    async with running(model_dir, mock_step_ms=5.0) as (rig, gateway):
        gateway.generate("r", [1, 2], max_tokens=5)
        gateway.generate("r", [1, 2], max_tokens=5)
        assert isinstance(await gateway.end_of("r"), Finished)
        assert gateway.tokens["r", 0] == rig.vocabulary.tokens([1, 2], 5)
        assert rig.front.num_accepted == 1


async def test_a_dead_engine_fails_everything_retryably_and_tells(model_dir):
    async with running(model_dir, mock_die_after_tokens=6) as (rig, gateway):
        gateway.generate("a", [1, 2], max_tokens=100)
        gateway.generate("b", [3, 4], max_tokens=100)
        for request_id in ("a", "b"):
            end = await gateway.end_of(request_id)
            assert isinstance(end, Failed)
            assert (end.code, end.retryable) == ("peer.gone", True)
        assert rig.died
        assert not rig.engine.alive


async def test_a_gateway_whose_connection_ended_loses_its_requests(model_dir):
    async with running(model_dir, mock_step_ms=5.0) as (rig, gateway):
        gateway.generate("r", [1, 2, 3], max_tokens=4000)
        await gateway.has_tokens("r")
        gateway.link.close()
        await until(lambda: not rig.front.num_inflight)


async def test_a_prompt_asks_the_pool_for_its_full_blocks_but_one_token(model_dir):
    pages = FakePages(num_blocks=0)
    async with running(model_dir, pages) as (rig, gateway):
        seed = chain_seed(rig.engine.description.fingerprint, "")
        for length, blocks in ((3, 0), (4, 0), (5, 1), (8, 1), (9, 2)):
            pages.calls.clear()
            prompt = list(range(3, 3 + length))
            gateway.generate(f"r{length}", prompt, max_tokens=1)
            await gateway.end_of(f"r{length}")
            want = hash_blocks(seed, pack_tokens(prompt), 4)[:blocks]
            assert pages.calls == ([(want, "", 0)] if want else [])
        assert rig.pages.num_leases == 0


async def test_decode_asks_for_the_handoffs_blocks_and_tail_and_releases_after_the_first_output(model_dir):
    pages = FakePages()
    async with running(model_dir, pages, mock_step_ms=20.0) as (rig, gateway):
        description = rig.engine.description
        prompt = list(range(3, 13))  # two blocks of 4 and a tail of 2
        handoff = HandoffState(
            handoff_id=HandoffId("h"), source=InstanceId("p"), description=description, valid_tokens=10,
            source_mempool="tcp://a:1",
        )  # fmt: skip
        gateway.generate("d", prompt, stage="decode", handoff=handoff, max_tokens=30)
        await gateway.has_tokens("d")
        seed = chain_seed(description.fingerprint, "")
        full = hash_blocks(seed, pack_tokens(prompt), 4)
        want = [*full, hash_tail(full[-1], pack_tokens(prompt[8:]))]
        assert pages.calls == [(want, "h", 2000)]
        assert pages.sources == ["tcp://a:1"]
        assert pages.released == ["l1"]
        assert "d" not in gateway.ends, "released long before the end"


@pytest.mark.parametrize("trouble", ["error", "description", "lists", "down"])
async def test_trouble_with_the_pool_costs_time_but_not_the_answer(model_dir, trouble):
    pages = FakePages(error=PeerTimeout("slow") if trouble == "error" else None)
    async with running(model_dir, pages) as (rig, gateway):
        description = rig.engine.description
        if trouble == "description":
            import msgspec

            description = msgspec.structs.replace(description, isa="other")
        if trouble == "lists":
            pages.num_blocks = 99
        pages.connected = trouble != "down"
        handoff = HandoffState(
            handoff_id=HandoffId("h"), source=InstanceId("p"), description=description, valid_tokens=10
        )
        gateway.generate("d", list(range(3, 13)), stage="decode", handoff=handoff)
        end = await gateway.end_of("d")
        assert isinstance(end, Finished)
        assert gateway.tokens["d", 0] == rig.vocabulary.tokens(list(range(3, 13)), 8)
        assert end.receipt.tokens_pool == 0
        assert rig.pages.num_leases == 0
        assert pages.calls == [] if trouble in ("description", "down") else len(pages.calls) == 1


@pytest.mark.parametrize("has_ended", [True, False])
async def test_an_abort_that_names_a_handoff_lets_its_pages_go(model_dir, has_ended):
    pages = FakePages()
    async with running(model_dir, pages, mock_prefill_tokens_per_s=1e6 if has_ended else 10.0) as (
        rig,
        gateway,
    ):
        gateway.generate("p", list(range(3, 103)), stage="prefill")
        if has_ended:
            await gateway.end_of("p")
        else:
            await until(lambda: rig.front.num_inflight == 1)
        gateway.abort("p")
        gateway.abort("p", handoff_id="h-p")
        await until(lambda: rig.front.num_inflight == 0 and len(pages.dropped) >= 2 - has_ended)
        assert pages.dropped == ["h-p"] * (2 - has_ended)
        pages.connected = False
        gateway.abort("p", handoff_id="h-q")
        gateway.generate("d", [5], max_tokens=1)
        await gateway.end_of("d")
        assert "h-q" not in pages.dropped


async def test_prompt_logprobs_come_once(model_dir):
    async with running(model_dir) as (_, gateway):
        spec = SamplingSpec(max_tokens=3, temperature=0.0, prompt_logprobs=1, logprobs=2)
        gateway.generate("p", [5, 6, 7], stage="prefill", sampling=spec)
        prefilled = await gateway.end_of("p")
        assert isinstance(prefilled, Prefilled)
        assert prefilled.prompt_logprobs is not None
        assert [row and row[0].token_id for row in prefilled.prompt_logprobs] == [None, 6, 7]
        gateway.generate("d", [5, 6, 7], stage="decode", sampling=spec, handoff=prefilled.handoff)
        assert isinstance(await gateway.end_of("d"), Finished)
        gateway.generate("c", [5, 6, 7], stage="colocated", sampling=spec)
        assert isinstance(await gateway.end_of("c"), Finished)
        assert gateway.scored == {"c": prefilled.prompt_logprobs}
        chunks = [c for m in gateway.messages if isinstance(m, Tokens) for c in m.chunks]
        assert all(c.logprobs and len(c.logprobs[0]) == 3 for c in chunks)


async def test_no_pages_are_leased_when_the_prompt_must_be_computed_for_its_log_probabilities(model_dir):
    pages = FakePages()
    async with running(model_dir, pages) as (_, gateway):
        spec = SamplingSpec(max_tokens=1, temperature=0.0, prompt_logprobs=1)
        for number, sampling in enumerate((spec, SamplingSpec(max_tokens=1, temperature=0.0))):
            gateway.generate(f"c{number}", list(range(3, 13)), stage="colocated", sampling=sampling)
            assert isinstance(await gateway.end_of(f"c{number}"), Finished)
            assert len(pages.calls) == number


@pytest.mark.parametrize("n", [1, 3])
async def test_the_prompt_alone_has_log_probabilities_and_no_output(model_dir, n):
    spec = SamplingSpec(max_tokens=0, temperature=0.0, prompt_logprobs=1, logprobs=1, n=n)
    async with running(model_dir) as (_, gateway):
        gateway.generate("c", [5, 6, 7], stage="colocated", sampling=spec)
        assert isinstance(await gateway.end_of("c"), Finished)
        assert [row and row[0].token_id for row in gateway.scored["c"]] == [None, 6, 7]
        assert gateway.tokens == {("c", index): [] for index in range(n)}
        assert gateway.finish_reasons == {("c", index): "length" for index in range(n)}
        gateway.generate("p", [5, 6, 7], stage="prefill", sampling=spec)
        prefilled = await gateway.end_of("p")
        assert isinstance(prefilled, Prefilled)
        assert prefilled.first.token_ids == []
        assert prefilled.prompt_logprobs == gateway.scored["c"]
        assert (prefilled.handoff is None) is (n == 1)


async def test_the_attempt_that_notices_its_engines_death_ends_once_too(model_dir):
    """It said Failed, and then the front that failed all said it again."""
    async with running(model_dir, mock_die_after_tokens=5) as (rig, gateway):
        rig.front._context = dataclasses.replace(rig.front._context, on_engine_died=rig.front.fail_all)
        for name in ("a", "b"):
            gateway.generate(name, [3, 4], max_tokens=4000)
        ends = [await gateway.end_of(name) for name in ("a", "b")]
        assert [end.code for end in ends] == ["peer.gone", "peer.gone"]
        gateway.generate("c", [3, 4])
        await gateway.end_of("c")  # what came before it is here
