"""Epochs at the scheduler where a coordinator lists members: the newest process wins, and an old one never returns.

A coordinator grants epochs to processes of one instance, its answers reach the scheduler late, and somebody says Hello
under epochs that nobody was granted.
"""

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.instances import CONTRADICTED_POLLS, Instances
from shared.wire.membership import InstanceList, InstanceView
from shared.wire.reports import Welcome
from tests.support.control_plane import description, hello

steps = st.one_of(
    st.just(("register",)),
    st.tuples(st.just("hello"), st.integers(0, 5)),  # of the process that registered so many times ago
    st.tuples(st.just("made_up"), st.integers(1, 30)),  # so much above the newest
    st.tuples(st.just("answer"), st.booleans()),  # whether it was on its way before the last registration
)


def answer(epoch):
    view = InstanceView(
        instance="d0", role="decode", endpoint="", host="", epoch=epoch, description=description(), age_ms=0,
        state="live",
    )  # fmt: skip
    return InstanceList(version=1, instances=[view])


@given(st.lists(steps, max_size=60))
def test_the_newest_process_wins_and_one_that_the_list_has_replaced_never_comes_back(history):
    instances, granted, listed = Instances(), [10], 0
    for step in history:
        match step:
            case ("register",):
                granted.append(granted[-1] + 10)
            case ("hello", back):
                epoch = granted[max(0, len(granted) - 1 - back)]
                instances.hello(hello("d0", epoch=epoch), now_ms=0)
            case ("made_up", above):
                epoch = granted[-1] + above
                if above % 10:
                    instances.hello(hello("d0", epoch=epoch), now_ms=0)
            case ("answer", late):
                told = granted[-2] if late and len(granted) > 1 and listed <= granted[-2] else granted[-1]
                listed = max(listed, told)
                instances.follow(answer(told))
        placed = instances.live(now_ms=0)
        assert all(known.epoch >= listed for known in placed), "the list has named a newer one"
    for _ in range(CONTRADICTED_POLLS):
        instances.follow(answer(granted[-1]))
    for epoch in granted[:-1]:
        instances.hello(hello("d0", epoch=epoch), now_ms=0)
        assert not instances.live(now_ms=0) or instances.live(now_ms=0)[0].epoch == granted[-1]
    assert isinstance(instances.hello(hello("d0", epoch=granted[-1]), now_ms=0), Welcome)
    assert [known.epoch for known in instances.live(now_ms=0)] == [granted[-1]]
