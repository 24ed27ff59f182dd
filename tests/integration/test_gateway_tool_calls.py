"""Tool calls over HTTP: the demo model's format streamed and whole, and forced calls, with scripted workers."""

import json

import pytest

from tests.integration.gateway_app import Rig, running
from tests.integration.gateway_rig import MODEL
from tests.unit.gateway_text_fixtures import make_model_dir

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln <3"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
CHAT = "/v1/chat/completions"


@pytest.fixture
async def rig(tmp_path):
    async with running(make_model_dir(tmp_path)) as found:
        yield found


def chat(**changes) -> dict:
    return {"model": MODEL, "messages": [{"role": "user", "content": "weather?"}], "tools": TOOLS, **changes}


async def streamed(rig: Rig, body: dict) -> tuple[str, list[dict], str]:
    """Content, calls and finish reason of a stream."""
    content, calls, reason = "", [], ""
    reply = await rig.client.post(CHAT, json={**body, "stream": True})
    for line in reply.text.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            content += choice["delta"].get("content") or ""
            for piece in choice["delta"].get("tool_calls", []):
                if "id" in piece:
                    calls.append({"name": piece["function"]["name"], "arguments": ""})
                calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
            reason = choice["finish_reason"] or reason
    return content, calls, reason


async def whole(rig: Rig, body: dict) -> tuple[str, list[dict], str]:
    """The same of a whole answer."""
    (choice,) = (await rig.client.post(CHAT, json=body)).json()["choices"]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return message["content"] or "", calls, choice["finish_reason"]


@pytest.mark.parametrize("read", [streamed, whole])
async def test_a_call_of_the_models_own_accord(rig, read):
    rig.say("Let me see." + CALL + "\n" + CALL)
    call = {"name": "get_weather", "arguments": '{"city": "Köln <3"}'}
    assert await read(rig, chat()) == ("Let me see.", [call, call], "tool_calls")
    assert await read(rig, chat(parallel_tool_calls=False)) == ("Let me see.", [call], "tool_calls")
    assert await read(rig, chat(tool_choice="none")) == ("Let me see." + CALL + "\n" + CALL, [], "stop")


@pytest.mark.parametrize("read", [streamed, whole])
async def test_what_only_looks_like_a_call_is_text(rig, read):
    text = 'Use <tool_call>{"like": this}</tool_call>.'
    rig.say(text)
    assert await read(rig, chat()) == (text, [], "stop")


@pytest.mark.parametrize("read", [streamed, whole])
@pytest.mark.parametrize(
    "call",
    [
        r'{"name": "get_\ud83d", "arguments": {"city": "x"}}',
        r'{"name": "get_weather", "arguments": "{\"city\": \"\ud83d\"}"}',
    ],
    ids=["name", "arguments"],
)
async def test_a_call_with_a_string_that_no_answer_can_carry_is_text(rig, read, call):
    text = f"<tool_call>\n{call}\n</tool_call>"
    rig.say(text)
    assert await read(rig, chat()) == (text, [], "stop")
    assert rig.gateway.admission.num_running == 0


@pytest.mark.parametrize("read", [streamed, whole])
async def test_forced_calls_are_grammars_to_the_engine(rig, read):
    rig.say('[{"name": "get_weather", "parameters": {"city": "Rom"}}]')
    call = {"name": "get_weather", "arguments": '{"city": "Rom"}'}
    assert await read(rig, chat(tool_choice="required")) == ("", [call], "tool_calls")
    assert json.loads(rig.a.generated[-1].sampling.structured.value)["type"] == "array"
    rig.say('{"city": "Rom"}')
    named = {"type": "function", "function": {"name": "get_weather"}}
    assert await read(rig, chat(tool_choice=named)) == ("", [call], "stop")
    assert rig.a.generated[-1].sampling.structured.value == '{"type":"object"}'


async def test_a_list_of_forced_calls_cut_anywhere_is_the_same_streamed_and_whole_and_never_text(rig):
    calls = [{"name": "get_weather", "parameters": {"city": city}} for city in ("Rom", "Bonn")]
    text = json.dumps(calls)
    spaced = " " + json.dumps(calls, indent=1)
    for said in [*(text[:at] for at in range(1, len(text))), *(spaced[:at] for at in range(1, 30))]:
        for finish in ("length", "stop"):
            rig.say(said, finish=finish)
            found = await streamed(rig, chat(tool_choice="required"))
            assert found == await whole(rig, chat(tool_choice="required")), said
            content, made, reason = found
            assert content == "", said
            assert reason == ("tool_calls" if made and finish == "stop" else finish)
    rig.say(text[:12], finish="length")
    reply = await rig.client.post(CHAT, json=chat(tool_choice="required"))
    assert reply.json()["choices"][0]["message"]["content"] is None
    rig.say(text)
    stopped = chat(tool_choice="required", stop="parameters")
    assert await streamed(rig, stopped) == await whole(rig, stopped) == ("", [], "stop")


async def test_the_template_sees_tools_and_earlier_calls(rig):
    rig.say("15 degrees")
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Bonn"}'},
    }
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "15"},
    ]
    await rig.client.post(CHAT, json=chat(messages=messages))
    prompt = await rig.gateway.text.decode(rig.a.prompts[-1], skip_special_tokens=False)
    assert json.dumps(TOOLS[0]) in prompt
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Bonn"}}</tool_call>' in prompt
