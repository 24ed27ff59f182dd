"""The operators of a decoder-only transformer as one rank runs them: what they compute, read and exchange.

No costs here, only counts; model.py multiplies. Source: MemServe 5.3.2.
"""

from typing import NamedTuple

from shared.wire.cost import ModelShape

GIGA = 1e9
# kernels take a smaller tile where there are fewer rows than the usual one has
SMALL_TILES = (16, 32, 64, 128)


class Matmul(NamedTuple):
    """[rows, inner] x [inner, columns] on one rank, `repeats` times a step."""

    name: str
    inner: int
    columns: int
    repeats: int
    by_request: bool = False  # rows are requests, not tokens


def kv_heads_of_rank(shape: ModelShape, tp: int) -> int:
    """Key-value heads on one rank; where there are fewer than ranks, each rank has a copy of one."""
    return max(1, -(-shape.num_kv_heads // tp))


def matmuls(shape: ModelShape, tp: int = 1) -> tuple[Matmul, ...]:
    """Of all layers, on one of `tp` ranks: columns of the first and rows of the second of each pair are divided."""
    heads, kv_heads = max(1, -(-shape.num_heads // tp)), kv_heads_of_rank(shape, tp)
    layers, hidden = shape.num_layers, shape.hidden_size
    inner = max(1, -(-shape.intermediate_size // tp))
    return (
        Matmul("qkv", hidden, (heads + 2 * kv_heads) * shape.head_dim, layers),
        Matmul("attention_output", heads * shape.head_dim, hidden, layers),
        Matmul("gate_up", hidden, 2 * inner, layers),
        Matmul("down", inner, hidden, layers),
        Matmul("logits", hidden, max(1, -(-shape.vocab_size // tp)), 1, by_request=True),
    )


def tile_rows(rows: int, tile: int) -> int:
    """Rows that are really computed: whole tiles, smaller ones where one of those holds all rows."""
    if rows < tile:
        for small in SMALL_TILES:
            if rows <= small < tile:
                return small
    return -(-rows // tile) * tile


def attention_gflop(shape: ModelShape, tp: int, num_pairs: float) -> float:
    """Of scores and values over pairs (new token, token at or before it), all layers, one rank."""
    heads = max(1, -(-shape.num_heads // tp))
    return 4.0 * heads * shape.head_dim * shape.num_layers * num_pairs / GIGA


def kv_gb_per_token(shape: ModelShape, tp: int) -> float:
    """Keys and values of one token, all layers, one rank."""
    return 2.0 * kv_heads_of_rank(shape, tp) * shape.head_dim * shape.num_layers * shape.dtype_bytes / GIGA


def elementwise_gb_per_token(shape: ModelShape, tp: int) -> float:
    """Read and written by norms, residuals, rotation, activation: hidden states on every rank, the rest divided."""
    hidden = 8 * shape.hidden_size
    divided = 4 * shape.num_heads * shape.head_dim + 3 * shape.intermediate_size
    return shape.num_layers * (hidden + divided / tp) * shape.dtype_bytes / GIGA


def all_reduce_gb_per_token(shape: ModelShape) -> float:
    """One of the two of every layer."""
    return shape.hidden_size * shape.dtype_bytes / GIGA
