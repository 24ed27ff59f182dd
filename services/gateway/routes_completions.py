"""POST /v1/completions: strings, lists of them, token ids, lists of them; echo."""

import time

from services.gateway.answer import Answer
from services.gateway.choices import ChoiceSpec
from services.gateway.core.stop import StopStrings
from services.gateway.deps import Gateway
from services.gateway.http_body import Receive, Scope, Send, read_json_body
from services.gateway.logprobs import Echo
from services.gateway.openai import CompletionBody, parse_body
from services.gateway.request import Incoming, Prompt, TokenizeSpan, begin, check_model
from services.gateway.submit import check_fits
from shared.kv.block_hash import pack_tokens

DOCUMENTED = ("/v1/completions", "Completions of one or more prompts, whole or streamed.", CompletionBody)


class CompletionEndpoint:
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
        body = parse_body(CompletionBody, raw)
        check_model(gateway, body.model)
        with Incoming(gateway, scope, body, received_ns, num_prompts=len(body.prompts)) as incoming:
            prompts = await completion_prompts(gateway, body, incoming)
            spec = ChoiceSpec(
                is_chat=False,
                stops=StopStrings(body.stops) if body.stops else None,
                include_stop=bool(body.include_stop_str_in_output),
                min_tokens=body.min_tokens or 0,
                skip_special_tokens=not body.keeps_special_tokens,
                num_top_logprobs=body.num_logprobs,
                return_token_ids=bool(body.return_token_ids),
                stop_token_ids=frozenset(body.stop_token_ids or ()),
            )
            return await begin(incoming, "text", spec, prompts)


async def completion_prompts(gateway: Gateway, body: CompletionBody, incoming: Incoming) -> list[Prompt]:
    """Token ids of every prompt, and its text where it is echoed."""
    prompts: list[Prompt] = []
    adds_special = body.add_special_tokens is not False
    with TokenizeSpan(incoming):
        for given in body.prompts:
            echo: Echo | None = None
            if isinstance(given, str):
                ids = await gateway.text.encode(
                    given,
                    add_special_tokens=adds_special,
                    max_tokens=gateway.max_model_len,
                    param="prompt",
                )
                packed = pack_tokens(ids)
                if body.echo:
                    echo = Echo(given, num_hidden=gateway.text.num_before if adds_special else 0)
            else:
                ids = given
                check_fits(len(ids), gateway.max_model_len, "prompt")  # before its ids are looked at
                packed = gateway.text.pack_token_ids(ids, "prompt")
                if body.echo:
                    skips = not body.keeps_special_tokens
                    shown = await gateway.text.decode(ids, skip_special_tokens=skips)
                    echo = Echo(shown, skips_special=skips)
            prompts.append(Prompt(ids, packed, echo))
    return prompts
