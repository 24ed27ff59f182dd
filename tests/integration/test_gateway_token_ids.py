"""return_token_ids: the tokens of answers and prompts, whole and streamed, where vLLM has them; how many are taken."""

import pytest

from services.gateway import request, routes_misc
from tests.integration.gateway_app import running
from tests.integration.gateway_rig import MAX_MODEL_LEN, MODEL, chat
from tests.integration.test_gateway_http import stream


@pytest.fixture
async def rig(model_dir):
    async with running(model_dir) as found:
        yield found


@pytest.mark.parametrize("max_tokens", [0, 50])
async def test_echoed_token_ids_are_the_same_streamed_as_whole(rig, max_tokens):
    rig.say(" jumps")
    body = {
        "model": MODEL,
        "prompt": "the fox",
        "echo": True,
        "max_tokens": max_tokens,
        "return_token_ids": True,
    }
    (whole,) = (await rig.client.post("/v1/completions", json=body)).json()["choices"]
    events = await stream(rig, "/v1/completions", body)
    pieces = [c["token_ids"] for e in events[:-1] for c in e["choices"] if "token_ids" in c]
    assert pieces, "a stream has the key, too"
    assert (
        [each for piece in pieces for each in piece]
        == whole["token_ids"]
        == (rig.ids(" jumps") if max_tokens else [])
    )


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"logprobs": 1}, {"n": 2}, {"stop": ["jum"]}])
async def test_a_completion_tells_its_prompts_token_ids_with_its_own_once_for_each_choice(rig, more):
    rig.say(" jumps")
    prompts = ["the fox", "the dog"]
    body = {"model": MODEL, "prompt": prompts, "max_tokens": 50, "return_token_ids": True, **more}
    whole = (await rig.client.post("/v1/completions", json=body)).json()
    want = [rig.ids(prompt) for prompt in prompts for _ in range(more.get("n", 1))]
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == want
    events = await stream(rig, "/v1/completions", body | {"stream_options": {"include_usage": True}})
    seen: dict[int, list] = {}
    for choice in (choice for event in events[:-1] for choice in event["choices"]):
        told = seen.setdefault(choice["index"], [])
        told.append(choice.get("prompt_token_ids"))
    assert {index: told[0] for index, told in seen.items()} == dict(enumerate(want))
    assert all(each is None for told in seen.values() for each in told[1:])
    silent = (await rig.client.post("/v1/completions", json=body | {"return_token_ids": False})).json()
    assert "prompt_token_ids" not in str(silent)


@pytest.mark.parametrize("usage", [{}, {"stream_options": {"include_usage": True}}])
async def test_a_chat_tells_its_prompts_token_ids_where_vllm_does(rig, usage):
    rig.say("a")
    body = chat(return_token_ids=True, n=2)
    whole = (await rig.client.post("/v1/chat/completions", json=body)).json()
    assert whole["prompt_token_ids"] == rig.a.prompts[-1]
    events = await stream(rig, "/v1/chat/completions", body | usage)
    roles = [e for e in events[:-1] if e["choices"] and "role" in e["choices"][0]["delta"]]
    assert [e["prompt_token_ids"] for e in roles] == [rig.a.prompts[-1]] * 2
    assert all("prompt_token_ids" not in e for e in events[:-1] if e not in roles)
    assert all(e.get("usage", 0) is None for e in roles) == bool(usage)


async def test_more_prompt_ids_than_can_be_told_at_once_are_refused(rig, monkeypatch):
    monkeypatch.setattr(request, "MAX_SUM", 5)
    body = {"model": MODEL, "prompt": "the fox", "n": 50, "return_token_ids": True}
    reply = await rig.client.post("/v1/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "return_token_ids")


async def test_echoed_ids_that_do_not_fit_are_refused_before_they_are_decoded(rig, monkeypatch):
    decoded: list[int] = []
    plain = rig.gateway.text.decode

    def decode(ids, **options):
        decoded.append(len(ids))
        return plain(ids, **options)

    monkeypatch.setattr(rig.gateway.text, "decode", decode)
    rig.say("a")
    body = {"model": MODEL, "echo": True, "max_tokens": 1}
    ids = rig.ids("the fox")
    reply = await rig.client.post("/v1/completions", json=body | {"prompt": [ids, [5] * MAX_MODEL_LEN]})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert decoded == [len(ids)]
    found = (await rig.client.post("/v1/completions", json=body | {"prompt": ids})).json()
    assert found["choices"][0]["text"] == "the foxa"


async def test_tokenize_and_detokenize_take_a_bounded_number_of_tokens(rig, monkeypatch):
    monkeypatch.setattr(routes_misc, "MAX_TOKENS", MAX_MODEL_LEN + 100)
    (the,) = rig.ids("the")
    for count, status in ((MAX_MODEL_LEN + 100, 200), (MAX_MODEL_LEN + 101, 400), (50_000, 400)):
        text = "the" + " the" * (count - 1)
        ids = rig.ids(text)
        assert len(ids) == count
        for path, body, param in (
            ("/tokenize", {"prompt": text, "return_token_strs": True}, "prompt"),
            ("/detokenize", {"tokens": ids}, "tokens"),
        ):
            reply = await rig.client.post(path, json=body)
            assert reply.status_code == status
            if status == 400:
                assert reply.json()["error"]["param"] == param
            elif path == "/tokenize":
                assert reply.json()["token_strs"] == ["the"] + ["\u0120the"] * (count - 1)
            else:
                assert reply.json()["prompt"] == text
    monkeypatch.setattr(routes_misc, "MAX_TOKENS", 1)
    reply = await rig.client.post("/detokenize", json={"tokens": [the] * MAX_MODEL_LEN})
    assert reply.status_code == 200, "what the model takes can be read"
