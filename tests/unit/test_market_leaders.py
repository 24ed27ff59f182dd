"""What survives a new leader of the memory market, with and without its journal: keys, leases, fences."""

import pytest
from msgspec.structs import replace

from services.coordinator.core.market import Market
from shared.ids import Epoch
from shared.wire.lending import Grant, OfferReport, ReclaimOrder
from tests.support.market_world import GIB, LIMITS
from tests.unit.market_calls import ask, borrow, code, lease_of, led_world, offer, reclaim, the_offer


@pytest.fixture
def world():
    return led_world()


# --- keys


def test_one_key_brings_one_grant_and_a_changed_wish_is_refused(world):
    grant = ask(world, key="k")
    assert ask(world, key="k") == grant
    assert len(world.a.book.leases) == 1
    assert code(ask(world, key="k", gib=0.5)) == "idempotency.mismatch"
    assert ask(world, key="k", consumer="c1") != grant, "keys belong to who asks"
    world.m0.present(grant, world.now_ms)
    world.settle("a", 1)
    assert ask(world, key="k") == grant
    world.m0.give_back(grant.lease_id)
    world.settle("a", 1)
    assert code(ask(world, key="k")) == "lease.ended"


def test_a_key_survives_a_new_leader_with_and_without_the_journal(world):
    grant = borrow(world, key="k")
    made = offer(world, key="o").offer
    world.write("a")
    for wiped in (False, True):
        world.crash("a")
        if wiped:
            world.store.wipe()
        world.store.until_ms = 0
        world.elect("a", lease_ms=10**9)
        world.a = world.coordinators["a"]
        world.settle("a")
        world.pass_ms(LIMITS.report_ttl_ms if wiped else 0)
        world.settle("a")
        assert ask(world, key="k").lease_id == grant.lease_id
        assert offer(world, key="o").offer.offer_id == made.offer_id


# --- leaders


def test_a_new_leader_grants_nothing_before_every_mempool_it_knows_of_has_its_fence(world):
    world.write("a")
    world.store.until_ms = 0
    world.elect("b", lease_ms=10**9)
    b = world.coordinators["b"]
    assert code(ask(world, name="b")) == "market.rebuilding"
    world.report_to("m0", "b")
    assert code(ask(world, name="b")) == "market.rebuilding", "its fence was not reported back yet"
    world.report_to("m0", "b")
    assert code(ask(world, name="b")) == "market.rebuilding", "m1 is awaited"
    world.pass_ms(LIMITS.report_ttl_ms)
    world.report_to("m0", "b")
    assert b.why_not(world.now_ms) == "", "m1 was silent for its time to live"
    assert isinstance(ask(world, name="b"), Grant)


def test_without_a_journal_a_new_leader_waits_for_mempools_that_it_cannot_know_of(world):
    world.store.wipe()
    world.crash("b")
    world.elect("b", lease_ms=10**9)
    assert code(ask(world, name="b")) == "market.rebuilding"
    world.settle("b")
    assert code(ask(world, name="b")) == "market.rebuilding"
    world.pass_ms(LIMITS.report_ttl_ms)
    world.settle("b")
    assert isinstance(ask(world, name="b"), Grant)


def test_a_woken_leaders_grants_are_refused_by_their_term(world):
    before = ask(world)
    world.write("a")
    world.store.until_ms = 0
    world.elect("b", lease_ms=10**9)
    world.settle("b")
    after = ask(world)  # it does not know yet
    assert isinstance(after, Grant)
    for grant in (before, after):
        assert not world.m0.present(grant, world.now_ms)
    assert code(world.report_to("m0", "a")) == "market.standby"
    assert code(ask(world)) == "market.standby", "the mempool's fence told it"
    taken = ask(world, name="b", gib=4)
    assert world.m0.present(taken, world.now_ms)


def test_leases_are_found_again_after_everything_was_lost(world):
    grant = borrow(world, gib=3)
    world.store.wipe()
    world.crash("a")
    world.elect("a", lease_ms=10**9)
    world.a = world.coordinators["a"]
    world.settle("a")
    world.pass_ms(LIMITS.report_ttl_ms)
    world.settle("a")
    found = lease_of(world, grant)
    assert (found.state, found.held_bytes, found.producer) == ("held", 3 * GIB, "p0")
    assert code(ask(world, gib=2)) == "offers.exhausted"
    assert isinstance(ask(world, gib=1), Grant)


def test_a_delayed_report_changes_nothing(world):
    late = world.m0.report(world.now_ms)
    grant = borrow(world)
    world.a.report(world.m0.name, late, now_ms=world.now_ms)
    assert lease_of(world, grant).state == "held"
    older = replace(late, boot_generation=Epoch(world.m0.boot - 1), seq=999)
    assert code(world.a.report(world.m0.name, older, now_ms=world.now_ms)) == "epoch.stale"


def test_grants_for_an_earlier_boot_of_the_mempool_are_dead(world):
    grant = ask(world, gib=4)
    world.m0.restart(keeps=True)
    world.settle("a")
    assert lease_of(world, grant).state == "ended"
    assert ask(world, gib=4).boot_generation == world.m0.boot


def test_a_mempool_that_is_gone_for_long_is_forgotten_and_believed_when_it_is_back(world):
    limits = replace_limits(forget_after_ms=2_000)
    world.a.limits = world.a.book.limits = limits
    grant = borrow(world)
    world.pass_ms(2_000)
    assert lease_of(world, grant).state == "ended"
    assert the_offer(world).closed
    world.settle("a")
    assert lease_of(world, grant).state == "held"
    assert the_offer(world).state == "open"


def replace_limits(**more):
    fields = {name: getattr(LIMITS, name) for name in LIMITS.__dataclass_fields__}
    return type(LIMITS)(**{**fields, **more})


def test_nothing_is_granted_while_intentions_cannot_be_stored(world):
    world.a.journal_trouble = "journal.down"
    assert code(ask(world)) == "journal.down"
    assert code(offer(world)) == "journal.down"
    assert isinstance(reclaim(world, the_offer(world).offer.offer_id), ReclaimOrder)


def test_who_never_led_answers_that_it_stands_by():
    idle = Market(LIMITS)
    assert idle.view(now_ms=0).why_not == "market.standby"


def test_an_offer_that_is_worth_nothing_and_forgotten_is_not_found_again_and_again(world):
    empty = replace(the_offer(world).offer, offer_id="o-1-1", length_bytes=0)
    report = world.m0.report(world.now_ms)
    listed = replace(report, offers=[*report.offers, OfferReport(offer=empty, leased_bytes=0)])
    world.a.report(world.m0.name, listed, now_ms=world.now_ms)
    assert "o-1-1" not in world.a.book.offers


@pytest.mark.parametrize("lost", [("mempool:",), ("mempool:", "offer:"), ("offer:",)])
def test_what_a_damaged_journal_left_without_its_mempool_or_offer_ends_in_time(world, lost):
    grant = borrow(world)
    reclaim(world, grant.offer_id)
    world.write("a")
    kept = {name: entry for name, entry in world.store.fields.items() if not name.startswith(lost)}
    assert {name.split(":")[0] for name in kept} >= {"lease", "reclaim"}
    b, now_ms = Market(LIMITS), 0
    b.restore(kept.values(), replace=True, now_ms=now_ms)
    b.lead(world.store.term + 1, until_ms=1 << 60, knows_all=True, now_ms=now_ms)
    b.tick(now_ms=LIMITS.forget_after_ms - 1)
    assert b.book.leases[grant.lease_id].state != "ended", "its mempool may come"
    assert any(b.book.open_reclaims(grant.offer_id))
    while now_ms < 5 * LIMITS.forget_after_ms:
        now_ms += 250
        b.tick(now_ms=now_ms)
    assert not b.book.leases
    assert not b.book.reclaims
    assert not b.book.offers
    written = {name for name, entry in b.take_journal().items() if entry is not None}
    assert written <= {"mempool:m0", "mempool:m1"}


def test_an_offer_that_is_open_again_is_in_the_journal_again(world):
    limits = replace_limits(forget_after_ms=2_000)
    world.a.limits = world.a.book.limits = limits
    field = f"offer:{the_offer(world).offer.offer_id}"
    world.pass_ms(2_000)
    world.write("a")
    assert field not in world.store.fields
    world.settle("a")
    world.write("a")
    assert the_offer(world).state == "open"
    assert field in world.store.fields


def test_a_reclaim_that_was_answered_while_the_store_was_away_stands_when_its_coordinator_leads_again(world):
    world.write("a")
    offer_id = the_offer(world).offer.offer_id
    world.a.journal_trouble = "journal.down"
    order = reclaim(world, offer_id, gib=3, key="r")
    assert isinstance(order, ReclaimOrder)
    world.a.take_journal()  # what a term leaves unstored is never written by a later one
    world.a.journal_trouble, world.store.until_ms = "", 0
    world.elect("a", lease_ms=10**9)
    assert the_offer(world).target_bytes == 1 * GIB
    assert reclaim(world, offer_id, gib=3, key="r").reclaim_id == order.reclaim_id
    assert f"reclaim:{order.reclaim_id}" in world.store.fields
    world.settle("a")
    assert world.a.view_reclaim(order.reclaim_id, now_ms=world.now_ms).state == "done"
    assert code(ask(world, gib=2)) == "offers.exhausted"


# --- reclaims of a mempool that is cut off


def cut_off(world, **limits):
    """A lease whose consumer renews at m0, reclaimed, and no report of m0's until it is forgotten here."""
    world.a.limits = world.a.book.limits = replace_limits(forget_after_ms=2_000, **limits)
    grant = borrow(world, gib=3)
    world.m0.leases[grant.lease_id].ends_at_ms = 1 << 60
    order = reclaim(world, grant.offer_id, key="r")
    world.pass_ms(5_000)
    assert world.m0.name not in world.a.book.mempools
    return grant, order.reclaim_id


def state(world, reclaim_id, name="a"):
    return world.coordinators[name].view_reclaim(reclaim_id, now_ms=world.now_ms).state


def test_a_reclaim_stays_open_while_its_mempool_is_cut_off_and_is_ordered_when_it_is_back(world):
    grant, reclaim_id = cut_off(world)
    assert world.m0.leased_bytes(grant.offer_id) == 3 * GIB
    assert state(world, reclaim_id) == "open"
    world.settle("a")
    assert world.m0.leased_bytes(grant.offer_id) == 0
    assert state(world, reclaim_id) == "done"
    assert code(ask(world, mempools=("m0",))) == "offers.exhausted", "nothing of it is lent on"


@pytest.mark.parametrize("keeps", [False, True])
def test_the_next_leader_and_the_mempools_next_process_end_a_reclaim_of_one_that_was_cut_off(world, keeps):
    grant, reclaim_id = cut_off(world)
    world.write("a")
    world.store.until_ms = 0
    world.elect("b", lease_ms=10**9)
    assert world.coordinators["b"].book.offers[grant.offer_id].closed
    assert state(world, reclaim_id, "b") == "open"
    world.m0.restart(keeps)
    world.settle("b")
    world.pass_ms(500)  # a new leader counts a deadline from its beginning
    world.settle("b")
    assert world.m0.leased_bytes(grant.offer_id) == 0
    assert state(world, reclaim_id, "b") == "done"
    world.write("b")
    assert not [name for name in world.store.fields if name.startswith(("offer:", "reclaim:"))]


def test_a_reclaim_of_a_mempool_that_never_comes_back_is_dropped_in_the_end_and_never_called_done(world):
    grant, reclaim_id = cut_off(world, lost_after_ms=20_000)
    world.pass_ms(16_000)
    assert state(world, reclaim_id) == "open"
    world.pass_ms(3_000)
    assert code(world.a.view_reclaim(reclaim_id, now_ms=world.now_ms)) == "reclaim.unknown"
    assert grant.offer_id not in world.a.book.offers
    assert not world.a.book.keys
    world.write("a")
    assert not world.store.fields.keys() & {f"reclaim:{reclaim_id}", f"offer:{grant.offer_id}"}


def test_no_mempool_is_silent_to_who_does_not_lead(world):
    world.a.limits = world.a.book.limits = replace_limits(forget_after_ms=2_000)
    grant = borrow(world, gib=3)
    world.m0.leases[grant.lease_id].ends_at_ms = 1 << 60
    world.write("a")
    order = reclaim(world, grant.offer_id)
    world.a.take_journal()  # Redis is away: it is not stored, and the leadership ends
    world.a.extend(0)
    world.store.until_ms = 0
    world.pass_ms(5_000)
    assert state(world, order.reclaim_id) == "open"
    world.elect("a", lease_ms=10**9)
    world.settle("a")
    assert state(world, order.reclaim_id) == "done"
    assert world.m0.leased_bytes(grant.offer_id) == 0


@pytest.mark.parametrize("silent_ms", [5_000, 20_000])
def test_who_reads_what_a_dead_producer_lent_has_its_time_from_when_its_mempool_hears_of_it(world, silent_ms):
    """A host that was cut off for less or more than it takes to be forgotten: all its engines live."""
    market, mempool = world.a, world.m0
    market.limits = market.book.limits = replace_limits(forget_after_ms=10_000)
    grant = borrow(world, gib=3)
    mempool.leases[grant.lease_id].ends_at_ms = 1 << 60
    offer = market.book.offers[grant.offer_id]
    offer.offer = replace(offer.offer, producer_epoch=Epoch(5))
    dead = {offer.offer.producer: (Epoch(5), False)}
    market.follow(dead, lambda _: None, now_ms=world.now_ms)
    (asked,) = [each.order(world.now_ms).deadline_ms for each in market.book.reclaims.values()]
    world.pass_ms(silent_ms)
    assert (mempool.name in market.book.mempools) == (silent_ms < 10_000)
    assert _told(world) == [asked]
    world.pass_ms(2_000)
    assert _told(world) == [asked - 2_000], "it runs from there"


def _told(world):
    answer = world.a.report(world.m0.name, world.m0.report(world.now_ms), now_ms=world.now_ms)
    return [each.deadline_ms for each in answer.reclaims]
