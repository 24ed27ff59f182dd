"""A gateway of a few lines for tests of workers: sends what it is told, records what comes back."""

import asyncio
from collections.abc import Sequence

from shared.ids import Epoch, HandoffId, InstanceId, RequestId
from shared.kv.block_hash import pack_tokens
from shared.transport.zmq_channel import DealerLink
from shared.wire.handoff import HandoffState
from shared.wire.requests import (
    TO_GATEWAY,
    TO_WORKER,
    Abort,
    Alive,
    Failed,
    Finished,
    GatewayToWorker,
    Generate,
    HandoffTarget,
    KvPlan,
    Prefilled,
    PromptScored,
    SamplingSpec,
    Stage,
    TokenLogprob,
    Tokens,
    WorkerToGateway,
)

Terminal = Prefilled | Finished | Failed


class ScriptedGateway:
    """One link to one worker. Use as an async context manager.

    Raises (end_of, has_tokens, the end of the context): AssertionError when the worker has broken the protocol.
    """

    def __init__(self, endpoint: str, epoch: int, *, silent_ms: int = 60_000) -> None:
        """`silent_ms`: a worker that the machine stops for so long is given up, see DealerLink."""
        self.epoch = Epoch(epoch)
        self.messages: list[WorkerToGateway] = []
        self.tokens: dict[tuple[str, int], list[int]] = {}  # (request, choice) -> tokens so far
        self.finish_reasons: dict[tuple[str, int], str] = {}
        self.scored: dict[str, list[list[TokenLogprob] | None]] = {}  # the prompt's log probabilities
        self.ends: dict[str, Terminal] = {}
        self.violations: list[str] = []  # the link's callback cannot raise: asyncio would log it
        self._changed = asyncio.Event()
        self.link: DealerLink[GatewayToWorker, WorkerToGateway] = DealerLink(
            endpoint,
            out=TO_WORKER,
            into=TO_GATEWAY,
            on_message=self._on_message,
            on_malformed=lambda error: self.violations.append(f"no message: {error.message}"),
            silent_ms=silent_ms,
        )

    async def __aenter__(self) -> "ScriptedGateway":
        await self.link.connect(30_000)
        return self

    async def __aexit__(self, _: object, error: BaseException | None, *__: object) -> None:
        self.close()
        if error is None:
            self._check()

    def close(self) -> None:
        """Without a word on what the worker did."""
        self.link.close()

    def _check(self) -> None:
        if self.violations:
            raise AssertionError(f"the worker broke the protocol: {'; '.join(self.violations)}")

    def generate(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        stage: Stage = "colocated",
        max_tokens: int = 8,
        deadline_ms: int = 20_000,
        attempt: int = 1,
        raw: Sequence[bytes] | None = None,
        epoch: int | None = None,
        handoff: HandoffState | None = None,
        handoff_to: HandoffTarget | None = None,
        sampling: SamplingSpec | None = None,
        traceparent: str = "",
        kv: KvPlan | None = None,
        num_output_tokens: int = 0,
    ) -> None:
        """Send one Generate; greedy unless `sampling` says otherwise."""
        if stage == "prefill" and handoff_to is None:
            handoff_to = HandoffTarget(handoff_id=HandoffId("h-" + request_id), target=InstanceId("decode-0"))
        message = Generate(
            request_id=RequestId(request_id),
            attempt=attempt,
            stage=stage,
            instance_epoch=self.epoch if epoch is None else Epoch(epoch),
            sampling=sampling or SamplingSpec(max_tokens=max_tokens, temperature=0.0),
            handoff=handoff,
            handoff_to=handoff_to,
            deadline_ms=deadline_ms,
            traceparent=traceparent,
            kv=kv,
            num_output_tokens=num_output_tokens,
        )
        self.link.send(message, [pack_tokens(prompt)] if raw is None else raw)

    def abort(self, request_id: str, attempt: int = 1, *, handoff_id: str | None = None) -> None:
        """Give an attempt up."""
        handoff = None if handoff_id is None else HandoffId(handoff_id)
        self.link.send(Abort(request_id=RequestId(request_id), attempt=attempt, handoff_id=handoff))

    def alive(self) -> None:
        """Say it once."""
        self.link.send(Alive())

    async def end_of(self, request_id: str, timeout_s: float = 30.0) -> Terminal:
        """The request's terminal message."""
        async with asyncio.timeout(timeout_s):
            while request_id not in self.ends:
                await self._next()
        self._check()
        return self.ends[request_id]

    async def has_tokens(self, request_id: str, count: int = 1, timeout_s: float = 30.0) -> None:
        """Until choice 0 has at least `count` tokens."""
        async with asyncio.timeout(timeout_s):
            while len(self.tokens.get((request_id, 0), ())) < count:
                await self._next()
        self._check()

    async def _next(self) -> None:
        self._changed.clear()
        await self._changed.wait()
        self._check()

    def _on_message(self, _seq: int, message: WorkerToGateway, _raw: list[bytes]) -> None:
        self.messages.append(message)
        if isinstance(message, Tokens):
            for chunk in message.chunks:
                self._must(
                    chunk.request_id not in self.ends, chunk.request_id, "tokens after the terminal message"
                )
                key = (chunk.request_id, chunk.index)
                self.tokens.setdefault(key, []).extend(chunk.token_ids)
                if chunk.finish_reason is not None:
                    self.finish_reasons[key] = chunk.finish_reason
        elif isinstance(message, PromptScored):
            name = message.request_id
            self._must((name, 0) not in self.tokens, name, "the prompt's scores come before the first token")
            self._must(name not in self.scored, name, "the prompt's scores come once")
            self.scored[name] = message.prompt_logprobs
        else:
            self._must(message.request_id not in self.ends, message.request_id, "a second terminal message")
            self.ends[message.request_id] = message
        self._changed.set()

    def _must(self, holds: bool, request_id: RequestId, what: str) -> None:
        if not holds:
            self.violations.append(f"{request_id}: {what}")
