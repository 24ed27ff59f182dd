"""A layer's bytes lie at the same place of a page whether they are addressed by block or by slot."""

import itertools

import pytest

from shared.errors import SettingsError
from shared.kv.layout import CUDA_PAGE_BYTES, EngineDescription, page_bytes_for
from shared.vmm.request_layout import request_layout


def layout_of(kind, *, block_tokens=32, max_model_len=100, granularity=4096, guard_tokens=0, heads=2):
    block_bytes = 2 * 3 * heads * 64 * 4 * block_tokens
    description = EngineDescription(
        model="m", fingerprint="f", dtype="float32", layout=kind, backend="b", num_layers=3, num_kv_heads=heads,
        head_dim=64, block_tokens=block_tokens, block_bytes=block_bytes, max_model_len=max_model_len,
    )  # fmt: skip
    return request_layout(
        description, item_bytes=4, page_bytes=page_bytes_for(block_bytes, granularity), num_slots=5,
        granularity_bytes=granularity, guard_tokens=guard_tokens,
    )  # fmt: skip


def offset_of(view, *at):
    assert all(i < n for i, n in zip(at, view.shape, strict=True))
    return 4 * (view.offset + sum(i * stride for i, stride in zip(at, view.strides, strict=True)))


@pytest.mark.parametrize("kind", ["token-major", "layer-major"])
def test_what_is_written_to_a_page_is_read_at_its_places_in_a_slot(kind):
    layout = layout_of(kind)
    page, slot, position = 6, 3, 2  # page 6 is the third page of the request in slot 3
    seen = set()
    for layer, token, side, head, dim in itertools.product(range(3), (0, 1, 31), (0, 1), (0, 1), (0, 63)):
        written = offset_of(layout.blocks(layer, 9), page + 1, token, side, head, dim)
        in_page = written - (page + 1) * layout.page_bytes
        assert 0 <= in_page < layout.page_bytes
        read = offset_of(layout.slots(layer), slot, position * 32 + token, side, head, dim)
        index, in_piece = divmod(read, layout.piece_bytes)
        piece = in_page // layout.piece_bytes
        assert index == layout.index(piece, slot * layout.slot_places + position)
        assert in_piece == in_page - piece * layout.piece_bytes
        seen.add(in_page)
    assert len(seen) == 3 * 3 * 2 * 2 * 2  # no two elements share a byte


@pytest.mark.parametrize("kind", ["token-major", "layer-major"])
def test_a_request_has_one_stride_from_token_to_token_across_its_pages(kind):
    layout = layout_of(kind)
    view = layout.slots(1)
    steps = {
        offset_of(view, 2, token + 1, 1, 1, 5) - offset_of(view, 2, token, 1, 1, 5) for token in range(127)
    }
    assert len(steps) == 1


@pytest.mark.parametrize("kind", ["token-major", "layer-major"])
def test_slots_end_with_places_for_the_guard_and_the_window_holds_them_all(kind):
    layout = layout_of(kind, guard_tokens=40)
    assert layout.slot_places == 4 + 2
    last = offset_of(layout.slots(2), 4, layout.slot_places * 32 - 1, 1, 1, 63)
    assert last + 4 <= layout.num_indices * layout.piece_bytes
    assert layout.slots(0).shape[1] == layout.slot_places * 32
    # slots lie side by side: all of them are one tensor of tokens, too
    assert layout.slots(0).strides[0] == layout.slot_places * 32 * layout.slots(0).strides[1]


def test_layer_major_pieces_that_cannot_be_mapped_apart_are_refused_with_a_number_that_works():
    with pytest.raises(SettingsError, match="use a multiple of 4096"):
        layout_of("layer-major", granularity=CUDA_PAGE_BYTES)
    assert layout_of("layer-major", granularity=CUDA_PAGE_BYTES, block_tokens=4096).piece_bytes == 2 << 20


def test_token_major_pages_without_equal_tokens_are_refused():
    with pytest.raises(SettingsError, match=r"worker\.block_tokens 20"):
        layout_of("token-major", block_tokens=20, heads=1)
