"""What an instance says about its own speed: coefficients of the operator-level cost model (MemServe 5.3.2).

Every coefficient is a non-negative cost in ms per unit of work, so that costs add up and 0 means "costs nothing".
shared/costmodel/model.py computes with them; shared/costmodel/fit.py finds them.
"""

from typing import Annotated

from msgspec import Meta, Struct

# What others divide by, and add up: a message with a count of none, or a cost or rate
# without end or below nothing, is malformed.
Count = Annotated[int, Meta(ge=1)]
Cost = Annotated[float, Meta(ge=0.0, le=1e12)]


class ModelShape(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sizes of the whole model, before tensor and pipeline parallelism."""

    num_layers: Count
    hidden_size: Count
    intermediate_size: Count  # of a mixture of experts: of all experts that one token goes through
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    vocab_size: Count
    dtype_bytes: Count = 2


class CostCoefficients(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One engine's costs. Rates are of one rank: `tp` and `pp` say how the shape is divided, and nothing else."""

    shape: ModelShape
    tp: Count = 1
    pp: Count = 1
    device: str = ""  # "cpu", a GPU's name, "mock"
    num_processors: Count = 1  # that share one matmul by whole tiles: a GPU's SMs; 1 on CPU
    max_batched_tokens: Count = 2048  # of one step: longer prompts are chunked
    tile_tokens: Count = 1  # matmul rows are computed in multiples of this
    tile_columns: Count = 1

    # operators: divided by tensor parallelism
    matmul_ms_per_gflop: Cost = 0.0
    memory_ms_per_gb: Cost = 0.0  # weights and activations, where they take longer than the arithmetic
    attention_ms_per_gflop: Cost = 0.0  # prefix attention, per pair of a new token and one at or before it
    attention_square_ms_per_gflop: Cost = 0.0  # more for the pairs among the new tokens themselves
    kv_read_ms_per_gb: Cost = 0.0  # decode's reading of its context

    # constant share: the same on any number of ranks
    step_overhead_ms: Cost = 0.0
    chunk_ms: Cost = 0.0  # per prompt in a step
    decode_request_ms: Cost = 0.0  # per decoding request in a step
    token_ms: Cost = 0.0  # per prompt token computed
    request_ms: Cost = 0.0  # per request, outside of steps
    graph_tokens: int = 0  # a step of more tokens is launched kernel by kernel, one of fewer from a graph
    launch_ms: Cost = 0.0  # that its launching takes at least; the device waits where its work is shorter
    idle_launch_ms: Cost = (
        0.0  # of a prompt from graphs, by pieces, in an idle engine; a busy one does it meanwhile
    )
    prompt_token_ms: Cost = 0.0  # per prompt token, cached or not: hashing, passing on

    # between ranks
    all_reduce_ms: Cost = 0.0  # each, whatever its size
    all_reduce_ms_per_gb: Cost = 0.0
    stage_hop_ms: Cost = 0.0  # from a pipeline stage to the next

    # how well they fit: relative errors on the calibration points themselves
    median_error_ratio: float = 0.0
    p90_error_ratio: float = 0.0
    num_samples: int = 0
    calibration_ms: Cost = 0.0  # what the profile took


class LinkRate(Struct, frozen=True, kw_only=True):
    """Measured speed of one path between an instance and other memory."""

    gb_per_s: Cost
    latency_ms: Cost = 0.0
