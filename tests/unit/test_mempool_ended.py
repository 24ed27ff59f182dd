"""What names a space that has ended, in a message, an answer or what parts of the mempool remember, harms nobody."""

import pytest

from services.mempool.core.actions import ApiSend, PoolLimits
from services.mempool.core.mempool import Mempool
from services.mempool.core.space import Plan
from shared.ids import Epoch, HandoffId, InstanceId
from shared.kv.layout import LENDER
from shared.kv.page import PageState, pack_word
from shared.kv.words import u32_list
from shared.wire import mempool as wire
from shared.wire import mempool_api as api_wire
from shared.wire import mempool_peer as peer_wire
from tests.unit.mempool_harness import BOOT, DESCRIPTION, PAGE_BYTES, chain, page_lists
from tests.unit.test_mempool_endings import AB, IDLE_MS, Rig, engine, rig, stays
from tests.unit.test_mempool_spaces import FRONT, PREFILL, answers

__all__ = ["rig"]  # a fixture


def test_late_answers_and_messages_that_name_an_ended_space_do_nothing(rig):
    connection = engine(rig)
    number = rig.space("kept")
    rig.core.peer_address = "here"
    rig.go(connection)
    assert not stays(rig)
    core, now_ms = rig.core, rig.now_ms
    rig.run(core.on_restored(number, [], 0, now_ms))
    rig.run(core.end_lease(number, "lease", now_ms))
    rig.run(core.on_corrupt(number, AB[0], now_ms))
    rig.run(core.on_settled(number, [], now_ms))
    assert core.hold(number, AB[0], 0, BOOT) is None
    check = peer_wire.CheckEpochs(
        call_id=1, space=number, pages=b"\0\0\0\0", epochs=int(BOOT).to_bytes(8, "little")
    )
    (told,) = [a.message for a in core.on_peer_call(1, check, now_ms) if hasattr(a, "link")]
    assert u32_list(told.stale) == [0], "no page of it is what it was"
    rig.say(PREFILL, wire.ReleaseMemory(call_id=7, num_bytes=1, space=number))
    assert answers(rig, PREFILL, wire.CallFailed)[-1].code == "space.unknown"
    stale = wire.Attach(
        kind="rank", instance=InstanceId("kept"), description=DESCRIPTION, memory_id=Epoch(BOOT + number)
    )
    rig.run(core.on_attach(80, 80, stale, now_ms))
    assert rig.disconnected[80] == "memory.replaced"


def test_nothing_goes_back_to_a_space_that_has_ended():
    rig = Rig(max_spaces=3)
    rig.worker(PREFILL, "cpu:0", quota=4)
    rig.client(FRONT, f"i{PREFILL}")
    rig.worker(40, "cpu:prompt", quota=8, instance="kept")
    rig.come("other")
    prompt = rig.save(40, AB)
    rig.ready(40, "h", AB, ttl_ms=10_000)
    rig.say(FRONT, wire.Acquire(call_id=1, hashes=b"".join(AB), handoff_id=HandoffId("h"), wait_ms=500))
    rig.copied()
    assert len(rig.core.pools[0].index) == 2
    rig.say(40, wire.Unpin(**page_lists(prompt)))
    rig.go(40)
    rig.advance(IDLE_MS)
    rig.answered()
    assert not stays(rig)
    more = chain("a", "b", "c")
    page = rig.take(PREFILL, 1)
    rig.write(PREFILL, page)
    rig.seal(PREFILL, page, more, first=2)
    assert not rig.copies


def test_blocks_of_this_content_are_found_when_their_engine_comes_to_another_space(rig):
    connection = engine(rig)
    rig.go(connection)
    assert not stays(rig)
    for name in ("other", "late"):
        pool = rig.core.pools[rig.space(name)]
        for each in list(pool.memory.engines.attached.values()):
            rig.go(each.process)
    again = rig.come("kept", "none", quota=4)
    pages = rig.save(again, AB)
    rig.client(FRONT, "kept")
    got = rig.acquire(FRONT, AB)
    assert u32_list(got.pages) == [page for page, _ in pages]


def test_a_successor_that_has_more_spaces_than_it_may_make_ends_as_many_as_a_newcomer_needs():
    rig = Rig(max_spaces=3)
    later = Mempool(PoolLimits(capacity_bytes=8 * PAGE_BYTES, max_spaces=3), Epoch(BOOT + 1_000))
    rig.pool = rig.core = later
    for number in (4, 6, 7, 8):
        words = [pack_word(Epoch(BOOT), PageState.FREE)] * 8
        actions = later.adopt(
            number, DESCRIPTION, Plan(8, PAGE_BYTES, 1), words, b"", memory_id=Epoch(BOOT + number), processes=[],
            engines=[], instances=[], label=f"old-{number}",
        )  # fmt: skip
        rig.run(actions)
    for name in ("a", "b", "c"):
        assert not rig.refused(rig.come(name))
    assert rig.ended == [4, 6, 7, 8]
    assert [rig.space(name) for name in ("a", "b", "c")] == [0, 9, 10]


@pytest.mark.parametrize("maps", [False, True])
def test_a_caller_of_an_instance_whose_space_has_ended_keeps_what_it_has_in_the_memory_behind(maps):
    rig = Rig(max_spaces=3, dram_bytes=4 * PAGE_BYTES, dram_for_host=True)
    rig.worker(PREFILL, "cpu")
    connection, name, api = rig.come("kept", "none", quota=2), InstanceId("kept"), rig.core.api
    behind = rig.core.dram.tiers[rig.space("kept")].slow
    api.connect(50, api_wire.ApiHello(instance=name), 999)
    rig.core.callers.computes([999] if maps else [])
    for medium in ("hbm", "dram"):
        api.on_call(50, api_wire.AllocMem(call_id=1, num_blocks=2, instance=name, mem_type=medium), 0)
    got = [each.message for each in rig.core.after_api(0) if isinstance(each, ApiSend)]
    api.on_call(50, api_wire.FreeMem(call_id=2, addresses=got[0].addresses), 0)
    rig.go(connection)
    rig.come("late", LENDER)
    assert (len(rig.ended), behind.num_free) == (1, 2)
    api.on_closed(50)
    rig.core.on_process_dead(999, 0)
    assert behind.num_free == 4
