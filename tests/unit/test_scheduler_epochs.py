"""Whose epoch counts where the coordinator and a Hello say different things."""

import pytest

from services.scheduler.core.admission import UNCONFIRMED
from services.scheduler.core.instances import CONTRADICTED_POLLS, Instances
from services.scheduler.core.refusals import MAX_NAMES, Refusals
from shared.wire.membership import InstanceList, InstanceView
from shared.wire.reports import Goodbye, Refused, Resync, Welcome
from tests.support.control_plane import description, hello, report

MADE_UP = 1 << 53


def members(epoch, name="d0", state="live"):
    view = InstanceView(
        instance=name, role="decode", endpoint="", host="", epoch=epoch, description=description(), age_ms=0,
        state=state,
    )  # fmt: skip
    return InstanceList(version=1, instances=[view])


@pytest.fixture
def instances():
    """d0 is a member under epoch 5, and has said so."""
    made = Instances()
    made.hello(hello("d0", epoch=5), now_ms=0)
    assert made.follow(members(5)) == []
    return made


def live(instances):
    return [known.epoch for known in instances.live(now_ms=0)]


def test_an_epoch_that_the_coordinator_contradicts_is_dropped_and_the_member_is_placed_again(instances):
    """Anybody may say Hello: one message took an instance out until the scheduler was started again."""
    instances.hello(hello("d0", epoch=MADE_UP), now_ms=0)
    assert isinstance(instances.report(report("d0", epoch=5), now_ms=0), Refused)
    for _ in range(CONTRADICTED_POLLS - 1):
        assert instances.follow(members(5)) == [], "an answer may be older than the Hello"
    (dropped,) = instances.follow(members(5))
    assert (dropped.instance, dropped.epoch, dropped.now) == ("d0", MADE_UP, 5)
    assert live(instances) == []
    assert isinstance(instances.report(report("d0", epoch=5), now_ms=0), Resync)
    assert isinstance(instances.hello(hello("d0", epoch=5), now_ms=0), Welcome)
    assert live(instances) == [5]


def test_it_is_dropped_too_when_whoever_said_it_has_said_goodbye(instances):
    instances.hello(hello("d0", epoch=MADE_UP), now_ms=0)
    instances.goodbye(Goodbye(instance="d0", epoch=MADE_UP))
    for _ in range(CONTRADICTED_POLLS):
        instances.follow(members(6))  # it has registered again meanwhile
    assert isinstance(instances.hello(hello("d0", epoch=5), now_ms=0), Refused), "what was over stays over"
    assert isinstance(instances.hello(hello("d0", epoch=6), now_ms=0), Welcome)


def test_a_dropped_epoch_is_believed_again_only_when_the_list_names_it(instances):
    instances.hello(hello("d0", epoch=9), now_ms=0)
    for _ in range(CONTRADICTED_POLLS):
        instances.follow(members(5))
    instances.hello(hello("d0", epoch=5), now_ms=0)
    for epoch in (9, 10):
        answer = instances.hello(hello("d0", epoch=epoch), now_ms=0)
        assert isinstance(answer, Refused)
        assert answer.code == UNCONFIRMED, "not stale: it would register again for nothing"
        assert live(instances) == [5]
    assert isinstance(instances.hello(hello("d0", epoch=8), now_ms=0), Welcome), "one that is just granted"
    instances.follow(members(10))
    assert isinstance(instances.hello(hello("d0", epoch=10), now_ms=0), Welcome)


@pytest.mark.parametrize("state", ["suspect", "dead"])
def test_who_does_not_beat_at_the_coordinator_contradicts_nobody(instances, state):
    """A new leader knows from a journal that lacks the last words who was replaced."""
    instances.hello(hello("d0", epoch=6), now_ms=0)
    for _ in range(10):
        assert instances.follow(members(5, state=state)) == []
    assert live(instances) == [6]


def test_a_member_that_is_late_with_a_beat_is_heard_all_the_same(instances):
    instances.hello(hello("d0", epoch=MADE_UP), now_ms=0)
    said = [
        instances.follow(members(5, state=state)) for state in ("live", "suspect", "live", "suspect", "live")
    ]
    assert [len(dropped) for dropped in said] == [0, 0, 0, 0, 1]


def test_each_newer_epoch_has_its_own_answers(instances):
    for epoch in range(6, 20):  # each list was asked for before the registration
        instances.hello(hello("d0", epoch=epoch), now_ms=0)
        assert instances.follow(members(epoch - 1)) == []
        assert live(instances) == [epoch]


def test_a_coordinator_that_lost_journal_and_clock_is_followed(instances):
    """Epochs that it names are smaller from now on."""
    for _ in range(CONTRADICTED_POLLS):
        instances.follow(members(3))
    assert isinstance(instances.hello(hello("d0", epoch=3), now_ms=0), Welcome)
    assert live(instances) == [3]


def test_without_a_coordinators_list_the_largest_epoch_counts_for_good(instances):
    instances.hello(hello("d0", epoch=MADE_UP), now_ms=0)
    assert instances.follow(InstanceList(version=2, instances=[])) == []
    assert isinstance(instances.hello(hello("d0", epoch=6), now_ms=0), Refused)


def test_who_is_refused_is_shown_while_it_comes_back_and_logged_every_ten_seconds():
    refusals = Refusals()
    logged = [now for now in range(0, 21_000, 2_000) if refusals.note("d0", now, "why", now_ms=now)]
    assert logged == [0, 10_000, 20_000]
    assert refusals.lately(now_ms=21_000) == [
        {"instance": "d0", "epoch": 20_000, "reason": "why", "ago_ms": 1_000}
    ]
    assert refusals.lately(now_ms=25_000) == []
    for i in range(2 * MAX_NAMES):
        refusals.note(f"x{i}", 1, "why", now_ms=0)
    assert len(refusals.lately(now_ms=0)) == MAX_NAMES
