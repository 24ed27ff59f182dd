"""A block may have pages in several spaces: each is found in the best one, and pinned there alone."""

from services.mempool.core.locations import Locations
from services.mempool.core.radix import Index
from shared.ids import BlockHash, PageId, SpaceId
from tests.unit.mempool_harness import SEED, chain

HBM, DRAM = SpaceId(0), SpaceId(1)
PROMPT = chain(*range(8))


def located(**where: list[int]) -> Locations:
    """Which blocks of PROMPT are in which space; a block's page has its own number."""
    indexes = {HBM: Index(), DRAM: Index()}
    for space, index in zip(("hbm", "dram"), indexes.values(), strict=True):
        for i in where.get(space, []):
            parent = PROMPT[i - 1] if i else SEED
            index.insert_path(parent, [PROMPT[i]], [PageId(i)], 4)
    return Locations(indexes)


def stretches(found) -> list[tuple[int, list[int]]]:
    return [(stretch.space, [entry.page for entry in stretch.entries]) for stretch in found]


def test_each_block_is_found_in_the_first_space_that_has_it():
    places = located(hbm=[0, 1, 5, 6], dram=[0, 1, 2, 3, 4, 5, 6, 7])
    assert stretches(places.prefix(PROMPT)) == [(HBM, [0, 1]), (DRAM, [2, 3, 4]), (HBM, [5, 6]), (DRAM, [7])]


def test_the_prefix_ends_where_no_space_goes_on():
    places = located(hbm=[0, 1], dram=[2, 4])
    assert stretches(places.prefix(PROMPT)) == [(HBM, [0, 1]), (DRAM, [2])]
    assert places.prefix(chain("other")) == []
    assert places.prefix([]) == []


def test_a_copy_that_is_not_used_ages():
    places = located(hbm=[0], dram=[0, 1])
    dram = places.indexes[DRAM]
    other = chain("x")
    dram.insert_path(SEED, other, [PageId(9)], 4)
    places.prefix(PROMPT[:1])
    assert [dram.evict().page for _ in range(3)] == [1, 0, 9]


def test_a_pin_protects_one_page_of_a_block():
    places = located(hbm=[0], dram=[0])
    hbm, dram = places.indexes.values()
    hbm.pin([hbm.get(PROMPT[0])])
    assert hbm.evict() is None
    assert places.is_elsewhere(PROMPT[0], HBM)
    assert dram.evict().block_hash == PROMPT[0]
    assert not places.is_elsewhere(PROMPT[0], HBM)
    assert [place.space for place in places.of(PROMPT[0])] == [HBM]


def test_delete_reaches_every_space_but_no_pinned_page():
    places = located(hbm=[0, 1], dram=[0, 1])
    hbm = places.indexes[HBM]
    hbm.pin([hbm.get(PROMPT[1])])
    removed = places.delete([*PROMPT[:2], BlockHash(b"?" * 32)])
    assert sorted((place.space, place.entry.page) for place in removed) == [(HBM, 0), (DRAM, 0), (DRAM, 1)]


def test_spaces_come_and_go():
    places = located(hbm=[0])
    remote = Index()
    remote.insert_path(PROMPT[0], [PROMPT[1]], [PageId(1)], 4)
    places.add(SpaceId(7), remote)
    assert stretches(places.prefix(PROMPT)) == [(HBM, [0]), (7, [1])]
    places.drop(HBM)
    places.drop(HBM)
    assert places.prefix(PROMPT) == []
