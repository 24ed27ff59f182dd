"""A prompt longer than its engine's memory: what is read in host memory is borrowed for, by nobody's order."""

from typing import Any

from services.mempool.core.far_pace import BASE_PAUSE_MS
from shared.ids import Epoch
from shared.lending.rules import LendingRules
from shared.wire.lending import AskLease
from shared.wire.mempool_far import NO_PLACE
from shared.wire.mempool_lending import ReportLoad
from tests.unit.mempool_harness import PAGE_BYTES
from tests.unit.test_mempool_desk import RULES, RULES_OF, STEP_MS, Rig
from tests.unit.test_mempool_far import FarMarket
from tests.unit.test_mempool_lending import ABCD, SELLER, WXYZ
from tests.unit.test_mempool_spaces import FRONT, PREFILL

IDLE, BUSY = ReportLoad(instance_epoch=Epoch(1)), ReportLoad(instance_epoch=Epoch(1), num_waiting=9)


class FarRig(Rig, FarMarket):
    """The consumer's engine reads a prompt of four blocks outside its memory."""

    def __init__(self, rules: LendingRules = RULES, **options: Any) -> None:
        self.far: list[int] = []  # places, by position in the prompt
        super().__init__(rules, **options)

    def read_far(self) -> None:
        """It begins: nothing is lent, so that host memory has it."""
        self.far = self.out(1, ABCD, "abcd")
        assert self.num_in_dram() == 4

    def step(self, times: int = 1, *, replies: bool = True) -> None:
        """And the engine reads every block where it is now, each time."""
        for _ in range(times):
            super().step(replies=replies)
            moved = dict(self.moved())
            self.sent[PREFILL] = []
            self.far = [moved.get(place, place) for place in self.far]
            self.drop(*moved)
            assert self.seen(self.far) == "abcd"[: len(self.far)]

    def num_in_dram(self) -> int:
        return sum(self.core.pools[self.maps[place][0]].is_dram for place in self.far)

    def asks(self) -> list[AskLease]:
        return [wish.body for wish in self.said if isinstance(wish.body, AskLease)]


def test_a_prompt_that_is_read_in_host_memory_borrows_what_it_lacks_and_moves_there():
    rig = FarRig()
    rig.step(12)
    rig.read_far()
    rig.step(8)
    assert rig.num_in_dram() == 0
    assert rig.told[FRONT].borrowed_bytes == 4 * PAGE_BYTES
    assert len(rig.asks()) == 1, "what the loan has room for is not asked for again"


def test_what_waits_for_the_lenders_budget_is_not_asked_for_again():
    rig = FarRig(LendingRules(**RULES_OF | {"budget_bytes_per_s": PAGE_BYTES}))
    rig.step(12)
    rig.read_far()
    rig.step(8)
    assert 0 < rig.num_in_dram() < 4
    rig.step(40)
    assert rig.num_in_dram() == 0
    assert len(rig.asks()) == 1


def test_a_loan_is_kept_while_a_prompt_is_read_there_although_nothing_moves_and_returned_after():
    rig = FarRig()
    rig.step(12)
    rig.read_far()
    rig.step(8)
    (lease_id,) = rig.core.lending.loans.loans
    rig.step(2 * RULES.idle_ms // STEP_MS)
    assert set(rig.core.lending.loans.loans) == {lease_id}
    assert rig.num_in_dram() == 0
    rig.drop(*rig.far)
    rig.far = []
    rig.step(RULES.idle_ms // STEP_MS + 1)
    assert not rig.core.lending.loans.loans


def test_a_lender_that_takes_its_memory_back_is_borrowed_from_again_when_it_is_idle():
    rig = FarRig()
    rig.step(12)
    rig.read_far()
    rig.step(8)
    rig.load[SELLER] = BUSY
    rig.step(1 + RULES.reclaim_deadline_ms // STEP_MS)
    assert rig.leased() == 0
    assert rig.num_in_dram() == 4
    rig.load[SELLER] = IDLE
    rig.step((RULES.window_ms + RULES.hold_ms + RULES.steady_ms + 2 * BASE_PAUSE_MS) // STEP_MS)
    assert rig.num_in_dram() == 0
    assert not rig.counters().get("far_engines_killed")


def test_less_than_it_asks_for_at_least_is_read_in_host_memory_and_nobody_is_asked():
    rig = FarRig()
    rig.step(12)
    rig.far = rig.out(1, ABCD[:2], "ab")
    assert RULES.ask_bytes > 2 * PAGE_BYTES
    rig.step(20)
    assert not rig.asks()


def test_one_block_that_finds_no_room_is_need_enough_and_goes_there_when_it_is_tried_again():
    rig = FarRig(dram_pages=1)
    rig.step(12)
    rig.far = rig.out(1, ABCD[:1], "a")
    assert rig.out(2, ABCD[1:2], "b") == [NO_PLACE]
    assert RULES.ask_bytes > 2 * PAGE_BYTES
    rig.step(2)
    (ask,) = rig.asks()
    assert ask.length_bytes == RULES.ask_bytes
    assert NO_PLACE not in rig.out(3, WXYZ[:3], "wxy")
    rig.step(20)
    assert len(rig.asks()) == 1, "an old refusal is no need"


def test_a_refusal_for_lack_of_places_is_no_need_for_memory():
    rig = FarRig(places=2)
    rig.step(12)
    assert rig.out(1, ABCD[:3], "abc")[2] == NO_PLACE
    rig.step(20)
    assert not rig.asks()


def test_a_space_whose_own_prompt_is_read_in_host_memory_takes_back_what_it_lends_and_borrows():
    rig = FarRig()
    rig.load[FRONT] = IDLE  # no profile says who it is
    rig.load[SELLER] = BUSY  # and the other lends nothing yet
    rig.step(12)
    assert {offer.producer for offer in rig.core.lending.loans.offers.values()} == {0}
    pages = rig.granted[PREFILL]
    assert len(pages) < 4, "too few for the prompt"
    rig.far = rig.out(1, ABCD[:2], "ab") + rig.out(2, ABCD[2:], "cd")
    rig.step(1 + RULES.reclaim_deadline_ms // STEP_MS)
    assert not rig.core.lending.loans.offers
    rig.load[SELLER] = IDLE
    rig.step(40)
    assert rig.num_in_dram() == 0


def test_who_cannot_be_read_in_place_is_not_asked_for_a_prompts_blocks():
    rig = FarRig()
    rig.step(12)
    memory = rig.core.pools[rig.producer].memory
    assert memory is not None
    memory.pages_per_slab = 1  # as on a GPU, which an engine in host memory cannot map
    rig.read_far()
    rig.step(20)
    assert not rig.asks()
    for _ in range(10):
        rig.overflow()
    assert rig.asks(), "for blocks that come back it is"


def test_whose_longest_prompt_is_longer_than_its_memory_lends_if_it_can_read_that_elsewhere():
    rig = FarRig()
    rig.load[FRONT] = IDLE  # no profile says who it is
    for number in (0, rig.producer):
        memory = rig.core.pools[number].memory
        assert memory is not None
        (engine,) = memory.engines.attached.values()
        engine.least = 24
        assert engine.quota == 8
    rig.step(12)
    (offer,) = rig.core.lending.loans.offers.values()
    assert (offer.producer, offer.limit) == (0, 4), "the other could not run that prompt, nor lends"
