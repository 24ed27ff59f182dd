"""The memory market's decisions, step by step: grants, the fence, the choice of an offer, reclaims, the table."""

import pytest
from msgspec.structs import replace

from services.coordinator.core.market_table import EVENTS, TABLE, as_markdown, next_state
from shared.errors import InvariantBroken
from shared.ids import Epoch, InstanceId
from shared.lending.budget import SLOWEST_BYTES_PER_S
from shared.wire.lending import (
    Grant,
    LeaseCall,
    OfferMemory,
    Pair,
    Placement,
    ReclaimOrder,
    Token,
    reclaim_shares,
)
from tests.support.market_world import GIB, LIMITS, SPACE
from tests.unit.market_calls import ask, borrow, call, code, lease_of, led_world, offer, reclaim, the_offer


@pytest.fixture
def world():
    return led_world()


def nobody_gone(_):
    return None


# --- grants


def test_an_offer_is_lent_from_only_once_its_mempool_lists_it(world):
    second = offer(world, producer="p1", mempool="m1")
    assert second.state == "proposed"
    refused = ask(world, mempools=("m1",))
    assert code(refused) == "offers.exhausted"
    assert refused.retry_after_ms > 0
    world.settle("a")
    assert isinstance(ask(world, mempools=("m1",)), Grant)


def test_a_grant_is_an_intention_until_the_mempool_lists_the_lease(world):
    grant = ask(world)
    assert lease_of(world, grant).state == "granted"
    assert world.a.view_offer(the_offer(world)).leased_bytes == GIB
    world.settle("a", 1)
    assert lease_of(world, grant).state == "granted"
    world.m0.present(grant, world.now_ms)
    world.settle("a", 1)
    assert lease_of(world, grant).state == "held"


def test_a_grant_that_was_never_presented_is_free_only_after_the_fence_has_passed_it(world):
    grant = ask(world, gib=4)
    world.pass_ms(LIMITS.present_ms + LIMITS.ttl_margin_ms)
    assert lease_of(world, grant).state == "lapsing"
    report = world.m0.report(world.now_ms)
    answer = world.a.report(world.m0.name, report, now_ms=world.now_ms)
    assert code(ask(world)) == "offers.exhausted", "nobody has refused the old grant yet"
    assert answer.fence > grant.token
    world.m0.hear(answer, world.now_ms)
    assert not world.m0.present(grant, world.now_ms)
    world.settle("a", 1)
    assert lease_of(world, grant).state == "ended"
    assert isinstance(ask(world, gib=4), Grant)


def test_the_fence_waits_for_a_grant_that_is_still_on_its_way(world):
    first, second = ask(world), ask(world)
    world.settle("a")
    assert world.m0.fence <= first.token
    assert world.m0.present(second, world.now_ms)
    assert world.m0.present(first, world.now_ms)


def test_a_released_lease_is_free_once_the_report_does_not_list_it(world):
    grant = borrow(world, gib=4)
    assert world.a.release(grant.lease_id, call(grant), now_ms=world.now_ms) is None
    assert lease_of(world, grant).state == "releasing"
    assert code(ask(world)) == "offers.exhausted"
    world.settle("a", 2)
    assert lease_of(world, grant).state == "ended"
    assert world.a.release(grant.lease_id, call(grant), now_ms=world.now_ms) is None
    assert isinstance(ask(world, gib=4), Grant)


def test_a_killed_consumers_memory_is_back_within_its_time_to_live(world):
    grant = borrow(world, gib=4)
    world.pass_ms(grant.ttl_ms)
    world.settle("a", 1)
    assert lease_of(world, grant).state == "ended"


def test_the_answer_to_a_renewal_promises_only_what_the_mempool_confirmed(world):
    grant = borrow(world)
    world.pass_ms(1_000)
    renewed = world.a.renew(grant.lease_id, call(grant), now_ms=world.now_ms)
    assert renewed.consumer_ttl_ms == grant.ttl_ms - 1_000 - LIMITS.ttl_margin_ms
    world.settle("a", 2)
    renewed = world.a.renew(grant.lease_id, call(grant), now_ms=world.now_ms)
    assert renewed.consumer_ttl_ms == grant.ttl_ms - LIMITS.ttl_margin_ms == grant.consumer_ttl_ms
    assert renewed.keep_bytes == renewed.length_bytes == GIB


def test_a_call_for_a_lease_needs_its_consumer_and_token(world):
    grant = borrow(world)
    other = LeaseCall(consumer=InstanceId("c1"), token=grant.token)
    older = LeaseCall(consumer=grant.consumer, token=Token(1, 1))
    for words in (other, older):
        assert code(world.a.renew(grant.lease_id, words, now_ms=world.now_ms)) == "lease.stale"
        assert code(world.a.release(grant.lease_id, words, now_ms=world.now_ms)) == "lease.stale"
    assert code(world.a.renew("l-9-9", call(grant), now_ms=world.now_ms)) == "lease.unknown"


def test_part_of_the_bytes_is_granted_only_to_who_takes_part(world):
    refused = ask(world, gib=6)
    assert (code(refused), refused.largest_bytes) == ("offers.exhausted", 4 * GIB)
    assert ask(world, gib=6, least_gib=2).length_bytes == 4 * GIB


def test_an_offer_of_another_boot_of_the_mempool_is_stale(world):
    body = OfferMemory(
        producer=InstanceId("p0"), mempool=world.m0.name, boot_generation=Epoch(world.m0.boot - 1), space=SPACE,
        length_bytes=GIB,
    )  # fmt: skip
    assert code(world.a.offer(body, "", now_ms=world.now_ms)) == "offer.stale"
    away = replace(body, mempool=InstanceId("m9"))
    assert code(world.a.offer(away, "", now_ms=world.now_ms)) == "mempool.unknown"


# --- choice


def test_the_placers_pair_is_served_first_and_a_producer_of_another_pair_last(world):
    offer(world, producer="p1", mempool="m1")
    world.settle("a")
    pairs = [Pair(consumer=InstanceId("c0"), producer=InstanceId("p1"))]
    world.a.place(Placement(pairs=pairs), now_ms=world.now_ms)
    assert ask(world, consumer="c0").mempool == "m1"
    assert ask(world, consumer="c1", mempools=("m1", "m0")).mempool == "m0"


def test_the_consumers_order_of_spaces_then_one_producer_per_consumer(world):
    offer(world, producer="p1", mempool="m0")
    world.settle("a")
    first = ask(world, consumer="c0")
    assert ask(world, consumer="c0").offer_id == first.offer_id
    assert ask(world, consumer="c1").offer_id != first.offer_id


def test_grants_are_of_whole_pages_of_their_lender_and_less_than_one_is_refused(world):
    """Its mempool would take so many, and refuse none at all; a refused grant counts until the fence has passed it."""
    world.m0.unit_bytes = 3 * GIB // 2
    world.settle("a", 1)
    refused = ask(world, gib=1)
    assert (code(refused), refused.largest_bytes) == ("offers.exhausted", 3 * GIB)
    assert ask(world, gib=4, least_gib=1).length_bytes == 3 * GIB
    assert code(ask(world, gib=4, least_gib=1)) == "offers.exhausted", "1 GiB is left"
    assert len(world.a.book.leases) == 1


def test_the_least_that_is_asked_for_counts_in_whole_pages_too(world):
    world.m0.unit_bytes = 3 * GIB // 2
    world.settle("a", 1)
    assert ask(world, gib=2).length_bytes == 3 * GIB // 2
    assert code(ask(world, gib=4, least_gib=3)) == "offers.exhausted"


def test_nobody_borrows_from_itself(world):
    assert code(ask(world, consumer="p0")) == "offers.exhausted"


# --- reclaims


def test_a_reclaim_of_free_bytes_is_done_when_the_mempool_lends_less(world):
    order = reclaim(world, the_offer(world).offer.offer_id, gib=3)
    assert isinstance(order, ReclaimOrder)
    assert (order.keep_bytes, order.deadline_ms) == (GIB, 500)
    assert code(ask(world, gib=2)) == "offers.exhausted", "nothing is granted that is asked back"
    world.settle("a", 2)
    view = world.a.view_reclaim(order.reclaim_id, now_ms=world.now_ms)
    assert (view.state, view.over_bytes) == ("done", 0)
    assert isinstance(ask(world, gib=1), Grant)


def test_lessees_hear_of_a_reclaim_and_the_newest_gives_back_first(world):
    old, new = borrow(world, gib=2, consumer="c0"), borrow(world, gib=2, consumer="c1")
    order = reclaim(world, old.offer_id, gib=1, deadline_ms=800)
    assert world.a.renew(old.lease_id, call(old), now_ms=world.now_ms).keep_bytes == 2 * GIB
    heard = world.a.renew(new.lease_id, call(new), now_ms=world.now_ms)
    assert (heard.state, heard.keep_bytes, heard.deadline_ms) == ("reclaiming", GIB, 800)
    world.settle("a", 1)
    world.pass_ms(800)
    world.settle("a", 1)
    assert world.a.view_reclaim(order.reclaim_id, now_ms=world.now_ms).state == "done"
    assert lease_of(world, new).state == "held"
    assert lease_of(world, new).held_bytes == GIB


def test_a_reclaim_ends_within_its_deadline_and_two_reports(world):
    grant = borrow(world, gib=4)
    asked_ms = world.now_ms
    order = reclaim(world, grant.offer_id, deadline_ms=700)
    while world.a.view_reclaim(order.reclaim_id, now_ms=world.now_ms).state != "done":
        world.pass_ms(LIMITS.report_interval_ms)
        world.settle("a", 1)
        assert world.now_ms - asked_ms <= 700 + 2 * LIMITS.report_interval_ms
    assert the_offer(world).state == "closed"
    assert lease_of(world, grant).state == "ended"


def test_asking_twice_never_lengthens_a_deadline(world):
    grant = borrow(world, gib=4)
    first = reclaim(world, grant.offer_id, deadline_ms=500, key="k")
    world.pass_ms(200)
    again = reclaim(world, grant.offer_id, deadline_ms=500, key="k")
    assert (again.reclaim_id, again.deadline_ms) == (first.reclaim_id, 300)
    reclaim(world, grant.offer_id, deadline_ms=5_000)
    assert world.a.renew(grant.lease_id, call(grant), now_ms=world.now_ms).deadline_ms == 300


def test_only_the_producer_takes_its_offer_back(world):
    assert code(reclaim(world, the_offer(world).offer.offer_id, producer="p9")) == "offer.unknown"


def test_what_a_dead_or_replaced_producer_offered_is_taken_back(world):
    offer(world, producer="p1", mempool="m1", producer_epoch=Epoch(7))
    world.settle("a")
    world.a.follow({InstanceId("p1"): (Epoch(7), True)}, nobody_gone, now_ms=world.now_ms)
    assert not world.a.book.reclaims
    world.a.follow({InstanceId("p1"): (Epoch(8), True)}, nobody_gone, now_ms=world.now_ms)
    assert [x.keep_bytes for x in world.a.book.reclaims.values()] == [0]


def test_what_a_producer_offered_that_is_gone_is_taken_back_and_what_nobody_knows_of_is_not(world):
    offer(world, producer="p1", mempool="m1", producer_epoch=Epoch(7))
    world.settle("a")
    for never_or_earlier in (None, Epoch(6)):
        world.a.follow({}, {InstanceId("p1"): never_or_earlier}.get, now_ms=world.now_ms)
        assert not world.a.book.reclaims
    for _ in range(2):
        world.a.follow({}, {InstanceId("p1"): Epoch(7)}.get, now_ms=world.now_ms)
    assert [x.keep_bytes for x in world.a.book.reclaims.values()] == [0], "once"


def test_what_is_lent_of_a_dead_producers_offer_has_the_time_that_moving_it_takes(world):
    offer(world, producer="p1", mempool="m1", gib=4, producer_epoch=Epoch(7))
    world.settle("a")
    borrow(world, gib=4, mempools=("m1",))
    world.a.follow({}, {InstanceId("p1"): Epoch(7)}.get, now_ms=world.now_ms)
    (found,) = world.a.book.reclaims.values()
    moved_ms = 4 * GIB * 1_000 // SLOWEST_BYTES_PER_S
    assert found.order(world.now_ms).deadline_ms == LIMITS.orphan_deadline_ms + moved_ms > 7_000


def test_who_has_an_older_epoch_than_its_member_neither_offers_nor_borrows(world):
    members = {InstanceId(name): (Epoch(8), True) for name in ("p1", "c0")}
    world.a.follow(members, nobody_gone, now_ms=world.now_ms)
    assert code(offer(world, producer="p1", producer_epoch=Epoch(7))) == "epoch.stale"
    assert offer(world, producer="p1", producer_epoch=Epoch(8)).state == "proposed"
    assert code(ask(world, consumer_epoch=Epoch(7))) == "epoch.stale"
    for epoch in (Epoch(8), Epoch(0)):
        assert isinstance(ask(world, consumer_epoch=epoch), Grant)


def test_an_offer_has_so_many_open_reclaims_and_one_that_asks_for_no_more_is_one_of_them(world):
    offer_id = borrow(world, gib=4).offer_id
    orders = [reclaim(world, offer_id, deadline_ms=999 - n) for n in range(LIMITS.max_reclaims)]
    assert code(reclaim(world, offer_id, deadline_ms=1)) == "market.full"
    assert reclaim(world, offer_id, 4, deadline_ms=999) == orders[0]


def test_shares_of_a_reclaim_cut_the_newest_first():
    leases = [(Token(2, 1), "c", 5), (Token(1, 2), "b", 5), (Token(1, 1), "a", 5)]
    assert reclaim_shares(leases, 7) == {"a": 5, "b": 2, "c": 0}
    assert reclaim_shares(leases, 99) == {"a": 5, "b": 5, "c": 5}
    assert reclaim_shares([], 7) == {}


# --- the table


def test_every_event_has_a_writer_a_proof_and_a_use():
    assert {event for _, event in TABLE} == set(EVENTS)
    assert all(rule.writer and rule.proof for rule in EVENTS.values())
    for (state, event), then in TABLE.items():
        assert f"| {state} | {event} | {then} |" in as_markdown()


def test_what_the_table_does_not_know_cannot_happen():
    with pytest.raises(InvariantBroken, match="fits in state granted"):
        next_state("granted", "fits")
