"""A small grammar may take all memory of a host: gateways and workers refuse it, and no loop stands still."""

import asyncio
import json
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from services.gateway.openai import ChatBody, parse_body, to_sampling
from shared.engine.grammar_checks import GrammarChecks
from shared.engine.grammar_child import TOO_MUCH
from shared.engine.worker_checks import Refusal, WorkerLimits, check_prompt
from shared.errors import ClusterError, InvalidRequest, PeerGone, ResourceError
from shared.grammar_limits import MAX_ARRAY_ITEMS, MAX_GRAMMAR_CHARS
from shared.ids import Epoch, RequestId
from shared.kv.block_hash import pack_tokens
from shared.kv.packed_ids import PackedIds
from shared.wire.requests import Generate, SamplingSpec, StructuredSpec

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of what vLLM's runners import
    from vllm.v1.engine.exceptions import EngineGenerateError

    from shared.engine.sampling import mark_checked, sampling_params, trust_checks
    from shared.engine.vllm_engine import VllmEngine

INTEGER = {"type": "integer"}
HUGE = {"type": "array", "items": INTEGER, "minItems": 1_000_000_000}
HALF = {"type": "array", "items": INTEGER, "maxItems": MAX_ARRAY_ITEMS // 2 + 1}
LARGEST = {"type": "array", "items": INTEGER, "maxItems": MAX_ARRAY_ITEMS}
SCHEMAS = {
    "minItems": HUGE,
    "maxItems": {**HALF, "maxItems": 1_000_000_000},
    "sum": {"type": "object", "properties": {"a": HALF, "b": HALF}},
    "prefix": {"type": "array", "prefixItems": [INTEGER], "minItems": 10**9},
    "ref": {"$ref": "#/$defs/a", "$defs": {"a": HUGE}},
    "allOf": {"allOf": [{"type": "array"}, {"minItems": 10**9}]},
    "anyOf": {"anyOf": [INTEGER, HUGE]},
    "pattern": {"type": "object", "patternProperties": {"^a": HUGE}},
}
# what no sum shows: 900 combinations of 10,000 items, and a schema inside of a grammar
MERGED = {
    "allOf": [
        {"anyOf": [{"type": "array", "items": {"minimum": 100 * side + i}} for i in range(30)]}
        for side in range(2)
    ]
    + [{"minItems": 10_000}]
}
INSIDE = f"start: a\na: %json {json.dumps(HUGE)}"


def chat(**fields) -> SamplingSpec:
    known = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    body = parse_body(ChatBody, json.dumps(known | fields).encode())
    return to_sampling(body, default_max_tokens=8, random_seed=1)


def asking(schema: dict) -> dict[str, dict]:
    """Every way to ask for this schema, by the field that is at fault."""
    function = {"name": "f", "parameters": schema}
    forced = {"type": "function", "function": {"name": "f"}}
    tools = {"tools": [{"type": "function", "function": function}]}
    escaped = json.dumps(schema).replace("Items", "\\u0049tems")
    return {
        "response_format": {
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        },
        "structured_outputs": {"structured_outputs": {"json": schema}},
        "structured_outputs ": {"structured_outputs": {"json": escaped}},
        "tools": {**tools, "tool_choice": "required"},
        "tools ": {**tools, "tool_choice": forced},
    }


def at_a_worker(spec: StructuredSpec) -> list[int] | Refusal:
    message = Generate(
        request_id=RequestId("r"),
        attempt=1,
        stage="colocated",
        instance_epoch=Epoch(1),
        sampling=SamplingSpec(max_tokens=1, structured=spec),
    )
    limits = WorkerLimits(vocab_size=100, max_model_len=16, max_inflight=2)
    return check_prompt(message, [pack_tokens([1])], limits=limits)


@pytest.mark.parametrize("name", SCHEMAS)
def test_gateways_and_workers_refuse_arrays_of_more_items_than_a_grammar_may_have(name):
    for param, fields in asking(SCHEMAS[name]).items():
        with pytest.raises(InvalidRequest, match=f"at most {MAX_ARRAY_ITEMS} are allowed") as caught:
            chat(**fields)
        assert caught.value.param == param.strip()
    refused = at_a_worker(StructuredSpec(kind="json_schema", value=json.dumps(SCHEMAS[name])))
    assert isinstance(refused, Refusal)
    assert (refused.code, refused.retryable) == ("invalid_request", False)


def test_the_limit_is_what_is_said_and_bounds_of_other_things_are_free():
    free = {"type": "string", "maxLength": 10**9, "title": "minItems", "default": {"maxItems": "many"}}
    for schema in ({**LARGEST, "title": "x"}, free, {"type": "object", "properties": {"minItems": INTEGER}}):
        for param, fields in asking(schema).items():
            if param != "tools":  # whose list has a bound of its own, 1
                assert chat(**fields).structured is not None
        assert isinstance(
            at_a_worker(StructuredSpec(kind="json_schema", value=json.dumps(schema))), PackedIds
        )


def test_a_worker_refuses_a_grammar_that_no_gateway_of_ours_would_send():
    refused = at_a_worker(StructuredSpec(kind="regex", value="a" * (MAX_GRAMMAR_CHARS + 1)))
    assert isinstance(refused, Refusal)
    assert refused.code == "invalid_request"
    assert isinstance(at_a_worker(StructuredSpec(kind="json_schema", value="[" * 100_000)), PackedIds)


@pytest.fixture
async def checks():
    made = GrammarChecks(flexible=False)
    yield made
    await made.close()


@pytest.mark.parametrize(
    "spec",
    [
        StructuredSpec(kind="json_schema", value=json.dumps(HUGE)),
        StructuredSpec(kind="json_schema", value=json.dumps(MERGED)),
        StructuredSpec(kind="grammar", value=INSIDE),
    ],
    ids=["huge", "merged", "inside"],
)
async def test_a_grammar_that_takes_too_much_is_refused_while_the_loop_goes_on(checks, spec):
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.001)

    ticking = asyncio.create_task(turn())
    with pytest.raises(InvalidRequest) as caught:
        await checks.check(spec)
    ticking.cancel()
    assert caught.value.message == TOO_MUCH
    assert turns > 10
    await checks.check(StructuredSpec(kind="json_object"))


@pytest.mark.parametrize(
    "spec",
    [
        StructuredSpec(kind="json_schema", value=json.dumps(LARGEST)),
        StructuredSpec(kind="json_object"),
        StructuredSpec(kind="regex", value="[a-c]{3,900000}🙂?"),
        StructuredSpec(kind="choice", value='["ja", "nein"]'),
        StructuredSpec(kind="grammar", value='root ::= "ab" | "cd" root'),
        StructuredSpec(kind="grammar", value='start: <[5]> "x"'),
    ],
    ids=["largest", "object", "regex", "choice", "grammar", "token"],
)
async def test_what_an_engine_takes_passes(checks, spec):
    await checks.check(spec)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (StructuredSpec(kind="json_schema", value='{"type": "nonsense"}'), "Invalid type"),
        (StructuredSpec(kind="regex", value="("), "unclosed group"),
        (StructuredSpec(kind="grammar", value="root := ??"), "Expected ::="),
    ],
)
async def test_a_fault_of_a_grammar_is_said(checks, spec, words):
    with pytest.raises(InvalidRequest, match=words):
        await checks.check(spec)


async def test_an_object_of_more_properties_than_a_parser_takes_is_refused_before_it_runs(checks):
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(600)}}
    with pytest.raises(InvalidRequest, match="max is 2000"):
        await checks.check(StructuredSpec(kind="json_schema", value=json.dumps(schema)))
    schema["required"] = list(schema["properties"])
    await checks.check(StructuredSpec(kind="json_schema", value=json.dumps(schema)))


async def test_whoever_gives_up_takes_no_answer_of_another(checks):
    bad, good = StructuredSpec(kind="regex", value="("), StructuredSpec(kind="regex", value="a")
    await checks.check(StructuredSpec(kind="regex", value="b"))
    left = asyncio.create_task(checks.check(bad))
    while not checks._turn.locked():  # noqa: ASYNC110  there is no event for it
        await asyncio.sleep(0)
    left.cancel()
    await checks.check(good)
    with pytest.raises(InvalidRequest):
        await checks.check(bad)


async def test_a_process_that_was_ended_is_replaced(checks):
    await checks.check(StructuredSpec(kind="regex", value="a"))
    checks._process.kill()
    await checks._process.wait()
    await checks.check(StructuredSpec(kind="regex", value="b"))
    with pytest.raises(InvalidRequest):
        await checks.check(StructuredSpec(kind="regex", value="("))


async def test_closing_ends_whoever_waits(checks):
    waiting = asyncio.create_task(checks.check(StructuredSpec(kind="json_schema", value=json.dumps(MERGED))))
    while checks._process is None:  # noqa: ASYNC110  there is no event for it
        await asyncio.sleep(0.001)
    await checks.close()
    with pytest.raises(ResourceError):
        await waiting


async def test_a_grammar_that_passed_is_not_tried_again(checks, monkeypatch):
    spec = StructuredSpec(kind="regex", value="a")
    await checks.check(spec)
    monkeypatch.setattr(checks, "_ask", None)
    await checks.check(spec)


def test_vllm_validates_no_grammar_again_on_the_loop():
    trust_checks()
    trust_checks()
    spec = SamplingSpec(max_tokens=1, structured=StructuredSpec(kind="regex", value="("))
    params = sampling_params(spec, {})
    model, backend = SimpleNamespace(is_diffusion=False), SimpleNamespace(backend="guidance")
    with pytest.raises(ValueError, match="Grammar error"):
        params._validate_structured_outputs(model, backend, object())  # type: ignore[arg-type]
    mark_checked(params)
    params._validate_structured_outputs(model, backend, object())  # type: ignore[arg-type]


@pytest.fixture
def engine(monkeypatch):
    made: Any = VllmEngine.__new__(VllmEngine)
    monkeypatch.setattr(VllmEngine, "_extra_args", lambda *_: {})
    made._early = SimpleNamespace(take=lambda _: None)
    made._unfinished_prefill, made._context_tokens = {}, {}
    return made


async def ask(engine: Any, spec: StructuredSpec | None = None) -> None:
    request = SimpleNamespace(num_output_tokens=0, engine_request_id="r", prompt_token_ids=[1])
    request.sampling = SamplingSpec(max_tokens=1, structured=spec)
    _ = [delta async for delta in engine.generate(request)]


async def test_an_engine_that_chokes_on_one_request_lives(engine, monkeypatch):
    async def outputs(_self, _request, params):
        try:
            config = SimpleNamespace(is_diffusion=False, backend="auto")
            params._validate_structured_outputs(config, config, config)
            raise KeyError
        except Exception as error:
            raise EngineGenerateError from error
        yield

    monkeypatch.setattr(VllmEngine, "_sent", outputs)
    engine._grammars = None
    deep = StructuredSpec(kind="json_schema", value="[" * 5_000)
    cases = (None, False, ClusterError), (None, True, PeerGone), (deep, False, InvalidRequest)
    for spec, errored, raised in cases:
        engine._llm = SimpleNamespace(errored=errored)
        with pytest.raises(ClusterError) as caught:
            await ask(engine, spec)
        assert (type(caught.value), caught.value.retryable) == (raised, errored)


async def test_an_engine_has_every_grammar_checked_first(engine):
    asked: list[StructuredSpec] = []

    class Checks:
        async def check(self, spec: StructuredSpec) -> None:
            asked.append(spec)
            raise InvalidRequest("no")

    engine._grammars = Checks()
    spec = StructuredSpec(kind="regex", value="a")
    with pytest.raises(InvalidRequest):
        await ask(engine, spec)
    assert asked == [spec]
