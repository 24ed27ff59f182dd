"""Loans against page tables: whatever is granted, replayed, renewed, reclaimed or lost, pages and sums add up.

Two producers, two consumers. Engines take free pages of the producers, blocks lie in lent pages and are copied out of
and into them for a while; time passes. At every step: each page is in one place, no loan is on pages that were not set
aside, what loans keep fits their offer, and no token below the fence took effect.
"""

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.mempool.core.loan_state import LoanState
from services.mempool.core.loans import GRACE_MS, Grant, LoanRefused, Loans, Shelf
from services.mempool.core.page_state import PageEvent
from services.mempool.core.page_table import PageTable
from shared.ids import Epoch, InstanceId, LeaseId, PageId
from shared.kv.page import PageState
from shared.wire.lending import Token
from tests.support.examples import examples

NUM_PAGES = 8
PRODUCERS, CONSUMERS = (0, 1), (10, 11)
BOOT = Epoch(1 << 32)
OFFERS = {"a": 0, "b": 1, "c": 1}  # one that was taken back is made anew under another name
TTL_MS = 1000

offers = st.sampled_from(sorted(OFFERS))
consumers = st.sampled_from(CONSUMERS)
leases = st.integers(0, 3)
kinds = st.sampled_from(["new", "new", "new", "old leader", "old mempool"])
few = st.integers(0, 5)


class LoansModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loans = Loans(BOOT)
        self.tables = {p: PageTable(NUM_PAGES, BOOT) for p in PRODUCERS}
        self.engine: dict[int, list[PageId]] = {p: [] for p in PRODUCERS}
        self.blocks: dict[tuple[int, int], list[PageId]] = {}  # by shelf: sealed there
        self.copies: dict[tuple[int, int], list[PageId]] = {}  # being written
        for p in PRODUCERS:
            for c in CONSUMERS:
                self.loans.shelves[p, c] = Shelf(100, p, c, PageTable(NUM_PAGES, BOOT))
                self.blocks[p, c], self.copies[p, c] = [], []
        self.now_ms = 0
        self.made = 0
        self.names: dict[str, str] = {}
        self.highest = Token(1, 0)
        self.granted: dict[int, Grant] = {}
        self.due: dict[LeaseId, int] = {}  # when all of its pages must be back, copies apart
        self.orders: list[tuple[str, int, int]] = []  # (offer, keep, deadline)

    # -- producers --------------------------------------------------------------------------------

    @initialize()
    def offers_are_there(self) -> None:
        for offer in OFFERS:
            self.offered(offer, 4)

    @rule(offer=offers, count=st.integers(2, 5))
    def offered(self, offer: str, count: int) -> None:
        if offer in self.names and self.names[offer] not in self.loans.offers:
            with pytest.raises(LoanRefused):
                self.loans.know(self.names[offer], OFFERS[offer], count, self.tables[OFFERS[offer]])
        if self.names.get(offer) not in self.loans.offers:
            self.names[offer] = f"{offer}{len(self.names)}-{self.now_ms}-{self.made}"
            self.made += 1
        producer = OFFERS[offer]
        self.loans.know(self.names[offer], producer, count, self.tables[producer])
        self.found(offer, True)

    @rule(offer=offers, patient=st.booleans())
    def found(self, offer: str, patient: bool) -> None:
        """Free pages are set aside, as many as there are."""
        known = self.loans.offers.get(self.names[offer])
        if known is None:
            return
        table = self.tables[known.producer]
        pages = table.take_many(self.loans.lacking(known), PageEvent.LEND)
        self.loans.set_aside(known, pages)
        if not patient:
            self.loans.settle_for(known)
            assert len(known.aside) + self.loans.lent(known) >= known.limit

    @rule(asked=st.sets(offers), told=st.sets(offers))
    def coordinator_answered(self, asked: set[str], told: set[str]) -> None:
        """It asks for some offers still; those that it was told are worth nothing, and nobody asks for, are over."""
        names, of_report = ({self.names[offer] for offer in some} for some in (asked, told))
        before = dict(self.loans.offers)
        for name, offer in before.items():
            offer.is_told = name in of_report and not offer.limit
        self.loans.forget_idle(names)
        for name, offer in before.items():
            is_idle = not offer.limit and not self.loans.lent(offer)
            assert (name in self.loans.offers) == (name in names or name not in of_report or not is_idle)

    @rule(producer=st.sampled_from(PRODUCERS), count=few)
    def engine_takes(self, producer: int, count: int) -> None:
        self.engine[producer] += self.tables[producer].grant_many(count)[0]

    @rule(producer=st.sampled_from(PRODUCERS))
    def engine_gives(self, producer: int) -> None:
        for page in self.engine[producer]:
            self.tables[producer].free(page, PageEvent.GIVE_BACK)
        self.engine[producer] = []

    @rule(offer=offers, keep=few, patience_ms=st.sampled_from([0, 100, 700]))
    def reclaimed(self, offer: str, keep: int, patience_ms: int) -> None:
        name = self.names[offer]
        self.loans.reclaim(name, keep, self.now_ms + patience_ms, self.now_ms)
        kept = sum(x.keep for x in self.loans.loans.values() if x.offer.offer_id == name)
        assert kept <= keep
        self.orders.append((name, keep, self.now_ms + patience_ms))

    # -- consumers --------------------------------------------------------------------------------

    @rule(offer=offers, consumer=consumers, slot=leases, count=st.integers(0, 4), kind=kinds)
    def granted_one(self, offer: str, consumer: int, slot: int, count: int, kind: str) -> None:
        """A new grant under a new token, or one of an old leader that comes late."""
        self.highest = Token(self.highest.term, self.highest.number + 1)
        token = Token(0, self.highest.number) if kind == "old leader" else self.highest
        boot = Epoch(BOOT - 1) if kind == "old mempool" else BOOT
        lease_id = LeaseId(f"l{slot}-{self.highest.term}-{self.highest.number}")
        grant = Grant(
            lease_id, self.names[offer], InstanceId(f"i{consumer}"), consumer, count, token, boot, TTL_MS
        )
        self.granted[slot] = grant
        self.take(grant)

    @rule(slot=leases)
    def granted_again(self, slot: int) -> None:
        """The network repeats it, however late."""
        if slot in self.granted:
            self.take(self.granted[slot])

    def take(self, grant: Grant) -> None:
        known = self.loans.offers.get(grant.offer_id)
        held = grant.lease_id in self.loans.loans
        aside = len(known.aside) if known is not None else 0
        try:
            loan = self.loans.take(grant, self.now_ms)
        except LoanRefused:
            assert known is None or len(known.aside) == aside
            return
        assert grant.boot_generation == BOOT
        if held:
            assert known is not None
            assert len(known.aside) == aside
            return
        assert grant.token >= self.loans.fence
        assert loan.num_pages == grant.num_pages <= aside
        assert grant.lease_id not in self.due, "a loan that ended came back to life"
        self.due[grant.lease_id] = self.now_ms + TTL_MS + GRACE_MS

    @rule(slot=leases, new_leader=st.booleans())
    def fenced(self, slot: int, new_leader: bool) -> None:
        before = self.loans.fence
        if new_leader:
            self.highest = Token(self.highest.term + 1, 0)
        elif slot not in self.granted:
            return
        self.loans.raise_fence(self.highest if new_leader else self.granted[slot].token)
        assert self.loans.fence >= before

    @rule(slot=leases)
    def renewed(self, slot: int) -> None:
        if slot in self.granted:
            lease_id = self.granted[slot].lease_id
            if self.loans.renew(lease_id, TTL_MS, self.now_ms):
                self.due[lease_id] = max(self.due[lease_id], self.now_ms + TTL_MS + GRACE_MS)

    @rule(slot=leases)
    def released(self, slot: int) -> None:
        if slot in self.granted and self.loans.release(self.granted[slot].lease_id, self.now_ms):
            lease_id = self.granted[slot].lease_id
            self.due[lease_id] = min(self.due[lease_id], self.now_ms + GRACE_MS)

    @rule(consumer=consumers)
    def consumer_died(self, consumer: int) -> None:
        self.loans.consumer_dead(consumer, self.now_ms)
        for loan in self.loans.loans.values():
            if loan.space == consumer:
                assert not loan.keep
                assert loan.deadline_ms <= self.now_ms + GRACE_MS

    # -- blocks -----------------------------------------------------------------------------------

    @rule(producer=st.sampled_from(PRODUCERS), consumer=consumers, count=few)
    def copy_begins(self, producer: int, consumer: int, count: int) -> None:
        shelf = self.loans.shelves[producer, consumer]
        if not self.loans.wanted_back(shelf):
            pages, _ = shelf.table.grant_many(count)
            shelf.table.apply_all(pages, PageEvent.WRITE)
            self.copies[producer, consumer] += pages

    @rule(producer=st.sampled_from(PRODUCERS), consumer=consumers)
    def copies_end(self, producer: int, consumer: int) -> None:
        key = producer, consumer
        self.loans.shelves[key].table.apply_all(self.copies[key], PageEvent.SEAL)
        self.blocks[key] += self.copies[key]
        self.copies[key] = []

    @rule(producer=st.sampled_from(PRODUCERS), consumer=consumers, count=few)
    def blocks_leave(self, producer: int, consumer: int, count: int) -> None:
        key = producer, consumer
        gone, self.blocks[key] = self.blocks[key][:count], self.blocks[key][count:]
        for page in gone:
            self.loans.shelves[key].table.free(page, PageEvent.RETIRE)

    # -- time -------------------------------------------------------------------------------------

    @rule(by_ms=st.sampled_from([1, 99, 400, 1500]))
    def time_passes(self, by_ms: int) -> None:
        self.now_ms += by_ms
        self.loans.tick(self.now_ms)
        for key, shelf in self.loans.shelves.items():
            count = self.loans.wanted_back(shelf, dropping=True)
            for page in self.blocks[key][:count]:  # what the caller does with blocks past their deadline
                shelf.table.free(page, PageEvent.RETIRE)
            del self.blocks[key][:count]
            self.loans.collect(shelf)
        for loan in self.loans.loans.values():
            key = loan.offer.producer, loan.space
            if self.now_ms >= self.due[loan.lease_id] and not self.copies[key]:
                raise AssertionError(f"{loan} is late, and nothing is being copied")
        if not any(self.copies.values()):
            for name, keep, deadline_ms in self.orders:
                if self.now_ms >= deadline_ms and (offer := self.loans.offers.get(name)) is not None:
                    assert self.loans.lent(offer) <= keep, "an order is late, and nothing is being copied"

    @rule(producer=st.sampled_from(PRODUCERS), consumer=consumers)
    def collected(self, producer: int, consumer: int) -> None:
        self.loans.collect(self.loans.shelves[producer, consumer])

    # -- always -----------------------------------------------------------------------------------

    @invariant()
    def pages_are_in_one_place_and_add_up(self) -> None:
        for producer, table in self.tables.items():
            assert sum(table.counts) == NUM_PAGES
            aside = [
                p for offer in self.loans.offers.values() if offer.producer == producer for p in offer.aside
            ]
            lent = [p for c in CONSUMERS for p in self.loans.shelves[producer, c].lent]
            places = [*aside, *lent, *self.engine[producer]]
            assert len(set(places)) == len(places), "a page is in two places"
            assert len(places) + table.num_free == NUM_PAGES
            assert all(table.states[p] == PageState.LEASED for p in [*aside, *lent])
            assert table.counts[PageState.LEASED] == len(aside) + len(lent)

    @invariant()
    def loans_are_on_pages_that_were_set_aside_and_fit_their_offers(self) -> None:
        for offer in self.loans.offers.values():
            mine = [x for x in self.loans.loans.values() if x.offer is offer]
            assert sum(x.keep for x in mine) <= offer.limit
            held = sum(x.num_pages for x in mine)
            assert held + len(offer.aside) <= max(offer.limit, held)
        for (producer, consumer), shelf in self.loans.shelves.items():
            mine = [
                x for x in self.loans.loans.values() if (x.offer.producer, x.space) == (producer, consumer)
            ]
            assert sum(x.num_pages for x in mine) == len(shelf.lent)

    @invariant()
    def what_is_not_on_loan_holds_nothing(self) -> None:
        for shelf in self.loans.shelves.values():
            assert sum(shelf.table.counts) == NUM_PAGES
            for page in range(NUM_PAGES):
                state = shelf.table.states[page]
                assert (state == PageState.WITHDRAWN) == (page not in shelf.lent), (page, state)

    @invariant()
    def every_loan_is_in_a_state_that_fits_its_numbers(self) -> None:
        for loan in self.loans.loans.values():
            assert 0 <= loan.keep <= loan.num_pages
            assert loan.num_pages > 0
            assert (loan.state is LoanState.HELD) == (loan.keep == loan.num_pages), loan
            assert (loan.state is LoanState.HELD) == (not loan.steps), loan
            assert all(loan.keep <= keep < loan.num_pages for keep, _ in loan.steps), loan


TestLoansModel = LoansModel.TestCase
TestLoansModel.settings = settings(
    max_examples=examples(80),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
