"""Copies of a running request's blocks at far places: mapped before they are read, unmapped before they are free."""

from types import SimpleNamespace
from typing import Any

import pytest

from services.mempool.core import far
from services.mempool.core.actions import Action, KillProcess, MapFarPages
from services.mempool.core.far_state import can_map
from services.mempool.far_messages import far_in_slabs
from services.mempool.takeover import SpaceMeta
from shared.errors import PeerProtocolError
from shared.ids import Epoch, InstanceId, PageId
from shared.kv.words import u32_bytes, u32_list, u64_list
from shared.wire import mempool as wire
from shared.wire.mempool_far import NO_PLACE, FarDrop, FarMapped, FarMoved, FarOut, FarPlaced, UnmapFar
from tests.unit.mempool_harness import DESCRIPTION, page_lists
from tests.unit.test_mempool_lending import ABCD, WXYZ, Market
from tests.unit.test_mempool_spaces import FRONT, PREFILL

RANK = 100 + PREFILL


class FarMarket(Market):
    """The consumer's rank can map `places` pages; `maps` is what it maps, (space, page) by place."""

    def __init__(self, *, places: int = 6, **options: Any) -> None:
        self.maps: dict[int, tuple[int, int]] = {}
        self.asked: list[tuple[int, Any]] = []  # (number, what the rank shall do)
        self.killed: set[int] = set()
        self.obeys = True
        self.places = places
        super().__init__(**options)

    def worker(self, connection: int, device: str, *, quota: int = 4, **more: Any) -> None:
        if connection != PREFILL:
            super().worker(connection, device, quota=quota, **more)
            return
        name = InstanceId(f"i{PREFILL}")
        rank = wire.Attach(
            kind="rank", instance=name, description=DESCRIPTION, device=device, far_places=self.places
        )
        self.run(self.core.on_attach(RANK, PREFILL, rank, self.now_ms))
        self.engine(connection, quota=quota, instance=name, works_in_pages=True)

    def run(self, actions: list[Action]) -> None:
        super().run(actions)
        for action in actions:
            if isinstance(action, KillProcess):
                self.killed.add(action.process)
            elif isinstance(action, MapFarPages):
                assert action.connection == RANK
                where = [(action.space, page) for page in action.pages]
                self.asked.append((action.number, dict(zip(action.places, where, strict=True))))
        unmaps = [m for m in self.sent[RANK] if isinstance(m, UnmapFar)]
        self.sent[RANK] = [m for m in self.sent[RANK] if not isinstance(m, UnmapFar)]
        self.asked += [(m.number, u32_list(m.places)) for m in unmaps]
        if self.obeys:
            self.obey()

    def obey(self, *, is_ok: bool = True) -> None:
        """The rank does what it was asked, in order."""
        while self.asked:
            number, what = self.asked.pop(0)
            if is_ok and isinstance(what, dict):
                assert not set(what) & set(self.maps), "a place is mapped twice"
                self.maps |= what
            elif is_ok:
                for place in what:
                    self.maps.pop(place, None)  # what could not be mapped is told to be unmapped, too
            self.say(RANK, FarMapped(number=number, is_ok=is_ok))

    def out(self, number: int, hashes: list, names: str) -> list[int]:
        """Compute, send far, and unpin what is there. Places."""
        pages = self.fill(PREFILL, 0, hashes, names)
        self.say(PREFILL, FarOut(number=number, hashes=b"".join(hashes)))
        self.copied()
        places = self.placed(number)
        self.say(PREFILL, wire.Unpin(**self.lists(pages, places)))
        return places

    @staticmethod
    def lists(pages: list, places: list[int]) -> dict[str, bytes]:
        return page_lists([page for page, place in zip(pages, places, strict=True) if place != NO_PLACE])

    def placed(self, number: int) -> list[int]:
        found = [m for m in self.sent[PREFILL] if isinstance(m, FarPlaced) and m.number == number]
        assert len(found) == 1
        return u32_list(found[0].places)

    def moved(self) -> list[tuple[int, int]]:
        found = [m for m in self.sent[PREFILL] if isinstance(m, FarMoved)]
        return [pair for m in found for pair in zip(u32_list(m.places), u32_list(m.to), strict=True)]

    def drop(self, *places: int) -> None:
        self.say(PREFILL, FarDrop(places=u32_bytes(places)))

    def seen(self, places: list[int]) -> str:
        """What attention would read there."""
        return "".join(self.bytes[self.maps[place]] for place in places)

    @property
    def num_placed(self) -> int:
        return self.core.swaps.far.num_placed


def test_an_engine_that_sends_blocks_far_before_its_rank_is_back_has_places_when_that_is():
    rig = FarMarket()
    ranks = rig.core.pools[0].memory.engines.ranks
    late = ranks.pop(RANK)
    assert rig.out(1, ABCD, "abcd") == [NO_PLACE] * 4
    ranks[RANK] = late
    rig.say(PREFILL, FarOut(number=2, hashes=b"".join(ABCD)))
    rig.copied()
    assert rig.seen(rig.placed(2)) == "abcd"


def test_blocks_are_read_where_their_copies_are_mapped_and_nothing_evicts_those():
    rig = FarMarket(dram_pages=4)
    places = rig.out(1, ABCD, "abcd")
    assert rig.seen(places) == "abcd"
    rig.leave(WXYZ, "wxyz")  # host memory is full of the others
    rig.copied()
    assert rig.seen(places) == "abcd"
    assert rig.counters()["far_blocks_out_dram"] == 4


def test_lent_pages_take_them_first_and_host_memory_the_rest():
    rig = FarMarket()
    rig.lend(3)
    places = rig.out(1, ABCD, "abcd")
    assert [rig.maps[place][0] == rig.producer for place in places].count(True) == 3
    assert rig.seen(places) == "abcd"


def test_places_are_unmapped_in_parts_and_those_of_the_first_are_free_while_the_last_are_mapped(monkeypatch):
    monkeypatch.setattr(far, "UNMAPPED_AT_ONCE", 3)
    rig = FarMarket()
    places = rig.out(1, ABCD, "abcd")
    rig.obeys = False
    rig.drop(*places)
    (first, _), (last, others) = rig.asked
    assert others == places[3:]
    rig.say(RANK, FarMapped(number=first, is_ok=True))
    assert rig.num_placed == 1
    rig.say(RANK, FarMapped(number=last, is_ok=True))
    assert rig.num_placed == 0


def test_what_is_kept_outside_already_is_mapped_without_a_copy():
    rig = FarMarket()
    first = rig.out(1, ABCD, "abcd")
    rig.drop(*first)
    rig.say(PREFILL, FarOut(number=2, hashes=b"".join(ABCD)))
    assert not rig.copies
    assert rig.seen(rig.placed(2)) == "abcd"


def test_places_that_are_no_more_come_back_as_no_place_and_their_blocks_stay_with_the_engine():
    rig = FarMarket(places=3)
    places = rig.out(1, ABCD, "abcd")
    assert places.count(NO_PLACE) == 1
    assert rig.num_placed == 3
    rig.drop(*[place for place in places if place != NO_PLACE])
    assert rig.num_placed == 0
    assert not rig.maps


def test_an_engine_whose_ranks_map_nothing_gets_no_place():
    rig = FarMarket(places=0)
    assert rig.out(1, ABCD, "abcd") == [NO_PLACE] * 4


def test_a_place_is_free_only_after_its_rank_has_unmapped_it():
    rig = FarMarket(places=4, dram_pages=4)
    places = rig.out(1, ABCD, "abcd")
    rig.obeys = False
    rig.drop(*places)
    assert rig.num_placed == 4
    rig.leave(WXYZ, "wxyz")
    rig.copied()
    assert rig.seen(places) == "abcd", "the rank maps them still"
    rig.obey()
    assert rig.num_placed == 0


def test_a_rank_that_cannot_map_leaves_the_blocks_with_the_engine_and_pins_nothing():
    rig = FarMarket()
    pages = rig.fill(PREFILL, 0, ABCD, "abcd")
    rig.obeys = False
    rig.say(PREFILL, FarOut(number=1, hashes=b"".join(ABCD)))
    rig.copied()
    rig.obey(is_ok=False)
    assert rig.placed(1) == [NO_PLACE] * 4
    assert rig.counters()["far_maps_failed"] == 4
    assert len(pages) == 4


def test_a_reclaim_brings_bytes_to_host_memory_and_the_lender_gets_its_pages_after_the_drop():
    rig = FarMarket(places=8)
    rig.lend(4)
    places = rig.out(1, ABCD, "abcd")
    rig.reclaim(0, 1000)
    rig.copied()
    moved = dict(rig.moved())
    assert sorted(moved) == sorted(places)
    assert rig.seen(places) == rig.seen([moved[place] for place in places]) == "abcd"
    assert rig.leased() == 4, "they are mapped still"
    rig.drop(*places)
    assert rig.leased() == 0
    assert rig.seen([moved[place] for place in places]) == "abcd"
    assert not rig.killed


def test_a_consumer_that_misses_the_deadline_is_killed_and_the_pages_return_at_its_proven_death():
    rig = FarMarket(places=8)
    rig.lend(4)
    rig.out(1, ABCD, "abcd")
    rig.reclaim(0, 1000)
    rig.copied()
    rig.advance(999)
    assert not rig.killed
    rig.advance(1)
    assert rig.killed == {PREFILL}
    assert rig.leased() == 4, "a killed process may run on until it is proven dead"
    rig.closed(RANK)
    rig.closed(PREFILL)
    assert rig.leased() == 4
    rig.dead(PREFILL)
    rig.advance(1)
    assert rig.leased() == 0
    assert rig.num_placed == 0


def test_a_reclaim_without_room_elsewhere_says_no_place():
    rig = FarMarket(places=8, dram_pages=4)
    rig.lend(4)
    lent = rig.out(1, ABCD, "abcd")
    rig.out(2, WXYZ, "wxyz")  # host memory is full, and read
    rig.reclaim(0, 1000)
    assert dict(rig.moved()) == dict.fromkeys(lent, NO_PLACE)
    rig.drop(*lent)
    rig.advance(1000)  # what nobody reads any more is forgotten then
    assert rig.leased() == 0
    assert not rig.killed


def test_what_was_dropped_while_it_was_moved_is_nobodys_and_no_place_changes_its_meaning():
    rig = FarMarket(places=8)
    rig.lend(4)
    lent = rig.out(1, ABCD, "abcd")
    rig.reclaim(0, 1000)
    rig.drop(*lent[:3])
    rig.copied()
    assert [place for place, _ in rig.moved()] == lent[3:]
    assert rig.num_placed == 2
    rig.drop(lent[3], rig.moved()[0][1])
    assert rig.num_placed == 0
    assert rig.leased() == 0


def test_an_engine_that_dies_in_the_middle_of_everything_leaves_no_pin():
    rig = FarMarket(places=8)
    rig.lend(2)
    rig.fill(PREFILL, 0, ABCD, "abcd")
    rig.obeys = False
    rig.say(PREFILL, FarOut(number=1, hashes=b"".join(ABCD)))
    rig.closed(RANK)
    rig.closed(PREFILL)
    rig.dead(PREFILL)
    rig.copied()
    assert rig.num_placed == 0
    assert rig.core.status().num_pinned == 0


def test_an_engine_that_lost_a_rank_alone_hears_that_nothing_is_placed():
    """It had no answer any more, and its requests waited for pages that were never to come."""
    rig = FarMarket(places=8)
    rig.fill(PREFILL, 0, ABCD, "abcd")
    rig.obeys = False
    rig.say(PREFILL, FarOut(number=1, hashes=b"".join(ABCD)))
    rig.closed(RANK)
    rig.copied()
    assert rig.placed(1) == [NO_PLACE] * 4
    rig.say(PREFILL, FarOut(number=2, hashes=b"".join(ABCD)))
    assert rig.placed(2) == [NO_PLACE] * 4
    rig.closed(PREFILL)
    rig.dead(PREFILL)
    assert rig.num_placed == 0
    assert rig.core.status().num_pinned == 0


def test_only_engines_that_work_in_the_pages_and_their_ranks_have_a_say():
    rig = FarMarket()
    with pytest.raises(PeerProtocolError):
        rig.say(FRONT, FarOut(number=1, hashes=b""))
    with pytest.raises(PeerProtocolError):
        rig.say(PREFILL, FarMapped(number=1))
    places = rig.out(1, ABCD, "abcd")
    rig.drop(77)
    assert rig.counters()["messages_stale"] == 1
    assert rig.seen(places) == "abcd"


def test_the_page_of_a_block_that_went_far_is_free_though_blocks_behind_it_are_pinned():
    rig = FarMarket(dram_pages=4)
    pages = rig.fill(PREFILL, 0, ABCD, "abcd")
    rig.say(PREFILL, FarOut(number=1, hashes=b"".join(ABCD[:2])))
    rig.copied()
    assert NO_PLACE not in rig.placed(1)
    rig.sent[PREFILL].clear()
    rig.say(PREFILL, wire.Unpin(**page_lists(pages[:2])))
    granted = [m for m in rig.sent[PREFILL] if isinstance(m, wire.Granted)]
    assert sum(len(u32_list(m.pages)) for m in granted) == 2
    assert rig.counters()["far_pages_freed"] == 2


def test_the_page_of_a_far_block_that_is_computed_again_for_another_request_is_free_when_that_is_over():
    """Nobody evicts it, with pinned blocks behind it: the engine never had it again while those were read."""
    rig = FarMarket(dram_pages=4)
    pages = rig.fill(PREFILL, 0, ABCD, "abcd")
    rig.say(PREFILL, FarOut(number=1, hashes=b"".join(ABCD[:2])))
    rig.copied()
    places = rig.placed(1)

    def granted() -> list[tuple[PageId, Epoch]]:
        got = [m for m in rig.sent[PREFILL] if isinstance(m, wire.Granted)]
        rig.sent[PREFILL].clear()
        return [page for m in got for page in zip(u32_list(m.pages), u64_list(m.epochs), strict=True)]

    granted()
    unused = pages[:2]
    for _ in range(3):
        rig.say(PREFILL, wire.Unpin(**page_lists(unused)))
        unused = granted()
        assert len(unused) == 2
        rig.write(PREFILL, unused)
        rig.seal(PREFILL, unused, ABCD[:2])
    assert rig.seen(places) == "ab"


def memory(num_pages: int = 8, pages_per_slab: int = 4, num_slabs: int = 2, page_bytes: int = 3 << 20) -> Any:
    """A space's, on a GPU where pages_per_slab is positive."""
    table = SimpleNamespace(num_pages=num_pages)
    return SimpleNamespace(
        memory=SimpleNamespace(
            table=table, pages_per_slab=pages_per_slab, num_slabs=num_slabs, page_bytes=page_bytes
        )
    )


@pytest.mark.parametrize(
    ("own", "lender", "is_mappable"),
    [
        (memory(), memory(num_pages=64, pages_per_slab=16, num_slabs=4), True),
        (memory(), memory(pages_per_slab=1, num_slabs=8), True),
        (memory(pages_per_slab=1, num_slabs=8), memory(), True),
        (memory(), memory(pages_per_slab=0, num_slabs=0), True),  # host memory
        (memory(), memory(page_bytes=2 << 20), False),
        (memory(), memory(pages_per_slab=1, num_slabs=8 * 64), False),  # a page is many allocations
        (memory(pages_per_slab=0, num_slabs=0), memory(), False),  # a CPU reads no GPU
    ],
)
def test_whole_pages_of_a_gpu_can_be_mapped_alone_or_with_the_slab_that_they_share(own, lender, is_mappable):
    assert can_map(own, lender) is is_mappable


def test_a_rank_is_told_which_part_of_which_slab_each_page_is_and_gets_each_slab_once():
    meta = SpaceMeta(
        description=DESCRIPTION, num_pages=16, page_bytes=3 << 20, num_ranks=1, pages_per_slab=4,
        memory_id=Epoch(70), number=2,
    )  # fmt: skip
    action = MapFarPages(RANK, 9, [5, 1, 3], 2, 0, [PageId(13), PageId(2), PageId(12)])
    told, slabs = far_in_slabs(action, meta)
    assert slabs == [3, 0]
    assert (told.number, u32_list(told.places), u32_list(told.slabs)) == (9, [5, 1, 3], [3, 0, 3])
    assert [offset >> 20 for offset in u64_list(told.offsets)] == [3, 6, 0]
    assert (told.slab_bytes, told.memory_id) == (12 << 20, 70)
