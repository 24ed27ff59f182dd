"""The scripted gateway of the workers' tests: what breaks the protocol fails the test that it happened in."""

import pytest

from shared.testing.scripted_gateway import ScriptedGateway
from shared.transport.zmq_channel import RouterServer
from shared.wire.requests import (
    TO_GATEWAY,
    TO_WORKER,
    Failed,
    Finished,
    PromptScored,
    StageReceipt,
    TokenChunk,
    Tokens,
)
from tests.integration.worker_rig import until

TOKENS = Tokens(chunks=[TokenChunk(request_id="a", attempt=1, index=0, token_ids=[5])])
END = Finished(request_id="a", attempt=1, receipt=StageReceipt(instance="w", stage="colocated"))
FAILED = Failed(request_id="a", attempt=1, code="peer.gone", message="", retryable=True)
SCORED = PromptScored(request_id="a", attempt=1, prompt_logprobs=[None])
LAST = Finished(request_id="z", attempt=1, receipt=StageReceipt(instance="w", stage="colocated"))

BROKEN = pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([TOKENS, END, TOKENS], "tokens after the terminal message"),
        ([TOKENS, END, FAILED], "a second terminal message"),
        ([TOKENS, SCORED, END], "before the first token"),
        ([SCORED, SCORED, END], "come once"),
    ],
)


class Worker:
    """Answers each message with what it was given."""

    def __init__(self, answers):
        self._answers = answers
        self._server = RouterServer(
            "tcp://127.0.0.1:0", into=TO_WORKER, out=TO_GATEWAY, on_message=self._on_message
        )

    def _on_message(self, identity, _seq, _message, _raw):
        for answer in self._answers:
            self._server.send(identity, answer)

    async def __aenter__(self):
        await self._server.start()
        return self._server.address

    async def __aexit__(self, *_):
        self._server.close()


@BROKEN
async def test_a_broken_order_fails_who_waits_for_an_end(messages, what):
    async with Worker([*messages, LAST]) as endpoint:
        gateway = ScriptedGateway(endpoint, 1)
        await gateway.link.connect()
        gateway.alive()
        with pytest.raises(AssertionError, match=what):
            await gateway.end_of("z")
        gateway.close()


async def saw_the_last(endpoint, error=None):
    """A test that waits for nothing that the gateway offers, and then fails with `error`."""
    async with ScriptedGateway(endpoint, 1) as gateway:
        gateway.alive()
        await until(lambda: "z" in gateway.ends)
        if error is not None:
            raise error


@BROKEN
async def test_a_broken_order_fails_a_test_that_looks_no_more(messages, what):
    async with Worker([*messages, LAST]) as endpoint:
        with pytest.raises(AssertionError, match=what):
            await saw_the_last(endpoint)


async def test_an_error_of_the_test_itself_is_not_hidden_by_what_the_worker_did():
    async with Worker([END, FAILED, LAST]) as endpoint:
        with pytest.raises(KeyError):
            await saw_the_last(endpoint, KeyError())


async def test_a_broken_order_fails_who_waits_for_tokens():
    late = Tokens(chunks=[TokenChunk(request_id="z", attempt=1, index=0, token_ids=[5])])
    async with Worker([END, TOKENS, late]) as endpoint:
        gateway = ScriptedGateway(endpoint, 1)
        await gateway.link.connect()
        gateway.alive()
        with pytest.raises(AssertionError, match="tokens after"):
            await gateway.has_tokens("z")
        gateway.close()


async def test_what_is_no_message_fails_the_test_that_it_comes_to():
    garbage = Finished(request_id=7, attempt=1, receipt=StageReceipt(instance="w", stage="colocated"))
    async with Worker([garbage, LAST]) as endpoint:
        with pytest.raises(AssertionError, match="no message: bad body"):
            await saw_the_last(endpoint)


async def test_what_is_in_order_passes():
    async with Worker([SCORED, TOKENS, TOKENS, END]) as endpoint, ScriptedGateway(endpoint, 1) as gateway:
        gateway.alive()
        assert await gateway.end_of("a") == END
        assert gateway.tokens == {("a", 0): [5, 5]}
