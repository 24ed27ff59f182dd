"""What the simulator asks of a cost model, and two that need no measurement."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Chunk = tuple[int, int]  # (new tokens, tokens before them in the same request)


class StepPrices(Protocol):
    """Times of one instance, in ms."""

    kv_bytes_per_token: int

    def step_ms(self, chunks: Sequence[Chunk], num_decodes: int, decode_context_tokens: int) -> float:
        """One engine step of prefill chunks and decodes together."""
        ...

    def decode_ms(self, num_requests: int, context_tokens: int) -> float:
        """One step of decodes alone; context_tokens: of all of them."""
        ...

    def prefill_ms(self, num_tokens: int, cached_tokens: int = 0) -> float:
        """A prompt alone on the instance: MemServe's exec(x, y)."""
        ...


@dataclass(frozen=True, slots=True)
class LinearPrices:
    """Costs that are easy to reckon with by hand: for tests, and where nothing was measured."""

    step_base_ms: float = 1.0
    token_ms: float = 0.01
    past_ms: float = 0.0  # per new token and past token
    context_ms: float = 1e-5  # per context token of a decode step
    decode_ms_per_request: float = 0.01
    kv_bytes_per_token: int = 1 << 17
    max_batched_tokens: int = 8192

    def step_ms(self, chunks: Sequence[Chunk], num_decodes: int, decode_context_tokens: int) -> float:
        """Linear in all of them."""
        work = sum(new * (self.token_ms + self.past_ms * (past + new / 2)) for new, past in chunks)
        decodes = num_decodes * self.decode_ms_per_request + decode_context_tokens * self.context_ms
        return self.step_base_ms + work + decodes

    def decode_ms(self, num_requests: int, context_tokens: int) -> float:
        """A step without chunks."""
        return self.step_ms((), num_requests, context_tokens)

    def prefill_ms(self, num_tokens: int, cached_tokens: int = 0) -> float:
        """Chunk by chunk."""
        return sum(
            self.step_ms([chunk], 0, 0)
            for chunk in chunks_of(num_tokens, cached_tokens, self.max_batched_tokens)
        )


def chunks_of(num_tokens: int, cached_tokens: int, max_batched_tokens: int) -> list[Chunk]:
    """How a prompt that has the instance for itself is cut."""
    out, done = [], cached_tokens
    while done < num_tokens:
        new = min(num_tokens - done, max_batched_tokens)
        out.append((new, done))
        done += new
    return out
