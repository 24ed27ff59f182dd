"""Which allocations of GPU memory an engine's pages become, by layout."""

import msgspec
import pytest

from shared.kv.layout import CUDA_PAGE_BYTES, EngineDescription, num_slabs, slab_plan, slabs_per_page

LLAMA = EngineDescription(
    model="m", fingerprint="f", dtype="bfloat16", layout="layers-blocks", backend="b", num_layers=32, num_kv_heads=8,
    head_dim=128, block_tokens=64, block_bytes=64 * 131_072,
)  # fmt: skip


def described(layout, block_tokens):
    return msgspec.structs.replace(
        LLAMA, layout=layout, block_tokens=block_tokens, block_bytes=block_tokens * 131_072
    )


def test_small_cross_layer_pages_share_an_allocation_contiguous_ones_never_do():
    assert slab_plan(described("layers-blocks", 4)) == (512 << 10, 4)
    assert slab_plan(described("token-major", 4)) == (CUDA_PAGE_BYTES, 1)
    assert slab_plan(described("token-major", 64)) == (8 << 20, 1)


def test_a_layer_major_page_is_an_allocation_for_each_layers_k_and_v():
    whole = described("layer-major", 1024)
    assert slab_plan(whole) == (128 << 20, 1)
    assert slabs_per_page(whole) == 64
    assert num_slabs(whole, 10, 1) == 640
    assert num_slabs(LLAMA, 12, 4) == 3


def test_a_layer_major_page_of_too_few_tokens_is_refused_with_a_number_that_works():
    with pytest.raises(ValueError, match="use block_tokens 1024"):
        slab_plan(described("layer-major", 64))
