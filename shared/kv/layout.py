"""Geometry of a block: what both ends of a transfer must agree on before a byte moves."""

import hashlib

import msgspec

HOST_PAGE_BYTES = 4096  # memfd granularity
CUDA_PAGE_BYTES = 2 << 20  # cuMemGetAllocationGranularity on H100 and H200 (facts.md)
LENDER = "aqua-lender"  # backend of who has pages only to lend them
TENSORS = "aqua"  # and of who has tensors there (shared/aqua)


class EngineDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine's KV bytes mean. Two engines exchange raw pages only if `content_key` agrees; pages are cut
    anew between engines that differ in their ranks only (`family_key` agrees)."""

    model: str  # the name that clients use
    fingerprint: str  # hex digest over the model's config and weights: same bytes in, same KV out
    dtype: str  # of the KV cache: "float32", "bfloat16", ...
    layout: str  # "layers-blocks" (one tensor per layer), later "cross-layer", "token-major"
    backend: str  # attention backend, e.g. "CPU_ATTN", "FLASH_ATTN"
    isa: str = ""  # CPU caches are packed per instruction set; "" on CUDA
    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    num_layers: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    block_tokens: int = 0
    block_bytes: int = 0  # one block: all layers, K and V, of one rank
    max_model_len: int = 0
    # of the whole model, and how a layer's block lies in memory: heads before tokens ("HND") or after ("NHD");
    # 0 and "": unknown, so that blocks are never cut anew
    total_kv_heads: int = 0
    order: str = ""
    total_layers: int = 0  # of the whole model, of which each pipeline rank has num_layers; 0: unknown
    by_length: str = ""  # what of the bytes follows from max_model_len; "": nothing, nor do the keys

    @property
    def num_ranks(self) -> int:
        """Of the engine: pp_rank * tp_size + tp_rank counts them. Each has a page of every block."""
        return max(1, self.tp_size) * max(1, self.pp_size)

    @property
    def only_lends(self) -> bool:
        """Whether no block of its own ever lies in its pages: they are there to be lent (shared/aqua/lender.py)."""
        return self.backend == LENDER

    @property
    def has_engine(self) -> bool:
        """Whether an engine works in the pages, which says what it holds to each successor of its mempool."""
        return self.backend not in (LENDER, TENSORS)

    @property
    def content_key(self) -> str:
        """Digest of everything that decides whether raw block bytes can be shared between engines."""
        parts = (
            self.fingerprint, self.dtype, self.layout, self.backend, self.isa, self.tp_size, self.tp_rank,
            self.pp_size, self.pp_rank, self.num_layers, self.num_kv_heads, self.head_dim,
            self.block_tokens, self.block_bytes, self.order, *filter(None, [self.by_length]),
        )  # fmt: skip
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]

    @property
    def family_key(self) -> str:
        """As content_key, but equal for engines of one model that differ only in how many ranks have it. Pipeline
        ranks must have as many layers each."""
        uneven = self.pp_size > 1 and self.total_layers != self.num_layers * self.pp_size
        if not self.total_kv_heads or not self.order or uneven or self.layout != "layers-blocks":
            return self.content_key
        num_layers = self.total_layers if self.pp_size > 1 else self.num_layers
        parts = (
            "family", self.fingerprint, self.dtype, self.layout, self.backend, self.isa, num_layers,
            self.total_kv_heads, self.head_dim, self.block_tokens, self.order, *filter(None, [self.by_length]),
        )  # fmt: skip
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]


def num_blocks(num_tokens: int, block_tokens: int) -> int:
    """Blocks that hold num_tokens, the last one perhaps partial."""
    return -(-num_tokens // block_tokens)


def page_bytes_for(block_bytes: int, granularity_bytes: int = HOST_PAGE_BYTES) -> int:
    """Smallest multiple of the medium's granularity that holds one block."""
    return -(-block_bytes // granularity_bytes) * granularity_bytes


def slab_plan(description: EngineDescription) -> tuple[int, int]:
    """(page_bytes, pages_per_slab) of an engine's pages on a GPU.

    Without a block table ("token-major", "layer-major") a page is mapped by itself, at many addresses: it shares no
    slab, because an allocation can only be mapped as a whole. Raises: ValueError when a layer-major page's pieces
    are no whole allocations.
    """
    if may_share_slabs(description):
        return slab_geometry(description.block_bytes)
    page_bytes = page_bytes_for(description.block_bytes, CUDA_PAGE_BYTES)
    pieces = slabs_per_page(description)
    if pieces > 1 and description.block_bytes % (pieces * CUDA_PAGE_BYTES):
        tokens = -(-pieces * CUDA_PAGE_BYTES * description.block_tokens // description.block_bytes)
        raise ValueError(
            f"a layer's K of a block is no multiple of {CUDA_PAGE_BYTES} bytes; use block_tokens {tokens}"
        )
    return page_bytes, 1


def may_share_slabs(description: EngineDescription) -> bool:
    """Whether several pages may lie in one allocation."""
    return description.layout not in ("token-major", "layer-major")


def slabs_per_page(description: EngineDescription) -> int:
    """On a GPU: in the layer-major layout each layer's K and V of a page are mapped apart, so they are allocations
    of their own, in this order behind each other."""
    return 2 * description.num_layers if description.layout == "layer-major" else 1


def num_slabs(description: EngineDescription, num_pages: int, pages_per_slab: int) -> int:
    """Allocations of one rank on its GPU."""
    return num_pages * slabs_per_page(description) // max(1, pages_per_slab)


def slab_geometry(block_bytes: int, granularity_bytes: int = CUDA_PAGE_BYTES) -> tuple[int, int]:
    """(page_bytes, pages_per_slab) for a medium that allocates in multiples of `granularity_bytes`, a power of two.

    A slab is one allocation and the unit that can be given back or lent. Where a page of its own would waste
    more than 1/64 of it, several pages share a slab: as few as that waste allows.
    """
    for pages_per_slab in (1, 2, 4, 8, 16, 32, 64, 128):
        align = granularity_bytes // pages_per_slab
        page_bytes = -(-block_bytes // align) * align
        if (page_bytes - block_bytes) * 64 <= page_bytes:
            break
    return page_bytes, pages_per_slab
