"""One prompt on its way through the cluster, and the interface of whoever takes its output."""

from typing import NamedTuple, Protocol

from services.gateway.core.request_flow import Limits, RequestFlow
from services.gateway.core.retry_budget import RetryBudget
from services.gateway.early_receipt import EarlyReceipt
from shared.ids import RequestId
from shared.kv.block_hash import pack_tokens
from shared.observe.trace import Span
from shared.wire.explain import explain as explain_placement
from shared.wire.placement import Placed, PrefixHit, Target
from shared.wire.requests import SamplingSpec, StageReceipt, TokenChunk, TokenLogprob, can_continue

PromptLogprobs = list[list[TokenLogprob] | None]


class FoundPrefix(NamedTuple):
    """What is known of a prompt's beginning: who holds it, and how many of its tokens were asked for here before."""

    hits: list[PrefixHit]
    seen_tokens: int = 0


NOTHING_FOUND = FoundPrefix([])


class Sink(Protocol):
    """Takes one call's output. Exactly one of complete() and fail() ends it, unless the client left first."""

    def chunk(self, chunk: TokenChunk) -> bool:
        """New tokens. Returns True when no more output is needed (the worker is then stopped)."""
        ...

    def scored(self, call: "Call", rows: PromptLogprobs) -> None:
        """The prompt's log probabilities, before the first chunk. Only when they were asked for."""
        ...

    def discard(self) -> None:
        """Forget the output so far: the request starts again. Only while nothing was sent."""
        ...

    def complete(self, call: "Call") -> None:
        """The answer is whole; call.receipts and call.placed are final."""
        ...

    def fail(self, call: "Call", code: str, message: str, retry_after_ms: int | None) -> None:
        """The answer will never be whole."""
        ...


class Call:
    """One prompt on its way through the cluster."""

    __slots__ = (
        "early", "ended", "explain", "first_ns", "flow", "found", "num_earlier_receipts", "num_prompt_tokens",
        "output_ids", "placed", "placed_ns", "prompt", "receipts", "request_id", "sampling", "schedule_span", "session",
        "sink", "span", "targets", "tenant", "tenant_salt", "weight",
    )  # fmt: skip

    def __init__(
        self,
        request_id: RequestId,
        sink: Sink,
        *,
        prompt: bytes,
        sampling: SamplingSpec,
        found: FoundPrefix,
        session: str,
        tenant: str,
        span: Span,
        limits: Limits,
        budget: RetryBudget | None = None,
        explain: bool = True,
        weight: float = 1.0,
    ) -> None:
        self.request_id = request_id
        self.sink = sink
        self.prompt = prompt  # packed token ids
        self.num_prompt_tokens = len(prompt) // 4
        self.sampling = sampling
        self.found = found
        self.session = session
        self.tenant = tenant
        self.tenant_salt = tenant
        self.weight = weight  # of its tenant
        self.span = span
        self.explain = explain  # somebody reads why it was placed as it was
        self.ended: set[int] = set()  # choices that have their finish reason from a worker
        self.output_ids: list[int] = []  # delivered so far; only if its flow continues, to go on behind them
        self.flow = RequestFlow(limits, budget, continues=can_continue(sampling))
        self.schedule_span: Span | None = None
        self.placed: Placed | None = None
        self.placed_ns = 0  # monotonic; when the attempt was sent to its first instance
        self.first_ns = 0  # its first token for the client; 0: none yet
        self.targets: list[Target] = []  # of the running attempt
        self.receipts: list[StageReceipt] = []
        self.num_earlier_receipts = 0  # of them, those of placements before the last one
        self.early: EarlyReceipt | None = None  # of the running stage, for an end before Finished

    @property
    def frame(self) -> bytes:
        """What the next stage begins with: the prompt, and output that is final."""
        return self.prompt + pack_tokens(self.output_ids) if self.output_ids else self.prompt

    def note_chunk(self, chunk: TokenChunk, now_ns: int) -> None:
        """Output came for the client; monotonic. Cost: of every token."""
        if not self.first_ns:
            self.first_ns = now_ns
            self.flow.mark_output()
        if chunk.receipt is not None:
            self.early = EarlyReceipt(chunk, now_ns)
        elif self.early is not None:
            self.early.ran_on(chunk, now_ns)

    def choice_ended(self, index: int) -> bool:
        """A choice has its finish reason. Whether all have: what comes then says nothing to the client."""
        self.ended.add(index)
        return len(self.ended) == self.sampling.n

    def keep_early_receipt(self) -> None:
        """The running stage ends without a receipt of its own: what it said with its first chunk stays."""
        if self.early is not None:
            self.receipts.append(self.early.whole(self.sampling.n))
            self.early = None

    def end_schedule_span(self, placed: Placed | None = None) -> None:
        """It has been placed, or ends without."""
        span, self.schedule_span = self.schedule_span, None
        if span is None:
            return
        if placed is not None:
            span.set("quire.kind", placed.kind)
            if span.recording:
                for name, value in explain_placement(placed).items():
                    span.set(name, value)
        span.end()

    def discard(self) -> None:
        """Its attempt was given up before anything was sent: as if none had been."""
        self.receipts.clear()
        self.output_ids.clear()
        self.ended.clear()
        self.early = None
        self.first_ns = 0
        self.sink.discard()

    @property
    def first_token(self) -> int:
        """Id of the prompt's first token."""
        return int.from_bytes(self.prompt[:4], "little")

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the first stage did not compute.

        The first that tells may have gone on behind output of one that was lost: it found some of that, too.
        """
        if not self.receipts:
            return 0
        first = self.receipts[0]
        cached = first.tokens_engine + first.tokens_pool
        went_on = first.prompt_tokens > self.num_prompt_tokens
        return min(cached, self.num_prompt_tokens) if went_on else cached
