"""How a long transfer is cut into parts, and lists that know their columns."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.mempool.direct import part_ends
from shared.mempool.direct_ways import FIRST_BYTES, FIRST_PAGES, first_part
from shared.mempool.held_pages import AddressList, stretch_of
from shared.wire.mempool_api import Medium, PageAddress

MIB = 1 << 20


@given(count=st.integers(1, 5000), first=st.integers(0, 100))
def test_parts_are_all_pages_once_and_each_is_twice_the_one_before_or_more(count, first):
    ends = part_ends(count, first)
    sizes = [end - begin for begin, end in pairwise((0, *ends))]
    assert ends[-1] == count
    assert min(sizes) > 0
    assert all(later >= 2 * before for before, later in pairwise(sizes))
    assert len(sizes) == 1 or sizes[0] == first


@pytest.mark.parametrize(
    ("count", "first", "ends"), [(8, 8, [8]), (23, 8, [23]), (24, 8, [8, 24]), (64, 8, [8, 24, 64])]
)
def test_a_part_too_small_to_be_worth_it_goes_with_the_one_before(count, first, ends):
    assert part_ends(count, first) == ends


@pytest.mark.parametrize(
    ("page_bytes", "pages"),
    [(32 << 10, 0), (MIB - 1, 0), (MIB, 16), (2 * MIB, 8), (8 * MIB, 8), (64 * MIB, 8)],
)
def test_the_first_part_is_of_so_many_bytes_and_pages_and_small_pages_go_at_once(page_bytes, pages):
    assert first_part(page_bytes) == pages
    assert FIRST_PAGES * 2 * MIB == FIRST_BYTES


def addresses(*pages: int, space: int = 0) -> list[PageAddress]:
    return [PageAddress(7, Medium.HBM, space, page, page + 1) for page in pages]


CHANGES = {
    "append": lambda found: found.append(addresses(9)[0]),
    "pop": lambda found: found.pop(),
    "another": lambda found: found.__setitem__(1, addresses(8)[0]),
    "another epoch": lambda found: found.__setitem__(1, found[1]._replace(epoch=77)),
    "order": lambda found: found.reverse(),
    "slice": lambda found: found.__delitem__(slice(0, 2)),
    "clear": lambda found: found.clear(),
    "another space": lambda found: found.__setitem__(0, addresses(3, space=1)[0]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_list_knows_its_columns_until_it_is_changed_and_says_what_it_holds_then(change):
    found = AddressList(addresses(3, 4, 5))
    assert found.stretch is stretch_of(found)
    assert found.stretch.pages.tolist() == [3, 4, 5]
    CHANGES[change](found)
    assert found.stretch is None
    now, fresh = stretch_of(found), stretch_of(list(found))
    if fresh is None:
        assert now is None
    else:
        assert (now.pages.tolist(), now.epochs.tolist(), now.space) == (
            fresh.pages.tolist(), fresh.epochs.tolist(), fresh.space,
        )  # fmt: skip


def test_lists_of_two_spaces_or_of_nothing_have_no_columns():
    assert AddressList([]).stretch is None
    assert AddressList(addresses(1) + addresses(1, space=1)).stretch is None
