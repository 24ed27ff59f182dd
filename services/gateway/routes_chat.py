"""POST /v1/chat/completions: parse, render, tokenize, run. No policy lives here."""

import time
from collections.abc import Sequence

from services.gateway.answer import Answer
from services.gateway.choices import ChoiceSpec
from services.gateway.core.stop import StopStrings
from services.gateway.deps import Gateway
from services.gateway.http_body import Receive, Scope, Send, read_json_body
from services.gateway.openai import ChatBody, parse_body
from services.gateway.request import Incoming, Prompt, TokenizeSpan, begin, chat_text, check_model
from shared.kv.block_hash import pack_tokens

DOCUMENTED = ("/v1/chat/completions", "Chat, whole or streamed.", ChatBody)


class ChatEndpoint:
    """ASGI endpoint."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request. Raises: ClusterErrors until the answer has begun."""
        del send  # answers are written by callbacks, see push.Push
        received_ns = time.monotonic_ns()
        raw = await read_json_body(scope, receive, self._gateway.settings.max_body_bytes)
        answer = await self.begin(scope, raw, received_ns)
        await answer.wait_for_end(receive)

    async def begin(self, scope: Scope, raw: bytes, received_ns: int) -> Answer:
        """A request whose body is whole; its answer runs when this returns. Raises: as above."""
        gateway = self._gateway
        body = parse_body(ChatBody, raw)
        check_model(gateway, body.model)
        with Incoming(gateway, scope, body, received_ns) as incoming:
            ids = await chat_token_ids(gateway, body, incoming, len(raw))
            plan = body.tool_plan(gateway.tool_format)
            spec = ChoiceSpec(
                is_chat=True,
                stops=StopStrings(body.stops) if body.stops else None,
                include_stop=bool(body.include_stop_str_in_output),
                min_tokens=body.min_tokens or 0,
                skip_special_tokens=not body.keeps_special_tokens,
                num_top_logprobs=body.num_logprobs,
                return_token_ids=bool(body.return_token_ids),
                stop_token_ids=frozenset(body.stop_token_ids or ()),
                tool_plan=plan,
            )
            return await begin(incoming, "chat", spec, [Prompt(ids, pack_tokens(ids))])


async def chat_token_ids(
    gateway: Gateway, body: ChatBody, incoming: Incoming, num_bytes: int
) -> Sequence[int]:
    """The prompt of a chat: template, then tokenizer."""
    with TokenizeSpan(incoming):
        text = await chat_text(gateway, body, num_bytes)
        return await gateway.text.encode(
            text, add_special_tokens=bool(body.add_special_tokens), max_tokens=gateway.max_model_len
        )
