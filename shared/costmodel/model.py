"""exec(x, y): how long an instance takes, operator by operator. Pure arithmetic, a few microseconds a call.

Source: MemServe 5.3.2. Compute-bound operators by waves of tiles, memory-bound ones by bytes, prefix attention by
pairs of tokens, and a constant share. The paper writes attention as a x^2 y + b x^2 + c x + d over a prompt of x tokens
with cached ratio y. Here it is over new and past tokens, n = x (1 - y) and p = x y, because then the chunks of a prompt
add up exactly: a (n p + n^2 / 2) + b n^2 + c n + d. Beyond the paper: a matmul is the larger of its arithmetic and its
bytes, batches of prompts and decodes have a step of their own, and chunks, host work, parallel ranks and the launching
of kernels are counted: kernel by kernel, of what no CUDA graph holds; of a prompt from graphs piece by piece, with
attention launched between them (vLLM's piecewise graphs). An idle engine waits for all of it; behind a step on the
device the next is launched meanwhile.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import msgspec

from shared.costmodel.operators import (
    GIGA,
    all_reduce_gb_per_token,
    attention_gflop,
    elementwise_gb_per_token,
    kv_gb_per_token,
    matmuls,
    tile_rows,
)
from shared.wire.cost import CostCoefficients

ALL_REDUCES_PER_LAYER = 2
MOST_TOGETHER = 256  # waiting prompts whose steps are thought through
MAX_REMEMBERED = 16_384  # sizes of a step, 200 bytes each


@dataclass(frozen=True, slots=True)
class StepShape:
    """One engine step. `chunks`: (new tokens, tokens before them) of each prompt in it."""

    chunks: Sequence[tuple[int, int]] = ()
    num_decodes: int = 0
    decode_context_tokens: int = 0  # of all decoding requests together

    @property
    def num_tokens(self) -> int:
        """Rows of the matmuls."""
        return self.num_decodes + sum(new for new, _ in self.chunks)


def pack_prefills(prompts: Sequence[tuple[int, int]], max_batched_tokens: int) -> list[StepShape]:
    """Steps of an engine that has these (tokens, cached tokens) waiting: first come, first served, cut to fit."""
    steps: list[StepShape] = []
    chunks: list[tuple[int, int]] = []
    room = max_batched_tokens
    for num_tokens, cached in prompts:
        past = min(max(0, cached), num_tokens - 1)
        while past < num_tokens:
            new = min(room, num_tokens - past)
            chunks.append((new, past))
            past += new
            room -= new
            if not room:
                steps.append(StepShape(chunks))
                chunks, room = [], max_batched_tokens
    if chunks:
        steps.append(StepShape(chunks))
    return steps


class CostModel:
    """An immutable view of coefficients. All results in ms; none is negative.

    Cost: prefill_ms and decode_step_ms take 3 to 5 us (one pass over five matmuls), whatever the length, and 1 us for
    a number of tokens that was asked for before.
    """

    __slots__ = (
        "_a_ms",
        "_b_ms",
        "_busy_ms",
        "_byte_ops",
        "_dense",
        "_eager_ms",
        "_elementwise_ms",
        "_full_ms",
        "_kv_ms",
        "_logits",
        "coefficients",
    )

    def __init__(self, coefficients: CostCoefficients) -> None:
        c = self.coefficients = coefficients
        shape, tp = c.shape, c.tp
        ops = []
        for op in matmuls(shape, tp):
            tiles = ceil(op.columns / c.tile_columns)
            wave_gflop = 2.0 * op.inner * c.tile_columns * c.num_processors * op.repeats / GIGA
            weights_gb = op.inner * op.columns * shape.dtype_bytes * op.repeats / GIGA
            row_gb = (op.inner + op.columns) * shape.dtype_bytes * op.repeats / GIGA
            ops.append(
                (
                    op.by_request,
                    tiles,
                    wave_gflop * c.matmul_ms_per_gflop,  # per row of a tile
                    weights_gb * c.memory_ms_per_gb,
                    row_gb * c.memory_ms_per_gb,
                )
            )
        self._byte_ops = tuple(op[1:] for op in ops if not op[0])
        self._logits = next(op[1:] for op in ops if op[0])
        per_pair = attention_gflop(shape, tp, 1.0)
        self._a_ms = per_pair * c.attention_ms_per_gflop
        self._b_ms = per_pair * c.attention_square_ms_per_gflop
        self._kv_ms = kv_gb_per_token(shape, tp) * c.kv_read_ms_per_gb
        self._elementwise_ms = elementwise_gb_per_token(shape, tp) * c.memory_ms_per_gb
        if tp > 1:
            reduces = ALL_REDUCES_PER_LAYER * shape.num_layers
            self._elementwise_ms += reduces * all_reduce_gb_per_token(shape) * c.all_reduce_ms_per_gb
        self._dense: dict[tuple[int, int], float] = {}  # of _dense_ms, at most MAX_REMEMBERED
        self._full_ms = self._dense_ms(c.max_batched_tokens, 1)
        # an idle engine's launching without graphs (a longer prompt never takes less), and what is left of it behind a
        # step, which reads the weights at least; without any graphs every step before has waited too
        self._eager_ms = max(c.launch_ms, c.idle_launch_ms)
        self._busy_ms = max(0.0, c.launch_ms - (self._dense_ms(1, 1) if c.graph_tokens else 0.0))

    # -- operators ------------------------------------------------------------------------------------

    def _matmul_ms(self, op: tuple[int, float, float, float], rows: int) -> float:
        """(waves) x (time of a full wave), or the bytes where they take longer (MemServe 5.3.2 a)."""
        column_tiles, row_ms, weights_ms, row_bytes_ms = op
        c = self.coefficients
        padded = tile_rows(rows, c.tile_tokens)
        tile = min(padded, c.tile_tokens)
        waves = -(-(padded // tile * column_tiles) // c.num_processors)
        return max(waves * tile * row_ms, weights_ms + rows * row_bytes_ms)

    def _dense_ms(self, num_tokens: int, num_requests: int) -> float:
        """Everything of a step but attention, constants and launches, communication included.

        Remembered: sizes come again.
        """
        key = num_tokens, num_requests
        found = self._dense.get(key)
        if found is None:
            if len(self._dense) >= MAX_REMEMBERED:
                self._dense.clear()
            found = self._dense[key] = self._dense_sum_ms(num_tokens, num_requests)
        return found

    def _dense_sum_ms(self, num_tokens: int, num_requests: int) -> float:
        total = num_tokens * self._elementwise_ms + self._matmul_ms(self._logits, num_requests)
        for op in self._byte_ops:
            total += self._matmul_ms(op, num_tokens)
        c = self.coefficients
        if c.tp > 1:
            total += ALL_REDUCES_PER_LAYER * c.shape.num_layers * c.all_reduce_ms
        return total

    # -- what others ask ------------------------------------------------------------------------------

    def prefill_ms(self, num_tokens: int, cached_tokens: int = 0) -> float:
        """MemServe's exec(x, y): a prompt of which `cached_tokens` need no computing, alone on the instance.

        Until its first token; in chunks of max_batched_tokens. At least one token is always computed. Grows with
        num_tokens, never with cached_tokens.
        """
        if num_tokens <= 0:
            return 0.0
        c = self.coefficients
        past = min(max(0, cached_tokens), num_tokens - 1)
        new, size = num_tokens - past, c.max_batched_tokens
        num_full, rest = divmod(new, size)
        work = num_full * self._full_ms
        rest_ms = self._dense_ms(rest, 1) if rest else 0.0
        first, first_ms = (size, self._full_ms) if num_full else (rest, rest_ms)
        least_ms = self._eager_ms if first > c.graph_tokens else c.idle_launch_ms
        work += rest_ms
        squares = num_full * size * size + rest * rest
        work += self._a_ms * 0.5 * (num_tokens * num_tokens - past * past) + self._b_ms * squares
        num_chunks = num_full + (rest > 0)
        if c.pp > 1:
            # chunks follow each other through the stages, and the last one runs through the others alone: counted as
            # full where there are several, so that it never grows with what is cached
            last_ms = first_ms + self._a_ms * first * (num_tokens - 0.5 * first) + self._b_ms * first * first
            work = (work + (c.pp - 1) * last_ms) / c.pp + (c.pp - 1) * c.stage_hop_ms
        return (
            work
            + max(0.0, least_ms - first_ms)
            + num_chunks * (c.step_overhead_ms + c.chunk_ms)
            + new * c.token_ms
            + num_tokens * c.prompt_token_ms
            + c.request_ms
        )

    def step_ms(self, step: StepShape) -> float:
        """One step of a busy engine, from its begin to its output, through all pipeline stages. 0 for an empty one."""
        num_tokens = step.num_tokens
        if not num_tokens:
            return 0.0
        c = self.coefficients
        pairs = squares = new_tokens = 0
        for new, past in step.chunks:
            pairs += new * past
            squares += new * new
            new_tokens += new
        dense_ms = self._dense_ms(num_tokens, len(step.chunks) + step.num_decodes)
        return (
            (max(dense_ms, self._busy_ms) if num_tokens > c.graph_tokens else dense_ms)
            + self._a_ms * (pairs + 0.5 * squares)
            + self._b_ms * squares
            + self._kv_ms * step.decode_context_tokens
            + c.step_overhead_ms
            + c.chunk_ms * len(step.chunks)
            + c.decode_request_ms * step.num_decodes
            + c.token_ms * new_tokens
            + (c.pp - 1) * c.stage_hop_ms
        )

    def decode_step_ms(self, num_requests: int, context_tokens: int) -> float:
        """One token for each of `num_requests`, whose contexts have `context_tokens` together."""
        return self.step_ms(StepShape((), num_requests, context_tokens))

    def batch_ms(self, prompts: Sequence[tuple[int, int]]) -> float:
        """Of (tokens, cached tokens) that wait together in a busy engine, until the last first token.

        What is done for a request outside of steps is done while other steps run. Pipeline stages work on different
        steps at once: each has its share of all of them, and the longest runs through the others alone.

        Cost: O(prompts).
        """
        c = self.coefficients
        steps_ms = [self.step_ms(step) for step in pack_prefills(prompts, c.max_batched_tokens)]
        return (sum(steps_ms) + (c.pp - 1) * max(steps_ms, default=0.0)) / c.pp

    def waiting_ms(self, prompts: Sequence[tuple[int, int]]) -> float:
        """Of (tokens, cached tokens) whose first tokens an engine still owes, first come first: until the last of them.

        Prompts that wait together share steps: what a step takes of itself, its launch above all, counts once for
        all of them. The first may have found the engine idle. Cost: 3 us a prompt, up to MOST_TOGETHER; those behind
        are counted one by one.
        """
        together, behind = prompts[:MOST_TOGETHER], prompts[MOST_TOGETHER:]
        first_ms = self.prefill_ms(*prompts[0]) if prompts else 0.0
        together_ms = max(first_ms, self.batch_ms(together)) if len(together) > 1 else first_ms
        return together_ms + sum(self.prefill_ms(*prompt) for prompt in behind)

    def scaled(self, *, tp: int = 1, pp: int = 1) -> "CostModel":
        """The same device and model on tp x pp ranks: operators are divided, the constant share is not.

        Communication costs what all_reduce_ms, all_reduce_ms_per_gb and stage_hop_ms say; 0 where nobody measured.
        """
        return CostModel(msgspec.structs.replace(self.coefficients, tp=tp, pp=pp))
