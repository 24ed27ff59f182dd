"""Loans among the spaces of test_mempool_spaces_model.py, with host memory behind them: bytes are right at every step.

Offers, grants, renewals, releases and reclaims come at any moment, with deadlines of nothing to long, while copies end
late, fail, and write on after failing, and while engines die and come back.
"""

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant, precondition, rule

from shared.ids import BlockHash, Epoch, InstanceId, LeaseId, SpaceId
from shared.kv.page import PageState
from shared.wire import lending as market
from shared.wire import mempool_lending as calls
from tests.property.test_mempool_spaces_model import NUM_PAGES, SpacesModel, workers
from tests.support.examples import examples
from tests.unit.mempool_harness import BOOT, PAGE_BYTES, chain
from tests.unit.test_mempool_spaces import Spaces

few = st.integers(1, 3)


def own_prompt(slot: int, name: int) -> list[BlockHash]:
    return chain(f"own {slot} {name}", "b", "c")


class LendingModel(SpacesModel):
    def __init__(self) -> None:
        super().__init__()
        self.spaces = Spaces(
            NUM_PAGES, kept_share=0.99, pull_patience_ms=100, dram_bytes=4 * PAGE_BYTES, dram_for_host=True,
            portion_bytes=self.portion_bytes,
        )  # fmt: skip
        self.offers: list[tuple[str, int]] = []  # and the producer's slot
        self.tokens = 0

    # -- blocks that leave ------------------------------------------------------------------------

    @rule(slot=workers, name=few, keep=st.integers(0, 1))
    def press(self, slot: int, name: int, keep: int) -> None:
        """An engine computes what nobody else has, and uses most of it no more."""
        self.compute(slot, own_prompt(slot, name), handoff=False)
        self.unpin(slot, max(0, len(self.workers[slot].pinned) - keep))

    @rule(slot=workers, whose=workers, name=few)
    def read_back(self, slot: int, whose: int, name: int) -> None:
        self.acquire(slot, own_prompt(whose, name), wait=False, kept=False)

    @precondition(lambda self: any(s.lent for s in self.spaces.core.lending.loans.shelves.values()))
    @rule(slot=workers)
    def read_all_of_its_own(self, slot: int) -> None:
        """Perhaps from lent pages."""
        self.all_copies_end_well()
        self.give_back(slot, 4)
        for name in (1, 2, 3):
            self.read_back(slot, slot, name)
            self.give_back(slot, 4)

    @precondition(lambda self: self.spaces.copies)
    @rule()
    def all_copies_end_well(self) -> None:
        while self.spaces.copies:
            self.end_copy(0, False, 0)

    # -- the market -------------------------------------------------------------------------------

    @rule(slot=workers, count=few)
    def offer(self, slot: int, count: int) -> None:
        worker = self.workers[slot]
        self.tokens += 1
        name = f"o{self.tokens}"
        offer = market.Offer(
            offer_id=name, producer=InstanceId(worker.name), producer_epoch=Epoch(1), mempool=InstanceId("m"),
            boot_generation=BOOT, space=SpaceId(self.space(worker)), length_bytes=count * PAGE_BYTES,
        )  # fmt: skip
        self.spaces.say(worker.front, calls.PresentOffer(call_id=1, offer=offer))
        self.offers.append((name, slot))
        self.give_back(slot, count)

    @precondition(lambda self: self.offers)
    @rule(pick=st.integers(0, 5), slot=workers, count=few, ttl_ms=st.sampled_from([300, 100_000]))
    def lend(self, pick: int, slot: int, count: int, ttl_ms: int) -> None:
        name, producer = self.offers[pick % len(self.offers)]
        if producer == slot:
            slot = (slot + 1) % 3
        worker = self.workers[slot]
        self.tokens += 1
        grant = market.Grant(
            lease_id=LeaseId(f"l{self.tokens}"), offer_id=name, consumer=InstanceId(worker.name),
            purpose="overflow", mempool=InstanceId("m"), address="", boot_generation=BOOT, space=SpaceId(0),
            length_bytes=count * PAGE_BYTES, token=market.Token(1, self.tokens), present_ms=1, ttl_ms=ttl_ms,
            consumer_ttl_ms=1,
        )  # fmt: skip
        self.spaces.say(worker.front, calls.PresentGrant(call_id=2, grant=grant))
        self.collect()

    @rule(slot=workers, to=st.integers(1, 2), count=few, presses=few)
    def lend_what_is_idle(self, slot: int, to: int, count: int, presses: int) -> None:
        """An offer and all of it on loan, as a rule; then blocks leave the consumer's space."""
        self.offer(slot, count)
        aside = len(self.spaces.core.lending.loans.offers[self.offers[-1][0]].aside)
        consumer = (slot + to) % 3
        if aside:
            self.lend(len(self.offers) - 1, consumer, aside, 100_000)
        for name in range(presses):
            self.press(consumer, name, 0)

    @precondition(lambda self: self.offers)
    @rule(pick=st.integers(0, 5), keep=st.integers(0, 2), deadline_ms=st.sampled_from([0, 100, 10_000]))
    def reclaim(self, pick: int, keep: int, deadline_ms: int) -> None:
        name, producer = self.offers[-1 - pick % len(self.offers)]
        order = market.ReclaimOrder(
            reclaim_id="r", offer_id=name, keep_bytes=keep * PAGE_BYTES, deadline_ms=deadline_ms
        )
        self.spaces.say(self.workers[producer].front, calls.PresentReclaim(call_id=3, order=order))
        self.collect()

    @precondition(lambda self: self.spaces.core.lending.loans.loans)
    @rule(pick=st.integers(0, 5), renew=st.booleans())
    def renew_or_release(self, pick: int, renew: bool) -> None:
        lease_ids = sorted(self.spaces.core.lending.loans.loans)
        lease_id = lease_ids[pick % len(lease_ids)]
        call = (
            calls.RenewLoan(call_id=4, lease_id=lease_id, ttl_ms=500)
            if renew
            else calls.ReleaseLoan(call_id=5, lease_id=lease_id)
        )
        self.spaces.say(self.workers[0].front, call)
        self.collect()

    # -- what must hold ---------------------------------------------------------------------------

    @invariant()
    def lent_pages_are_in_one_place_and_hold_their_blocks(self) -> None:
        lending, pools = self.spaces.core.lending, self.spaces.core.pools
        leased: dict[int, list[int]] = {}
        for offer in lending.loans.offers.values():
            leased.setdefault(offer.producer, []).extend(offer.aside)
        for shelf in lending.loans.shelves.values():
            leased.setdefault(shelf.producer, []).extend(shelf.lent)
            for entry in pools[shelf.number].index.entries():
                assert entry.page in shelf.lent
                assert self.bytes[shelf.producer, entry.page] == entry.block_hash
        for number, pool in pools.items():
            if pool.memory is None or pool.memory.is_behind:
                continue
            pages = leased.get(number, [])
            pages += [page for claim in pool.claims if claim.lends for page in claim.pages]
            assert len(set(pages)) == len(pages)
            states = pool.memory.table.states
            assert set(pages) == {p for p, state in enumerate(states) if state == PageState.LEASED}

    @invariant()
    def what_is_over_and_copied_by_nobody_is_back(self) -> None:
        if self.spaces.copies or self.in_doubt:
            return
        now_ms = self.spaces.now_ms
        for loan in self.spaces.core.lending.loans.loans.values():
            assert loan.keep or loan.deadline_ms > now_ms, loan

    @invariant()
    def pages_add_up(self) -> None:
        self.spaces.counts()

    def teardown(self) -> None:
        for pick in range(len(self.offers)):
            self.reclaim(pick, 0, 0)
        while self.in_doubt:
            self.settle()
        super().teardown()
        assert not self.spaces.core.lending.loans.loans
        for pool in self.spaces.core.pools.values():
            assert pool.memory is None or not pool.memory.is_loan or not len(pool.index)


LendingModel.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLending = LendingModel.TestCase


class LentPortionsModel(LendingModel):
    """Copies for readers go page by page, as pages come."""

    portion_bytes = PAGE_BYTES


LentPortionsModel.TestCase.settings = LendingModel.TestCase.settings
TestLentPortions = LentPortionsModel.TestCase
