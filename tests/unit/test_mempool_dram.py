"""Host memory behind a space: what leaves is copied first, comes back to readers, and nobody waits for it long."""

import pytest

from services.mempool.core.actions import ApiSend, CopyPages
from shared.aqua.own_space import describe
from shared.errors import PeerProtocolError
from shared.ids import InstanceId
from shared.kv.page import PageState
from shared.kv.words import u32_list
from shared.wire import mempool as wire
from shared.wire import mempool_api as api_wire
from tests.unit.mempool_harness import PAGE_BYTES, chain, page_lists
from tests.unit.test_mempool_spaces import DECODE, FRONT, PREFILL, Spaces, acquire, answers

LENT_TO = 30
CALLER = 1 << 32  # connection of one who makes the nine calls
ABCD = chain("a", "b", "c", "d")
WXYZ = chain("w", "x", "y", "z")


def spaces(num_pages: int = 8, dram_pages: int = 8, *, quota: int = 0, **limits: object) -> Spaces:
    options = {"dram_bytes": dram_pages * PAGE_BYTES, "dram_for_host": True} | limits
    made = Spaces(num_pages, **options)
    made.worker(PREFILL, "cpu:0", quota=quota or num_pages)
    made.client(FRONT, f"i{PREFILL}")
    return made


def fill(rig: Spaces, hashes: list, names: str) -> list:
    return rig.fill(PREFILL, 0, hashes, names)


def two_prompts(rig: Spaces) -> list:
    return fill(rig, ABCD, "abcd") + fill(rig, WXYZ, "wxyz")


def unpin(rig: Spaces, pages: list) -> None:
    rig.say(PREFILL, wire.Unpin(**page_lists(pages)))


def number_of_dram(rig: Spaces) -> int:
    return next(number for number, pool in rig.core.pools.items() if pool.is_dram)


def counters(rig: Spaces) -> dict[str, int]:
    return rig.core.status().counters


def test_host_memory_is_made_beside_the_first_space_of_a_content_and_shared_by_the_others():
    rig = spaces()
    assert [(s.label, s.num_pages) for s in rig.spaces.values()] == [("0", 8), ("dram", 8)]
    rig.worker(DECODE, "cpu:1")
    assert [s.label for s in rig.spaces.values()] == ["0", "dram", "1"]
    assert set(rig.core.dram.tiers) == {0, 2}
    assert rig.core.status().spaces[1].devices == ["cpu:dram"]


def test_without_the_settings_there_is_none():
    assert len(spaces(dram_bytes=0).spaces) == 1
    assert len(spaces(dram_for_host=False).spaces) == 1
    assert len(spaces(dram_bytes=PAGE_BYTES - 1).spaces) == 1
    assert len(spaces(max_spaces=1).spaces) == 1


def test_who_only_lends_gets_none():
    """It held a lender's size of page-locked memory in which nothing ever lay, and locking it held up a burst."""
    rig = spaces()
    rig.worker(DECODE, "cpu:1", description=describe("lender", PAGE_BYTES, "layers-blocks", only_lends=True))
    assert [s.label for s in rig.spaces.values()] == ["0", "dram", "1"]
    assert set(rig.core.dram.tiers) == {0}
    rig.worker(LENT_TO, "cpu:2", description=describe("tensors", PAGE_BYTES, "token-major"))
    assert [s.label for s in rig.spaces.values()] == ["0", "dram", "1", "2", "dram"]


def test_no_engine_works_in_it():
    rig = spaces()
    with pytest.raises(PeerProtocolError):
        rig.worker(DECODE, "cpu:dram")


def test_what_an_engine_unpins_is_copied_out_before_its_pages_are_granted_again():
    rig = spaces()
    pages = two_prompts(rig)
    unpin(rig, pages[2:4])
    (copy,) = rig.copies.values()
    assert sorted(copy.sources) == sorted((0, page) for page, _ in pages[2:4])
    assert not rig.granted[PREFILL]
    rig.copied()
    dram = rig.core.pools[number_of_dram(rig)]
    assert {rig.bytes[dram.number, e.page] for e in dram.index.entries()} == {"c", "d"}
    assert len(rig.granted[PREFILL]) == 2
    assert counters(rig)["dram_blocks_out"] == 2
    rig.counts()


def test_events_while_everything_is_pinned_do_not_keep_blocks_from_being_copied():
    rig = spaces(20, 20, kept_share=0.9)
    rig.engine(20, quota=20, device="cpu:0")  # one that copies takes what is left
    assert rig.core.pools[0].memory.table.num_free == 0
    count = len(rig.granted[PREFILL])
    pages = rig.fill(PREFILL, 0, chain(*range(count)), [str(i) for i in range(count)])
    rig.say(FRONT, wire.Match(call_id=1, hashes=ABCD[0]))  # nothing can leave
    unpin(rig, pages[-1:])
    assert len(rig.copies) == 1
    assert not counters(rig).get("pages_evicted")


def test_words_of_pages_that_leave_without_a_copy_are_written_at_once():
    rig = spaces(kept_share=0.5)
    for hashes in (ABCD, WXYZ):
        unpin(rig, fill(rig, hashes, "abcd"))
        rig.copied()
    acquire(rig, ABCD)
    rig.copied()
    rig.say(FRONT, wire.Release(lease_id=answers(rig, FRONT, wire.Acquired)[0].lease_id))
    rig.advance(1_000)
    assert counters(rig)["dram_blocks_freed"] == 4
    assert [rig.state_in(0, page) for page in range(8)] == list(rig.core.pools[0].memory.table.states)


def test_it_comes_back_to_a_reader_and_leaves_again_without_a_copy():
    rig = spaces()
    pages = two_prompts(rig)
    unpin(rig, pages[2:4])
    rig.copied()
    acquire(rig, ABCD)
    rig.give_back(PREFILL, rig.take(PREFILL, 2))
    (copy,) = rig.copies.values()
    assert {space for space, _ in copy.sources} == {number_of_dram(rig)}
    rig.copied()
    (got,) = answers(rig, FRONT, wire.Acquired)
    assert [rig.bytes[0, page] for page in u32_list(got.pages)] == ["a", "b", "c", "d"]
    assert counters(rig)["blocks_pulled_from_dram"] == 2
    rig.say(FRONT, wire.Release(lease_id=got.lease_id))
    rig.need(PREFILL, 8)
    assert not rig.copies
    assert len(rig.granted[PREFILL]) == 2
    assert counters(rig)["dram_blocks_freed"] == 2
    rig.counts()


def test_beyond_what_may_be_on_its_way_blocks_are_evicted_at_once():
    rig = spaces(out_in_flight_bytes=2 * PAGE_BYTES)
    unpin(rig, two_prompts(rig))
    assert sum(len(copy.sources) for copy in rig.copies.values()) == 2
    assert len(rig.granted[PREFILL]) == 6
    rig.copied()
    assert len(rig.granted[PREFILL]) == 8
    assert counters(rig)["pages_evicted"] == 6
    rig.counts()


def test_a_block_that_another_space_has_needs_no_copy():
    rig = spaces()
    rig.worker(DECODE, "cpu:1")
    there = next(n for n, s in rig.spaces.items() if s.label == "1")
    rig.fill(DECODE, there, ABCD, "abcd")
    unpin(rig, two_prompts(rig)[:4])
    assert not rig.copies
    assert len(rig.granted[PREFILL]) == 4


def test_a_full_dram_drops_its_oldest():
    rig = spaces(dram_pages=2)
    pages = two_prompts(rig)
    unpin(rig, pages[2:4])
    rig.copied()
    unpin(rig, pages[6:])
    rig.copied()
    dram = rig.core.pools[number_of_dram(rig)]
    assert {rig.bytes[dram.number, e.page] for e in dram.index.entries()} == {"y", "z"}
    rig.counts()


@pytest.mark.parametrize("in_doubt", [False, True])
def test_a_failed_copy_keeps_the_block_and_the_next_ones_are_evicted_for_a_while(in_doubt):
    rig = spaces()
    pages = two_prompts(rig)
    unpin(rig, pages[3:4])
    (copy,) = rig.copies.values()
    rig.copied(failed=True, in_doubt=copy.targets if in_doubt else ())
    assert len(rig.granted[PREFILL]) == 1
    number = number_of_dram(rig)
    table = rig.core.pools[number].memory.table
    assert table.by_state()["writing"] == (1 if in_doubt else 0)
    if in_doubt:
        rig.run(rig.core.on_settled(number, copy.targets, rig.now_ms))
    assert table.num_free == 8
    unpin(rig, pages[7:])
    assert not rig.copies
    rig.advance(1_000)
    unpin(rig, pages[2:3])
    assert len(rig.copies) == 1
    rig.counts()


def test_a_block_that_is_read_while_it_leaves_stays():
    rig = spaces()
    pages = two_prompts(rig)
    unpin(rig, pages[3:4])
    acquire(rig, ABCD)
    (got,) = answers(rig, FRONT, wire.Acquired)
    assert got.num_blocks == 4
    rig.copied()
    assert rig.state_in(0, pages[3][0]) is PageState.SEALED
    assert not rig.granted[PREFILL]


def test_pages_that_engines_do_not_get_are_kept_free_ahead_of_them():
    rig = spaces(100, 100, kept_share=0.9)
    hashes = chain(*range(90))
    pages = rig.fill(PREFILL, 0, hashes, [str(i) for i in range(90)])
    unpin(rig, pages[-8:])
    assert len(rig.granted[PREFILL]) == 8, "at once, out of the ten that were free"
    assert sum(len(copy.sources) for copy in rig.copies.values()) == 8
    rig.copied()
    assert rig.core.pools[0].memory.table.num_free == 10


def test_the_copy_out_has_a_short_deadline():
    rig = spaces(out_timeout_ms=300)
    unpin(rig, two_prompts(rig)[3:4])
    (copy,) = rig.copies.values()
    assert isinstance(copy, CopyPages)
    assert copy.timeout_ms == 300


def caller(rig: Spaces, num_blocks: int) -> None:
    """Another process asks for a swap."""
    rig.core.api.connect(CALLER, api_wire.ApiHello(instance=InstanceId(f"i{PREFILL}")), None)
    call = api_wire.SwapOut(call_id=1, num_blocks=num_blocks, instance=InstanceId(f"i{PREFILL}"))
    rig.core.api.on_call(CALLER, call, rig.now_ms)
    perform(rig, rig.core.after_api(rig.now_ms))


def perform(rig: Spaces, actions: list) -> None:
    rig.run([action for action in actions if not isinstance(action, ApiSend)])
    rig.replies += [action.message for action in actions if isinstance(action, ApiSend)]


def end_copies(rig: Spaces) -> None:
    """All that are under way."""
    for copy_id in list(rig.copies):
        del rig.copies[copy_id]
        perform(rig, rig.core.on_copied(copy_id, rig.now_ms))


@pytest.mark.parametrize("quota", [8, 12], ids=["pages-free", "every-page-an-engines"])
def test_a_swap_asks_the_engine_for_cached_blocks_that_nobody_uses_and_takes_what_it_lets_go(quota):
    rig = spaces(12, 12, quota=quota)
    rig.replies = []
    pages = two_prompts(rig)
    caller(rig, 3)
    assert answers(rig, PREFILL, wire.Shrink) == [wire.Shrink(count=3, cached=True)]
    assert not rig.copies, "it waits for the engine"
    for part in (pages[7:], pages[5:7]):  # at its own pace
        let_go = wire.Unpin(**page_lists(part))
        perform(rig, rig.core.on_message(PREFILL, let_go, rig.now_ms))
        assert not rig.replies
        end_copies(rig)
    (reply,) = rig.replies
    there = api_wire.unpack_addresses(reply.addresses)
    assert [a.medium for a in there] == [api_wire.Medium.DRAM] * 3
    assert counters(rig)["dram_blocks_out"] == 3
    assert not counters(rig).get("pages_evicted")
    rig.counts()


def test_a_swap_does_not_wait_longer_than_its_patience_for_an_engine_that_uses_its_blocks():
    rig = spaces(12, 12, quota=8, pull_patience_ms=50)
    rig.replies = []
    two_prompts(rig)
    caller(rig, 3)
    assert rig.core.next_deadline_ms() == rig.now_ms + 50
    rig.now_ms += 50
    perform(rig, rig.core.tick(rig.now_ms))
    (reply,) = rig.replies
    assert not reply.addresses
    rig.counts()


def test_what_a_reader_is_about_to_get_from_host_memory_is_not_dropped_to_make_room_for_it():
    rig = spaces(4, 2, quota=2)
    rig.replies = []
    unpin(rig, fill(rig, ABCD[:2], "ab"))
    caller(rig, 2)
    rig.copied()
    unpin(rig, fill(rig, WXYZ[:2], "wx"))
    assert rig.core.pools[0].memory.table.num_free == 0
    acquire(rig, ABCD[:2])  # room has to be made, and host memory is full of what is wanted
    rig.copied()
    (got,) = answers(rig, FRONT, wire.Acquired)
    assert [rig.bytes[0, page] for page in u32_list(got.pages)] == ["a", "b"]
    rig.counts()


def test_a_copy_for_a_reader_begins_in_the_event_that_its_pages_come_free_in():
    """They had left for host memory; the copy waited for whatever event came next, or for 50 ms."""
    rig = Spaces(4, dram_bytes=16 * PAGE_BYTES, dram_for_host=True)
    rig.worker(PREFILL, "cpu:0", quota=4)
    rig.worker(DECODE, "cpu:1", quota=4)
    rig.client(FRONT, f"i{DECODE}")
    unpin_of = rig.fill(DECODE, 1, WXYZ, "wxyz")
    rig.say(DECODE, wire.Unpin(**page_lists(unpin_of)))  # all four of its pages begin to leave
    fill(rig, ABCD, "abcd")
    acquire(rig, ABCD)
    assert {copy.space for copy in rig.copies.values()} == {number_of_dram(rig)}
    rig.copied()
    assert [(copy.space, len(copy.targets)) for copy in rig.copies.values()] == [(2, 4)]
