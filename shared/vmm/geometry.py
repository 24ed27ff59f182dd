"""How large a page is and how many blocks share it: the least waste, few handles, prefix hits of at most 64 tokens.

Paged ("cross-layer") blocks are found by a block table, so several may share a page and nothing else changes: the
page is then the unit of mapping, lending and release, the block stays the unit of hashing, sharing and transfer. In
the contiguous layouts (vAttention 5.1.2 and 8.2) a page is aliased as a whole, so that it is the block. No I/O.
"""

from dataclasses import dataclass
from math import lcm

from shared.errors import SettingsError
from shared.kv.layout import CUDA_PAGE_BYTES, HOST_PAGE_BYTES, slab_geometry

DEFAULT_BLOCK_TOKENS = 64
MIN_CUDA_PAGE_BYTES = 4 << 20  # driver calls cost by the handle, not by the byte
TOKEN_STEP = 16  # attention libraries take pages of multiples of 16 tokens
STRIDE_BYTES = 256  # what a padded token is a multiple of
MAX_PADDING_RATIO = 1 / 8


@dataclass(frozen=True, slots=True)
class KvShape:
    """One tensor-parallel rank's KV: `num_kv_heads` is already divided, 1 when there are more ranks than heads."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int = 2

    @classmethod
    def of_rank(
        cls, num_layers: int, num_kv_heads: int, head_dim: int, dtype_bytes: int = 2, tp_size: int = 1
    ) -> "KvShape":
        """Raises: SettingsError when the heads do not divide (vLLM replicates them only when ranks are more)."""
        if tp_size < 1 or (num_kv_heads % tp_size and tp_size % num_kv_heads):
            raise SettingsError(f"{num_kv_heads} KV heads do not divide over {tp_size} ranks; use a divisor")
        return cls(num_layers, max(1, num_kv_heads // tp_size), head_dim, dtype_bytes)

    @property
    def side_token_bytes(self) -> int:
        """K (or V) of one token in one layer."""
        return self.num_kv_heads * self.head_dim * self.dtype_bytes

    @property
    def token_bytes(self) -> int:
        """K and V of one token in all layers."""
        return 2 * self.num_layers * self.side_token_bytes


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """`blocks_per_page` blocks, each at a multiple of `block_stride_bytes`, fill one page of `page_bytes`."""

    block_tokens: int
    block_bytes: int
    block_stride_bytes: int
    blocks_per_page: int
    page_bytes: int

    @property
    def page_tokens(self) -> int:
        """Tokens whose KV one page holds."""
        return self.block_tokens * self.blocks_per_page

    @property
    def waste_ratio(self) -> float:
        """Share of a full page that holds no KV."""
        return 1 - self.block_bytes * self.blocks_per_page / self.page_bytes


def paged_geometry(
    shape: KvShape, granularity_bytes: int = CUDA_PAGE_BYTES, block_tokens: int = DEFAULT_BLOCK_TOKENS
) -> PageGeometry:
    """Pages of cross-layer blocks, wasting at most 1/64.

    On a GPU a page has at least 4 MiB: small blocks share one. Host pages hold one block.
    Raises: SettingsError unless block_tokens is a multiple of 16 and at most 64, the largest prefix-hit step.
    """
    if not 0 < block_tokens <= DEFAULT_BLOCK_TOKENS or block_tokens % TOKEN_STEP:
        raise SettingsError(f"block_tokens = {block_tokens}; use 16, 32, 48 or 64")
    block_bytes = shape.token_bytes * block_tokens
    stride, per_page = slab_geometry(block_bytes, granularity_bytes)
    least = MIN_CUDA_PAGE_BYTES if granularity_bytes == CUDA_PAGE_BYTES else 0
    while stride * per_page < least:
        per_page *= 2
    return PageGeometry(block_tokens, block_bytes, stride, per_page, stride * per_page)


def token_major_geometry(shape: KvShape, granularity_bytes: int = CUDA_PAGE_BYTES) -> PageGeometry:
    """Pages of [.., L, N, 2, H, D]: whole tokens at one stride, so what does not fit is padding behind each token.

    The least waste with 64, 32 or 16 tokens a page, the most tokens of equals (fewer driver calls). When that wastes
    more than 1/8, more tokens a page, up to the page without padding: prefix hits are coarser then.
    """
    padded = [_token_major(shape, tokens, granularity_bytes) for tokens in (64, 32, 16)]
    found = min(padded, key=lambda one: one.waste_ratio)
    exact_tokens = exact_page_tokens(shape.token_bytes, granularity_bytes)
    tokens = 2 * DEFAULT_BLOCK_TOKENS
    while found.waste_ratio > MAX_PADDING_RATIO and tokens < exact_tokens:
        found = _token_major(shape, tokens, granularity_bytes)
        tokens *= 2
    if found.waste_ratio > MAX_PADDING_RATIO:
        found = _token_major(shape, exact_tokens, granularity_bytes)
    return found


def _token_major(shape: KvShape, tokens: int, granularity_bytes: int) -> PageGeometry:
    """`tokens` divides the page: both are powers of two times what the token itself brings."""
    size = shape.token_bytes * tokens
    step = lcm(granularity_bytes, tokens * STRIDE_BYTES) if size % granularity_bytes else granularity_bytes
    page_bytes = -(-size // step) * step
    return PageGeometry(tokens, size, page_bytes, 1, page_bytes)


def token_stride_bytes(geometry: PageGeometry) -> int:
    """From one token to the next in the token-major layout."""
    return geometry.page_bytes // geometry.block_tokens


def exact_page_tokens(token_bytes: int, granularity_bytes: int = CUDA_PAGE_BYTES) -> int:
    """Tokens of the smallest page that holds whole tokens without padding."""
    return lcm(token_bytes, granularity_bytes) // token_bytes


def layer_major_geometry(shape: KvShape, granularity_bytes: int = CUDA_PAGE_BYTES) -> PageGeometry:
    """Pages of one of the 2N tensors [B, L, H, D]: a block is a group of 2N such pages, one per tensor.

    Tokens have no padding; the smallest page with whole tokens. Its tokens are the step of growth and of prefix
    hits (vAttention Table 10, "without tensor slicing"): with 2 MiB pages far more than 64.
    """
    tokens = exact_page_tokens(shape.side_token_bytes, granularity_bytes)
    size = tokens * shape.side_token_bytes
    return PageGeometry(tokens, size, size, 1, size)


def slicing_tokens(shape: KvShape, granularity_bytes: int = CUDA_PAGE_BYTES) -> float:
    """Tokens of K alone in all layers that one page holds, tokens split at its ends (vAttention Table 10)."""
    return granularity_bytes / (shape.num_layers * shape.side_token_bytes)


def common_models() -> list[tuple[str, int, KvShape]]:
    """(model, TP degree, KV of one rank) of the documentation's table, 16-bit."""
    models = {  # layers, KV heads, head dim, TP degrees
        "Llama-3-8B": (32, 8, 128, (1, 2)),
        "Llama-3-70B": (80, 8, 128, (4, 8)),
        "Yi-34B": (60, 8, 128, (1, 2)),
        "Qwen2.5-0.5B": (24, 2, 64, (1, 2)),
        "Mixtral-8x7B": (32, 8, 128, (2,)),
    }
    return [
        (name, tp_size, KvShape.of_rank(layers, heads, dim, tp_size=tp_size))
        for name, (layers, heads, dim, degrees) in models.items()
        for tp_size in degrees
    ]


def host_geometry(shape: KvShape, block_tokens: int = DEFAULT_BLOCK_TOKENS) -> PageGeometry:
    """Pages in a memfd: one block each."""
    return paged_geometry(shape, HOST_PAGE_BYTES, block_tokens)
