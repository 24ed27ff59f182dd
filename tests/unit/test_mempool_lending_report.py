"""A mempool and the coordinator's market, by reports and answers alone: what one grants the other lends, or neither."""

import pytest

from services.coordinator.core.market import Market as Coordinator
from services.coordinator.core.market_records import MarketLimits
from services.mempool.core.lending_report import make_report
from shared.ids import Epoch, InstanceId, SpaceId
from shared.wire import lending as market
from shared.wire import mempool as wire
from shared.wire import mempool_lending as calls
from tests.unit.mempool_harness import BOOT, PAGE_BYTES, chain
from tests.unit.test_mempool_lending import FRONT, LENDER, PREFILL, SELLER, Market

M = InstanceId("mempool-0")
ABCD = chain("a", "b", "c", "d")
LEADS_MS = 10_000_000


class Both(Market):
    """The mempool of test_mempool_lending.py, and a coordinator that leads."""

    def __init__(self) -> None:
        super().__init__()
        self.coordinator = Coordinator(MarketLimits())
        self.coordinator.lead(5, until_ms=LEADS_MS, knows_all=True, now_ms=0)
        self.seq = 0
        self.rounds(2)

    def report(self) -> market.MempoolReport:
        self.seq += 1
        return make_report(self.core.lending, self.core.pools, self.seq, self.now_ms, address="s", host="h")

    def rounds(self, count: int = 1) -> None:
        for _ in range(count):
            answer = self.coordinator.report(M, self.report(), now_ms=self.now_ms)
            assert isinstance(answer, market.ReportReply)
            self.run(self.core.on_market_reply(answer, self.now_ms))
            self.answer_engine()

    def answer_engine(self) -> None:
        """The producer's engine gives back what it is asked for."""
        asked = [m for m in self.sent[LENDER] if isinstance(m, wire.Shrink)]
        self.sent[LENDER].clear()
        for message in asked:
            self.give_back(LENDER, self.take(LENDER, message.count))

    def offered(self, num_pages: int, key: str = "k") -> market.OfferView:
        ask = market.OfferMemory(
            producer=InstanceId(f"i{LENDER}"), mempool=M, boot_generation=BOOT, space=SpaceId(self.producer),
            length_bytes=num_pages * PAGE_BYTES,
        )  # fmt: skip
        answer = self.coordinator.offer(ask, key, now_ms=self.now_ms)
        assert isinstance(answer, market.OfferView)
        return answer

    def leased_to(self, num_pages: int, key: str = "l") -> market.Grant:
        ask = market.AskLease(
            consumer=InstanceId(f"i{PREFILL}"), length_bytes=num_pages * PAGE_BYTES, purpose="swap",
            spaces=[market.SpaceRef(mempool=M, space=SpaceId(self.producer))],
        )  # fmt: skip
        answer = self.coordinator.lease(ask, key, now_ms=self.now_ms)
        assert isinstance(answer, market.Grant), answer
        return answer

    def lease_state(self) -> str:
        (lease,) = self.coordinator.view(now_ms=self.now_ms).leases
        return lease.state


@pytest.fixture
def both() -> Both:
    return Both()


def test_an_offer_of_the_coordinators_is_set_aside_and_open_once_engines_gave_back(both):
    assert both.offered(4).state == "proposed"
    both.rounds(2)
    assert both.leased() == 4
    view = both.offered(4)
    assert (view.state, view.limit_bytes) == ("open", 4 * PAGE_BYTES)


def test_an_offer_for_which_engines_give_nothing_is_closed_by_a_report_and_then_forgotten(both):
    both.offered(4)
    both.answer_engine = both.sent[LENDER].clear  # it gives nothing
    both.rounds()
    both.advance(both.core.lending._limits.offer_patience_ms)
    assert [offer.limit for offer in both.core.lending.loans.offers.values()] == [0]
    both.rounds()
    assert [view.state for view in both.coordinator.view(now_ms=both.now_ms).offers] == ["closed"]
    assert not both.core.lending.loans.offers
    assert not both.core.lending.known_offers
    both.rounds()
    assert not both.report().offers


def comes_to_nothing(both) -> market.Offer:
    """Of an offer that its producer presented."""
    both.answer_engine = both.sent[LENDER].clear  # it gives nothing
    offer = both.offered(4).offer
    both.say(SELLER, calls.PresentOffer(call_id=1, offer=offer))
    both.advance(both.core.lending._limits.offer_patience_ms)
    assert [known.limit for known in both.core.lending.loans.offers.values()] == [0]
    return offer


def test_an_answer_from_before_an_offer_does_not_forget_it_untold(both):
    """The coordinator proposed it again and again to a mempool that refused it as over, without a word."""
    late = both.coordinator.report(M, both.report(), now_ms=both.now_ms)
    comes_to_nothing(both)
    both.run(both.core.on_market_reply(late, both.now_ms))
    both.rounds()
    assert [view.state for view in both.coordinator.view(now_ms=both.now_ms).offers] == ["closed"]
    assert not both.core.lending.loans.offers


def test_an_answer_that_still_asks_for_a_forgotten_offer_brings_nothing_of_it_back(both):
    both.offered(4)
    late = both.coordinator.report(M, both.report(), now_ms=both.now_ms)
    assert len(late.offers) == 1
    offer = comes_to_nothing(both)
    both.rounds(2)
    assert not both.core.lending.loans.offers
    both.sent[LENDER].clear()
    both.run(both.core.on_market_reply(late, both.now_ms))
    assert not both.core.lending.loans.offers
    assert not both.core.lending.known_offers
    assert not both.core.pools[both.producer].claims
    assert not both.sent[LENDER], "no engine is asked for pages"
    both.say(SELLER, calls.PresentOffer(call_id=2, offer=offer))
    refused = both.sent[SELLER][-1]
    assert isinstance(refused, wire.CallFailed)
    assert refused.code == "offer.ended"
    both.rounds()
    assert not both.report().offers


def test_a_grant_of_the_coordinators_lends_and_is_listed_as_held(both):
    both.offered(4)
    both.rounds(2)
    grant = both.leased_to(3)
    assert isinstance(both.present(grant), calls.LendingDone)
    both.rounds()
    assert both.lease_state() == "held"
    (report,) = both.report().leases
    assert (report.length_bytes, report.state, report.token) == (3 * PAGE_BYTES, "held", grant.token)
    both.leave(ABCD, "abcd")
    both.copied()
    assert both.counters()["peer_blocks_out"] == 3


def test_a_renewal_and_a_release_by_rest_reach_the_mempool_with_a_report(both):
    both.offered(4)
    both.rounds(2)
    grant = both.leased_to(4)
    both.present(grant)
    both.rounds()
    call = market.LeaseCall(consumer=grant.consumer, token=grant.token)
    before = both.core.lending.loans.loans[grant.lease_id].expires_at_ms
    both.now_ms += 1_000
    assert isinstance(both.coordinator.renew(grant.lease_id, call, now_ms=both.now_ms), market.Renewed)
    both.rounds()
    assert both.core.lending.loans.loans[grant.lease_id].expires_at_ms == before + 1_000
    assert both.coordinator.release(grant.lease_id, call, now_ms=both.now_ms) is None
    both.rounds(2)
    assert not both.core.lending.loans.loans
    assert both.leased() == 4, "the offer is still open"
    assert isinstance(both.leased_to(4, "again"), market.Grant)


def test_a_reclaim_by_rest_returns_the_pages_and_is_done_when_they_are_back(both):
    offer = both.offered(4).offer
    both.rounds(2)
    both.present(both.leased_to(4))
    both.leave(ABCD, "abcd")
    both.copied()
    both.rounds()
    ask = market.AskReclaim(offer_id=offer.offer_id, producer=offer.producer, deadline_ms=1_000)
    order = both.coordinator.reclaim(ask, "r", now_ms=both.now_ms)
    assert isinstance(order, market.ReclaimOrder)
    both.rounds()
    view = both.coordinator.view_reclaim(order.reclaim_id, now_ms=both.now_ms)
    assert isinstance(view, market.ReclaimView)
    assert view.state == "open"
    both.copied()
    assert both.leased() == 0
    both.rounds(2)
    view = both.coordinator.view_reclaim(order.reclaim_id, now_ms=both.now_ms)
    assert isinstance(view, market.ReclaimView)
    assert view.state == "done"
    assert not both.core.lending.known_offers


def test_a_coordinator_that_lost_everything_learns_what_is_lent_before_it_grants(both):
    both.offered(4)
    both.rounds(2)
    grant = both.leased_to(3)
    both.present(grant)
    both.coordinator = Coordinator(MarketLimits())
    both.coordinator.lead(6, until_ms=LEADS_MS, knows_all=False, now_ms=both.now_ms)
    both.rounds(2)
    both.advance(MarketLimits().report_ttl_ms)
    both.rounds()
    assert both.lease_state() == "held"
    assert isinstance(both.leased_to(1, "one"), market.Grant)
    ask = market.AskLease(
        consumer=InstanceId("c"), length_bytes=PAGE_BYTES, purpose="swap",
        spaces=[market.SpaceRef(mempool=M, space=SpaceId(both.producer))],
    )  # fmt: skip
    assert isinstance(both.coordinator.lease(ask, "two", now_ms=both.now_ms), market.LendingRefused)


def test_an_old_leader_is_neither_obeyed_nor_are_its_grants_taken(both):
    both.offered(4)
    both.rounds(2)
    old = both.leased_to(2)
    late = both.coordinator.report(M, both.report(), now_ms=both.now_ms)
    assert isinstance(late, market.ReportReply)
    both.core.lending.loans.raise_fence(market.Token(6, 0))
    assert both.refused(old) == "lease.stale"
    offers = dict(both.core.lending.known_offers)
    stolen = market.ReportReply(
        seq=late.seq, fence=late.fence, interval_ms=1, ttl_ms=1,
        reclaims=[market.ReclaimOrder(reclaim_id="r", offer_id=next(iter(offers)), keep_bytes=0, deadline_ms=0)],
    )  # fmt: skip
    both.run(both.core.on_market_reply(stolen, both.now_ms))
    assert both.leased() == 4
    assert both.counters()["lending_replies_of_old_leaders"] == 1


def test_a_loan_of_a_consumer_that_nobody_renews_is_back_within_a_second_of_its_time(both):
    both.offered(4)
    both.rounds(2)
    both.present(both.leased_to(4))
    both.leave(ABCD, "abcd")
    both.copied()
    both.advance(MarketLimits().lease_ttl_ms)
    both.copied(failed=True)
    both.advance(999)
    assert not both.core.lending.loans.loans
    both.rounds()
    assert not both.report().leases
    assert both.report().offers[0].leased_bytes == 0


def test_somebody_is_told_when_a_report_would_say_something_new(both):
    told: list[int] = []
    both.core.lending.on_change = lambda: told.append(both.now_ms)
    both.offered(4)
    both.rounds(2)
    assert told, "pages were set aside"
    told.clear()
    grant = both.leased_to(4)
    both.present(grant)
    assert told
    told.clear()
    both.advance(1)
    assert not told
    both.say(FRONT, calls.ReleaseLoan(call_id=1, lease_id=grant.lease_id))
    assert told


def test_spaces_of_engines_are_reported_and_those_behind_them_are_not(both):
    both.offered(4)
    both.rounds(2)
    both.present(both.leased_to(1))
    spaces = both.report().spaces
    assert [space.name for space in spaces] == ["cpu:0", "cpu:1"]
    assert {space.total_bytes for space in spaces} == {8 * PAGE_BYTES}
    assert {space.unit_bytes for space in spaces} == {PAGE_BYTES}
    assert both.report().boot_generation == Epoch(BOOT)
