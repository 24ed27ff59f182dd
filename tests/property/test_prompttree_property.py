"""HeldBlocks against a model of Redis that loses, refuses and forgets: in the end it holds what is held."""

from hypothesis import given
from hypothesis import strategies as st

from shared.prompttree.held_blocks import HeldBlocks
from shared.prompttree.scripts import SHORT_HASH_BYTES

blocks = st.lists(st.integers(0, 30), max_size=12)
steps = st.one_of(
    st.tuples(st.just("stored"), blocks),
    st.tuples(st.just("removed"), blocks),
    st.tuples(
        st.sampled_from(["cleared", "send", "send", "send", "fail before", "fail after", "flush", "beat"])
    ),
)


def block(i):
    return i.to_bytes(4, "big") * 8


class Server:
    """One instance's set, or None when there is no publication."""

    def __init__(self):
        self.held = None

    def claim(self):
        self.held = set()

    def write(self, batch):
        if self.held is None:
            return False
        size = SHORT_HASH_BYTES
        self.held |= {batch.stored[i : i + size] for i in range(0, len(batch.stored), size)}
        self.held -= {batch.removed[i : i + size] for i in range(0, len(batch.removed), size)}
        return True


def send(held, server, fault=""):
    """One turn of the publisher."""
    if not held.claimed:
        server.claim()
        held.on_claimed()
    batch = held.next_batch()
    if batch is None:
        return False
    if fault == "fail before" or not server.write(batch) or fault == "fail after":
        held.lost()
    return True


@given(st.lists(steps, max_size=60), st.integers(1, 20))
def test_redis_ends_up_with_exactly_what_is_held(history, max_pending):
    held, server, truth = HeldBlocks(max_pending=max_pending), Server(), set()
    for kind, *rest in history:
        if kind == "stored":
            held.stored([block(i) for i in rest[0]])
            truth |= set(rest[0])
        elif kind == "removed":
            held.removed([block(i) for i in rest[0]])
            truth -= set(rest[0])
        elif kind == "cleared":
            held.cleared()
            truth.clear()
        elif kind == "flush":
            server.held = None
        elif kind == "beat":
            if held.claimed and not (server.held is not None and held.agrees(len(server.held))):
                held.lost()
        else:
            send(held, server, kind)
        assert held.num_pending <= len(held) + max_pending
    if server.held is None:
        held.lost()  # the next beat or write finds out
    for _ in range(100):
        if not send(held, server):
            break
    assert server.held == {block(i)[:SHORT_HASH_BYTES] for i in truth}
    assert held.agrees(len(truth))
