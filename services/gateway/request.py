"""What both completion routes do around their prompts: admission, root span, calls, and the answer that fits."""

import os
import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from types import TracebackType
from typing import Any

from msgspec import Struct

from services.gateway import metrics
from services.gateway.answer import Answer
from services.gateway.choices import Choice, ChoiceSpec
from services.gateway.core.admission import Admitted
from services.gateway.deps import Gateway
from services.gateway.edge import REQUEST_ID, TENANT
from services.gateway.http_body import Scope, header, is_on
from services.gateway.http_errors import HttpFailure
from services.gateway.logprobs import Echo
from services.gateway.openai import ChatBody, SamplingBody, TokenizeBody, to_sampling
from services.gateway.push import PUSH_KEY, Push
from services.gateway.streaming import EventShape, StreamAnswer
from services.gateway.submit import find_hits, make_call, output_budget
from services.gateway.text import LONG
from services.gateway.whole import WholeAnswer
from shared.errors import InvalidRequest, ModelNotFound
from shared.observe.trace import start_span
from shared.wire.requests import MAX_SCORES, SamplingSpec, num_scores

SEED_BITS = 63
MAX_SESSION_CHARS = 512  # longer ones go as their digests
MAX_SUM = 4 * MAX_SCORES  # over all prompts, each rendered when it is complete: some 25 MB of JSON
_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}\Z")
MAX_TOTAL_CHOICES = 2_048  # prompts times n


class Prompt(Struct, frozen=True):
    """Token ids, the same packed, and what `echo` puts before the answer."""

    ids: Sequence[int]
    packed: bytes
    echo: Echo | None = None


def incoming_traceparent(scope: Scope) -> str:
    """The client's W3C traceparent, "" without a well-formed one: it goes into every message from here on."""
    value = header(scope, b"traceparent")
    return value.decode() if value is not None and _TRACEPARENT.match(value) else ""


class Incoming:
    """An admitted request until its answer takes over. Leaving the `with` block by an error gives all back.

    Raises: HttpFailure 503 or 429 when the gateway is full; InvalidRequest if it never has room for so many prompts.
    """

    def __init__(
        self, gateway: Gateway, scope: Scope, body: SamplingBody, received_ns: int, *, num_prompts: int = 1
    ) -> None:
        self.gateway = gateway
        self.scope = scope
        self.body = body
        self.received_ns = received_ns
        self.request_id: str = scope[REQUEST_ID]
        self.tenant: str = scope[TENANT]
        self.taken = False  # by an answer
        if num_prompts > (largest := gateway.admission.largest):
            raise InvalidRequest(
                f"A request may have at most {largest} prompts here, as many as may run at a time; got {num_prompts}.",
                param="prompt",
            )
        self.ticket = admitted(gateway, self.tenant, num_prompts, now_ms=received_ns // 1_000_000)
        self.span = start_span(
            "gateway.receive",
            parent=incoming_traceparent(scope),
            attributes={"quire.request_id": self.request_id, "http.route": scope["path"]},
        )

    def __enter__(self) -> "Incoming":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if not self.taken:
            self.gateway.admission.leave(self.ticket, now_ms=time.monotonic_ns() // 1_000_000)
            if error is not None:
                self.span.fail(str(error))
            self.span.end()


def admitted(gateway: Gateway, tenant: str, cost: int, *, now_ms: int) -> Admitted:
    """Places taken. Raises: HttpFailure 503 or 429 when the gateway, or what the tenant may have, is full."""
    verdict = gateway.admission.enter(tenant, cost, now_ms=now_ms)
    if isinstance(verdict, Admitted):
        return verdict
    raise HttpFailure(
        verdict.http_status, verdict.code, verdict.reason, retry_after_ms=verdict.retry_after_ms
    )


@contextmanager
def one_place(gateway: Gateway, scope: Scope) -> Iterator[None]:
    """For what is no completion and takes the tokenizer's time all the same. Raises: as admitted()."""
    ticket = admitted(gateway, scope[TENANT], 1, now_ms=time.monotonic_ns() // 1_000_000)
    try:
        yield
    finally:
        gateway.admission.leave(ticket, now_ms=time.monotonic_ns() // 1_000_000, is_answer=False)


def check_model(gateway: Gateway, model: str) -> None:
    """Raises: ModelNotFound, as OpenAI words it."""
    if model != gateway.settings.model_name:
        raise ModelNotFound(f"The model `{model[:128]}` does not exist.", param="model")


async def chat_text(gateway: Gateway, body: ChatBody | TokenizeBody, num_bytes: int) -> str:
    """The prompt, rendered on a thread if the body is LONG. Raises: as ModelText.render_chat()."""

    def render() -> str:
        return gateway.text.render_chat(
            body.template_messages(),
            tools=body.template_tools(),
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
            extra=body.chat_template_kwargs,
        )

    return await gateway.text.beside(num_bytes, render) if num_bytes > LONG else render()


class TokenizeSpan:
    """Times template and tokenizer, as a span and a metric."""

    __slots__ = ("_began_ns", "_span")

    def __init__(self, incoming: Incoming) -> None:
        self._began_ns = time.monotonic_ns()
        attributes = {"quire.request_id": incoming.request_id}
        self._span = start_span("tokenize", parent=incoming.span.traceparent, attributes=attributes)

    def __enter__(self) -> None:
        """It runs since it was made."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._span.__exit__(kind, error, trace)
        if error is None:
            metrics.TOKENIZE.observe((time.monotonic_ns() - self._began_ns) / 1e6)


def new_call_id() -> str:
    """Id of a tool call."""
    return f"call_{os.urandom(12).hex()}"


async def begin(incoming: Incoming, kind: str, spec: ChoiceSpec, prompts: list[Prompt]) -> Answer:
    """Check the context, look the prompts up, and start the answer. Raises: RequestErrors."""
    gateway, body = incoming.gateway, incoming.body
    if len(prompts) * body.num_choices > MAX_TOTAL_CHOICES:
        raise InvalidRequest(f"prompts times n must be at most {MAX_TOTAL_CHOICES}.", param="n")
    samplings = [
        to_sampling(
            body,
            default_max_tokens=output_budget(
                len(prompt.ids),
                body.max_output_tokens,
                gateway.max_model_len,
                is_chat=spec.is_chat,
                max_tokens_field=body.max_tokens_field,
            ),
            random_seed=random.getrandbits(SEED_BITS),
            defaults=gateway.sampling_defaults,
            vocab_size=gateway.text.vocab_size,
        )
        for prompt in prompts
    ]
    check_scores(prompts, samplings)
    if spec.return_token_ids:
        check_prompt_ids(prompts, body.num_choices)
    found = [
        await find_hits(gateway, prompt.packed, incoming.tenant, incoming.span, incoming.request_id)
        for prompt in prompts
    ]
    session = session_of(incoming.scope, body.user)
    answer = _make_answer(incoming, kind)
    calls = []
    num_choices = body.num_choices
    for number, prompt in enumerate(prompts):
        choices = [
            Choice(
                number * num_choices + each,
                spec,
                gateway.text,
                prompt.ids,
                new_id=new_call_id,
                echo=prompt.echo,
            )
            for each in range(num_choices)
        ]
        sink = answer.sink(choices, echo=prompt.echo.text if prompt.echo is not None else None)
        call = make_call(
            gateway,
            incoming.request_id if len(prompts) == 1 else f"{incoming.request_id}-{number}",
            sink,
            packed=prompt.packed,
            sampling=samplings[number],
            found=found[number],
            session=session,
            tenant=incoming.tenant,
            span=incoming.span,
            wants_receipt=answer.wants_receipt,
        )
        sink.mark_sent = call.flow.mark_sent
        calls.append(call)
    incoming.taken = True
    answer.run(calls)
    return answer


def check_scores(prompts: list[Prompt], samplings: list[SamplingSpec]) -> None:
    """What a prompt brings is rendered at once, whatever comes meanwhile. Raises: InvalidRequest."""
    costs = [num_scores(spec, len(prompt.ids)) for spec, prompt in zip(samplings, prompts, strict=True)]
    for cost, most, of in ((max(costs), MAX_SCORES, "a prompt"), (sum(costs), MAX_SUM, "all prompts")):
        if cost > most:
            raise InvalidRequest(
                f"With echo, prompt tokens times (logprobs + 3) times n must be at most {most} for {of}; got {cost}.",
                param="logprobs",
            )


def check_prompt_ids(prompts: list[Prompt], num_choices: int) -> None:
    """Every choice tells its prompt's. Raises: InvalidRequest."""
    if (cost := num_choices * sum(len(prompt.ids) for prompt in prompts)) > MAX_SUM:
        raise InvalidRequest(
            f"With return_token_ids, prompt tokens times n must be at most {MAX_SUM} for all prompts; got {cost}.",
            param="return_token_ids",
        )


def session_of(scope: Scope, user: str | None) -> str:
    """The header x-quire-session, else the body's `user`: the `session` policy sticks to it. Bounded in length."""
    value = header(scope, b"x-quire-session")
    name = value.decode("latin-1") if value else user or ""
    return name if len(name) <= MAX_SESSION_CHARS else sha256(name.encode()).hexdigest()


def _make_answer(incoming: Incoming, kind: str) -> StreamAnswer | WholeAnswer:
    gateway, body, scope = incoming.gateway, incoming.body, incoming.scope
    common: dict[str, Any] = {
        "cluster": gateway.cluster,
        "admission": gateway.admission,
        "ticket": incoming.ticket,
        "scope": scope,
        "push": Push(scope[PUSH_KEY]),
        "request_id": incoming.request_id,
        "span": incoming.span,
        "received_ns": incoming.received_ns,
        "grammar_field": body.grammar_field,
        "wants_receipt": bool(body.quire_receipt) or is_on(header(scope, b"x-quire-receipt")),
    }
    created, model = int(time.time()), gateway.settings.model_name
    fingerprint = gateway.system_fingerprint
    if not body.stream:
        return WholeAnswer(kind=kind, created=created, model=model, fingerprint=fingerprint, **common)
    shape = EventShape(kind, incoming.request_id, created, model, fingerprint, body.include_usage)
    return StreamAnswer(shape=shape, include_usage=body.include_usage, **common)
