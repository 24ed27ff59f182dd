"""Where K and V of a layer lie in a window of request slots, in the two layouts without a block table. No I/O.

Token-major (vAttention 8.2): one tensor [B, L, N, 2, H, D]; a layer's K is a slice with one stride from token to token.
Layer-major (vAttention 5.1.2): 2N tensors [B, L, H, D], one behind the other in the window; a block is a group of 2N
pages, one in each. B slots, L tokens of the longest request (whole pages), N layers, H KV heads, D dimensions.
"""

from dataclasses import dataclass
from typing import NamedTuple

from shared.kv.layout import CUDA_PAGE_BYTES
from shared.vmm.errors import BadMapping
from shared.vmm.geometry import (
    KvShape,
    PageGeometry,
    layer_major_geometry,
    token_major_geometry,
    token_stride_bytes,
)


class StridedView(NamedTuple):
    """[B, L, H, D] elements, the first at `offset_bytes` in the window; strides in elements, as torch counts them."""

    offset_bytes: int
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]


class LayerViews(NamedTuple):
    """One layer's cache."""

    k: StridedView
    v: StridedView


@dataclass(frozen=True, slots=True)
class KvLayout:
    """`num_tensors` stretches of num_slots * slot_pages places each; a block takes one page in every one of them."""

    kind: str
    shape: KvShape
    geometry: PageGeometry
    num_slots: int
    slot_pages: int
    num_tensors: int
    views: tuple[LayerViews, ...]

    @property
    def num_places(self) -> int:
        """Of one tensor."""
        return self.num_slots * self.slot_pages

    @property
    def num_indices(self) -> int:
        """Of the whole window."""
        return self.num_places * self.num_tensors

    def sub_page(self, page: int, tensor: int, num_pages: int) -> int:
        """The source's page behind block page `page` in one tensor: consecutive block pages stay consecutive."""
        return tensor * num_pages + page


def token_major(
    shape: KvShape, num_slots: int, max_tokens: int, granularity_bytes: int = CUDA_PAGE_BYTES
) -> KvLayout:
    """Raises: BadMapping when a size is not positive."""
    geometry = token_major_geometry(shape, granularity_bytes)
    slot_pages = _slot_pages(geometry, num_slots, max_tokens)
    size, side = shape.dtype_bytes, shape.side_token_bytes
    dims = (num_slots, slot_pages * geometry.block_tokens, shape.num_kv_heads, shape.head_dim)
    token = token_stride_bytes(geometry) // size
    strides = (slot_pages * geometry.page_bytes // size, token, shape.head_dim, 1)
    views = tuple(
        LayerViews(StridedView(2 * n * side, dims, strides), StridedView((2 * n + 1) * side, dims, strides))
        for n in range(shape.num_layers)
    )
    return KvLayout("token-major", shape, geometry, num_slots, slot_pages, 1, views)


def layer_major(
    shape: KvShape, num_slots: int, max_tokens: int, granularity_bytes: int = CUDA_PAGE_BYTES
) -> KvLayout:
    """Raises: BadMapping when a size is not positive."""
    geometry = layer_major_geometry(shape, granularity_bytes)
    slot_pages = _slot_pages(geometry, num_slots, max_tokens)
    heads, dim = shape.num_kv_heads, shape.head_dim
    tokens = slot_pages * geometry.block_tokens
    dims, strides = (num_slots, tokens, heads, dim), (tokens * heads * dim, heads * dim, dim, 1)
    tensor_bytes = num_slots * slot_pages * geometry.page_bytes
    views = tuple(
        LayerViews(
            StridedView(2 * n * tensor_bytes, dims, strides),
            StridedView((2 * n + 1) * tensor_bytes, dims, strides),
        )
        for n in range(shape.num_layers)
    )
    return KvLayout("layer-major", shape, geometry, num_slots, slot_pages, 2 * shape.num_layers, views)


def _slot_pages(geometry: PageGeometry, num_slots: int, max_tokens: int) -> int:
    if num_slots <= 0 or max_tokens <= 0:
        raise BadMapping(f"{num_slots} slots of {max_tokens} tokens")
    return -(-max_tokens // geometry.block_tokens)
