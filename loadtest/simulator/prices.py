"""What the simulator asks of a cost model: the calibrated one, and one that needs no measurement."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from shared.costmodel.model import CostModel, StepShape, pack_prefills
from shared.wire.cost import CostCoefficients, ModelShape

Chunk = tuple[int, int]  # (new tokens, tokens before them in the same request)


class StepPrices(Protocol):
    """Times of one instance, in ms."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Of all layers and ranks, K and V."""
        ...

    @property
    def coefficients(self) -> CostCoefficients | None:
        """What the instance says in its Hello; None: nothing, and `cost` works as `prompt_tree`."""
        ...

    @property
    def prefill_correction(self) -> float:
        """How many times the coefficients' prediction its prompts take: what its reports say."""
        ...

    @property
    def decode_correction(self) -> float:
        """The same of decode steps."""
        ...

    def step_ms(self, chunks: Sequence[Chunk], num_decodes: int, decode_context_tokens: int) -> float:
        """One engine step of prefill chunks and decodes together."""
        ...

    def decode_ms(self, num_requests: int, context_tokens: int) -> float:
        """One step of decodes alone; context_tokens: of all of them."""
        ...

    def prefill_ms(self, num_tokens: int, cached_tokens: int = 0) -> float:
        """A prompt alone on the instance: MemServe's exec(x, y)."""
        ...

    def waiting_ms(self, prompts: Sequence[Chunk]) -> float:
        """Of (tokens, cached tokens) that an engine has yet to finish, all together."""
        ...

    def outside_ms(self, num_tokens: int) -> float:
        """What is done for a prompt outside of steps."""
        ...


class ModelPrices:
    """The production cost model. Decode steps are remembered: their time is linear in the context.

    Args: prefill_correction, decode_correction: factors of its predictions, as a worker learns them online; a step
    with prompts in it counts as prefill.
    """

    def __init__(
        self,
        coefficients: CostCoefficients,
        *,
        prefill_correction: float = 1.0,
        decode_correction: float = 1.0,
    ) -> None:
        self.coefficients = coefficients
        self.kv_bytes_per_token = kv_bytes_per_token(coefficients.shape)
        self._model = model = CostModel(coefficients)
        self.prefill_correction, self.decode_correction = prefill_correction, decode_correction

        @lru_cache(maxsize=4096)
        def line(num_requests: int) -> tuple[float, float]:
            none, some = (model.decode_step_ms(num_requests, context) for context in (0, 1 << 20))
            return none, (some - none) / (1 << 20)

        self._line = line

    def step_ms(self, chunks: Sequence[Chunk], num_decodes: int, decode_context_tokens: int) -> float:
        """As the model predicts it."""
        factor = self.prefill_correction if chunks else self.decode_correction
        return factor * self._model.step_ms(StepShape(chunks, num_decodes, decode_context_tokens))

    def decode_ms(self, num_requests: int, context_tokens: int) -> float:
        """The same without chunks. Cost: 0.2 us."""
        base, slope = self._line(num_requests)
        return self.decode_correction * (base + slope * context_tokens)

    def prefill_ms(self, num_tokens: int, cached_tokens: int = 0) -> float:
        """exec(x, y)."""
        return self.prefill_correction * self._model.prefill_ms(num_tokens, cached_tokens)

    def waiting_ms(self, prompts: Sequence[Chunk]) -> float:
        """As a worker reports it."""
        return self.prefill_correction * self._model.waiting_ms(prompts)

    def outside_ms(self, num_tokens: int) -> float:
        """Hashing and passing on."""
        c = self.coefficients
        return self.prefill_correction * (c.request_ms + c.prompt_token_ms * num_tokens)


def kv_bytes_per_token(shape: ModelShape) -> int:
    """K and V of all layers, in the model's own type."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * shape.dtype_bytes


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
    coefficients: CostCoefficients | None = None
    prefill_correction: float = 1.0
    decode_correction: float = 1.0

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
        return self.waiting_ms([(num_tokens, cached_tokens)])

    def waiting_ms(self, prompts: Sequence[Chunk]) -> float:
        """Packed into steps."""
        return sum(
            self.step_ms(step.chunks, 0, 0) for step in pack_prefills(prompts, self.max_batched_tokens)
        )

    def outside_ms(self, num_tokens: int) -> float:
        """Nothing."""
        return 0.0
