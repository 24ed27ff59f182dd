"""Memory under pressure: what goes, in which order, when, and how it comes back."""

import msgspec
import pytest

from services.mempool.core.regains import MAX_PAGES_UNDER_WAY
from services.mempool.core.space import Plan
from shared.errors import PeerProtocolError
from shared.ids import Epoch, InstanceId
from shared.kv.page import PageState
from shared.kv.words import u32_bytes, u32_list
from shared.wire import mempool as wire
from tests.unit.mempool_harness import BOOT, PAGE_BYTES, Harness, chain
from tests.unit.mempool_release_rig import GPU_DESCRIPTION, UNIT_BYTES, ReleaseRig


def host(num_pages: int = 8) -> ReleaseRig:
    """Units are pages of host memory."""
    rig = ReleaseRig(num_pages)
    rig.pool = Harness(num_pages, kept_share=1.0).pool
    return rig


def coming_back() -> ReleaseRig:
    """One of two allocations was away and is made again; its two ranks have not heard of it."""
    rig = ReleaseRig(2)
    rig.two_ranks()
    rig.press(UNIT_BYTES)
    rig.settle()
    rig.regain()
    assert rig.system()
    return rig


def test_free_host_pages_go_at_once_and_are_counted():
    rig = host()
    rig.engine(1, quota=2)
    rig.press(3 * PAGE_BYTES)
    assert rig.counts() == {"granted": 2, "withdrawn": 3, "free": 3}
    rig.settle()
    assert rig.counts() == {"granted": 2, "released": 3, "free": 3}
    (answer,) = rig.answers
    assert (answer.num_bytes, answer.released_bytes) == (3 * PAGE_BYTES, 3 * PAGE_BYTES)


def test_the_blocks_used_longest_ago_go_first():
    rig = host()
    rig.engine(1, quota=3)
    old, new = chain("old-a", "old-b"), chain("new-a", "new-b")
    old_pages = {page for page, _ in rig.save(1, old)}
    rig.need(1, 3)
    rig.save(1, new)
    rig.client(2)
    free = rig.counts()["free"]
    rig.press((free + 2) * PAGE_BYTES)
    rig.settle()
    assert rig.acquire(2, new).num_blocks == 2
    assert rig.acquire(2, old).num_blocks == 0
    assert all(rig.state(page) is PageState.RELEASED for page in old_pages)


def test_leased_pages_stay_and_the_answer_says_how_much_could_go():
    rig = host()
    rig.engine(1, quota=3)
    rig.client(2)
    abc = chain("a", "b", "c")
    rig.save(1, abc)
    assert rig.acquire(2, abc).num_blocks == 3
    rig.press(8 * PAGE_BYTES)
    rig.settle()
    assert rig.counts().get("sealed") == 3
    (answer,) = rig.answers
    assert answer.num_bytes == rig.counts()["released"] * PAGE_BYTES < 8 * PAGE_BYTES


def test_released_pages_come_back_with_a_larger_epoch_and_are_granted_again():
    rig = host(4)
    rig.engine(1, quota=0)
    before = dict(rig.words)
    rig.press(4 * PAGE_BYTES)
    rig.settle()
    assert rig.counts() == {"released": 4}
    rig.engine(2, quota=4, instance="other")
    rig.dead(1)
    assert rig.granted[2] == []
    rig.regain(2 * PAGE_BYTES)
    rig.settle()
    assert rig.counts() == {"granted": 2, "released": 2}
    assert rig.answers[-1].num_bytes == rig.answers[-1].released_bytes == 2 * PAGE_BYTES
    assert all(epoch > before[page] >> 8 for page, epoch in rig.granted[2])
    rig.regain()
    rig.settle()
    assert rig.counts() == {"granted": 4}


def test_memory_that_must_not_be_punched_stays_and_is_used_on():
    rig = host(4)
    rig.engine(1, quota=0)
    rig.press(2 * PAGE_BYTES)
    assert rig.system(fails=True)
    assert rig.counts() == {"free": 4}
    assert rig.answers[-1].num_bytes == 0


def test_a_gpus_allocation_goes_when_every_process_has_unmapped_it():
    rig = ReleaseRig(4)
    rig.two_ranks()
    rig.press(2 * UNIT_BYTES)
    assert rig.counts() == {"withdrawn": 4, "free": 4}
    assert rig.hear(1)
    assert not rig.pending
    assert rig.hear(2)
    assert rig.system()
    assert rig.memory == {2, 3}
    assert rig.counts() == {"released": 4, "free": 4}
    assert rig.answers[-1].num_bytes == 2 * UNIT_BYTES


def test_a_dead_process_maps_nothing():
    rig = ReleaseRig(4)
    rig.two_ranks()
    rig.press(UNIT_BYTES)
    rig.hear(1)
    rig.closed(2)
    assert not rig.pending, "its connection ended, it may live"
    del rig.ranks[2]
    rig.dead(2)
    assert rig.system()
    assert rig.counts() == {"released": 2, "free": 6}


def test_a_death_that_is_read_before_the_end_of_the_connection_stops_no_call():
    rig = ReleaseRig(2)
    rig.two_ranks()
    rig.two_ranks(11, "f")
    del rig.ranks[11]
    rig.dead(11)
    rig.press(UNIT_BYTES)
    rig.settle()
    assert [answer.num_bytes for answer in rig.answers] == [UNIT_BYTES]


def test_an_allocation_comes_back_when_every_process_maps_it():
    rig = coming_back()
    assert rig.counts() == {"withdrawn": 2, "free": 2}
    assert rig.hear(1)
    assert rig.counts() == {"withdrawn": 2, "free": 2}
    assert rig.hear(2)
    assert rig.counts() == {"free": 4}
    assert rig.answers[-1].num_bytes == UNIT_BYTES


def test_when_the_system_has_less_memory_the_rest_stays_released():
    rig = ReleaseRig(4)
    rig.two_ranks()
    rig.press(3 * UNIT_BYTES)
    rig.settle()
    rig.regain()
    assert rig.system(has=1)
    rig.settle()
    assert rig.counts() == {"free": 4, "released": 4}
    assert (rig.answers[-1].num_bytes, rig.answers[-1].released_bytes) == (UNIT_BYTES, 2 * UNIT_BYTES)


def test_an_engine_is_asked_for_cached_pages_and_what_it_keeps_keeps_its_allocation():
    rig = ReleaseRig(4)
    rig.two_ranks()
    rig.pages_engine(3)
    saved = rig.save(3, chain(*range(8)))
    rig.press(2 * UNIT_BYTES)
    assert rig.counts() == {"sealed": 8}
    in_use = saved[0][0]
    while rig.vacates:
        rig.vacate(keep=frozenset({in_use}))
    rig.settle()
    assert rig.state(in_use) is PageState.SEALED
    assert rig.counts() == {"released": 4, "sealed": 3, "granted": 1}  # its neighbour went and came again
    assert rig.answers[-1].num_bytes == 2 * UNIT_BYTES
    assert len(rig.pool.index) == 3


def test_the_pages_of_an_allocation_that_could_not_go_are_granted_again():
    rig = ReleaseRig(2)
    rig.two_ranks()
    rig.pages_engine(3)
    saved = rig.save(3, chain(*range(4)))
    rig.press(2 * UNIT_BYTES)
    while rig.vacates:
        rig.vacate(keep=frozenset({saved[0][0], saved[2][0]}))
    rig.settle()
    assert rig.answers[-1].num_bytes == 0
    assert rig.counts() == {"sealed": 2, "granted": 2}


def test_an_engine_keeps_room_for_its_longest_request():
    rig = ReleaseRig(8)
    rig.two_ranks()
    longest = msgspec.structs.replace(GPU_DESCRIPTION, max_model_len=9 * GPU_DESCRIPTION.block_tokens)
    rig.pages_engine(3, quota=16, description=longest)
    rig.press(8 * UNIT_BYTES)
    rig.settle()
    assert rig.counts() == {"released": 6, "granted": 10}


def test_an_engine_that_does_not_answer_costs_the_call_its_time_and_nothing_else():
    rig = ReleaseRig(4)
    rig.two_ranks()
    rig.pages_engine(3, quota=6)
    rig.press(3 * UNIT_BYTES, wait_ms=100)
    assert rig.hear(1)
    assert rig.hear(2)
    assert rig.system()
    rig.advance(100)
    assert rig.answers[-1].num_bytes == UNIT_BYTES
    assert rig.counts() == {"released": 2, "granted": 6}
    rig.settle()  # its late answer gives the pages back, and they are its own again
    assert rig.counts()["released"] == 2


def test_a_process_that_cannot_unmap_makes_the_call_fail():
    rig = ReleaseRig(4)
    rig.rank(1, 0)
    rig.rank(2, 1)
    rig.ready(1)
    rig.press(UNIT_BYTES)
    assert rig.answers[-1].code == "release.unsupported"
    rig.ready(2)
    rig.press(UNIT_BYTES)
    rig.settle()
    assert rig.answers[-1].num_bytes == UNIT_BYTES


def test_a_process_that_attaches_meanwhile_is_told_what_is_absent_and_hears_of_it_once_it_is_ready():
    rig = ReleaseRig(4)
    rig.two_ranks()
    rig.press(UNIT_BYTES)
    rig.settle()
    rig.rank(5, 0, "later")
    assert u32_list(rig.sent[5][-1].absent_slabs) == [0]
    assert rig.ranks[5].slabs == {1, 2, 3}
    rig.ready(5)
    rig.regain()
    assert rig.system()
    rig.hear(1)
    rig.hear(2)
    assert rig.counts() == {"withdrawn": 2, "free": 6}
    rig.hear(5)
    assert rig.counts() == {"free": 8}


def test_a_process_that_comes_while_allocations_leave_is_waited_for_if_it_maps_them():
    rig = ReleaseRig(4)
    rig.two_ranks()
    rig.pages_engine(3, quota=8)
    rig.press(UNIT_BYTES)
    assert rig.vacates
    rig.rank(5, 0, "later")  # maps all four, and has not said so yet
    while rig.vacates:
        rig.vacate()
    rig.hear(1)
    rig.hear(2)
    assert not rig.pending
    rig.ready(5)
    assert rig.hear(5)
    assert rig.system()
    assert rig.counts()["released"] == 2


def test_calls_are_served_one_after_the_other():
    rig = ReleaseRig(4)
    rig.two_ranks()
    rig.press(UNIT_BYTES)
    rig.regain()
    rig.press(2 * UNIT_BYTES)
    rig.settle()
    assert [type(a) for a in rig.answers] == [wire.MemoryChanged] * 3
    assert rig.answers[-1].num_bytes == 2 * UNIT_BYTES
    assert rig.counts()["released"] * UNIT_BYTES // 2 == rig.answers[-1].released_bytes


def test_a_client_cannot_speak_for_a_rank():
    rig = ReleaseRig(2)
    rig.two_ranks()
    rig.client(9)
    with pytest.raises(PeerProtocolError):
        rig.say(9, wire.Unmapped(slabs=u32_bytes([0])))
    with pytest.raises(PeerProtocolError):
        rig.say(1, wire.Mapped(slabs=b"abc"))


def test_a_rank_that_names_other_allocations_changes_nothing():
    rig = ReleaseRig(2)
    rig.two_ranks()
    rig.press(UNIT_BYTES)
    rig.say(1, wire.Unmapped(slabs=u32_bytes([1, 77])))
    rig.say(2, wire.Mapped(slabs=u32_bytes([0, 77])))
    assert not rig.pending


def test_a_process_that_comes_while_allocations_come_back_is_waited_for():
    rig = coming_back()
    rig.rank(5, 0, "later")  # is told that it is absent
    rig.hear(1)
    rig.hear(2)
    assert rig.counts() == {"withdrawn": 2, "free": 2}
    rig.ready(5)
    assert rig.hear(5)
    assert rig.counts() == {"free": 4}
    assert rig.ranks[5].slabs == {0, 1}


def test_a_successor_ends_what_processes_were_asked_and_asks_them_again():
    old = ReleaseRig(4)
    old.two_ranks()
    old.press(3 * UNIT_BYTES)
    old.hear(1)
    old.hear(2)
    old.system()  # the three are gone
    old.regain(UNIT_BYTES)
    old.system()
    old.hear(1)  # one is on its way back: rank 1 maps it, rank 2 does not
    assert old.counts() == {"released": 4, "withdrawn": 2, "free": 2}
    new = ReleaseRig(4, boot=Epoch(BOOT + 1_000))
    new.memory, new.words, new.ranks = old.memory, dict(old.words), old.ranks
    for rank in new.ranks.values():
        rank.ready = False
        rank.inbox.clear()
    new.run(
        new.pool.adopt(
            GPU_DESCRIPTION, Plan(8, 1 << 20, 2, 2), list(old.words.values()), b"", memory_id=BOOT,
            processes=[1, 2], engines=[], instances=[InstanceId("e")] * 2, mappers=[1, 2],
        )
    )  # fmt: skip
    assert new.counts() == {"released": 4, "withdrawn": 2, "free": 2}
    for number, connection in enumerate((1, 2)):
        mapped = set(new.ranks[connection].slabs)
        new.rank(connection, number, process=connection)
        new.ranks[connection].slabs = mapped
        assert len(u32_list(new.sent[connection][-1].absent_slabs)) == 3
        new.ready(connection)
    new.settle()
    assert new.counts() == {"released": 6, "free": 2}
    new.regain()
    new.settle()
    assert new.counts() == {"free": 8}
    assert all(rank.slabs == {0, 1, 2, 3} for rank in new.ranks.values())


def test_who_wants_all_memory_back_gets_what_is_just_leaving_too():
    rig = host(4)
    rig.engine(1, quota=0)
    rig.press(3 * PAGE_BYTES, wait_ms=10)
    rig.run(rig.pool.tick(rig.now_ms + 20))  # the caller waits no longer; the system has not answered yet
    assert [answer.num_bytes for answer in rig.answers] == [0]
    rig.regain()
    assert len(rig.answers) == 1
    rig.settle()
    assert rig.counts() == {"free": 4}
    assert (rig.answers[-1].num_bytes, rig.answers[-1].released_bytes) == (3 * PAGE_BYTES, 0)


def test_who_wants_all_memory_back_hears_of_a_release_that_failed():
    rig = host(4)
    rig.engine(1, quota=0)
    rig.press(2 * PAGE_BYTES, wait_ms=10)
    rig.run(rig.pool.tick(rig.now_ms + 20))
    rig.regain()
    assert rig.system(fails=True)
    rig.settle()
    assert rig.counts() == {"free": 4}
    assert (len(rig.answers), rig.answers[-1].num_bytes) == (2, 0)


def test_what_goes_in_small_parts_is_asked_for_in_large_ones():
    rig = ReleaseRig(MAX_PAGES_UNDER_WAY)  # twice as many pages
    rig.two_ranks()
    rig.pages_engine(3, quota=2 * MAX_PAGES_UNDER_WAY)
    rig.need(3, 2 * MAX_PAGES_UNDER_WAY)
    rig.press(2 * MAX_PAGES_UNDER_WAY * UNIT_BYTES)
    sizes = []
    while rig.vacates or rig.pending or any(rank.inbox for rank in rig.ranks.values()):
        if rig.vacates:
            sizes.append(len(rig.vacates[0][1].pages) // 4)
            rig.vacate()
        for connection, rank in rig.ranks.items():
            while rank.inbox:  # a word for each slab
                slabs = u32_list(rank.inbox.popleft().slabs)
                rank.slabs.difference_update(slabs)
                for slab in slabs:
                    rig.say(connection, wire.Unmapped(slabs=u32_bytes([slab])))
        while rig.system():
            pass
    least = -(-sum(sizes) // wire.PAGES_PER_VACATE)
    assert sum(sizes) >= MAX_PAGES_UNDER_WAY
    assert len(sizes) <= least + 2, sizes
