"""Pages that ranges touch: the same as one by one, at a cost that overlaps do not multiply."""

import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shared.transfer.interface import MAX_PIECES
from shared.transfer.pieces import Pieces, pages_of
from tests.support.quickest import quickest_s


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 60)), max_size=20), st.integers(1, 20))
def test_ranges_touch_the_pages_of_each_of_their_bytes(ranges, page_bytes):
    offsets = np.array([offset for offset, _ in ranges], np.uint64)
    sizes = np.array([size for _, size in ranges], np.uint64)
    touched = {byte // page_bytes for offset, size in ranges for byte in range(offset, offset + size)}
    assert pages_of(offsets, sizes, page_bytes) == touched


async def test_a_question_that_names_every_page_in_every_piece_costs_as_much_as_one_that_names_it_once():
    page_bytes, num_pages = 2 << 20, 2_000
    region = np.uint64(page_bytes * num_pages)
    many = np.arange(MAX_PIECES, dtype=np.uint64)
    pieces = Pieces(many * 0, many * region, np.full(MAX_PIECES, region))
    pieces.check(int(region), 1 << 62)  # sources may overlap: two blocks may hold the same bytes

    def look():
        begun_s = time.thread_time()
        assert pieces.source_pages(page_bytes) == frozenset(range(num_pages))
        return time.thread_time() - begun_s

    assert await quickest_s(look, 1) < 1, "it was 6 s, on the thread that serves all peers"
