"""How many waves a layer's matrix products take on so many multiprocessors, whole and in two parts. No I/O.

A product of `num_tokens` rows is computed in tiles, one thread block (CTA) each; as many CTAs run at once as there are
multiprocessors, and each such round is a wave. The last wave is seldom full, so two parts may need one wave more than
the whole (TokenWeave 3.1.1: 300 CTAs on 132 multiprocessors are 3 waves, 150 + 150 are 4, 132 + 168 are 3 again).
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """Of the output, computed by one CTA."""

    tokens: int
    columns: int

    def __post_init__(self) -> None:
        """Raises: ValueError."""
        if self.tokens < 1 or self.columns < 1:
            raise ValueError(f"a tile of {self.tokens} tokens x {self.columns} columns")


@dataclass(frozen=True, slots=True)
class Gemm:
    """One matrix product of a layer on one rank: [tokens, inner] x [inner, columns].

    A wave of it takes time in proportion to `wave_cost`, what one CTA multiplies and adds.
    """

    name: str
    columns: int
    inner: int
    tile: Tile

    def __post_init__(self) -> None:
        """Raises: ValueError."""
        if self.columns < 1 or self.inner < 1:
            raise ValueError(f"{self.name}: {self.columns} columns, {self.inner} inner")

    @property
    def wave_cost(self) -> int:
        """Multiply-adds of one CTA."""
        return self.inner * self.tile.tokens * self.tile.columns

    def ctas(self, num_tokens: int) -> int:
        """Of the product for so many tokens."""
        return -(-num_tokens // self.tile.tokens) * -(-self.columns // self.tile.columns)

    def waves(self, num_tokens: int, num_sms: int) -> int:
        """Of the product for so many tokens, one CTA to a multiprocessor."""
        return -(-self.ctas(num_tokens) // num_sms)


def split_ctas(num_ctas: int, num_sms: int) -> tuple[int, int] | None:
    """The most equal two parts that together take no more waves than the whole; the first is never the larger of a tie.

    None where there are none: all of it is one wave, or nothing. Cost: constant.
    Raises: ValueError on a negative count or no multiprocessor.
    """
    if num_ctas < 0 or num_sms < 1:
        raise ValueError(f"{num_ctas} CTAs on {num_sms} multiprocessors")
    if num_ctas <= num_sms:
        return None
    last = num_ctas % num_sms or num_sms  # CTAs of the last wave
    half = num_ctas // 2
    # a part of i whole waves and x CTAs keeps the waves where x is 0 or at least `last`: the other part then
    # begins no wave that the whole had not
    rest = half % num_sms
    if rest == 0 or rest >= last:
        return half, num_ctas - half
    down, up = half - rest, half - rest + last
    first = down if down and num_ctas - 2 * down <= 2 * up - num_ctas else up
    return first, num_ctas - first


def layer_gemms(
    *,
    hidden: int,
    intermediate: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    tp: int,
    tiles: Sequence[Tile],
) -> tuple[Gemm, Gemm, Gemm, Gemm]:
    """The four products of a dense decoder layer on one of `tp` ranks: qkv, o, gate and up, down.

    Args: tiles: one for all, or one for each in this order.
    Raises: ValueError on sizes that ranks cannot share, or another number of tiles.
    """
    if len(tiles) not in (1, 4):
        raise ValueError(f"{len(tiles)} tiles for 4 products")
    if tp < 1 or num_heads % tp or intermediate % tp:
        raise ValueError(f"{num_heads} heads and {intermediate} columns over {tp} ranks")
    each = list(tiles) * (4 // len(tiles))
    heads, kv_heads = num_heads // tp, max(1, num_kv_heads // tp)
    return (
        Gemm("qkv", (heads + 2 * kv_heads) * head_dim, hidden, each[0]),
        Gemm("o", hidden, heads * head_dim, each[1]),
        Gemm("gate_up", 2 * intermediate // tp, hidden, each[2]),
        Gemm("down", hidden, intermediate // tp, each[3]),
    )
