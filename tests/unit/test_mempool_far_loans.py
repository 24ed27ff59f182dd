"""Loans whose pages an engine reads in place: that is use, and nothing that ends by itself takes it by surprise."""

from services.mempool.core.loans import EXCUSED_MS, GRACE_MS, LATE_MS, Grant, Loans, Shelf
from services.mempool.core.page_state import PageEvent
from services.mempool.core.page_table import PageTable
from shared.ids import Epoch, InstanceId, LeaseId
from shared.lending.budget import SLOWEST_BYTES_PER_S
from shared.lending.rules import LendingRules
from shared.wire import mempool as wire
from shared.wire import mempool_lending as calls
from shared.wire.lending import Token
from tests.unit.mempool_harness import PAGE_BYTES, chain
from tests.unit.test_mempool_desk import RULES, RULES_OF, STEP_MS, Rig
from tests.unit.test_mempool_far import FarMarket
from tests.unit.test_mempool_lending import ABCD, WXYZ
from tests.unit.test_mempool_spaces import FRONT, PREFILL

FAR = chain("x", "y", "z")
TTL_MS = 10_000


class FarRig(Rig, FarMarket):
    """Engines that lend and borrow by themselves; the borrower reads in place."""

    def read_in_place(self) -> LeaseId:
        """Blocks of a running request lie in lent pages. The loan."""
        self.lend_all()
        self.step(3)
        for pool in self.core.pools.values():
            while (pool.is_loan or pool.number == 0) and pool.evict():
                pass  # no cached block is in its way
        self.step()
        self.reading = self.out(1, FAR, "xyz")
        assert self.counters()["far_blocks_out_peer"] == len(FAR)
        (lease_id,) = self.core.lending.loans.loans
        return lease_id


def presented(**options: int) -> tuple[FarMarket, LeaseId]:
    """Blocks in place, on a loan that somebody presented."""
    rig = FarMarket(places=8, **options)
    grant = rig.lend(4)
    rig.reading = rig.out(1, ABCD, "abcd")
    return rig, grant.lease_id


def test_a_loan_whose_blocks_are_read_in_place_is_not_idle_though_no_copy_moves():
    rig = FarRig()
    lease_id = rig.read_in_place()
    rig.step(2 * RULES.idle_ms // STEP_MS)
    assert not rig.killed
    assert lease_id in rig.core.lending.loans.loans
    assert rig.seen(rig.reading) == "xyz"
    rig.drop(*rig.reading)
    rig.step(2 * RULES.idle_ms // STEP_MS)
    assert lease_id not in rig.core.lending.loans.loans


def test_a_mempool_that_stood_still_longer_than_a_loan_lasts_renews_it_and_kills_nobody():
    rig = FarRig()
    lease_id = rig.read_in_place()
    rig.advance(3 * RULES.ttl_ms)  # its timer comes first
    rig.desk.excuse(3 * RULES.ttl_ms - STEP_MS, rig.now_ms)
    rig.core.decide_market(rig.now_ms)
    rig.step(3 * RULES.ttl_ms // STEP_MS)
    assert not rig.killed
    assert lease_id in rig.core.lending.loans.loans
    assert rig.seen(rig.reading) == "xyz"


def test_a_renewal_that_lay_unread_while_the_mempool_stood_still_counts():
    rig, lease_id = presented()
    rig.now_ms += 3 * TTL_MS
    rig.say(FRONT, calls.RenewLoan(call_id=9, lease_id=lease_id, ttl_ms=TTL_MS))
    assert not [m for m in rig.sent[FRONT] if isinstance(m, wire.CallFailed)]
    rig.advance(TTL_MS - 1)
    assert not rig.moved()
    assert not rig.killed


def test_a_mempool_that_is_late_at_every_turn_excuses_a_loan_once():
    rig, lease_id = presented()
    for _ in range(2):
        rig.advance(TTL_MS + LATE_MS)
    rig.copied()
    rig.drop(*dict(rig.moved()))
    rig.copied()
    assert lease_id not in rig.core.lending.loans.loans
    assert not rig.killed


def test_a_loan_ends_in_its_time_where_the_mempool_did_not_stand_still():
    rig, lease_id = presented()
    rig.advance(TTL_MS)
    rig.copied()
    rig.drop(*dict(rig.moved()))
    assert lease_id not in rig.core.lending.loans.loans


def ended(rig: FarMarket, lease_id: LeaseId, how: str) -> None:
    if how == "lapsed":
        rig.advance(TTL_MS)
    else:
        rig.say(FRONT, calls.ReleaseLoan(call_id=9, lease_id=lease_id))


def test_who_reads_in_place_has_a_reclaims_time_to_let_go_of_a_loan_that_ends_and_no_more():
    for how in ("lapsed", "released"):
        rig, lease_id = presented()
        rig.core.lending.copies.limit_one(rig.producer, rate := 2 * PAGE_BYTES)
        ended(rig, lease_id, how)
        bound_ms = len(ABCD) * PAGE_BYTES * 1_000 // rate + rig.core.lending.rules.reclaim_deadline_ms
        rig.advance(bound_ms - 1)
        assert not rig.killed, how
        rig.advance(1)
        assert rig.killed == {PREFILL}, "it has not let go by then"
        assert rig.leased() == 4, "until it is proven dead"


def test_where_nothing_was_measured_the_slowest_rate_says_how_long_that_takes():
    rig, lease_id = presented()
    loan = rig.core.lending.loans.loans[lease_id]
    copied_ms = -(-len(ABCD) * PAGE_BYTES * 1_000 // SLOWEST_BYTES_PER_S)
    assert rig.core.lending.loans.moved_in_ms(loan) == copied_ms + rig.core.lending.rules.reclaim_deadline_ms
    rig.drop(*rig.reading)
    rig.leave(WXYZ, "wxyz")  # what is cached there is forgotten sooner
    rig.advance(TTL_MS)
    rig.advance(GRACE_MS)
    rig.copied()
    assert lease_id not in rig.core.lending.loans.loans


def test_a_reclaim_is_not_put_off_by_the_time_that_an_ended_loan_has():
    rig, lease_id = presented()
    ended(rig, lease_id, "released")
    rig.reclaim(0, 100)
    rig.advance(100)
    assert rig.killed == {PREFILL}


def be_in_debt(rig: FarMarket) -> None:
    """Cached blocks may not leave what is lent."""
    rig.core.lending.copies.limit_one(rig.producer, 1)
    rig.core.lending.copies._budget(rig.producer).spend(1_000_000, rig.now_ms)


def test_blocks_that_are_read_in_place_move_though_their_producers_budget_is_in_debt():
    rig, lease_id = presented()
    be_in_debt(rig)
    rig.leave(WXYZ, "wxyz")
    rig.reclaim(0, 100)
    rig.copied()
    moved = dict(rig.moved())
    assert sorted(moved) == sorted(rig.reading)
    rig.drop(*moved)
    rig.advance(100)
    assert lease_id not in rig.core.lending.loans.loans
    assert not rig.killed
    assert rig.seen([moved[place] for place in rig.reading]) == "abcd"


def test_the_desks_rule_for_reclaims_holds_for_loans_that_end_too():
    rules = LendingRules(**RULES_OF | {"reclaim_deadline_ms": 7_000})
    assert FarRig(rules).core.lending.rules.reclaim_deadline_ms == 7_000
    assert EXCUSED_MS < TTL_MS


def test_nobody_is_killed_for_a_deadline_that_the_pages_of_cached_blocks_can_meet():
    rig = FarMarket(places=8)
    rig.lend(4)
    rig.out(1, ABCD[:2], "ab")
    rig.leave(WXYZ[:2], "wx")
    rig.copied()
    be_in_debt(rig)
    rig.reclaim(2, 100)
    rig.copied()
    rig.advance(100)
    assert (rig.leased(), rig.killed) == (2, set())


def test_an_order_that_is_said_again_wants_no_more_pages_by_its_time():
    """As every answer to a mempool's report does."""
    boot = Epoch(1)
    loans, table = Loans(boot), PageTable(20, boot)
    loans.set_aside(loans.know("o", 0, 20, table), table.take_many(20, PageEvent.LEND))
    loans.shelves[0, 1] = Shelf(9, 0, 1, PageTable(20, boot))
    for number in (1, 2):
        token = Token(term=1, number=number)
        loans.take(Grant(LeaseId(f"l{number}"), "o", InstanceId("c"), 1, 10, token, boot, 100_000), 0)
    loans.moved_in_ms = lambda _: 3_000
    loans.reclaim("o", 10, 1_000, 0)
    loans.release(LeaseId("l1"), 1)
    for now_ms in (2, 3):
        loans.reclaim("o", 10, 1_000, now_ms)
        assert [loan.steps for loan in loans.loans.values()] == [[(0, 3_001)], [(0, 1_000)]]


def test_a_reclaims_deadline_is_for_the_pages_that_it_asked_for_and_others_have_their_own():
    for orders in (((3, 100), (0, 10_000)), ((0, 10_000), (3, 100))):
        rig, _ = presented()
        for order in orders:
            rig.reclaim(*order)
        rig.drop(rig.reading[3])
        rig.copied()
        rig.advance(9_999)
        assert (rig.leased(), rig.killed) == (3, set())
        rig.advance(1)
        assert rig.killed == {PREFILL}
