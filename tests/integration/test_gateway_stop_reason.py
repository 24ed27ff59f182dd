"""An answer tells what ended it, as with vLLM: the stop string, or the token of stop_token_ids; null for all else."""

import pytest

from shared.wire.requests import TokenChunk, Tokens
from tests.integration.gateway_app import running
from tests.integration.gateway_rig import MODEL, chat
from tests.integration.test_gateway_http import stream

EOS, ASKED = 1, 5
CASES = {
    "stop string": (None, {"stop": ["zzz", "ick"]}, ("stop", "ick")),
    "token": (ASKED, {"stop_token_ids": [7, ASKED]}, ("stop", ASKED)),
    "token, no stop string": (ASKED, {"stop": "zzz", "stop_token_ids": [ASKED]}, ("stop", ASKED)),
    "end of the text": (EOS, {"stop_token_ids": [ASKED]}, ("stop", None)),
    "length": (None, {}, ("length", None)),
}  # fmt: skip


@pytest.fixture
async def rig(model_dir):
    async with running(model_dir) as found:
        yield found


def says(ids, last):
    """A script: these tokens, then the one that ends the choice, if any."""

    async def script(worker, identity, gen, prompt):
        for index in range(gen.sampling.n):
            worker.tokens(identity, gen, ids, index=index)
            end = TokenChunk(gen.request_id, gen.attempt, index, [], "length")
            if last is not None:
                end = TokenChunk(gen.request_id, gen.attempt, index, [last], "stop", last)
            worker.server.send(identity, Tokens(chunks=[end]))
        worker.finished(identity, gen, len(prompt))

    return script


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"return_token_ids": True}], ids=str)
@pytest.mark.parametrize(("last", "fields", "want"), CASES.values(), ids=CASES)
async def test_an_answer_tells_what_ended_it_streamed_as_whole(rig, last, fields, want, more):
    rig.a.script = says(rig.ids(" the quick fox"), last)
    for path, body in (
        ("/v1/chat/completions", chat(**fields, **more)),
        ("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 50, **fields, **more}),
    ):
        whole = (await rig.client.post(path, json=body)).json()["choices"]
        assert [(each["finish_reason"], each["stop_reason"]) for each in whole] == [want] * more.get("n", 1)
        events = await stream(rig, path, body)
        choices = [choice for event in events[:-1] for choice in event["choices"]]
        last_ones = [each for each in choices if each["finish_reason"]]
        assert [(each["finish_reason"], each["stop_reason"]) for each in last_ones] == [want] * more.get(
            "n", 1
        )
        assert all("stop_reason" not in each for each in choices if each not in last_ones)
