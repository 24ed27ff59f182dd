"""Blocks that leave layer by layer while their prompt is computed: what is sealed at the target, and when."""

import msgspec
import pytest

from services.mempool.core.actions import StepOver
from services.mempool.core.pull import ASK_AGAIN_MS
from shared.errors import PeerProtocolError
from shared.ids import HandoffId, InstanceId
from shared.kv.layer_words import ALL_LAYERS, layer_word, layers_written
from shared.kv.page import PageState
from shared.kv.transfer_mode import layer_bytes_of
from shared.kv.words import u32_list
from shared.wire import mempool as wire
from tests.unit.mempool_harness import DESCRIPTION, PAGE_BYTES, Harness, chain, page_lists
from tests.unit.mempool_release_rig import ReleaseRig
from tests.unit.test_mempool_spaces import DECODE, FRONT, PREFILL, Spaces, acquire, answers

ABC = chain("a", "b", "c")
LAYERED = msgspec.structs.replace(DESCRIPTION, num_layers=4)
H = HandoffId("h")


def spaces(num_pages: int = 8, **limits: object) -> Spaces:
    it = Spaces(num_pages, **limits)
    it.worker(PREFILL, "cpu:0", description=LAYERED)
    it.worker(DECODE, "cpu:1", description=LAYERED)
    it.client(FRONT, f"i{DECODE}")
    return it


@pytest.fixture
def two() -> Spaces:
    return spaces()


def announce(it: Spaces, hashes: list, step: int = 1, **fields: object) -> list:
    """What the prefill engine does at a step's beginning."""
    pages = it.take(PREFILL, len(hashes))
    it.write(PREFILL, pages)
    say_layers(it, pages, hashes, step, **fields)
    return pages


def say_layers(it: Spaces, pages: list, hashes: list, step: int = 1, **fields: object) -> None:
    fields = {"target": InstanceId(f"i{DECODE}"), "handoff_id": H} | fields
    it.say(PREFILL, wire.StepLayers(step=step, **page_lists(pages), hashes=b"".join(hashes), **fields))


def over(it: Spaces, pages: list, step: int = 1) -> None:
    it.say(PREFILL, wire.LayersSealed(step=step, **page_lists(pages)))


def in_target(it: Spaces, hashes: list) -> list:
    return it.core.pools[1].index.prefix(hashes)


def test_nothing_is_in_the_target_before_both_the_copy_and_the_step_are_over(two):
    pages = announce(two, ABC)
    (copy,) = two.copies.values()
    assert (copy.cut.num_layers, copy.cut.layer_bytes, copy.cut.step) == (4, 250, 1)
    assert [page for _, page in copy.sources] == [page for page, _ in pages]
    two.copied()
    assert in_target(two, ABC) == []
    assert all(two.state_in(1, page) is PageState.WRITING for page in copy.targets)
    two.seal(PREFILL, pages, ABC)
    assert in_target(two, ABC) == [], "sealed at the source is not yet: by this step"
    over(two, pages)
    assert [entry.page for entry in in_target(two, ABC)] == copy.targets
    assert all(two.state_in(1, page) is PageState.SEALED for page in copy.targets)
    two.counts()


def without_layers(**limits: object) -> Spaces:
    it = Spaces(**limits)
    for connection, device in ((PREFILL, "cpu:0"), (DECODE, "cpu:1")):
        it.worker(connection, device)
    it.client(FRONT, f"i{DECODE}")
    return it


def test_sealed_blocks_of_a_prompt_under_way_go_ahead_where_pages_have_no_layers_apart_and_the_rest_follows():
    it = without_layers()
    it.save(PREFILL, ABC[:2])
    say_layers(it, [], [], cached=b"".join(ABC[:2]))
    (copy,) = it.copies.values()
    assert (len(copy.targets), copy.cut) == (2, None)
    it.copied()
    assert len(in_target(it, ABC)) == 2
    assert it.core.pools[1].index.num_pinned == 2, "they wait for their reader"
    pages = it.take(PREFILL, 1)
    it.write(PREFILL, pages)
    it.seal(PREFILL, pages, ABC, first=2)
    it.ready(PREFILL, H, ABC)
    acquire(it, ABC, handoff_id=H, wait_ms=100)
    (copy,) = it.copies.values()
    assert len(copy.targets) == 1, "only what had not come yet"
    it.copied()
    assert answers(it, FRONT, wire.Acquired)[-1].num_blocks == 3
    assert [entry.pins for entry in in_target(it, ABC)] == [1, 1, 1], "the lease's; nothing is held besides"
    it.counts()


def test_a_step_that_is_over_first_pins_its_blocks_until_the_copy_has_ended(two):
    pages = announce(two, ABC)
    two.seal(PREFILL, pages, ABC)
    over(two, pages)
    two.say(PREFILL, wire.Unpin(**page_lists(pages)))
    assert in_target(two, ABC) == []
    assert two.core.pools[0].index.num_pinned == 3, "nobody may have these pages while they are read"
    two.copied()
    assert len(in_target(two, ABC)) == 3
    assert two.core.pools[0].index.num_pinned == 0
    two.counts()


def test_the_copy_hears_that_its_step_is_over(two):
    pages = announce(two, ABC)
    (copy,) = two.copies.values()
    message = wire.LayersSealed(step=1, **page_lists(pages))
    assert StepOver(copy.copy_id) in two.core.on_message(PREFILL, message, two.now_ms)
    more = announce(two, chain("x"), step=2)
    two.copied()
    assert not any(
        isinstance(action, StepOver)
        for action in two.core.on_message(PREFILL, wire.LayersSealed(step=2, **page_lists(more)), two.now_ms)
    )


def test_a_block_that_the_step_did_not_seal_is_thrown_away_and_the_others_stay(two):
    pages = announce(two, ABC)
    two.copied()
    two.seal(PREFILL, pages[:2], ABC)
    over(two, pages[:2])
    assert len(in_target(two, ABC)) == 2
    assert sum(two.core.pools[1].memory.table.states[p] == PageState.WRITING for p in range(8)) == 0
    two.counts()


def test_a_page_that_another_step_wrote_anew_is_not_taken_for_the_first_ones_block(two):
    """An aborted prompt's page serves the next one under the same epoch, even for the same block."""
    (page, *_) = pages = announce(two, ABC[:1])
    two.copied()
    say_layers(two, pages, ABC[:1], step=2)  # on its way already: nothing new begins
    two.seal(PREFILL, pages, ABC[:1])
    over(two, [], step=1)
    over(two, pages, step=2)
    assert in_target(two, ABC) == []
    assert two.core.pools[0].index.get(ABC[0]).page == page[0]
    acquire(two, ABC[:1])  # what comes now is the sealed page, whole
    two.copied()
    assert answers(two, FRONT, wire.Acquired)[-1].num_blocks == 1


def test_an_abort_in_the_middle_frees_every_target_page(two):
    announce(two, ABC)
    over(two, [])
    two.copied(failed=True)
    states = two.core.pools[1].memory.table.by_state()
    assert in_target(two, ABC) == []
    assert states.get("writing", 0) == 0
    assert not two.core.pulls.pulls
    assert not two.core.layers._open
    two.counts()


def test_an_engine_that_dies_in_the_middle_leaves_nothing_behind(two):
    announce(two, ABC)
    two.closed(PREFILL)
    two.copied(failed=True)
    two.dead(PREFILL)
    assert not two.core.pulls.pulls
    assert two.core.pools[1].memory.table.by_state().get("writing", 0) == 0
    two.counts()


def test_an_engine_that_says_nothing_costs_its_target_pages_for_a_bounded_time(two):
    announce(two, ABC)
    two.copied()
    two.advance(29_999)
    assert two.core.pulls.pulls
    assert two.core.next_deadline_ms() == 30_000
    two.advance(1)
    assert not two.core.pulls.pulls
    two.counts()


def test_pages_in_doubt_come_back_when_they_have_settled(two):
    announce(two, ABC)
    (copy,) = two.copies.values()
    two.copied(failed=True, in_doubt=copy.targets[:1])
    assert two.state_in(1, copy.targets[0]) is PageState.QUARANTINED
    two.run(two.core.on_settled(1, copy.targets[:1], two.now_ms))
    assert two.state_in(1, copy.targets[0]) is not PageState.QUARANTINED
    two.counts()


def test_a_reader_that_comes_early_is_answered_once_with_what_came_layer_by_layer(two):
    pages = announce(two, ABC)
    acquire(two, ABC, handoff_id=H, wait_ms=1000)
    assert answers(two, FRONT, wire.Acquired) == []
    two.seal(PREFILL, pages, ABC)
    over(two, pages)
    two.say(PREFILL, wire.HandoffReady(handoff_id=H, hashes=b"".join(ABC), ttl_ms=1000))
    assert answers(two, FRONT, wire.Acquired) == [], "the copy has not ended"
    assert len(two.copies) == 1, "nothing is copied a second time"
    targets = next(iter(two.copies.values())).targets
    two.copied()
    (got,) = answers(two, FRONT, wire.Acquired)
    assert (got.num_blocks, u32_list(got.pages), got.blocks_peer) == (3, targets, 3)


def test_what_was_cached_before_goes_along_as_whole_pages(two):
    two.fill(PREFILL, 0, ABC[:2], "ab")
    announce(two, ABC[2:], cached=b"".join(ABC[:2]))
    cuts = sorted((copy.cut is not None, len(copy.sources)) for copy in two.copies.values())
    assert cuts == [(False, 2), (True, 1)]


def test_blocks_of_a_target_that_is_not_here_or_has_them_are_left_alone(two):
    announce(two, ABC[:1], target=InstanceId("elsewhere"))
    announce(two, ABC[:1], target=InstanceId(f"i{PREFILL}"))
    assert not two.copies
    two.fill(DECODE, 1, ABC[:1], "a")
    announce(two, ABC[:1])
    assert not two.copies
    assert two.core.counters["layers_not_for_here"] == 2


def test_a_full_target_is_not_waited_for(two):
    full = spaces(2)
    full.fill(DECODE, 1, ABC[:2], "ab")
    announce(full, chain("x", "y"))
    assert not full.copies
    full.advance(200)
    assert not full.core.pulls.pulls
    full.counts()


def test_a_malformed_announcement_ends_the_connection_and_changes_nothing(two):
    pages = announce(two, ABC[:1])
    for broken in ([*pages, *pages], pages[:0]):
        with pytest.raises(PeerProtocolError):
            say_layers(two, broken, ABC[:2])
    with pytest.raises(PeerProtocolError):
        two.say(FRONT, wire.LayersSealed(step=1))
    assert len(two.core.pulls.pulls) == 1


def test_by_request_cuts_pages_of_equal_ends_by_layers():
    it = spaces(transfer_mode="by-request")
    it.fill(PREFILL, 0, ABC, "abc")
    acquire(it, ABC)
    (copy,) = it.copies.values()
    assert (copy.cut.num_layers, copy.cut.layer_bytes, copy.cut.step) == (4, 250, 0)


def test_only_ranks_get_layer_words(two):
    two.say(100 + PREFILL, wire.LayerWordsCall(call_id=1))
    with pytest.raises(PeerProtocolError):
        two.say(PREFILL, wire.LayerWordsCall(call_id=1))


def test_a_later_steps_word_says_that_every_earlier_step_is_written():
    assert layers_written(layer_word(7, 3), 7) == 3
    assert layers_written(layer_word(7, 3), 6) == ALL_LAYERS
    assert layers_written(layer_word(7, 3), 8) == 0
    assert layer_word(7, ALL_LAYERS) < layer_word(8, 0)


def test_layouts_whose_layers_do_not_follow_each_other_have_no_layer_bytes():
    assert layer_bytes_of(LAYERED) == 250
    for other in ({"layout": "token-major"}, {"num_layers": 3}, {"pp_size": 2}):
        assert layer_bytes_of(msgspec.structs.replace(LAYERED, **other)) == 0


def test_what_came_early_stays_for_its_reader_whatever_needs_room_and_goes_when_it_has_it_or_never_comes(two):
    pages = announce(two, ABC)
    two.copied()
    two.seal(PREFILL, pages, ABC)
    over(two, pages)
    target = two.core.pools[1].index
    two.worker(9, "cpu:1", quota=8)
    assert target.num_pinned == 3
    assert len(target.prefix(ABC)) == 3, "a new engine's pages were not worth a prompt on its way"
    acquire(two, ABC, handoff_id=H)
    (got,) = answers(two, FRONT, wire.Acquired)
    assert got.num_blocks == 3
    two.say(FRONT, wire.Release(lease_id=got.lease_id))
    assert target.num_pinned == 0
    more = announce(two, chain("x"), step=2, handoff_id=HandoffId("other"))
    two.copied()
    two.seal(PREFILL, more, chain("x"))
    over(two, more, step=2)
    assert target.num_pinned == 1
    two.advance(30_000)
    assert target.num_pinned == 0
    two.counts()


def test_a_page_that_is_read_before_its_seal_stays_mapped_until_the_copy_has_ended(two):
    pages = announce(two, ABC)
    read = two.core.pools[0].memory.read_early
    assert read == {page: 1 for page, _ in pages}
    over(two, [])
    two.give_back(PREFILL, pages)
    assert read == {page: 1 for page, _ in pages}, "given back, and still read"
    two.copied(failed=True)
    assert not read


def test_memory_that_a_copy_reads_early_does_not_go_to_the_system_before_the_copy_has_ended():
    rig = ReleaseRig(4)
    rig.pool = Harness(4, kept_share=1.0).pool
    rig.engine(1, quota=1)
    (free, *_) = [page for page in range(4) if rig.state(page) is PageState.FREE]
    rig.pool.memory.read_early[free] = 1
    rig.press(3 * PAGE_BYTES)
    rig.settle()
    assert rig.counts() == {"granted": 1, "released": 2, "withdrawn": 1}
    del rig.pool.memory.read_early[free]
    rig.run(rig.pool.flush())
    rig.settle()
    assert rig.counts() == {"granted": 1, "released": 3}


def test_a_prompt_that_is_given_up_pins_nothing_neither_what_came_nor_what_is_on_its_way(two):
    first = announce(two, ABC[:1])
    two.copied()
    two.seal(PREFILL, first, ABC)
    over(two, first)
    second = announce(two, ABC[1:], step=2)
    two.seal(PREFILL, second, ABC, first=1)
    over(two, second, step=2)
    target = two.core.pools[1].index
    assert target.num_pinned == 1
    say_layers(two, [], [], step=0)
    assert target.num_pinned == 0
    two.copied()
    assert len(target.prefix(ABC)) == 3
    assert target.num_pinned == 0
    two.counts()


@pytest.mark.parametrize("when", ["copy under way", "word on its way"])
def test_a_hand_off_that_is_over_pins_nothing_of_what_still_comes_ahead_of_it(when):
    """Its first token ended the request, say: no reader will come for the 30 s that blocks wait for theirs."""
    it = without_layers()
    it.save(PREFILL, ABC)
    drop = wire.Acquire(call_id=9, hashes=b"", handoff_id=H)  # as MempoolClient.drop_handoff
    if when == "word on its way":
        it.say(FRONT, drop)
    say_layers(it, [], [], cached=b"".join(ABC[:2]))
    if when == "copy under way":
        assert len(it.copies) == 1
        it.say(FRONT, drop)
        it.copied()
    assert not it.copies, "nothing leaves for nobody"
    assert len(in_target(it, ABC)) == (2 if when == "copy under way" else 0)
    assert it.core.pools[1].index.num_pinned == 0
    it.counts()


def test_layers_of_a_hand_off_that_is_over_stay_and_pin_nothing(two):
    two.say(FRONT, wire.Acquire(call_id=9, hashes=b"", handoff_id=H))
    pages = announce(two, ABC)
    assert not two.copies
    two.seal(PREFILL, pages, ABC)
    over(two, pages)
    assert two.core.pools[1].index.num_pinned == 0
    assert in_target(two, ABC) == []
    two.counts()


def test_a_copy_that_got_no_pages_was_no_reader_of_its_sources():
    """The counts went below zero, and pages of which nothing was read never went to the system."""
    it = spaces(4, pull_patience_ms=150)
    it.save(DECODE, chain(*"wxyz"))
    pages = announce(it, chain(*"abcd"))
    it.advance(150)
    assert (it.copies, it.core.counters["pulls_without_pages"]) == ({}, 1)
    assert not it.core.pools[0].memory.read_early
    it.say(PREFILL, wire.ReleaseMemory(call_id=7, num_bytes=3 * PAGE_BYTES, wait_ms=1_000))
    it.give_back(PREFILL, pages)
    it.say(PREFILL, wire.Vacated(number=1))
    assert len(it.core.pools[0].releases.freeing) == 3


@pytest.mark.parametrize("stands_still", [False, True])
def test_layers_go_into_pages_that_an_engine_can_spare_before_blocks_are_evicted_for_them(stands_still):
    it = Spaces(20, stock_share=0.25)
    it.worker(PREFILL, "cpu:0", description=LAYERED)
    it.worker(DECODE, "cpu:1", description=LAYERED, quota=16)
    it.say(DECODE, wire.Unpin(**page_lists(it.save(DECODE, chain(*"wxyz")))))
    announce(it, ABC)
    assert [asked.count for asked in answers(it, DECODE, wire.Shrink)] == [3]
    it.advance(ASK_AGAIN_MS) if stands_still else it.give_back(DECODE, it.take(DECODE, 3))
    assert (len(it.copies), len(in_target(it, chain(*"wxyz")))) == (1, 1 if stands_still else 4)
