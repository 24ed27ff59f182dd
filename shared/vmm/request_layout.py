"""Where K and V of a layer lie in a mempool's page, and in a window of request slots over such pages. No I/O.

Token-major (vAttention 8.2): a page is [tokens, layers, 2, heads, dim], one stride from token to token. Layer-major
(vAttention 5.1.2): a page is 2 x layers pieces [tokens, heads, dim], one behind the other; each is mapped apart.

Both views have five dimensions, [blocks or slots, tokens, 2, heads, dim], and differ in their strides only: the first
is for writing through the identity window, the second for kernels that know of no block table.
"""

from dataclasses import dataclass

from shared.errors import SettingsError
from shared.kv.layout import CUDA_PAGE_BYTES, EngineDescription, page_bytes_for
from shared.vmm.geometry import (
    KvShape,
    PageGeometry,
    exact_page_tokens,
    layer_major_geometry,
    token_major_geometry,
)

CROSS_LAYER, TOKEN_MAJOR, LAYER_MAJOR = "cross-layer", "token-major", "layer-major"
CONTIGUOUS = (TOKEN_MAJOR, LAYER_MAJOR)
ALIGN_BYTES = 16  # of every stride: bulk tensor copies of Hopper GPUs need it
NULL_PLACES = 1  # the window's first place: never a hole


@dataclass(frozen=True, slots=True)
class TokenView:
    """[first, tokens, 2, heads, dim] elements, the first at `offset`; all in elements, as torch counts them."""

    offset: int
    shape: tuple[int, int, int, int, int]
    strides: tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class RequestLayout:
    """Slots of `slot_places` pages of `page_bytes`, in `num_pieces` stretches of the window.

    The window has `num_indices` places of piece_bytes: a null place, then of each piece all slots side by side.
    """

    kind: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    item_bytes: int
    block_tokens: int
    page_bytes: int
    num_slots: int
    slot_places: int

    @property
    def num_pieces(self) -> int:
        """Parts of a page that are mapped apart."""
        return 2 * self.num_layers if self.kind == LAYER_MAJOR else 1

    @property
    def piece_bytes(self) -> int:
        """Unit of mapping."""
        return self.page_bytes // self.num_pieces

    @property
    def num_places(self) -> int:
        """Of one stretch."""
        return self.num_slots * self.slot_places

    @property
    def num_indices(self) -> int:
        """Of the whole window."""
        return NULL_PLACES + self.num_pieces * self.num_places

    def index(self, piece: int, place: int) -> int:
        """Of a place (slot * slot_places + page's position) in the stretch of one piece."""
        return NULL_PLACES + piece * self.num_places + place

    def blocks(self, layer: int, num_blocks: int) -> TokenView:
        """One layer in the identity window: block b is page b - 1, block 0 the null page."""
        side = self.num_kv_heads * self.head_dim
        page = self.page_bytes // self.item_bytes
        shape = (num_blocks, self.block_tokens, 2, self.num_kv_heads, self.head_dim)
        if self.kind == TOKEN_MAJOR:
            token = page // self.block_tokens
            return TokenView(2 * layer * side, shape, (page, token, side, self.head_dim, 1))
        piece = page // self.num_pieces
        return TokenView(2 * layer * piece, shape, (page, side, piece, self.head_dim, 1))

    def slots(self, layer: int) -> TokenView:
        """One layer in the window of slots."""
        side = self.num_kv_heads * self.head_dim
        piece = self.piece_bytes // self.item_bytes
        tokens = self.slot_places * self.block_tokens
        shape = (self.num_slots, tokens, 2, self.num_kv_heads, self.head_dim)
        start = NULL_PLACES * piece
        if self.kind == TOKEN_MAJOR:
            token = piece // self.block_tokens
            return TokenView(start + 2 * layer * side, shape, (tokens * token, token, side, self.head_dim, 1))
        stretch = self.num_places * piece
        return TokenView(start + 2 * layer * stretch, shape, (tokens * side, side, stretch, self.head_dim, 1))


def slot_block(kind: str, shape: KvShape, block_tokens: int = 0) -> PageGeometry:
    """A block in a page of its own on a GPU, all layers together, as the mempool allocates it (slab_plan).

    Args: block_tokens: 0: as many as waste least of the page, by docs/page-geometry.md.
    """
    geometry = layer_major_geometry if kind == LAYER_MAJOR else token_major_geometry
    tokens = block_tokens or geometry(shape).block_tokens
    block_bytes = shape.token_bytes * tokens
    page_bytes = page_bytes_for(block_bytes, CUDA_PAGE_BYTES)
    return PageGeometry(tokens, block_bytes, page_bytes, 1, page_bytes)


def request_layout(
    description: EngineDescription,
    *,
    item_bytes: int,
    page_bytes: int,
    granularity_bytes: int,
    num_slots: int,
    guard_tokens: int = 0,
) -> RequestLayout:
    """The layout of an engine that describes itself, in pages of its pool.

    Args:
        granularity_bytes: what can be mapped apart.
        guard_tokens: tokens behind the longest request that a kernel may load (and mask) with its last tile.
    Raises: SettingsError naming a block_tokens that works.
    """
    tokens = description.block_tokens
    found = RequestLayout(
        description.layout, description.num_layers, description.num_kv_heads, description.head_dim,
        item_bytes, tokens, page_bytes, num_slots,
        -(-description.max_model_len // tokens) - (-guard_tokens // tokens),
    )  # fmt: skip
    side_bytes = found.num_kv_heads * found.head_dim * item_bytes
    if found.kind == LAYER_MAJOR:
        step = exact_page_tokens(side_bytes, granularity_bytes)
        if found.piece_bytes != tokens * side_bytes or found.piece_bytes % granularity_bytes:
            raise SettingsError(
                f"worker.block_tokens {tokens}: in the layout {LAYER_MAJOR} a page has {tokens * side_bytes} "
                f"bytes of one layer's K, which cannot be mapped apart here; use a multiple of {step}"
            )
        return found
    if page_bytes % (tokens * ALIGN_BYTES) or page_bytes % granularity_bytes:
        raise SettingsError(
            f"worker.block_tokens {tokens}: a page of {page_bytes} bytes is no whole number of equal tokens in "
            f"mappable units of {granularity_bytes} bytes; use a power of two, on a GPU "
            f"{exact_page_tokens(side_bytes * 2 * found.num_layers, CUDA_PAGE_BYTES)} or more"
        )
    return found
