"""Limits that name themselves, cut and nameless tool calls, usage after a loss, readers that do not read, sessions."""

import itertools
import json
from types import SimpleNamespace

import pytest

from services.gateway.call import NOTHING_FOUND, Call
from services.gateway.core.request_actions import SendPlace
from services.gateway.core.request_flow import Complete, Fail, Limits, RequestFlow
from services.gateway.core.tools import TextDelta, ToolPlan, make_parser, read_whole
from services.gateway.messages import place_message
from services.gateway.openai import CompletionBody, parse_body
from services.gateway.request import session_of
from shared.ids import RequestId
from shared.kv.block_hash import pack_tokens
from shared.observe.trace import start_span
from shared.transport.unread import Unread, num_unsent
from shared.wire.placement import Placed, Target
from shared.wire.requests import SamplingSpec, StageReceipt

HERMES, LLAMA = ToolPlan(kind="hermes"), ToolPlan(kind="llama")
ONE = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def streamed(plan, text, size):
    """Content and calls as a client of a stream puts them together."""
    ids = map("call_{}".format, itertools.count())
    parser = make_parser(plan, lambda: next(ids))
    cut = [text[at : at + size] for at in range(0, len(text), size)]
    content, calls = "", []
    for delta in [d for piece in cut for d in parser.feed(piece)] + parser.flush():
        if isinstance(delta, TextDelta):
            content += delta.text
        elif delta.name:
            calls.append([delta.name, delta.arguments])
        else:
            calls[delta.index][1] += delta.arguments
    return content, calls


def whole(plan, text, *, was_cut):
    content, calls, _ = read_whole(plan, text, lambda: "id", was_cut=was_cut)
    return content, [[call.name, call.arguments] for call in calls]


# ---- tool calls ----


@pytest.mark.parametrize("size", [1, 7, 1_000])
@pytest.mark.parametrize(
    "text", ['{"name": "Bob"}', '{"name": "Bob", "type": "person"}', ' {"name": "Bob"} is he.']
)
def test_an_object_with_a_name_and_no_parameters_is_no_llama_call(text, size):
    assert streamed(LLAMA, text, size) == (text, [])
    assert whole(LLAMA, text, was_cut=False) == (text, [])


@pytest.mark.parametrize("size", [1, 7, 1_000])
def test_behind_its_tag_a_name_alone_calls_a_function_without_parameters(size):
    text = '<|python_tag|>{"name": "now"}; {"name": "today"}'
    assert streamed(LLAMA, text, size) == ("", [["now", "{}"], ["today", "{}"]])
    assert streamed(LLAMA, '{"name": "now", "parameters": null}', size) == ("", [["now", "{}"]])


@pytest.mark.parametrize("plan", [HERMES, LLAMA])
def test_an_answer_cut_anywhere_in_a_call_reads_the_same_whole_and_streamed_and_loses_nothing(plan):
    one = ONE if plan is HERMES else '{"name": "f", "parameters": {"a": 1}}'
    text = (f"Look: {one}\n{one}" if plan is HERMES else f"{one}; {one}").replace("1", r'{"b": ["\"é", 2]}')
    begin = text.index("{")
    for end in range(begin, len(text)):
        content, calls = whole(plan, text[:end], was_cut=True)
        assert (content, calls) == streamed(plan, text[:end], 3)
        for _, arguments in calls[:-1]:
            json.loads(arguments)
        shown = content + "".join(name + arguments for name, arguments in calls)
        for said in ("Look", "f", r"\"é", "2"):
            assert shown.count(said) >= min(1, text[begin:end].count(said)), (text[:end], shown)


def test_a_whole_answer_that_max_tokens_cut_keeps_the_calls_before_the_last():
    text = ONE + '\n<tool_call>{"name": "g", "arguments": {"b": "lon'
    assert whole(HERMES, text, was_cut=True) == ("", [["f", '{"a": 1}'], ["g", '{"b": "lon']])
    assert whole(HERMES, text, was_cut=False) == (text, []), "the model itself wrote it so"


@pytest.mark.parametrize("end", ["<", "</tool_call"])
def test_what_may_begin_a_closing_tag_behind_broken_arguments_is_theirs_when_the_answer_ends(end):
    text = '<tool_call>{"name": "f", "arguments": {"a": 1] '
    assert streamed(HERMES, text + end, 1) == ("", [["f", '{"a": 1] ' + end]])
    assert streamed(HERMES, text + "</tool_call>", 1) == ("", [["f", '{"a": 1] ']])


# ---- calls ----


def make_call(**sampling):
    return Call(
        RequestId("r"), SimpleNamespace(discard=lambda: None), prompt=pack_tokens(list(range(20))),
        sampling=SamplingSpec(**{"max_tokens": 9, **sampling}), found=NOTHING_FOUND, session="", tenant="",
        span=start_span("t"), limits=Limits(),
    )  # fmt: skip


def test_cached_tokens_are_of_the_prompt_though_the_attempt_that_tells_went_on_behind_output():
    call = make_call()
    call.receipts = [
        StageReceipt(instance="b", stage="colocated", prompt_tokens=52, tokens_engine=16, tokens_pool=32)
    ]
    assert call.cached_tokens == 20


def test_a_call_has_ended_when_each_choice_has_and_begins_anew_with_another_attempt():
    call = make_call(n=2)
    assert [call.choice_ended(0), call.choice_ended(0), call.choice_ended(1)] == [False, False, True]
    call.discard()
    assert [call.choice_ended(0), call.choice_ended(0), call.choice_ended(1)] == [False, False, True]


def test_the_scheduler_hears_how_much_is_left_to_make_and_of_a_prompt_alone_one_token():
    call = make_call(n=3)
    assert place_message(call, SendPlace(1, []), "m").num_choices == 3
    before = place_message(call, SendPlace(1, []), "m")
    call.output_ids = [5] * 8
    after = place_message(call, SendPlace(2, []), "m")
    assert after.num_prompt_tokens == before.num_prompt_tokens + 8
    assert after.max_tokens == before.max_tokens - 8 > 0
    call = make_call(n=3, max_tokens=0)
    alone = place_message(call, SendPlace(1, []), "m")
    assert (alone.max_tokens, alone.num_choices) == (1, 1)


def test_the_scheduler_hears_whether_the_client_has_some_of_the_answer():
    call = make_call()
    assert not place_message(call, SendPlace(2, []), "m").begun, (
        "an attempt before it ended without an answer"
    )
    call.flow.mark_sent()
    assert place_message(call, SendPlace(2, []), "m").begun


def test_an_answered_request_whose_deadline_passes_is_complete():
    for answered in (False, True):
        flow = RequestFlow(Limits(request_deadline_ms=1_000))
        flow.start(now_ms=0)
        target = Target(instance="a", epoch=1, role="decode", endpoint="e")
        flow.on_placed(
            Placed(request_id="r", attempt=1, kind="colocated", decode=target, policy="p", reason=""),
            now_ms=1,
        )
        if answered:
            flow.mark_answered()
        (*_, outcome) = flow.on_tick(now_ms=1_000)
        assert isinstance(outcome, Complete if answered else Fail)


# ---- readers ----


class Connection:
    """Of which some bytes are unsent."""

    def __init__(self, unsent):
        self.unsent = unsent
        gone = SimpleNamespace(fileno=lambda: -1)
        self.transport = SimpleNamespace(
            get_write_buffer_size=lambda: self.unsent, get_extra_info=lambda name: gone
        )


def test_who_takes_no_byte_of_a_complete_answer_for_so_long_is_found():
    unread, one, done = Unread(timeout_s=10), Connection(100), Connection(0)
    assert [unread.look([one, done], now_s) for now_s in (0, 5, 9)] == [[], [], []]
    assert unread.look([one, done], 10) == [one]
    assert num_unsent([one, done]) == 1


def test_who_reads_however_slowly_has_all_the_time_it_needs():
    unread, one = Unread(timeout_s=10), Connection(100)
    for now_s in range(0, 100, 9):
        assert unread.look([one], now_s) == []
        one.unsent -= 1
    one.unsent = 0
    assert unread.look([one], 200) == []
    one.unsent = 100  # of the next answer
    assert unread.look([one], 300) == []


def test_an_answer_that_is_being_written_is_bounded_by_its_bytes_not_here():
    unread, one = Unread(timeout_s=10), Connection(100)
    for now_s in range(0, 100, 9):
        assert unread.look([one], now_s) == []
        one.unsent += 1
    assert [unread.look([one], now_s) for now_s in (100, 109, 110)] == [[], [], [one]]


# -- sessions ---------------------------------------------------------------------------------------------


def session(user=None, header=None):
    headers = [] if header is None else [(b"x-quire-session", header)]
    fields = {"model": "m", "prompt": "a", "user": user}
    body = parse_body(CompletionBody, json.dumps(fields).encode())
    return session_of({"headers": headers}, body.user)


def test_a_users_name_is_the_session_unless_the_header_names_one():
    assert session() == ""
    assert session("u1") == session("u2", b"u1") == "u1"
    assert session("u" * 512) == "u" * 512


@pytest.mark.parametrize("more", ["x", "x" * 1_000_000, "\u00e9"])
def test_a_long_name_is_a_session_of_its_own_and_of_bounded_length(more):
    long = "u" * 512
    found = session(long + more)
    assert found == session(long + more)
    assert len({found, session(long), session(long + more + "y"), session("u")}) == 4
    assert len(found) <= 512


def test_a_long_session_of_the_header_is_bounded_too():
    assert len(session(header=b"\xff" * 10_000)) <= 512
