"""A request that goes to the engine core before its lease: its outputs, its end, and what the core keeps of it."""

import asyncio
import contextlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request, RequestStatus

from shared.engine import early_requests
from shared.engine.block_hasher import EXTRA_ARGS_KEY, given, quire_block_hasher
from shared.engine.early_requests import EARLY_KEY, PACKED, EarlyRequests, EarlyStream, EarlyStreams
from shared.engine.long_lists import TokenIds
from shared.kv.block_hash import chain_seed, hash_blocks, pack_tokens

IDS = list(range(100, 200))


class Llm:
    """vLLM's generate(), with its client of the core. Args: error: of the request; outputs: of it."""

    def __init__(self, *outputs: str, error: Exception | None = None) -> None:
        self.outputs, self.error = outputs, error
        self.said: list[Any] = []
        self.core = SimpleNamespace(add_request_async=self._add)
        self.may_answer = asyncio.Event()

    async def _add(self, request: Any) -> None:
        self.said.append(("add", request.prompt_token_ids))

    async def generate(self, key: str, **more: Any):
        params = SamplingParams(extra_args={EXTRA_ARGS_KEY: {EARLY_KEY: key, **more}})
        try:
            if self.error is not None:
                raise self.error
            await self.core.add_request_async(SimpleNamespace(sampling_params=params, prompt_token_ids=IDS))
            await self.may_answer.wait()
            for output in self.outputs:
                yield output
        except (asyncio.CancelledError, GeneratorExit):
            self.said.append("abort")
            raise


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_it_is_sent_before_anybody_waits_for_its_outputs_and_all_of_these_come():
    llm = Llm("a", "b")
    streams = EarlyStreams(llm.core)
    streams.begin("k", lambda: llm.generate("k"))
    await turns()
    assert llm.said == [("add", IDS)]
    early = streams.take("k")
    assert early is not None
    assert await early.is_sent()
    llm.may_answer.set()
    assert [output async for output in early] == ["a", "b"]
    await early.aclose()
    assert llm.said == [("add", IDS)]
    assert (streams.take("k"), streams._sending) == (None, {})


async def test_a_lease_that_is_there_at_once_waits_until_the_request_is_sent():
    """Nothing of it has run when it is taken: told first, the core would not know whose lease it is."""
    llm = Llm("a")
    streams = EarlyStreams(llm.core)
    streams.begin("k", lambda: llm.generate("k"))
    early = streams.take("k")
    assert early is not None
    assert not llm.said
    assert await early.is_sent()
    assert llm.said == [("add", IDS)]
    await early.aclose()


async def test_its_list_is_made_when_who_sends_it_has_said_what_it_wants_of_the_mempool():
    llm, said = Llm("a"), []
    streams = EarlyStreams(llm.core)
    streams.begin("k", lambda: said.append("made") or llm.generate("k"))
    assert not said
    await turns()
    assert said == ["made"]
    streams.drop("k")
    await turns()


async def test_what_is_packed_goes_without_its_list():
    llm = Llm("a")
    streams = EarlyStreams(llm.core)
    streams.begin("k", lambda: llm.generate("k", **{PACKED: pack_tokens(IDS)}))
    await turns()
    assert llm.said == [("add", [])]
    streams.drop("k")
    await turns()


async def test_a_request_without_settings_of_ours_goes_as_it_is():
    llm = Llm()
    EarlyStreams(llm.core)
    for params in (None, SamplingParams(), SamplingParams(extra_args={"other": 1})):
        await llm.core.add_request_async(SimpleNamespace(sampling_params=params, prompt_token_ids=IDS))
    assert llm.said == [("add", IDS)] * 3


@pytest.mark.parametrize("is_taken", [False, True])
async def test_one_that_nobody_waits_for_any_more_is_aborted(is_taken):
    llm = Llm("a")
    streams = EarlyStreams(llm.core)
    streams.begin("k", lambda: llm.generate("k"))
    await turns()
    if is_taken:
        early = streams.take("k")
        assert early is not None
        await early.aclose()
    streams.drop("k")
    await turns()
    assert llm.said == [("add", IDS), "abort"]
    assert (streams._begun, streams._sending, streams._ending) == ({}, {}, set())


async def test_one_that_is_dropped_before_it_was_sent_is_not_left_with_the_core():
    llm = Llm("a")
    streams = EarlyStreams(llm.core)
    streams.begin("k", lambda: llm.generate("k"))
    streams.drop("k")
    await turns()
    assert llm.said in ([], [("add", IDS), "abort"])
    assert (streams._sending, streams._ending) == ({}, set())


async def test_who_stops_waiting_for_its_first_output_aborts_it():
    llm = Llm("a")
    early = EarlyStream(lambda: llm.generate("k"))
    task = asyncio.create_task(anext(early))  # type: ignore[arg-type]
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await early.aclose()
    assert llm.said == [("add", IDS), "abort"]


async def test_vllms_refusal_is_the_first_output_and_no_lease_follows():
    llm = Llm(error=ValueError("too long"))
    streams = EarlyStreams(llm.core)
    streams.begin("k", lambda: llm.generate("k"))
    early = streams.take("k")
    assert early is not None
    assert not await early.is_sent()
    with pytest.raises(ValueError, match="too long"):
        await anext(early)
    await early.aclose()
    assert streams._sending == {}


# -- the engine core ------------------------------------------------------------------------------------


def request_of(name: str, **brought: Any) -> Request:
    params = SamplingParams(max_tokens=4, extra_args={EXTRA_ARGS_KEY: brought})
    return Request(name, list(IDS), params, None)


def scheduler(*names: str) -> EarlyRequests:
    out = EarlyRequests()
    out._early, out._early_keys = {}, {}
    for name in names:
        assert out.keep_early(request_of(name, **{EARLY_KEY: f"key-{name}"}))
    return out


def test_a_request_without_the_word_waits_for_nothing():
    assert not scheduler().keep_early(request_of("r"))


def test_with_its_lease_it_is_like_one_that_came_with_it():
    out = scheduler("r")
    request = out.take_early("key-r", {"lease_id": "l", "pages": b"1234"})
    assert request is not None
    assert given(request) == {"lease_id": "l", "pages": b"1234"}
    assert not out.keep_early(request)
    assert (out._early, out._early_keys, out.take_early("key-r", {})) == ({}, {}, None)


@pytest.mark.parametrize(
    ("asked", "left"), [("a", "bc"), (["a", "c", "x"], "b"), ([], "abc"), ({"b": 1}.keys(), "ac"), (None, "")]
)
def test_those_that_are_aborted_end_and_the_others_wait_on(asked, left):
    out = scheduler("a", "b", "c")
    ended = out.finish_early(asked, RequestStatus.FINISHED_ABORTED)
    assert sorted([r.request_id for r in ended] + list(left)) == ["a", "b", "c"]
    assert all(r.is_finished() for r in ended)
    assert sorted(out._early_keys) == list(left)
    assert sorted(out._early) == [f"key-{name}" for name in left]


def test_a_packed_prompt_is_the_list_and_the_hashes_that_it_was_packed_of(monkeypatch):
    made: list[Request] = []

    def preprocess(core: Any, request: EngineCoreRequest) -> None:
        made.append(Request.from_engine_core_request(request, quire_block_hasher(8, None)))

    monkeypatch.setattr(EngineCore, "preprocess_add_request", preprocess)
    monkeypatch.setattr(EngineCore, "quire_lease_came", None, raising=False)
    early_requests.install()
    early_requests.install()
    for brought in ({PACKED: pack_tokens(IDS)}, {}):
        params = SamplingParams(extra_args={EXTRA_ARGS_KEY: brought})
        request: Any = EngineCoreRequest(
            request_id="r", prompt_token_ids=[] if brought else list(IDS), mm_features=None,
            sampling_params=params, pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None,
            data_parallel_rank=None,
        )  # fmt: skip
        EngineCore.preprocess_add_request(None, request)  # type: ignore[arg-type]
        assert PACKED not in brought
    packed, listed = made
    assert (packed.prompt_token_ids, list(packed.all_token_ids)) == (IDS, IDS)
    assert (type(packed.prompt_token_ids), type(listed.prompt_token_ids)) == (TokenIds, list)
    want = hash_blocks(chain_seed("", ""), pack_tokens(IDS), 8)
    assert packed.block_hashes == listed.block_hashes == want
    for request in made:
        request.append_output_token_ids([7, 8, 9, 10])
    want = hash_blocks(chain_seed("", ""), pack_tokens([*IDS, 7, 8, 9, 10]), 8)
    assert packed.block_hashes == listed.block_hashes == want


@pytest.mark.parametrize("error", [None, ValueError("no")])
def test_threads_take_short_turns_while_a_packed_prompt_is_taken_in_and_usual_ones_behind_it(error):
    """The one that gives pages back waited 5 ms for the interpreter, and the first copies for these pages."""
    usual_s, seen = sys.getswitchinterval(), []

    def stock(core: Any, request: Any) -> None:
        seen.append(sys.getswitchinterval())
        if error is not None:
            raise error

    preprocess = early_requests._with_packed(stock)
    for brought in ({}, {PACKED: pack_tokens(IDS)}):
        params = SamplingParams(extra_args={EXTRA_ARGS_KEY: brought})
        with contextlib.suppress(ValueError):
            preprocess(None, SimpleNamespace(sampling_params=params))  # type: ignore[arg-type]
        assert sys.getswitchinterval() == usual_s
    assert seen == pytest.approx([usual_s, early_requests.TURN_S])


def test_a_lease_that_cannot_be_taken_over_ends_the_core(monkeypatch):
    ended: list[int] = []
    monkeypatch.setattr(early_requests.os, "_exit", ended.append)

    def fails(key: str, params: Any) -> None:
        raise AssertionError(key)

    early_requests._lease_came(SimpleNamespace(scheduler=SimpleNamespace(lease_came=fails)), "k", {})  # type: ignore[arg-type]
    assert ended == [early_requests.EXIT_LEASE_LOST]
