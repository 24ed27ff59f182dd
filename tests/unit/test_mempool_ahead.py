"""Blocks that go to decode's space before their reader comes: whose pages they take, how many, and who goes first."""

import pytest

from services.mempool.core.claims import SPARE_PART
from services.mempool.core.pull import SPARE_WITHIN_MS
from shared.ids import BlockHash, HandoffId, InstanceId
from shared.wire import mempool as wire
from tests.unit.mempool_harness import chain
from tests.unit.test_mempool_spaces import DECODE, FRONT, PREFILL, Spaces, acquire, answers

NUM_PAGES, STEP = 200, 8
TARGET = InstanceId(f"i{DECODE}")


class Pair(Spaces):
    """Prefill and decode whose engines have every page that they may have, as engines in pages do."""

    def __init__(self) -> None:
        super().__init__(NUM_PAGES, kept_share=0.99)
        self.worker(PREFILL, "cpu:0", quota=NUM_PAGES)
        self.worker(DECODE, "cpu:1", quota=NUM_PAGES)
        self.client(FRONT, f"i{DECODE}")
        self.num_shrinks = 0

    def gives_back(self) -> int:
        """Decode's engine answers what it was asked for; how much that was."""
        asked = answers(self, DECODE, wire.Shrink)[self.num_shrinks :]
        self.num_shrinks += len(asked)
        count = sum(each.count for each in asked)
        if count:
            self.give_back(DECODE, self.take(DECODE, count))
        return count

    def step(
        self, handoff_id: HandoffId, hashes: list[BlockHash], first: int, *, is_last: bool = False
    ) -> None:
        """Prefill's engine has sealed the next blocks of a prompt."""
        pages = self.take(PREFILL, len(hashes[first : first + STEP]))
        self.write(PREFILL, pages)
        self.seal(PREFILL, pages, hashes, first=first)
        if is_last:
            self.ready(PREFILL, handoff_id, hashes)
            return
        cached = b"".join(hashes[first : first + STEP])
        self.say_ahead(handoff_id, 1, cached)

    def say_ahead(self, handoff_id: HandoffId, step: int, cached: bytes = b"") -> None:
        message = wire.StepLayers(
            handoff_id=handoff_id, target=TARGET, step=step, cached=cached, pages=b"", epochs=b"", hashes=b""
        )
        self.say(PREFILL, message)

    def prompt(self, name: str, num_blocks: int) -> list[BlockHash]:
        """All steps but the last, and what they have copied."""
        hashes = chain(*[(name, i) for i in range(num_blocks)])
        for first in range(0, num_blocks - STEP, STEP):
            self.step(HandoffId(name), hashes, first)
            self.gives_back()
            self.copied()
        return hashes

    @property
    def num_copying(self) -> int:
        return sum(len(copy.targets) for copy in self.copies.values())


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_every_prompt_waits_for_its_last_step_only_also_when_decodes_pages_are_all_taken(pair):
    """Pages that were free at first are cached blocks later: these make room, and engines give of their stock."""
    for name in ("p", "q", "r", "s"):
        hashes = pair.prompt(name, 5 * STEP)
        pair.step(HandoffId(name), hashes, 4 * STEP, is_last=True)
        pair.gives_back()
        assert pair.num_copying == STEP, f"{name}: under way before the reader has come"
        acquire(pair, hashes, handoff_id=HandoffId(name), wait_ms=100, until_release=True)
        assert pair.num_copying == STEP, "the reader waits for that copy, and begins no other"
        pair.copied(took_us=70)
        got = answers(pair, FRONT, wire.Acquired)[-1]
        assert got.num_blocks == got.blocks_peer == 5 * STEP, "what came ahead of the call came for it"
        assert (got.blocks_timed, got.timed_us) == (STEP, 70), "and says nothing of the link"
        pair.say(FRONT, wire.Release(lease_id=got.lease_id))
    assert pair.core.pools[1].index.num_pinned == 0
    assert not pair.core.counters["blocks_ahead_refused"]
    pair.counts()


def test_a_reader_hears_once_of_what_came_and_not_of_what_was_there(pair):
    hashes = chain(*[("p", i) for i in range(5 * STEP)])
    pair.save(DECODE, hashes[:STEP])  # and uses them: they make room for nothing
    assert pair.prompt("p", 5 * STEP) == hashes
    pair.step(HandoffId("p"), hashes, 4 * STEP, is_last=True)
    pair.gives_back()
    acquire(pair, hashes, handoff_id=HandoffId("p"), wait_ms=100)
    pair.copied()
    got = answers(pair, FRONT, wire.Acquired)[-1]
    assert (got.num_blocks, got.blocks_peer) == (5 * STEP, 4 * STEP)


def test_no_more_than_a_part_of_the_spare_pages_goes_ahead_however_many_prompts_there_are(pair):
    """Spare are free pages, cached blocks that nobody uses, and pages that engines have in stock."""
    for name in "pqrstu":
        pair.prompt(name, 3 * STEP)
    assert pair.core.pools[1].index.num_pinned == NUM_PAGES // SPARE_PART
    in_use = pair.take(DECODE, 100)
    pair.write(DECODE, in_use)
    pair.prompt("v", 2 * STEP)
    assert pair.core.pools[1].index.num_pinned == NUM_PAGES // SPARE_PART, "of fewer spare ones no more"


def test_an_engine_that_gives_nothing_back_keeps_blocks_where_they_are(pair):
    pair.take(DECODE, 0)
    hashes = chain(*range(3 * STEP))
    pair.step(HandoffId("p"), hashes, 0)
    assert not pair.copies, "two pages were free: it waits for the rest"
    pair.advance(SPARE_WITHIN_MS)
    assert pair.num_copying == 2, "and goes with those that came"
    pair.copied()
    pair.step(HandoffId("p"), hashes, STEP)
    pair.advance(SPARE_WITHIN_MS)
    assert not pair.copies
    assert not pair.core.pulls.pulls
    pair.counts()


def test_a_reader_that_needs_pages_goes_before_blocks_that_nobody_has_come_for(pair):
    other = pair.prompt("q", STEP)
    pair.step(HandoffId("q"), other, 0, is_last=True)
    pair.step(HandoffId("p"), chain(*range(2 * STEP)), 0)
    (waiting,) = pair.core.pulls.pulls.values()
    assert waiting.is_ahead
    acquire(pair, other, handoff_id=HandoffId("q"), wait_ms=100)
    (reading,) = pair.core.pulls.pulls.values()
    assert reading.readers
    assert len(reading.claim.pages) == 2, "the pages that the other one had got"
    pair.gives_back()
    pair.copied()
    assert answers(pair, FRONT, wire.Acquired)[-1].num_blocks == STEP


def test_what_came_ahead_of_a_reader_whose_wait_ran_out_waits_for_nobody_nor_does_what_its_prefill_says_late(
    pair,
):
    hashes = pair.prompt("p", 5 * STEP)
    acquire(pair, hashes, handoff_id=HandoffId("p"), wait_ms=100)
    assert not answers(pair, FRONT, wire.Acquired)
    pair.advance(100)
    (got,) = answers(pair, FRONT, wire.Acquired)
    assert got.num_blocks == got.blocks_peer == 4 * STEP
    pair.say(FRONT, wire.Release(lease_id=got.lease_id))
    pair.step(HandoffId("p"), hashes, 4 * STEP, is_last=True)
    assert not pair.copies
    status = pair.core.status()
    assert (status.num_handoffs, status.spaces[1].num_ahead, status.counters["waits_expired"]) == (0, 0, 1)
    assert pair.core.pools[1].index.num_pinned == 0
    pair.counts()


def test_the_last_steps_blocks_of_a_hand_off_that_was_given_up_wait_for_nobody(pair):
    hashes = pair.prompt("p", 3 * STEP)
    pair.step(HandoffId("p"), hashes, 2 * STEP, is_last=True)
    pair.gives_back()
    pair.say_ahead(HandoffId("p"), 0)
    pair.copied()
    assert pair.core.pools[1].index.num_pinned == 0
    pair.counts()


def test_blocks_that_nobody_has_come_for_let_a_reader_have_their_pages_when_there_are_no_others(pair):
    """The last come go first; where the engine has enough in stock none goes."""
    for name in "pqrs":
        pair.prompt(name, 2 * STEP)
    wanted = chain(*range(3 * STEP))
    pair.save(PREFILL, wanted)
    in_use = pair.take(DECODE, len(pair.granted[DECODE]) - 2 * STEP)
    pair.write(DECODE, in_use)
    acquire(pair, wanted, wait_ms=100)
    assert pair.core.counters["blocks_ahead_let_go"] == STEP
    assert pair.gives_back() == 2 * STEP
    pair.copied()
    assert answers(pair, FRONT, wire.Acquired)[-1].num_blocks == 3 * STEP
    pair.counts()


def test_the_status_says_how_many_pages_only_wait_for_their_reader(pair):
    hashes = pair.prompt("p", 3 * STEP)

    def ahead() -> int:
        pair.say(FRONT, wire.StatusCall(call_id=1))
        return answers(pair, FRONT, wire.PoolStatus)[-1].spaces[1].num_ahead

    assert ahead() == 2 * STEP
    acquire(pair, hashes[:STEP], wait_ms=0, until_release=True)
    assert ahead() == STEP, "the others are in use"
    acquire(pair, hashes, handoff_id=HandoffId("p"), wait_ms=0, until_release=True)
    assert ahead() == 0


def test_blocks_that_make_way_in_the_moment_in_which_their_own_time_is_over_end_once(pair):
    """Their copy and the one that a reader waits for came to nothing together: the mempool ended of it."""
    pair.core.pools[1].claim(2, ask=False)
    hashes = {name: chain(*[(name, i) for i in range(2 * STEP)]) for name in "pq"}
    for name in "pq":
        pair.step(HandoffId(name), hashes[name], 0)
    acquire(pair, hashes["p"][:STEP], handoff_id=HandoffId("p"), wait_ms=0)
    joined, other = pair.core.pulls.pulls.values()
    assert (len(joined.readers), other.is_ahead) == (1, True)
    pair.advance(SPARE_WITHIN_MS)
    (reading,) = pair.core.pulls.pulls.values()
    assert reading.readers, "it waits for pages of its own now"
    pair.counts()
