"""Requests that an engine would end by, or a loop stand still for: refused, or made such that it takes them."""

import asyncio
import json
import warnings
from types import SimpleNamespace

import msgspec
import pytest
import torch
from vllm import SamplingParams
from vllm.logprobs import create_prompt_logprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingType
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.outputs import LogprobsTensors

from services.gateway.logprobs import LEAST, CompletionLogprobs, TextOffsets
from services.gateway.openai import ChatBody, CompletionBody, parse_body, to_sampling
from services.gateway.request import MAX_SUM, Prompt, begin, check_scores
from services.gateway.whole import WholeSink
from shared.engine.interface import EngineRequest
from shared.engine.worker_checks import Refusal, WorkerLimits, check_prompt
from shared.engine.worker_front import WorkerFront
from shared.errors import InvalidRequest, Overloaded
from shared.ids import Epoch, HandoffId, InstanceId, RequestId
from shared.kv.block_hash import pack_tokens
from shared.kv.layout import EngineDescription
from shared.transport.zmq_channel import RouterServer
from shared.wire.codec import MAX_BODY_BYTES
from shared.wire.handoff import HandoffState
from shared.wire.requests import (
    GREEDY_BELOW,
    MAX_LOGIT_BIAS,
    MAX_SCORES,
    MAX_STOP_IDS,
    MAX_STOP_LIST,
    TO_GATEWAY,
    Failed,
    Generate,
    PromptScored,
    SamplingSpec,
    TokenChunk,
    TokenLogprob,
    num_scores,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of what vLLM's runners import
    from vllm.v1.worker.gpu.sample import logit_bias, states

    from shared.engine.sampling import SLICE_SCORES, engine_seed, prompt_rows, sampling_params
    from shared.engine.vllm_engine import VllmEngine

VOCAB = 32_000
LIMITS = WorkerLimits(vocab_size=VOCAB, max_model_len=1 << 20, max_inflight=2)
EOS_IDS = range(28)  # more than any model has
LARGEST = (1 << 63) - 1


def chat_spec(**fields) -> SamplingSpec:
    known = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 8}
    body = parse_body(ChatBody, json.dumps(known | fields).encode())
    return to_sampling(body, default_max_tokens=8, random_seed=1, vocab_size=VOCAB)


def echo_body(logprobs: int, n: int = 1) -> CompletionBody:
    body = {"model": "m", "prompt": [1], "echo": True, "max_tokens": 0, "logprobs": logprobs, "n": n}
    return parse_body(CompletionBody, json.dumps(body).encode())


def echo_spec(logprobs: int, n: int = 1) -> SamplingSpec:
    return to_sampling(echo_body(logprobs, n), default_max_tokens=8, random_seed=1)


def checked(spec: SamplingSpec, num_tokens: int = 1, **changes) -> list[int] | Refusal:
    values = {"request_id": RequestId("r"), "attempt": 1, "stage": "colocated", "instance_epoch": Epoch(1)}
    message = Generate(**(values | changes), sampling=spec)
    return check_prompt(message, [pack_tokens([1] * num_tokens)], limits=LIMITS)


def is_refused(found: list[int] | Refusal) -> bool:
    return isinstance(found, Refusal) and (found.code, found.retryable) == ("invalid_request", False)


@pytest.fixture
def add_to_runner(monkeypatch):
    """Adds a request to the sampler of vLLM's runner for GPUs: its code, its buffers' shapes, memory of the host."""

    class Buffer:
        def __init__(self, size, dtype=None, **_):
            self.np = torch.zeros(size, dtype=dtype).numpy()

        def stage_write(self, *_):
            """The limits are checked before."""

        def copy_to_uva(self):
            """Nothing runs."""

    for module in (logit_bias, states):
        for name in ("UvaBackedTensor", "StagedWriteTensor"):
            monkeypatch.setattr(module, name, Buffer, raising=False)
    biases = logit_bias.LogitBiasState(1, torch.device("cpu"))
    sampling = states.SamplingStates(1, VOCAB)

    def add(spec: SamplingSpec) -> list[int | None]:
        """The choices' seeds, as the engine core's process reads them."""
        params = sampling_params(spec, {})
        params.all_stop_token_ids.update(EOS_IDS, params.stop_token_ids or ())
        parent = ParentRequest(SimpleNamespace(request_id="r", external_req_id="r", params=params))
        seeds = []
        for index in range(params.n):
            sent = msgspec.msgpack.encode(parent.get_child_info(index)[1])
            child = msgspec.msgpack.decode(sent, type=SamplingParams)
            child.all_stop_token_ids.update(params.all_stop_token_ids)
            sampling.add_request(0, child)
            biases.add_request(0, 5, child)
            seeds.append(child.seed)
        return seeds

    return add


@pytest.mark.parametrize(
    ("fields", "param", "limit"),
    [
        ({"logit_bias": {str(i): 1 for i in range(MAX_LOGIT_BIAS + 1)}}, "logit_bias", MAX_LOGIT_BIAS),
        ({"stop_token_ids": [*range(MAX_STOP_IDS + 1)], "min_tokens": 1}, "stop_token_ids", MAX_STOP_IDS),
        ({"stop_token_ids": [*range(MAX_STOP_LIST + 1)]}, "stop_token_ids", MAX_STOP_LIST),
    ],
)
def test_more_than_an_engine_has_room_for_is_refused_by_name_and_limit(fields, param, limit):
    with pytest.raises(InvalidRequest, match=f"at most {limit}") as raised:
        chat_spec(**fields)
    assert (raised.value.param, raised.value.http_status) == (param, 400)
    typed = {"logit_bias": lambda given: {int(key): float(value) for key, value in given.items()}}
    spec = SamplingSpec(
        max_tokens=8, **{key: typed.get(key, lambda v: v)(each) for key, each in fields.items()}
    )
    assert is_refused(checked(spec)), "a worker does not trust its gateway"


def test_as_much_as_is_allowed_fits_an_engine(add_to_runner):
    ids = list(range(1_000, 1_000 + MAX_STOP_IDS))
    spec = chat_spec(
        logit_bias={str(i): 1 for i in range(MAX_LOGIT_BIAS)}, stop_token_ids=ids * 2, min_tokens=1
    )
    assert list(checked(spec)) == [1]
    add_to_runner(spec)
    free = chat_spec(stop_token_ids=[*range(500, 0, -1)] * 2)
    assert free.stop_token_ids == [*range(1, 501)]
    assert list(checked(free)) == [1], "without min_tokens vLLM needs no room for them"
    add_to_runner(free)


@pytest.mark.parametrize("seed", [LARGEST, LARGEST - 127, -2, -128, -LARGEST - 1, 0, 7])
def test_any_seed_gives_every_choice_one_that_an_engine_can_take(add_to_runner, seed):
    seeds = add_to_runner(chat_spec(seed=seed, n=128, temperature=1.0))
    assert None not in seeds, "not reproducible"
    assert len(set(seeds)) == 128
    assert seeds == add_to_runner(chat_spec(seed=seed, n=128, temperature=1.0))
    assert add_to_runner(chat_spec(seed=seed, temperature=1.0)) == seeds[:1]


def test_seeds_that_can_be_taken_stay_as_they_are():
    for seed in (None, 0, 1, 1 << 62, -(1 << 63)):
        assert engine_seed(seed) == seed


@pytest.mark.parametrize(
    "changes",
    [
        {"stop_token_ids": [VOCAB]},
        {"stop_token_ids": [-1], "min_tokens": 1},
        {"max_tokens": 1 << 31},
        {"min_tokens": 1 << 31},
        {"logprobs": VOCAB + 1},
        {"logit_bias": {1: float("nan")}},
    ],
)
def test_what_vllm_looks_at_in_a_step_only_is_looked_at_before(changes):
    assert is_refused(checked(SamplingSpec(**({"max_tokens": 8} | changes))))


def test_a_temperature_that_gateways_take_for_greedy_is_greedy_in_the_engine():
    tiny = sampling_params(SamplingSpec(max_tokens=4, temperature=GREEDY_BELOW / 10), {})
    assert tiny.sampling_type is SamplingType.GREEDY
    drawn = sampling_params(SamplingSpec(max_tokens=4, temperature=GREEDY_BELOW, seed=1), {})
    assert drawn.sampling_type is SamplingType.RANDOM_SEED
    with pytest.raises(InvalidRequest):
        sampling_params(SamplingSpec(max_tokens=4, temperature=-0.5), {})


# -- a prompt's log probabilities ----------------------------------------------------------------------------


@pytest.mark.parametrize(("logprobs", "n", "most"), [(1, 1, 131_072), (20, 1, 22_795), (0, 2, 87_381)])
async def test_prompts_are_scored_up_to_a_bound_at_the_gateway_and_at_the_worker(logprobs, n, most):
    spec = echo_spec(logprobs, n)
    check_scores([Prompt(range(most), b"")], [spec])
    assert len(checked(spec, most)) == most
    assert is_refused(checked(spec, most + 1))
    text = SimpleNamespace(vocab_size=VOCAB)
    gateway = SimpleNamespace(max_model_len=1 << 20, sampling_defaults=None, text=text)
    incoming = SimpleNamespace(gateway=gateway, body=echo_body(logprobs, n))
    full = Prompt(range(most), b"")
    check_scores([full] * 4, [spec] * 4)
    for prompts in ([Prompt(range(most + 1), b"")], [full] * 4 + [Prompt(range(8), b"")]):
        bound = MAX_SCORES if len(prompts) == 1 else MAX_SUM
        with pytest.raises(InvalidRequest, match=str(bound)) as raised:
            await begin(incoming, "text", SimpleNamespace(is_chat=False), prompts)
        assert (raised.value.param, raised.value.http_status) == ("logprobs", 400)
    check_scores([Prompt(range(1 << 20), b"")], [SamplingSpec(max_tokens=1, logprobs=20)])


def test_a_stage_that_goes_on_behind_a_scored_prompt_scores_nothing_and_is_not_refused():
    spec = msgspec.structs.replace(echo_spec(1), max_tokens=8, temperature=0.0)
    described = EngineDescription(
        model="m", fingerprint="f", dtype="float32", layout="x", backend="MOCK", block_tokens=8, max_model_len=9
    )  # fmt: skip
    handoff = HandoffState(
        handoff_id=HandoffId("h"), source=InstanceId("p"), description=described, valid_tokens=8
    )
    assert len(checked(spec, 131_073, stage="decode", handoff=handoff, num_output_tokens=1)) == 131_073
    assert len(checked(spec, 131_073, num_output_tokens=1)) == 131_073


def test_the_largest_scores_that_are_allowed_are_well_below_a_frames_limit():
    for num_alternatives in range(21):
        spec = SamplingSpec(max_tokens=0, prompt_logprobs=num_alternatives)
        row = [TokenLogprob((1 << 32) - 1, -1.5, (1 << 32) - 1)] * (num_alternatives + 1)

        def size(num_rows, row=row):
            scored = PromptScored(request_id=RequestId("r"), attempt=1, prompt_logprobs=[row] * num_rows)
            return len(TO_GATEWAY.pack(scored)[2])

        most = MAX_SCORES // num_scores(spec, 1)
        assert size(100) + (most - 100) * (size(101) - size(100)) < MAX_BODY_BYTES / 2


def scored_by_vllm(tensors: LogprobsTensors, *, flat: bool):
    found = LogprobsProcessor(
        tokenizer=None, cumulative_logprob=None, logprobs=None, num_logprobs=None,
        prompt_logprobs=create_prompt_logprobs(flat), num_prompt_logprobs=tensors.logprobs.shape[1] - 1,
    )  # fmt: skip
    found._update_prompt_logprobs(tensors)
    return found.pop_prompt_logprobs()


@pytest.mark.parametrize("num_alternatives", [0, 1, 5])
async def test_rows_of_a_prompt_are_vllms_and_the_loop_gets_its_turn_between_them(num_alternatives):
    num_rows, width = 3 * SLICE_SCORES // (num_alternatives + 1), num_alternatives + 1
    torch.manual_seed(5)
    ids = torch.stack([torch.randperm(8)[:width] for _ in range(num_rows)]).int()
    values = torch.rand(num_rows, width).neg().sort(descending=True).values
    for row in range(0, num_rows, 2):  # the token itself is among the best, as a rule
        place = row // 2 % width
        ids[row, 0], values[row, 0] = ids[row, place].clone(), values[row, place].clone()
    tensors = LogprobsTensors(ids, values, torch.randint(1, 9, (num_rows,)))
    want = [
        row and [TokenLogprob(token, each.logprob, each.rank) for token, each in row.items()]
        for row in scored_by_vllm(tensors, flat=False)
    ]
    turns = 0

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    assert await prompt_rows(scored_by_vllm(tensors, flat=True)) == want
    counting.cancel()
    assert turns >= 2
    assert want[0] is None
    assert sampling_params(SamplingSpec(max_tokens=1, prompt_logprobs=1), {}).flat_logprobs


async def test_an_engine_makes_rows_for_the_first_output_alone_though_every_choice_brings_some():
    tensors = LogprobsTensors(
        torch.tensor([[7, 7], [8, 9]]), torch.tensor([[-1.0] * 2] * 2), torch.tensor([1, 3])
    )
    scored = scored_by_vllm(tensors, flat=True)

    async def outputs(*_, **__):
        for index in range(2):
            choice = CompletionOutput(index, "", [5], None, None)
            yield RequestOutput("r", None, [6, 7, 8], scored, [choice], index == 1, num_cached_tokens=0)

    engine = object.__new__(VllmEngine)
    engine._llm = SimpleNamespace(generate=outputs)
    engine._reads_cache = engine.keeps_leases = True
    engine.settings = SimpleNamespace(early_from_tokens=0)  # type: ignore[assignment]
    engine._early = SimpleNamespace(take=lambda _: None)  # type: ignore[assignment]
    engine._unfinished_prefill, engine._context_tokens = {}, {}
    spec = SamplingSpec(max_tokens=2, n=2, prompt_logprobs=1)
    request = EngineRequest(
        engine_request_id="r", stage="colocated", prompt_token_ids=[6, 7, 8], sampling=spec, chain_seed=b""
    )
    deltas = [delta async for delta in engine.generate(request)]
    want = [None, [TokenLogprob(7, -1.0, 1)], [TokenLogprob(8, -1.0, 3), TokenLogprob(9, -1.0, 1)]]
    assert [delta.prompt_logprobs for delta in deltas] == [want, None]


def test_log_probabilities_that_json_has_no_word_for_are_the_least():
    least, texts = float("-inf"), SimpleNamespace(text=str)
    rows = [None, [TokenLogprob(4, least, 9), TokenLogprob(5, -0.5, 1), TokenLogprob(6, least, 2)]]
    maker = CompletionLogprobs(2, texts, TextOffsets(lambda each: ("", str(each)), start=2))
    maker.begin_with_prompt(2, 3, TextOffsets(lambda each: ("", str(each))))
    found = maker.entries(rows)
    assert found == {
        "tokens": ["3", "4"],
        "token_logprobs": [None, LEAST],
        "top_logprobs": [None, {"5": -0.5, "4": LEAST}],
        "text_offset": [0, 1],
    }


# -- a gateway that does not read ----------------------------------------------------------------------------


async def test_a_gateway_whose_messages_were_dropped_loses_its_connection(monkeypatch):
    """Else it would wait for their streams until the deadline."""
    ended = []

    def full(*_, **__):
        raise Overloaded("a peer does not read", retry_after_ms=100)

    monkeypatch.setattr(RouterServer, "send", full)
    monkeypatch.setattr(RouterServer, "disconnect", lambda _, identity: ended.append(identity))
    front = WorkerFront("tcp://127.0.0.1:0", LIMITS, lambda: None)
    front._on_alive(b"gateway")
    running = asyncio.create_task(asyncio.sleep(60))
    front._attempts[b"gateway", RequestId("r"), 1] = (SimpleNamespace(is_waiting=False), running)
    failed = Failed(request_id=RequestId("q"), attempt=1, code="overloaded", message="", retryable=True)
    front.outbox.terminal(b"gateway", failed)
    front.outbox.flush()
    assert ended == [b"gateway"]
    assert running.cancelling()
    assert front.num_gateways == 0


def test_a_whole_answers_log_probabilities_are_rendered_as_they_come():
    kept: list[int] = []
    choice = SimpleNamespace(finish_reason=None, is_plain=False, feed=kept.append, parts=[])
    choice.keep_logprobs = lambda: kept.append(0)
    WholeSink(SimpleNamespace(ended=False, first_ns=1), [choice], None).chunk(
        TokenChunk(RequestId("r"), 1, 0, [5])
    )
    assert kept[1:] == [0]
