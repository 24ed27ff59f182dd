"""Page sizes: what they hold, what they waste, and that they agree with vAttention's Table 10."""

from math import ceil

import pytest

from shared.errors import SettingsError
from shared.kv.layout import CUDA_PAGE_BYTES, HOST_PAGE_BYTES
from shared.vmm.geometry import (
    KvShape,
    common_models,
    exact_page_tokens,
    host_geometry,
    layer_major_geometry,
    paged_geometry,
    slicing_tokens,
    token_major_geometry,
    token_stride_bytes,
)

MODELS = pytest.mark.parametrize(("name", "tp_size", "shape"), common_models())


@MODELS
def test_pages_waste_at_most_a_64th_and_hits_come_in_64_tokens(name, tp_size, shape):
    for geometry, granularity in (
        (paged_geometry(shape), CUDA_PAGE_BYTES),
        (host_geometry(shape), HOST_PAGE_BYTES),
    ):
        assert geometry.waste_ratio <= 1 / 64
        assert geometry.block_tokens == 64
        assert geometry.page_bytes % granularity == 0
        assert geometry.block_stride_bytes * geometry.blocks_per_page == geometry.page_bytes
        assert geometry.block_stride_bytes >= geometry.block_bytes == 64 * shape.token_bytes


@MODELS
def test_a_gpu_page_is_worth_its_driver_calls(name, tp_size, shape):
    assert 4 << 20 <= paged_geometry(shape).page_bytes <= 32 << 20


@pytest.mark.parametrize("tokens", [16, 32, 48, 64])
@MODELS
def test_smaller_blocks_share_pages_too(name, tp_size, shape, tokens):
    geometry = paged_geometry(shape, block_tokens=tokens)
    assert geometry.waste_ratio <= 1 / 64
    assert geometry.page_bytes % CUDA_PAGE_BYTES == 0


def test_an_8b_block_of_64_tokens_is_a_page_of_8_mib():
    geometry = paged_geometry(KvShape(32, 8, 128))
    assert (geometry.page_bytes, geometry.blocks_per_page, geometry.page_tokens) == (8 << 20, 1, 64)


@MODELS
def test_token_major_pages_hold_whole_tokens_at_one_stride(name, tp_size, shape):
    geometry = token_major_geometry(shape)
    stride = token_stride_bytes(geometry)
    assert stride * geometry.block_tokens == geometry.page_bytes
    assert stride % 256 == 0
    assert stride >= shape.token_bytes
    assert geometry.waste_ratio <= 1 / 8


@pytest.mark.parametrize(
    ("layers", "heads", "tp_size", "whole", "sliced"),
    [
        (32, 4, 1, 2048, 64),
        (32, 4, 2, 4096, 128),
        (32, 8, 1, 1024, 32),
        (32, 8, 2, 2048, 64),
        (60, 8, 1, 1024, 18),
    ],
)
def test_block_sizes_are_those_of_vattention_table_10(layers, heads, tp_size, whole, sliced):
    shape = KvShape.of_rank(layers, heads, 128, tp_size=tp_size)
    assert layer_major_geometry(shape).block_tokens == whole
    assert ceil(slicing_tokens(shape)) == sliced


def test_without_padding_a_34b_page_needs_128_tokens():
    assert exact_page_tokens(KvShape(60, 8, 128).token_bytes) == 128


def test_more_ranks_than_heads_replicate_and_odd_splits_are_refused():
    assert KvShape.of_rank(24, 2, 64, tp_size=4).num_kv_heads == 1
    with pytest.raises(SettingsError):
        KvShape.of_rank(24, 6, 64, tp_size=4)
    for tokens in (0, 8, 24, 128):
        with pytest.raises(SettingsError):
            paged_geometry(KvShape(24, 2, 64), block_tokens=tokens)
