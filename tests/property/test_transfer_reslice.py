"""reslice.py against plain slicing of the whole block, and there and back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.transfer.errors import TransferRefused
from shared.transfer.reslice import KvEnd, Order, reslice

SLACK = 24  # bytes of a page behind its block


@st.composite
def ends(draw):
    heads = draw(st.sampled_from([1, 2, 4, 8]))
    model = {
        "num_layers": draw(st.integers(4, 6)),
        "num_kv_heads": heads,
        "block_tokens": draw(st.integers(1, 3)),
        "row_bytes": draw(st.sampled_from([2, 6, 8])),
    }
    return [
        KvEnd(
            **model,
            tp_size=draw(st.sampled_from([1, 2, 4])),
            pp_size=draw(st.sampled_from([1, 2, 3])),
            order=draw(st.sampled_from(list(Order))),
        )
        for _ in range(2)
    ]


def block(end: KvEnd, seed: int) -> np.ndarray:
    shape = (end.num_layers, end.num_kv_heads, end.block_tokens, 2, end.row_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def rank_bytes(end: KvEnd, rank: int, whole: np.ndarray) -> np.ndarray:
    """The reference: slice, bring the axes into order, flatten."""
    layers, heads = end.layers_of(rank), end.heads_of(rank)
    part = whole[layers.start : layers.stop, heads.start : heads.stop]
    axes = {Order.HND: (0, 1, 2, 3, 4), Order.NHD: (0, 2, 1, 3, 4), Order.PLANES: (0, 3, 1, 2, 4)}[end.order]
    return np.ascontiguousarray(part.transpose(axes)).reshape(-1)


def memory(end: KvEnd, blocks: list[np.ndarray | None], pages: list[int]) -> list[np.ndarray]:
    """One region for each rank, blocks at these pages, zeros elsewhere."""
    found = []
    for rank in range(end.num_ranks):
        region = np.zeros((max(pages) + 1, end.block_bytes(rank) + SLACK), np.uint8)
        for page, whole in zip(pages, blocks, strict=True):
            if whole is not None:
                region[page, : end.block_bytes(rank)] = rank_bytes(end, rank, whole)
        found.append(region)
    return found


def move(source: KvEnd, theirs: list[np.ndarray], target: KvEnd, mine: list[np.ndarray], there, here) -> None:
    for each in reslice(source, target):
        read, write = theirs[each.source_rank], mine[each.target_rank]
        pieces = each.over(there, here, read.shape[1], write.shape[1])
        pieces.check(read.size, write.size)
        for begin, end, size in zip(
            pieces.source_offsets.tolist(), pieces.target_offsets.tolist(), pieces.sizes.tolist(), strict=True
        ):
            written = write.reshape(-1)[end : end + size]
            written[:] = read.reshape(-1)[begin : begin + size]


@given(ends(), st.integers(0, 1000))
def test_resliced_pages_are_those_of_plain_slicing(pair, seed):
    source, target = pair
    there, here = [3, 1], [0, 2]
    blocks = [block(source, seed), block(source, seed + 1)]
    mine = memory(target, [None, None], here)
    move(source, memory(source, blocks, there), target, mine, there, here)
    for got, want in zip(mine, memory(target, blocks, here), strict=True):
        assert np.array_equal(got, want)


@given(ends(), st.integers(0, 1000))
def test_there_and_back_is_the_identity(pair, seed):
    source, target = pair
    blocks = [block(source, seed)]
    first = memory(source, blocks, [0])
    between = memory(target, [None], [1])
    back = memory(source, [None], [0])
    move(source, first, target, between, [0], [1])
    move(target, between, source, back, [1], [0])
    for rank in range(source.num_ranks):
        assert np.array_equal(back[rank], first[rank])


@given(ends())
def test_every_target_byte_is_written_once(pair):
    source, target = pair
    for rank in range(target.num_ranks):
        written = np.zeros(target.block_bytes(rank), np.uint8)
        for each in reslice(source, target):
            if each.target_rank == rank:
                offsets, sizes = each.pieces.target_offsets.tolist(), each.pieces.sizes.tolist()
                for begin, size in zip(offsets, sizes, strict=True):
                    written[begin : begin + size] += 1
        assert (written == 1).all()


@pytest.mark.parametrize(
    ("source_tp", "target_tp", "order", "pieces"),
    [
        (1, 1, Order.HND, 1),
        (2, 2, Order.NHD, 1),
        (1, 2, Order.HND, 32),
        (2, 1, Order.HND, 32),
        (4, 2, Order.HND, 32),
    ],
)
def test_equal_ends_move_whole_blocks_and_halved_heads_one_piece_a_layer(source_tp, target_tp, order, pieces):
    model = {"num_layers": 32, "num_kv_heads": 8, "block_tokens": 16, "row_bytes": 256, "order": order}
    found = reslice(KvEnd(**model, tp_size=source_tp), KvEnd(**model, tp_size=target_tp))
    assert all(len(each.pieces) == pieces for each in found)
    assert len(found) == max(source_tp, target_tp)


def test_pipeline_halves_are_one_piece_each():
    model = {"num_layers": 32, "num_kv_heads": 8, "block_tokens": 16, "row_bytes": 256}
    found = reslice(KvEnd(**model), KvEnd(**model, pp_size=2))
    assert [len(each.pieces) for each in found] == [1, 1]


def test_ends_of_different_models_are_refused():
    end = KvEnd(num_layers=4, num_kv_heads=2, block_tokens=16, row_bytes=256)
    for change in ({"num_layers": 5}, {"num_kv_heads": 4}, {"block_tokens": 32}, {"row_bytes": 128}):
        other = KvEnd(**{"num_layers": 4, "num_kv_heads": 2, "block_tokens": 16, "row_bytes": 256} | change)
        with pytest.raises(TransferRefused, match=next(iter(change))):
            reslice(end, other)
    with pytest.raises(TransferRefused, match="divide"):
        KvEnd(num_layers=4, num_kv_heads=3, block_tokens=16, row_bytes=256, tp_size=2)
