"""Which allocations of GPU memory an engine's pages become, by layout."""

import msgspec
import pytest

from shared.kv.layout import CUDA_PAGE_BYTES, EngineDescription, num_slabs, slab_plan, slabs_per_page
from shared.vmm.geometry import common_models
from shared.vmm.geometry_table import PATH
from shared.vmm.request_layout import request_layout, slot_block

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


def contiguous_rows():
    """Of the document: model and TP degree -> tokens, page in MiB, waste in %, then layer-major's tokens and page."""
    _, _, text = PATH.read_text().partition("## Contiguous layouts")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line
    ]
    return {
        (name, int(tp_size)): [float(cell.replace(",", "")) for cell in cells]
        for name, tp_size, *cells in rows[2:]
    }


@pytest.mark.parametrize(("name", "tp_size", "shape"), common_models())
def test_by_default_pages_without_block_table_are_those_of_the_document(name, tp_size, shape):
    tokens, page_mib, waste_percent, layer_tokens, layer_page_mib, num_pieces = contiguous_rows()[
        name, tp_size
    ]
    for layout, wanted_tokens, wanted_page, wanted_waste in (
        ("token-major", tokens, page_mib, waste_percent),
        ("layer-major", layer_tokens, layer_page_mib * num_pieces, 0.0),
    ):
        block = slot_block(layout, shape)
        one = msgspec.structs.replace(
            LLAMA, layout=layout, num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim, block_tokens=block.block_tokens, max_model_len=32_768,
            block_bytes=block.block_tokens * shape.token_bytes,
        )  # fmt: skip
        page_bytes, _ = slab_plan(one)
        assert (block.block_tokens, page_bytes / (1 << 20)) == (wanted_tokens, wanted_page), layout
        assert block.page_bytes == page_bytes
        assert round(100 * block.waste_ratio, 1) == pytest.approx(wanted_waste, abs=0.06)
        request_layout(  # and an engine can map them
            one, item_bytes=2, page_bytes=page_bytes, granularity_bytes=CUDA_PAGE_BYTES, num_slots=2
        )


def test_what_a_named_number_of_tokens_wastes_is_what_the_mempool_allocates():
    (shape,) = (shape for name, tp_size, shape in common_models() if (name, tp_size) == ("Qwen2.5-0.5B", 2))
    assert slot_block("token-major", shape, 64).waste_ratio == pytest.approx(0.8125)
