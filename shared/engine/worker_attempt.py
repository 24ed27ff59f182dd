"""One attempt of one stage, from an accepted Generate to its single terminal message.

accepted -> pages leased (or not) -> engine -> Tokens ... -> Prefilled | Finished | Failed
    any point -- Abort, gateway gone --> nothing is said; lease released, engine's request ended
    any point -- deadline, refusal, engine dead --> Failed
"""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import msgspec

from shared.engine.engine_sampling import going_on
from shared.engine.interface import Engine, EngineDelta, EngineRequest, KvUse
from shared.engine.worker_config import WorkerSettings
from shared.engine.worker_cost import WorkerCost
from shared.engine.worker_outbox import Outbox
from shared.engine.worker_pages import PageLease, PromptPages
from shared.engine.worker_room import DecodeRoom
from shared.engine.worker_trace import AttemptClock
from shared.engine.worker_use import count_use
from shared.errors import ClusterError, InvariantBroken, PeerGone, PeerTimeout, ResourceError
from shared.ids import HandoffId, InstanceId, RequestId
from shared.kv.block_hash import chain_digest, chain_seed
from shared.observe import metrics
from shared.observe.log import get_logger
from shared.wire.handoff import HandoffState
from shared.wire.requests import (
    Failed,
    Finished,
    Generate,
    Prefilled,
    PromptScored,
    SamplingSpec,
    StageReceipt,
    TokenChunk,
    TokenLogprob,
    can_continue,
)

_log = get_logger("worker.attempt")
_seed = lru_cache(maxsize=1024)(chain_seed)

PromptLogprobs = list[list[TokenLogprob] | None]


@dataclass(frozen=True, slots=True)
class AttemptContext:
    """What every attempt of one worker shares. on_engine_died runs once per attempt that notices."""

    instance: InstanceId
    settings: WorkerSettings
    engine: Engine
    pages: PromptPages
    outbox: Outbox
    on_engine_died: Callable[[str], None]
    on_invariant_broken: Callable[[str], None]
    cost: WorkerCost = field(default_factory=WorkerCost)
    room: DecodeRoom | None = None  # None: nobody waits for room


class _Metrics:
    """Children of the hot path's metrics, made once."""

    def __init__(self) -> None:
        ended = metrics.counter("quire_worker_attempts_total", "Attempts by stage and end.", ("stage", "end"))
        ttft = metrics.histogram_ms("quire_worker_first_output_ms", "Receipt to first output.", ("stage",))
        self.ended: Callable[[str, str], Any] = lru_cache(maxsize=64)(ended.labels)
        self.first = {stage: ttft.labels(stage) for stage in ("prefill", "decode", "colocated")}
        self.tokens = metrics.counter("quire_worker_output_tokens_total", "Tokens sent to gateways.")


def first_token_sampling(spec: SamplingSpec) -> SamplingSpec:
    """What the prefill stage samples: one token of one choice, as the first token of the whole would be."""
    return msgspec.structs.replace(
        spec, max_tokens=min(spec.max_tokens, 1), n=1, min_tokens=min(spec.min_tokens, 1)
    )


def ends_with_first_token(spec: SamplingSpec, finish_reason: str | None) -> bool:
    """No handoff: the first token is the whole answer. With n choices the others may go on."""
    return spec.n == 1 and (spec.max_tokens <= 1 or finish_reason not in (None, "length"))


class Attempt:
    """Runs as one task. cancel() ends it silently."""

    def __init__(
        self,
        context: AttemptContext,
        identity: bytes,
        message: Generate,
        prompt: bytes,
        tokens: Sequence[int],
        number: int,
    ) -> None:
        self.identity = identity
        self.message = message
        self._context = context
        self._prompt = prompt
        self._tokens = tokens
        self._engine_id = f"{message.request_id}-{message.attempt}-{number}"
        page_path = "memfd" if context.engine.device in ("cpu", "mock") else "cuda"
        self._clock = AttemptClock(message, context.instance, len(tokens), page_path)
        self._lease: PageLease | None = None
        self._use = KvUse()
        self._sampling = going_on(message.sampling, message.num_output_tokens)
        self._seed = _seed(context.engine.description.fingerprint, message.tenant_salt)
        self._prompt_logprobs: PromptLogprobs | None = None
        self._engine_done = False  # the engine said that the request is over
        self._unclaimed: HandoffId | None = (
            None  # a hand-off that the engine makes ready and nobody will claim
        )
        self.is_waiting = True  # not in the engine yet

    @property
    def _placed(self) -> tuple[RequestId, int]:
        """As the scheduler knows it."""
        return self.message.request_id, self.message.attempt

    async def run(self) -> None:
        """Until the terminal message is queued, or cancelled. Raises nothing."""
        deadline_ms = min(self.message.deadline_ms, self._context.settings.max_deadline_ms)
        end, error_text = "failed", ""
        try:
            async with asyncio.timeout(deadline_ms / 1000):
                await (self._prefill() if self.message.stage == "prefill" else self._decode())
            end = "finished"
        except asyncio.CancelledError:
            end = "aborted"  # nobody waits for a reply
        except TimeoutError:
            end, error_text = "deadline", f"the deadline of {deadline_ms} ms passed"
            self._fail(PeerTimeout.code, error_text, retryable=False)
        except ClusterError as error:
            error_text = error.message
            self._fail(error.code, error.message, retryable=error.retryable)
            if isinstance(error, InvariantBroken):
                self._context.on_invariant_broken(error.message)
            elif isinstance(error, PeerGone):
                self._context.on_engine_died(error.message)
        except Exception as error:  # noqa: BLE001  one request that the engine chokes on must not end the others
            error_text = f"{type(error).__name__}: {error}"
            _log.error("attempt_crashed", request_id=self.message.request_id, exc_info=True)
            self._fail(ClusterError.code, "the engine could not run this request", retryable=False)
        finally:
            self._context.engine.drop_early(self._engine_id)
            self._release()
            if self._unclaimed is not None:
                self._context.pages.drop_handoff(self._unclaimed)
            self._context.cost.end(self._engine_id)
            if self._context.room is not None:
                self._context.room.leave(self._engine_id)
            self._clock.end(self._use, error=error_text)
            if self._clock.ttft_ms:
                count_use(self._use)
            _METRICS.ended(self.message.stage, end).inc()

    def _fail(self, code: str, text: str, *, retryable: bool) -> None:
        message = self.message
        failed = Failed(
            request_id=message.request_id,
            attempt=message.attempt,
            code=code,
            message=text,
            retryable=retryable,
        )
        self._context.outbox.terminal(self.identity, failed)

    def _release(self) -> None:
        if self._lease is not None:
            if self._context.engine.keeps_leases:
                self._context.pages.settle(self._lease.lease_id, self._context.engine, self._engine_done)
            else:
                self._context.pages.release(self._lease.lease_id)
            self._lease = None

    async def _lease_pages(self, request: EngineRequest) -> None:
        """Args: request: the engine's, but for what a lease brings; it may be there meanwhile."""
        pages, message = self._context.pages, self.message
        parent = self._clock.span.traceparent
        if message.handoff is not None:
            # a stream that lost its instance stands still at the client, and its next token is due: it waits for nobody
            num_from_prefill = (
                len(message.handoff.output_token_ids) if message.handoff.mode == "continue" else 0
            )
            goes_on = message.num_output_tokens > num_from_prefill
            if self._context.room is not None and not goes_on:
                self._clock.room_wait_ms = await self._context.room.enter(
                    self._engine_id, message.handoff, len(self._tokens), self._sampling
                )
            self._context.engine.send_early(request)
            self._lease = await pages.for_handoff(self._seed, self._prompt, message.handoff, parent)
        else:
            self._context.engine.send_early(request)
            self._lease = await pages.for_prompt(self._seed, self._prompt, parent, message.kv)
        if self._lease is not None:
            self._clock.brought = self._lease.brought

    def _request(self, sampling: SamplingSpec, handoff_id: HandoffId | None) -> EngineRequest:
        """Without a lease."""
        message = self.message
        return EngineRequest(
            engine_request_id=self._engine_id,
            stage=message.stage,
            prompt_token_ids=self._tokens,
            packed_prompt=self._prompt,
            sampling=sampling,
            chain_seed=self._seed,
            tenant_salt=message.tenant_salt,
            weight=message.weight,
            handoff_id=handoff_id,
            handoff_target=message.handoff_to.target if message.handoff_to else None,
            traceparent=self._clock.span.traceparent,
            num_output_tokens=message.num_output_tokens,
            handed_tokens=min(message.handoff.valid_tokens, len(self._tokens))
            if message.handoff is not None
            else 0,
        )

    async def _deltas(
        self, sampling: SamplingSpec, handoff_id: HandoffId | None
    ) -> AsyncGenerator[EngineDelta, None]:
        """The engine's output, with the bookkeeping that both stages need."""
        asked_pool = self._context.pages.usable
        request = self._request(sampling, handoff_id)
        if sampling.prompt_logprobs is None:  # they come with computing the prompt: pages would skip that
            await self._lease_pages(request)
        self._clock.mark_submitted(asked_pool=asked_pool)
        if self._lease is not None:
            held = self._lease.held
            digest = chain_digest(self._prompt, b"".join(held.hashes))
            request = dataclasses.replace(request, held=held, held_digest=digest)
        self.is_waiting = False
        is_first = True
        cost = self._context.cost
        if self._context.room is not None:
            self._context.room.entered(self._engine_id)
        placed = self._placed if self.message.stage != "decode" else None
        cached = request.held.valid_tokens if request.held else 0
        cost.begin(self._engine_id, len(self._tokens), cached, placed)
        # The interface promises that closing the iterator aborts the request.
        stream = cast(AsyncGenerator[EngineDelta, None], self._context.engine.generate(request))
        async with aclosing(stream):
            async for delta in stream:
                if delta.kv_use is not None:
                    self._use = delta.kv_use
                if is_first:
                    is_first = False
                    self._clock.mark_first()
                    cost.first_output(self._engine_id, self._use, decodes_on=not delta.request_done)
                    _METRICS.first[self.message.stage].observe(self._clock.ttft_ms)
                    if not self._context.engine.keeps_leases:
                        self._release()
                if delta.prompt_logprobs is not None:
                    self._prompt_logprobs = delta.prompt_logprobs
                if delta.finish_reason == "error":
                    raise ClusterError(self._refusal())
                if delta.finish_reason == "abort":  # not by us: we close the iterator instead
                    raise ResourceError("The engine ended the request early.")
                self._clock.num_output_tokens += len(delta.token_ids)
                yield delta
                if delta.request_done:
                    self._engine_done = True
                    return
        raise PeerGone("the engine's output ended before the request did")

    def _refusal(self) -> str:
        """No other engine could serve it either."""
        text = "The engine could not go on with this request."
        if self._sampling.structured is None:
            return text
        return f"{text} Its grammar may ask for text that the tokenizer spells with a special token."

    def _chunk(self, delta: EngineDelta, receipt: StageReceipt | None = None) -> TokenChunk:
        return TokenChunk(
            self.message.request_id,
            self.message.attempt,
            delta.index,
            delta.token_ids,
            delta.finish_reason,
            delta.stop_token_id,
            delta.logprobs,
            receipt,
        )

    async def _prefill(self) -> None:
        message = self.message
        assert message.handoff_to is not None  # checked before the attempt was made
        handoff_id = message.handoff_to.handoff_id
        sampling = first_token_sampling(self._sampling)
        parts: list[EngineDelta] = []
        is_whole = ends_with_first_token(
            self._sampling, None
        )  # known before: then nothing is held for a reader
        self._unclaimed = None if is_whole else handoff_id
        async with aclosing(self._deltas(sampling, None if is_whole else handoff_id)) as deltas:
            parts = [delta async for delta in deltas]
        first = _joined(parts)
        handoff = None
        if not ends_with_first_token(self._sampling, first.finish_reason):
            is_final = self._context.settings.handoff_mode == "continue" and can_continue(message.sampling)
            if is_final:
                first.finish_reason = None  # it was the length that the prefill stage was asked for
            handoff = HandoffState(
                handoff_id=handoff_id,
                source=self._context.instance,
                description=self._context.engine.description,
                mode="continue" if is_final else "resample",
                # Without a pool there is nothing to wait for on the other side.
                valid_tokens=len(self._tokens) if self._context.pages.usable else 0,
                output_token_ids=first.token_ids,
                num_sampler_draws=len(first.token_ids) if message.sampling.temperature > 0 else 0,
                source_mempool=self._context.pages.peer_address,
            )
        is_shown = handoff is None or handoff.mode == "continue"
        _METRICS.tokens.inc(len(first.token_ids) if is_shown else 0)
        prefilled = Prefilled(
            request_id=message.request_id,
            attempt=message.attempt,
            first=self._chunk(first),
            receipt=self._clock.receipt(self._use),
            handoff=handoff,
            prompt_logprobs=self._prompt_logprobs,
        )
        if handoff is not None:
            self._unclaimed = None
        self._context.outbox.terminal(self.identity, prefilled)

    async def _decode(self) -> None:
        """Also the colocated stage: it differs only in where the pages come from."""
        sampling = self._sampling
        if self.message.stage == "decode":  # however long it waits here for room, it is done with its source
            self._context.cost.arrived.append(self._placed)
        if self.message.handoff is not None and sampling.prompt_logprobs is not None:
            # The prefill stage has answered them; asking again would compute the whole prompt.
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        async with aclosing(self._deltas(sampling, None)) as deltas:
            is_first = True
            async for delta in deltas:
                # A stop string ends the request at the gateway, before Finished could tell. Of several choices each
                # tells with its first token what it found.
                tells = is_first or (delta.kv_use is not None and not delta.request_done)
                receipt = self._clock.receipt(self._use) if tells else None
                if is_first and self._prompt_logprobs is not None:
                    self._context.outbox.scored(self.identity, self._scored(self._prompt_logprobs))
                is_first = False
                self._context.outbox.chunk(self.identity, self._chunk(delta, receipt))
                _METRICS.tokens.inc(len(delta.token_ids))
        finished = Finished(
            request_id=self.message.request_id,
            attempt=self.message.attempt,
            receipt=self._clock.receipt(self._use),
        )
        self._context.outbox.terminal(self.identity, finished)

    def _scored(self, rows: PromptLogprobs) -> PromptScored:
        message = self.message
        return PromptScored(request_id=message.request_id, attempt=message.attempt, prompt_logprobs=rows)


def _joined(parts: list[EngineDelta]) -> EngineDelta:
    """The first token and what ended it, should the engine have said so in two deltas."""
    first = EngineDelta(index=0, token_ids=[])
    for part in parts:
        first.token_ids = first.token_ids + part.token_ids
        first.finish_reason = part.finish_reason or first.finish_reason
        first.stop_token_id = part.stop_token_id if part.stop_token_id is not None else first.stop_token_id
        if part.logprobs is not None:
            first.logprobs = (first.logprobs or []) + part.logprobs
    return first


_METRICS = _Metrics()
