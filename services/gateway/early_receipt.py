"""The receipt of a stage that ends without one of its own: by a stop string, or by the loss of its instance."""

import msgspec

from shared.wire.requests import StageReceipt, TokenChunk


class EarlyReceipt:
    """What a stage said with its first output, whose KV it knew by then. How long it ran on is what was seen here.

    Args: chunk: it carries the receipt; at_ns: when it came, monotonic.
    """

    __slots__ = ("_at_ns", "_last_ns", "_num_steps", "_receipt")

    def __init__(self, chunk: TokenChunk, at_ns: int) -> None:
        assert chunk.receipt is not None, "only what carries one"
        self._receipt = chunk.receipt
        self._at_ns = self._last_ns = at_ns
        self._num_steps = max(0, len(chunk.token_ids) - 1)

    def ran_on(self, chunk: TokenChunk, now_ns: int) -> None:
        """More output came. Cost: of every token."""
        self._last_ns = now_ns
        self._num_steps += len(chunk.token_ids)

    def whole(self, num_choices: int) -> StageReceipt:
        """As the stage would have said it behind its last output. Of several choices nobody knows a step's time."""
        ran_ms = (self._last_ns - self._at_ns) / 1e6
        has_steps = num_choices == 1 and self._num_steps > 0
        return msgspec.structs.replace(
            self._receipt,
            compute_ms=round(self._receipt.compute_ms + ran_ms, 3),
            step_ms=round(ran_ms / self._num_steps, 3) if has_steps else 0.0,
        )
