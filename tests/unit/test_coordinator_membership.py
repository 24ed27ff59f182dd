"""Membership: states by missed heartbeats, epochs that only grow, the journal."""

import pytest

from services.coordinator.core.membership import (
    Full,
    JournalEntry,
    Membership,
    MemberState,
    Stale,
    Unknown,
)
from shared.wire.membership import Heartbeat, HeartbeatReply, Registered
from tests.support.control_plane import register


def joined(membership, name="p0", now_ms=0, now_unix_us=1_000, **more):
    reply = membership.register(register(name, **more), now_ms=now_ms, now_unix_us=now_unix_us)
    assert isinstance(reply, Registered)
    return reply.epoch


def states(membership, now_ms):
    membership.tick(now_ms=now_ms)
    return {view.instance: view.state for view in membership.listing(now_ms=now_ms).instances}


def test_a_member_is_live_then_suspect_then_dead_then_forgotten():
    membership = Membership()
    joined(membership)
    assert states(membership, 749) == {"p0": "live"}
    assert states(membership, 750) == {"p0": "suspect"}
    assert states(membership, 1_499) == {"p0": "suspect"}
    assert states(membership, 1_500) == {"p0": "dead"}
    assert states(membership, 61_499) == {"p0": "dead"}
    assert states(membership, 61_500) == {}


def test_a_heartbeat_revives_and_carries_the_load():
    membership = Membership()
    epoch = joined(membership)
    membership.tick(now_ms=2_000)
    beat = Heartbeat(epoch=epoch, num_running=3, num_waiting=2, kv_used_share=0.5)
    assert membership.heartbeat("p0", beat, now_ms=2_100) == HeartbeatReply(ttl_ms=1_500)
    view = membership.listing(now_ms=2_150).instances[0]
    assert (view.state, view.age_ms, view.num_running, view.num_waiting, view.kv_used_share) == (
        "live", 50, 3, 2, 0.5,
    )  # fmt: skip


def test_an_epoch_is_the_wall_clock_and_never_below_the_last_plus_one():
    membership = Membership()
    assert joined(membership, now_unix_us=5_000) == 5_000
    assert joined(membership, now_unix_us=5_000) == 5_001
    assert joined(membership, now_unix_us=1) == 5_002
    assert joined(membership, now_unix_us=9_000) == 9_000


def test_an_old_epoch_is_stale_and_an_unknown_id_unknown():
    membership = Membership()
    old = joined(membership)
    new = joined(membership)
    assert membership.heartbeat("p0", Heartbeat(epoch=old), now_ms=0) == Stale(
        instance="p0", epoch=old, current=new
    )
    assert isinstance(membership.remove("p0", old), Stale)
    assert isinstance(membership.heartbeat("x", Heartbeat(epoch=1), now_ms=0), Unknown)
    assert isinstance(membership.remove("x", 1), Unknown)
    assert membership.remove("p0", new) is None
    assert isinstance(membership.heartbeat("p0", Heartbeat(epoch=new), now_ms=0), Unknown)


def test_the_version_grows_with_every_visible_change_and_only_then():
    membership = Membership()
    seen = [membership.version]

    def changed():
        seen.append(membership.version)
        return seen[-1] > seen[-2]

    epoch = joined(membership)
    assert changed()
    membership.heartbeat("p0", Heartbeat(epoch=epoch), now_ms=100)
    membership.tick(now_ms=200)
    assert not changed()
    membership.tick(now_ms=1_000)
    assert changed()
    membership.heartbeat("p0", Heartbeat(epoch=epoch), now_ms=1_000)
    assert changed()
    membership.remove("p0", epoch)
    assert changed()


def test_members_are_bounded_but_may_come_back():
    membership = Membership(max_members=2)
    joined(membership, "a")
    joined(membership, "b")
    assert membership.register(register("c"), now_ms=0, now_unix_us=1) == Full(max_members=2)
    joined(membership, "a")


def restarted(membership, **more):
    """Another life that reads what this one wrote."""
    other = Membership(**more)
    other.restore(membership.take_journal(), now_ms=0)
    return other


def test_a_restart_keeps_members_and_their_epochs():
    membership = Membership()
    epoch = joined(membership)
    after = restarted(membership)
    assert states(after, 0) == {"p0": "suspect"}
    assert isinstance(after.heartbeat("p0", Heartbeat(epoch=epoch), now_ms=100), HeartbeatReply)
    assert states(after, 100) == {"p0": "live"}


def test_epochs_grow_across_a_restart_even_if_the_wall_clock_went_back():
    membership = Membership()
    epoch = joined(membership, now_unix_us=9_000)
    membership.remove("p0", epoch)
    assert joined(restarted(membership), now_unix_us=10) == 9_001


def test_a_journal_that_comes_late_never_replaces_what_is_newer():
    membership = Membership()
    joined(membership, now_unix_us=5_000)
    old = JournalEntry(instance="p0", epoch=4_000, member=register("p0", endpoint="tcp://old:1"))
    assert membership.restore([old], now_ms=0) == 0
    assert membership.listing(now_ms=0).instances[0].endpoint != "tcp://old:1"


def test_a_late_journal_with_a_larger_epoch_makes_the_member_register_again():
    membership = Membership()
    epoch = joined(membership, now_unix_us=10)
    membership.restore([JournalEntry(instance="p0", epoch=4_000)], now_ms=0)
    assert isinstance(membership.heartbeat("p0", Heartbeat(epoch=epoch), now_ms=0), Unknown)
    assert joined(membership, now_unix_us=11) == 4_001


def test_the_journal_has_each_instance_once_and_is_taken_once():
    membership = Membership()
    for _ in range(3):
        epoch = joined(membership)
    entries = membership.take_journal()
    assert [(e.instance, e.epoch) for e in entries] == [("p0", epoch)]
    assert membership.take_journal() == []
    membership.journal_all()
    assert len(membership.take_journal()) == 1


def test_a_tick_tells_each_change_once():
    membership = Membership()
    joined(membership)
    assert membership.tick(now_ms=1_600) == [("p0", MemberState.DEAD)]
    assert membership.tick(now_ms=1_700) == []


def test_time_in_which_the_coordinator_stood_still_is_no_members_silence():
    membership = Membership()
    joined(membership)
    membership.excuse(5_000, now_ms=5_100)
    assert membership.tick(now_ms=5_100) == []
    assert membership.tick(now_ms=5_100 + 1_400) == [("p0", MemberState.DEAD)], "but its own 100 ms count"
    membership.excuse(5_000, now_ms=20_000)
    assert membership.tick(now_ms=20_000) == [], "and who was dead before stays dead"


def test_a_coordinator_that_stands_still_at_every_turn_sees_the_dead_too():
    membership = Membership()
    joined(membership)
    now_ms, changes = 0, []
    while now_ms < 60_000 and not changes:
        now_ms += 250 + 3_000
        membership.excuse(3_000, now_ms=now_ms)
        changes = [state for _, state in membership.tick(now_ms=now_ms) if state is MemberState.DEAD]
    assert changes


def led_again(**more):
    """p0 and p1 spoke here; long after that, in which others may have led, a new term begins."""
    membership = Membership(**more)
    for name in ("p0", "p1"):
        joined(membership, name, now_unix_us=5_000)
    membership.take_journal()
    membership.lead(now_ms=100_000)
    return membership


def test_a_term_begins_with_a_full_time_to_live_for_everybody():
    membership = led_again()
    assert states(membership, 100_000 + 1_499) == {"p0": "suspect", "p1": "suspect"}
    membership.heartbeat("p0", Heartbeat(epoch=5_000), now_ms=101_499)
    assert states(membership, 101_500) == {"p0": "live", "p1": "dead"}
    membership.lead(now_ms=102_000)
    assert states(membership, 103_499) == {"p0": "suspect", "p1": "suspect"}, "a dead one may beat elsewhere"


def test_a_term_that_begins_is_a_new_version_where_there_are_members():
    membership = led_again()
    version = membership.version
    membership.lead(now_ms=100_100)
    assert membership.version == version + 1
    empty = Membership()
    empty.lead(now_ms=0)
    assert empty.version == 0


def test_a_member_that_registered_with_another_leader_is_taken_over_from_it():
    membership = led_again(max_members=2)
    version = membership.version
    entry = JournalEntry(instance="p0", epoch=6_000, member=register("p0", endpoint="tcp://new:1"))
    assert membership.restore([entry], now_ms=100_100) == 1
    view = membership.listing(now_ms=100_100).instances[0]
    assert (view.instance, view.epoch, view.endpoint, view.state) == ("p0", 6_000, "tcp://new:1", "suspect")
    assert membership.version > version
    assert membership.take_journal() == [], "it is not gone"
    assert isinstance(membership.heartbeat("p0", Heartbeat(epoch=5_000), now_ms=0), Stale)
    assert isinstance(membership.heartbeat("p0", Heartbeat(epoch=6_000), now_ms=0), HeartbeatReply)


@pytest.mark.parametrize("epoch", [5_000, 6_000])
def test_a_member_that_left_under_another_leader_is_none_any_more(epoch):
    membership = led_again()
    gone = JournalEntry(instance="p0", epoch=epoch)
    membership.restore([gone], now_ms=100_100)
    assert states(membership, 100_100) == {"p1": "suspect"}
    assert membership.take_journal() == [gone]
    assert membership.gone_epoch("p0") == epoch


def test_a_member_that_spoke_in_this_term_is_believed_before_the_journal_of_its_epoch():
    membership = led_again()
    membership.heartbeat("p0", Heartbeat(epoch=5_000), now_ms=100_100)
    membership.restore([JournalEntry(instance="p0", epoch=5_000)], now_ms=100_200)
    assert states(membership, 100_200)["p0"] == "live"
    newer = JournalEntry(instance="p0", epoch=6_000, member=register("p0"))
    assert membership.restore([newer], now_ms=100_300) == 0
    assert "p0" not in states(membership, 100_300), "it must register again"


def test_an_entry_of_the_same_epoch_leaves_its_member_as_it_is():
    membership = led_again()
    same = JournalEntry(instance="p0", epoch=5_000, member=register("p0"))
    assert membership.restore([same], now_ms=101_000) == 0
    assert states(membership, 101_500) == {"p0": "dead", "p1": "dead"}


def test_what_the_journal_brings_is_hearsay_until_it_speaks():
    membership = Membership()
    membership.restore([JournalEntry(instance="p0", epoch=5_000, member=register("p0"))], now_ms=0)
    membership.restore([JournalEntry(instance="p0", epoch=6_000, member=register("p0"))], now_ms=100)
    assert [view.epoch for view in membership.listing(now_ms=100).instances] == [6_000]


def test_who_left_or_was_forgotten_is_gone_and_who_was_never_known_is_not():
    membership = Membership()
    left, _ = joined(membership, "p0"), joined(membership, "p1", now_unix_us=7_000)
    assert membership.gone_epoch("p0") is None
    membership.remove("p0", left)
    membership.tick(now_ms=61_500)
    assert (membership.gone_epoch("p0"), membership.gone_epoch("p1")) == (left, 7_000)
    assert membership.gone_epoch("x") is None


def test_who_is_silent_while_another_coordinator_may_lead_is_dead_and_not_forgotten():
    membership = Membership()
    joined(membership)
    membership.take_journal()
    membership.tick(now_ms=1_000_000, forgets=False)
    assert [view.state for view in membership.listing(now_ms=1_000_000).instances] == ["dead"]
    assert membership.take_journal() == []
