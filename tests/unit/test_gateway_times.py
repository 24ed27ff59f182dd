"""First token, time per token, and times of stages: what the gateway measures is what a client waits for."""

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from services.gateway import answer as answer_module
from services.gateway import streaming, tally
from services.gateway.call import NOTHING_FOUND, Call
from services.gateway.core.admission import Admission
from services.gateway.core.request_flow import Limits
from services.gateway.whole import WholeAnswer
from shared.ids import InstanceId, RequestId
from shared.kv.block_hash import pack_tokens
from shared.observe.trace import start_span
from shared.wire.requests import SamplingSpec, StageReceipt, TokenChunk
from tests.support.stream_answer import stream_answer

MS = 1_000_000


class Text:
    """A choice of which every token is a letter; those that are `held` stay here until the end."""

    is_plain, held, stop_reason = True, 0, None

    def __init__(self, index: int = 0, held: int = 0) -> None:
        self.index, self.held, self.is_plain = index, held, True
        self.reset()

    def reset(self) -> None:
        self.num_tokens, self.finish_reason, self.parts = 0, None, []

    def take_prompt_ids(self) -> None:
        """Nobody asked."""

    def feed(self, chunk: TokenChunk) -> str:
        self.num_tokens += len(chunk.token_ids)
        self.finish_reason = chunk.finish_reason
        return "x" if self.num_tokens > self.held or chunk.finish_reason else ""

    def text(self) -> str:
        return "".join(self.parts)

    def message(self) -> dict[str, Any]:
        return {"content": self.text()}

    def kept_logprobs(self) -> None:
        return None

    take_token_ids = kept_logprobs


class Push:
    """Takes everything."""

    def start_stream(self, headers: bytes) -> None: ...

    def write(self, data: bytes) -> bool:
        return True

    def end_stream(self, last: bytes) -> None: ...

    def respond(self, *_: Any) -> None: ...


class Clock:
    """In ms, where answers look."""

    ms = 0.0

    def monotonic_ns(self) -> int:
        return int(self.ms * MS)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(answer_module, "time", made)
    monkeypatch.setattr(streaming, "time", made)
    return made


def whole_answer() -> WholeAnswer:
    admission = Admission(10)
    return WholeAnswer(
        kind="chat", created=1, model="m", fingerprint="fp", cluster=SimpleNamespace(cancel=lambda call: None),
        admission=admission, ticket=admission.enter("", 1, now_ms=0), scope={}, push=Push(), request_id="id",
        span=start_span("test"), received_ns=0, wants_receipt=False,
    )  # fmt: skip


def make_call(sink: Any = None, n: int = 1) -> Call:
    return Call(
        RequestId("r"), sink, prompt=pack_tokens([1]), sampling=SamplingSpec(max_tokens=8, n=n), found=NOTHING_FOUND,
        session="", tenant="", span=start_span("x"), limits=Limits(), explain=False,
    )  # fmt: skip


class Served:
    """Prompts of one answer, at a clock; tokens come as a worker's do."""

    def __init__(self, clock: Clock, answer: Any, *choices: list[Text]) -> None:
        self.clock, self.answer = clock, answer
        sinks = [answer.sink(of_prompt) for of_prompt in choices]
        self.calls = answer.calls = [make_call(sink) for sink in sinks]

    def token(self, ms: float, *, prompt: int = 0, choice: int = 0, finish: str | None = None) -> None:
        self.clock.ms = ms
        call = self.calls[prompt]
        chunk = TokenChunk(call.request_id, 1, choice, [5], finish)
        call.note_chunk(chunk, self.clock.monotonic_ns())
        call.sink.chunk(chunk)

    def end(self, ms: float) -> None:
        self.clock.ms = ms
        for call in list(self.calls):
            call.sink.complete(call)


def observed(name: str) -> tuple[float, float]:
    """(how many, their sum)."""
    tally.settle()
    return tuple(REGISTRY.get_sample_value(f"quire_gateway_{name}_{end}") or 0.0 for end in ("count", "sum"))  # type: ignore[return-value]


class Watch:
    """What a histogram has seen since."""

    def __init__(self, name: str) -> None:
        self.name, self.before = name, observed(name)

    @property
    def new(self) -> list[float]:
        """One observation, or none."""
        count, total = (now - was for now, was in zip(observed(self.name), self.before, strict=True))
        assert count <= 1
        return [pytest.approx(total)] if count else []


def test_tokens_of_an_attempt_that_was_thrown_away_are_no_first_ones(clock):
    served, tpot = Served(clock, whole_answer(), [Text()]), Watch("tpot_ms")
    served.token(284)
    served.calls[0].discard()
    served.token(4_600)
    served.token(4_620, finish="stop")
    served.end(4_620)
    assert tpot.new == [20.0]


def test_what_another_prompt_of_the_answer_has_is_still_its_first(clock):
    served = Served(clock, whole_answer(), [Text()], [Text(1)])
    served.token(10)
    served.token(40, prompt=1)
    served.calls[0].discard()
    assert served.answer.first_ns == 40 * MS


async def test_a_streams_first_token_is_when_text_leaves_not_when_it_is_held_back(clock):
    served, ttft, tpot = (
        Served(clock, stream_answer(Push()), [Text(held=3)]),
        Watch("ttft_ms"),
        Watch("tpot_ms"),
    )
    for ms in (15, 25, 35, 1_040):
        served.token(ms)
    served.token(1_045, finish="stop")
    served.end(1_045)
    assert ttft.new == [1_040.0]
    assert tpot.new == [(1_045 - 15) / 4], "the engine's tokens took what they took"


async def test_a_stream_of_a_single_event_has_its_first_token_with_it(clock):
    served, ttft = Served(clock, stream_answer(Push()), [Text()]), Watch("ttft_ms")
    served.token(33, finish="length")
    served.end(33)
    assert ttft.new == [33.0]


def test_an_answer_in_one_piece_has_no_first_token(clock):
    served, ttft = Served(clock, whole_answer(), [Text()]), Watch("ttft_ms")
    served.token(15)
    served.token(30, finish="stop")
    served.end(30)
    assert ttft.new == []


def test_the_time_per_token_of_several_choices_is_that_of_the_longest(clock):
    served, tpot = Served(clock, whole_answer(), [Text(i) for i in range(4)]), Watch("tpot_ms")
    for step in range(4):
        for choice in range(4):
            ends = step == 3 or (choice == 0 and step == 1)
            if step < 2 or choice:
                served.token(100 + 19 * step, choice=choice, finish="stop" if ends else None)
    served.end(100 + 19 * 3)
    assert tpot.new == [19.0]


def test_several_prompts_have_no_time_per_token(clock):
    served, tpot = Served(clock, whole_answer(), [Text()], [Text(1)]), Watch("tpot_ms")
    for prompt in (0, 1):
        served.token(10 + 500 * prompt, prompt=prompt)
        served.token(20 + 500 * prompt, prompt=prompt, finish="stop")
    served.end(600)
    assert tpot.new == []


# -- receipts of stages that end without one of their own ------------------------------------------------


def first_chunk(**more: Any) -> TokenChunk:
    receipt = StageReceipt(
        instance=InstanceId("w"), stage="colocated", compute_ms=16.6, blocks_moved=3, **more
    )
    return TokenChunk(RequestId("r"), 1, 0, [5], None, None, None, receipt)


def test_a_stage_that_a_stop_string_ended_took_as_long_as_its_output():
    call = make_call()
    call.note_chunk(first_chunk(prefill_ms=16.6), 100 * MS)
    for step in range(1, 11):
        call.note_chunk(TokenChunk(RequestId("r"), 1, 0, [5]), (100 + 10 * step) * MS)
    call.keep_early_receipt()
    [receipt] = call.receipts
    assert (receipt.compute_ms, receipt.prefill_ms, receipt.step_ms) == (116.6, 16.6, 10.0)
    assert receipt.blocks_moved == 3


def test_a_stage_that_ended_with_its_first_token_took_until_then():
    call = make_call()
    call.note_chunk(first_chunk(), 100 * MS)
    call.keep_early_receipt()
    assert (call.receipts[0].compute_ms, call.receipts[0].step_ms) == (16.6, 0.0)


def test_nobody_knows_what_a_step_of_several_choices_took():
    call = make_call(n=2)
    call.note_chunk(first_chunk(), 100 * MS)
    for step in range(1, 5):
        call.note_chunk(TokenChunk(RequestId("r"), 1, step % 2, [5]), (100 + step) * MS)
    call.keep_early_receipt()
    assert call.receipts[0].step_ms == 0.0
