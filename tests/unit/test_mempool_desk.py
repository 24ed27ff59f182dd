"""A mempool that asks the market by itself: engines report load, and memory goes to who lacks some and comes home."""

from itertools import pairwise
from typing import Any

from services.mempool.core.actions import CopyPages, Send
from services.mempool.core.wishes import Answer, Wish
from shared.ids import Epoch, InstanceId, LeaseId
from shared.lending.budget import AUTO_SHARE
from shared.lending.rules import GB, EngineProfile, LendingRules
from shared.wire import lending as market
from shared.wire import mempool as wire
from shared.wire.mempool_lending import MemoryShares, ReportLoad
from tests.unit.mempool_harness import BOOT, PAGE_BYTES
from tests.unit.test_mempool_lending import ABCD, LENDER, SELLER, WXYZ, Market
from tests.unit.test_mempool_spaces import FRONT, PREFILL

NAME = InstanceId("m")
CONSUMER = EngineProfile(
    format="quire-profile/1",
    model="c",
    tp=1,
    role="consumer",
    bytes_per_gpu=-8 * PAGE_BYTES,
    stable_rate_per_s=1.0,
)
RULES = LendingRules(
    threshold_bytes=2 * PAGE_BYTES, reserve_share=0.25, steady_ms=1_000, hold_ms=5_000, window_ms=1_000, peak_ms=1_000,
    silent_ms=600, reclaim_deadline_ms=200, ask_bytes=3 * PAGE_BYTES, idle_ms=10_000, pause_ms=500, ttl_ms=2_000,
)  # fmt: skip
STEP_MS = 100


class Rig(Market):
    """Two engines whose fronts report load; the test answers for the coordinator."""

    def __init__(self, rules: LendingRules = RULES, profiles: dict | None = None, **options: Any) -> None:
        self.told: dict[int, MemoryShares] = {}
        super().__init__(**options)
        self.desk = self.core.open_desk(rules, {"c": CONSUMER} | (profiles or {}), NAME, STEP_MS)
        self.load = {
            SELLER: ReportLoad(instance_epoch=Epoch(1)),
            FRONT: ReportLoad(instance_epoch=Epoch(1), model="c"),
        }
        self.wishes: list[Wish] = []  # not answered yet
        self.said: list[Wish] = []
        self.offers: dict[str, market.Offer] = {}

    def step(self, times: int = 1, *, replies: bool = True) -> None:
        """The fronts report, the desk decides, engines give back what they are asked for, copies end."""
        for _ in range(times):
            self.advance(STEP_MS)
            for connection, message in self.load.items():
                self.say(connection, message)
            wishes, actions = self.core.decide_market(self.now_ms)
            self.run(actions)
            self.wishes += wishes
            self.said += wishes
            if replies:
                self.reply()
            self.give(LENDER)
            self.give(PREFILL)
            self.copied()
            self.counts()

    def give(self, engine: int) -> None:
        shrinks = [m for m in self.sent[engine] if isinstance(m, wire.Shrink) and not m.cached]
        asked = sum(m.count for m in shrinks)
        self.sent[engine] = [m for m in self.sent[engine] if m not in shrinks]
        if asked:
            self.give_back(engine, self.take(engine, min(asked, len(self.granted[engine]))))

    def reply(self) -> None:
        wishes, self.wishes = self.wishes, []
        for wish in wishes:
            self.run(self.core.on_wish_answered(wish, self.coordinator(wish), self.now_ms))

    def coordinator(self, wish: Wish) -> Answer:
        body = wish.body
        if isinstance(body, market.OfferMemory):
            offer = market.Offer(
                offer_id=f"o-{wish.key}", producer=body.producer, producer_epoch=body.producer_epoch,
                mempool=body.mempool, boot_generation=body.boot_generation, space=body.space,
                length_bytes=body.length_bytes, key=wish.key,
            )  # fmt: skip
            self.offers[offer.offer_id] = offer
            return market.OfferView(offer=offer, state="proposed", limit_bytes=0, leased_bytes=0)
        if isinstance(body, market.AskLease):
            return self.lease(wish.key, body)
        self.offers.pop(body.offer_id, None)
        return market.ReclaimOrder(
            reclaim_id="r", offer_id=body.offer_id, keep_bytes=0, deadline_ms=body.deadline_ms
        )

    def lease(self, key: str, body: market.AskLease) -> market.Grant | market.LendingRefused:
        spaces = {ref.space for ref in body.spaces}
        for offer in self.offers.values():
            known = self.core.lending.loans.offers.get(offer.offer_id)
            room = len(known.aside) * PAGE_BYTES if known is not None else 0
            if offer.space in spaces and room >= body.min_bytes:
                self.tokens += 1
                return market.Grant(
                    lease_id=LeaseId(f"l{self.tokens}"), offer_id=offer.offer_id, consumer=body.consumer,
                    purpose=body.purpose, mempool=NAME, address="", boot_generation=BOOT, space=offer.space,
                    length_bytes=min(room, body.length_bytes), token=market.Token(1, self.tokens),
                    present_ms=1_000, ttl_ms=body.ttl_ms, consumer_ttl_ms=body.ttl_ms // 2, key=key,
                )  # fmt: skip
        return market.LendingRefused(code="offers.exhausted", message="", retry_after_ms=300)

    def _sent(self, action: Send) -> None:
        if isinstance(action.message, MemoryShares):
            self.told[action.connection] = action.message
        super()._sent(action)

    def overflow(self) -> None:
        """More blocks than the consumer's space holds."""
        for hashes, names in ((ABCD, "abcd"), (WXYZ, "wxyz")):
            if self.read(hashes) != names:
                self.leave(hashes, names)
            self.step()

    def lend_all(self) -> None:
        """Offered, asked for and taken: the offer's pages are on loan."""
        self.step(12)
        for _ in range(20):
            self.overflow()
            if self.core.lending.loans.loans:
                return
        raise AssertionError("nothing was borrowed")


def test_an_idle_engine_lends_to_one_that_overflows_and_has_everything_back_when_its_queue_grows():
    rig = Rig()
    rig.step(12)
    assert rig.leased() == 6, "all but the reserve"
    assert rig.told[SELLER] == MemoryShares(total_bytes=8 * PAGE_BYTES, offered_bytes=6 * PAGE_BYTES)
    rig.lend_all()
    assert rig.told[SELLER].lent_bytes == rig.told[FRONT].borrowed_bytes > 0
    for _ in range(4):
        rig.overflow()
    assert rig.counters()["peer_blocks_out"] > 0
    assert rig.counters()["blocks_pulled_from_peer"] > 0, "rather than from host memory, which has them too"
    rig.load[SELLER] = ReportLoad(instance_epoch=Epoch(1), num_waiting=9)
    rig.step(1)
    assert any(word.event == "memory_taken_back" for word in rig.desk.words)
    rig.step(RULES.reclaim_deadline_ms // STEP_MS)
    assert rig.leased() == 0
    assert rig.told[SELLER] == MemoryShares(total_bytes=8 * PAGE_BYTES)
    assert not rig.core.lending.loans.loans
    assert (rig.read(ABCD), rig.read(WXYZ)) == ("abcd", "wxyz"), "host memory has what was lent"
    assert not rig.offers, "the coordinator heard of it"


def test_of_two_idle_engines_that_both_offer_the_one_whose_blocks_come_back_withdraws_and_borrows():
    rig = Rig()
    rig.load[FRONT] = ReportLoad(instance_epoch=Epoch(1))  # no profile says who it is
    rig.overflow()
    rig.step(12)
    offering = {offer.producer for offer in rig.core.lending.loans.offers.values()}
    assert offering == {0, rig.producer}
    for hashes, names in ((ABCD, "abcd"), (WXYZ, "wxyz")) * 10:
        assert names.startswith(rig.read(hashes))
        rig.step()
        if rig.core.lending.loans.loans:
            break
    (loan,) = rig.core.lending.loans.loans.values()
    assert (loan.offer.producer, loan.space) == (rig.producer, 0)
    assert {offer.producer for offer in rig.core.lending.loans.offers.values()} == {rig.producer}


def test_a_space_whose_offer_is_worth_nothing_borrows_like_any_other():
    rig = Rig()
    rig.load[FRONT] = ReportLoad(instance_epoch=Epoch(1))  # no profile says who it is
    rig.overflow()
    rig.step(12)
    loans = rig.core.lending.loans
    (mine,) = [offer for offer in loans.offers.values() if offer.producer == 0]
    mine.limit = 0
    loans.set_aside(mine, [])  # as if its engine had given nothing
    for hashes, names in ((ABCD, "abcd"), (WXYZ, "wxyz")) * 10:
        assert names.startswith(rig.read(hashes))
        rig.step()
        if loans.loans:
            break
    (loan,) = loans.loans.values()
    assert (loan.offer.producer, loan.space) == (rig.producer, 0)


def test_memory_comes_home_without_a_coordinator():
    rig = Rig()
    rig.lend_all()
    rig.load[SELLER] = ReportLoad(instance_epoch=Epoch(1), num_waiting=9)
    rig.step(1 + RULES.reclaim_deadline_ms // STEP_MS, replies=False)
    assert rig.leased() == 0


def test_an_engine_that_falls_silent_gets_its_memory_back():
    rig = Rig()
    rig.step(12)
    assert rig.leased()
    del rig.load[SELLER]
    rig.step(2 + RULES.silent_ms // STEP_MS * 2)
    assert rig.leased() == 0


def test_a_mempool_that_stood_still_takes_nothing_back_for_what_it_has_not_read_yet():
    rig = Rig()
    rig.step(12)
    lent = rig.leased()
    assert lent
    rig.advance(10 * RULES.silent_ms)
    rig.desk.excuse(10 * RULES.silent_ms - STEP_MS, rig.now_ms)
    rig.core.decide_market(rig.now_ms)
    rig.step(5)
    assert rig.leased() == lent
    del rig.load[SELLER]
    for _ in range(1 + 2 * RULES.silent_ms // STEP_MS):  # always late: the interval itself counts
        rig.advance(1_000)
        rig.desk.excuse(1_000, rig.now_ms)
        rig.step()
    assert rig.leased() == 0


def test_nothing_is_offered_for_an_engine_whose_neighbour_in_the_space_reports_nothing():
    rig = Rig()
    rig.worker(30, "cpu:1")
    rig.step(30)
    assert rig.leased() == 0


def test_an_offer_that_nobody_wants_any_more_when_the_coordinator_answers_is_taken_back_at_once():
    rig = Rig()
    while not rig.wishes:
        rig.step(replies=False)
    rig.load[SELLER] = ReportLoad(instance_epoch=Epoch(1), num_waiting=9)
    rig.step(replies=False)
    rig.reply()
    assert rig.leased() == 0
    assert not rig.core.lending.loans.offers
    rig.step()
    assert not rig.offers, "the coordinator was told"


def test_offers_and_loans_of_others_are_left_alone():
    rig = Rig()
    grant = rig.lend(3)
    rig.load[SELLER] = ReportLoad(instance_epoch=Epoch(1), num_waiting=9)
    rig.step(30)
    assert rig.leased() == 3
    assert grant.lease_id in rig.core.lending.loans.loans


def test_a_loan_is_renewed_while_it_is_used_and_returned_when_it_is_idle():
    rig = Rig()
    rig.lend_all()
    (lease_id,) = rig.core.lending.loans.loans
    rig.step(2 * RULES.ttl_ms // STEP_MS)
    assert lease_id in rig.core.lending.loans.loans
    rig.step(RULES.idle_ms // STEP_MS)
    assert lease_id not in rig.core.lending.loans.loans
    assert any(word.event == "memory_returned" for word in rig.desk.words)


def test_a_consumer_that_is_silent_keeps_nothing_beyond_its_time_to_live():
    rig = Rig()
    rig.lend_all()
    del rig.load[FRONT]
    rig.step((RULES.silent_ms + RULES.ttl_ms + 1_000) // STEP_MS)
    assert not rig.core.lending.loans.loans


def test_who_is_no_producer_by_its_profile_lends_nothing():
    profile = EngineProfile(
        format="quire-profile/1", model="x", tp=1, role="neutral", bytes_per_gpu=0, stable_rate_per_s=1.0
    )
    rig = Rig(profiles={"x": profile})
    rig.load[SELLER] = ReportLoad(instance_epoch=Epoch(1), model="x")
    rig.step(30)
    assert rig.leased() == 0


def test_after_refusals_it_is_asked_again_later_and_nobody_is_asked_twice_at_once():
    rig = Rig()
    rig.load.pop(SELLER)  # nobody lends
    asked_at = []
    for _ in range(30):
        for hashes, names in ((ABCD, "abcd"), (WXYZ, "wxyz")):
            if rig.read(hashes) != names:
                rig.leave(hashes, names)
        rig.step(replies=False)
        asked_at += [rig.now_ms for wish in rig.wishes if isinstance(wish.body, market.AskLease)]
        rig.reply()
    assert len(asked_at) > 1
    gaps = [later - earlier for earlier, later in pairwise(asked_at)]
    assert all(gap >= RULES.pause_ms for gap in gaps)


def test_nobody_is_asked_where_no_other_space_could_lend():
    rig = Rig()
    rig.core.pools.pop(rig.producer)
    rig.load.pop(SELLER)
    for _ in range(10):
        rig.overflow()
    back = rig.core.lending.num_back(0)
    assert back is not None
    assert back * PAGE_BYTES > RULES.ask_bytes
    assert not rig.said


class Slow(Rig):
    """Notes when copies of lent pages begin."""

    def __init__(self, pages_per_s: int) -> None:
        self.begun: list[tuple[int, int]] = []
        super().__init__(LendingRules(**RULES_OF | {"budget_bytes_per_s": pages_per_s * PAGE_BYTES}))

    def run(self, actions: list) -> None:
        for action in actions:
            if isinstance(action, CopyPages) and getattr(self, "producer", -1) in (
                action.space, *(space for space, _ in action.sources)
            ):  # fmt: skip
                self.begun.append((self.now_ms, len(action.sources)))
        super().run(actions)


RULES_OF = {name: getattr(RULES, name) for name in LendingRules.__dataclass_fields__}


def test_no_more_pages_of_a_producer_are_copied_than_its_budget_lets_through():
    rate = 10
    rig = Slow(rate)
    rig.lend_all()
    for _ in range(30):
        rig.overflow()
    lent_bytes, began_ms = rig.told[SELLER].lent_bytes, rig.now_ms
    assert lent_bytes
    rig.load[SELLER] = ReportLoad(instance_epoch=Epoch(1), num_waiting=9)
    while rig.leased():
        rig.step()
    deadline_ms = lent_bytes * 1_000 // (rate * PAGE_BYTES) + RULES.reclaim_deadline_ms
    assert rig.now_ms - began_ms <= deadline_ms + 2 * STEP_MS, (
        "bytes/bandwidth, and a step to hear and one to end"
    )
    assert len(rig.begun) > 4
    for first in range(len(rig.begun)):
        for last in range(first, len(rig.begun)):
            part = rig.begun[first : last + 1]
            seconds = (part[-1][0] - part[0][0]) / 1_000
            burst = rate / 10
            assert sum(n for _, n in part) <= seconds * rate + burst + max(n for _, n in part) + 1e-9
    assert rig.read(ABCD) in ("abcd", "abc", "ab", "a", "")


def test_what_the_mover_measured_becomes_the_producers_budget_and_the_deadline_of_a_reclaim():
    rig = Rig()
    memory = rig.core.pools[rig.producer].memory
    assert memory is not None
    memory.devices = {0: "cuda:a"}
    slow = 10 * PAGE_BYTES  # bytes per second
    rig.core.learn_rates({("cuda:a", "cuda:b"): slow / GB / AUTO_SHARE})
    rig.lend_all()
    copies = rig.core.lending.copies
    budget = copies.limit_of(rig.producer)
    assert abs(budget - slow) <= 1
    assert copies.limit_of(0) == 0
    lent_bytes = rig.told[SELLER].lent_bytes
    rig.load[SELLER] = ReportLoad(instance_epoch=Epoch(1), num_waiting=9)
    rig.step()
    taken = [wish.body for wish in rig.said if isinstance(wish.body, market.AskReclaim)]
    assert taken[0].deadline_ms == -(-lent_bytes * 1_000 // budget) + RULES.reclaim_deadline_ms
    assert [word.event for word in rig.desk.words].count("lending_budget") == 1


def test_who_lends_host_memory_has_no_budget_and_that_is_said_once():
    rig = Rig()
    rig.lend_all()
    rig.step(5)
    assert rig.core.lending.copies.limit_of(rig.producer) == 0
    events = [word.event for word in rig.desk.words]
    assert events.count("lending_without_budget") == 1
    assert "lending_budget" not in events
