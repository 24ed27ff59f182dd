"""How a source says that its pages are cut, and which pieces a reader asks it for."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.mempool import mover_pieces
from services.mempool.mover_regions import HostRegion, region_name
from services.mempool.peer_cuts import MAX_AT_ONCE, MAX_CUTS, cut_anew, heard, mine_of, told, whole_pages
from shared.errors import PeerProtocolError
from shared.transfer.errors import TransferRefused
from shared.transfer.reslice import KvEnd, Order
from shared.wire import mempool_peer as wire

MODEL = {"num_layers": 4, "num_kv_heads": 4, "block_tokens": 2, "row_bytes": 8}
cuts = st.builds(
    lambda tp, pp: KvEnd(**MODEL, tp_size=tp, pp_size=pp, order=Order.HND),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4]),
)


def page_bytes(end: KvEnd, space: int, padding: int) -> dict[str, int]:
    return {region_name(space, rank): end.block_bytes(rank) + padding for rank in range(end.num_ranks)}


def block(end: KvEnd, rank: int, number: int) -> np.ndarray:
    """Rows of one rank's page: of block, layer, head, token and plane."""
    layers, heads = end.layers_of(rank), end.heads_of(rank)
    rows = [
        [number, layer, head, token, plane, 7, 7, 7]
        for layer in layers for head in heads for token in range(end.block_tokens) for plane in range(2)
    ]  # fmt: skip
    return np.asarray(rows, np.uint8).ravel()


@given(cuts, cuts, st.integers(0, 16), st.permutations(range(4)))
def test_every_byte_of_every_rank_comes_from_where_it_is(source, target, padding, order):
    pages, targets = order[:2], [3, 1]
    sizes = page_bytes(source, 0, padding), page_bytes(target, 0, 2 * padding)  # spaces of one number
    there = {name: np.zeros(4 * size, np.uint8) for name, size in sizes[0].items()}
    here = {name: np.full(4 * size, 255, np.uint8) for name, size in sizes[1].items()}
    for rank in range(source.num_ranks):
        name = region_name(0, rank)
        for number, page in enumerate(pages):
            raw = block(source, rank, number)
            there[name][page * sizes[0][name] :][: raw.size] = raw
    for pulls in cut_anew((0, source, pages), (0, target, targets), *sizes):
        assert len({pull.target for pull in pulls}) == len(pulls), "a page is in one transfer at a time"
        for pull in pulls:
            columns = pull.what.source_offsets, pull.what.target_offsets, pull.what.sizes
            for begin, into, size in zip(*(column.tolist() for column in columns), strict=True):
                here[pull.target][into : into + size] = there[pull.source][begin : begin + size]
    for rank in range(target.num_ranks):
        name = region_name(0, rank)
        for number, page in enumerate(targets):
            raw = block(target, rank, number)
            np.testing.assert_array_equal(here[name][page * sizes[1][name] :][: raw.size], raw)


def test_long_prompts_in_small_pieces_go_in_rounds_that_a_path_takes(monkeypatch):
    monkeypatch.setattr(mover_pieces, "MAX_PIECES", 64)
    source = KvEnd(**MODEL | {"block_tokens": 16}, tp_size=2, order=Order.NHD)  # a piece a layer and token
    target = KvEnd(**MODEL | {"block_tokens": 16}, order=Order.NHD)
    pages = list(range(100))
    rounds = cut_anew(
        (0, source, pages), (0, target, pages), page_bytes(source, 0, 0), page_bytes(target, 0, 0)
    )
    assert max(map(len, rounds)) <= MAX_AT_ONCE < len(pages)
    assert sum(pull.what.num_bytes for pulls in rounds for pull in pulls) == 100 * target.block_bytes(0)


@given(cuts)
def test_a_cut_is_heard_as_it_was_told(end):
    raw = msgspec.msgpack.encode(wire.PathOpened(path_id=1, description=b"", cuts=[told(3, end)]))
    assert heard(msgspec.msgpack.decode(raw, type=wire.PathOpened).cuts) == {3: end}


@pytest.mark.parametrize(
    "wrong",
    [
        {"tp_size": 0}, {"tp_size": -1, "pp_size": -1}, {"tp_size": 1 << 40}, {"tp_size": 3}, {"order": "XYZ"},
        {"num_layers": 0}, {"row_bytes": -8}, {"num_kv_heads": 0},
    ],
)  # fmt: skip
def test_what_is_no_cut_is_refused(wrong):
    good = told(0, KvEnd(**MODEL))
    with pytest.raises(PeerProtocolError):
        heard([msgspec.structs.replace(good, **wrong)])


def test_more_cuts_than_spaces_can_be_are_refused():
    with pytest.raises(PeerProtocolError):
        heard([told(0, KvEnd(**MODEL))] * (MAX_CUTS + 1))


@pytest.mark.parametrize(
    ("source", "lacking"),
    [
        (KvEnd(**MODEL | {"num_layers": 8}, tp_size=2), ()),  # another model
        (KvEnd(**MODEL, tp_size=2), ("0.1",)),  # a rank that the source has not opened
    ],
)
def test_ends_that_do_not_fit_are_refused(source, lacking):
    target = KvEnd(**MODEL)
    there = {name: size for name, size in page_bytes(source, 0, 0).items() if name not in lacking}
    with pytest.raises(TransferRefused):
        cut_anew((0, source, [0]), (0, target, [0]), there, page_bytes(target, 0, 0))


def test_a_source_whose_pages_hold_no_block_is_refused():
    source, target = KvEnd(**MODEL, tp_size=2), KvEnd(**MODEL)
    there = {name: size - 1 for name, size in page_bytes(source, 0, 0).items()}
    with pytest.raises(TransferRefused):
        cut_anew((0, source, [0]), (0, target, [0]), there, page_bytes(target, 0, 0))


def test_pages_cut_alike_go_rank_by_rank_at_once():
    ((first, second),) = whole_pages(5, 2, [1, 2], 0, [3, 4])
    assert (first.source, first.target, first.target_rank, first.what) == ("5.0", "0.0", 0, ([1, 2], [3, 4]))
    assert (second.source, second.target, second.target_rank) == ("5.1", "0.1", 1)
    assert mine_of([HostRegion(-1, 0, 64, 4), HostRegion(-1, 256, 64, 4)], 0) == {"0.0": 64, "0.1": 64}
