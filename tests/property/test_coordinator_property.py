"""Epochs of one instance only grow, whatever the wall clock, the journal and restarts do."""

from hypothesis import given
from hypothesis import strategies as st

from services.coordinator.core.membership import Membership, Stale
from shared.wire.membership import Heartbeat, HeartbeatReply
from tests.support.control_plane import register

NAMES = ["a", "b"]
steps = st.one_of(
    st.tuples(st.just("register"), st.sampled_from(NAMES), st.integers(0, 50)),
    st.tuples(st.just("beat"), st.sampled_from(NAMES), st.integers(0, 60)),
    st.tuples(st.just("remove"), st.sampled_from(NAMES), st.integers(0, 60)),
    st.tuples(st.just("wait"), st.integers(0, 70_000)),
    st.tuples(st.just("restart"), st.booleans()),  # with the journal there at once, or after the next steps
    st.tuples(
        st.just("journal comes"),
    ),
)


@given(st.lists(steps, max_size=50))
def test_epochs_only_grow_and_only_the_newest_may_beat(history):
    membership, now_ms = Membership(), 0
    store, granted, unread = {}, dict.fromkeys(NAMES, -1), False
    version = membership.version

    for kind, *rest in history:
        if kind == "register":
            name, unix_us = rest
            # Without the journal only the wall clock keeps epochs growing, so then it must not go back.
            unix_us = max(unix_us, granted[name] + 1) if unread else unix_us
            epoch = membership.register(register(name), now_ms=now_ms, now_unix_us=unix_us).epoch
            assert epoch > granted[name]
            granted[name] = epoch
        elif kind == "beat":
            name, epoch = rest
            reply = membership.heartbeat(name, Heartbeat(epoch=epoch), now_ms=now_ms)
            if isinstance(reply, HeartbeatReply):
                assert epoch == granted[name]
            elif isinstance(reply, Stale):
                assert epoch != reply.current == granted[name]
        elif kind == "remove":
            membership.remove(rest[0], rest[1])
        elif kind == "wait":
            now_ms += rest[0]
            membership.tick(now_ms=now_ms)
        elif kind == "restart":
            store.update({e.instance: e for e in membership.take_journal()})
            membership, now_ms, unread = Membership(version=version + 1), 0, True
        if kind == "journal comes" or (kind == "restart" and rest[0]):
            membership.restore(list(store.values()), now_ms=now_ms)
            unread = False
        if not unread:  # the shell writes only after it has read
            store.update({e.instance: e for e in membership.take_journal()})
        assert membership.version >= version
        version = membership.version
        views = membership.listing(now_ms=now_ms).instances
        assert [v.instance for v in views] == sorted({v.instance for v in views})
        assert all(v.epoch == granted[v.instance] for v in views)
