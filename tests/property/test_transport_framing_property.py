"""Any messages, cut anywhere, come back; any garbage is refused or awaited, never anything else."""

from hypothesis import given
from hypothesis import strategies as st

from shared.errors import PeerProtocolError
from shared.transport.unix_framing import MAX_FDS, Deframer, pack_message

MESSAGES = st.lists(
    st.tuples(st.lists(st.binary(max_size=200), min_size=1, max_size=11), st.integers(0, MAX_FDS)), max_size=8
)


@given(MESSAGES, st.data())
def test_messages_cut_anywhere_come_back(messages, data):
    stream = b"".join(pack_message(frames, num_fds=num_fds) for frames, num_fds in messages)
    deframer, got = Deframer(), []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        got += deframer.feed(stream[:cut])
        stream = stream[cut:]
    assert got == messages


@given(st.binary(max_size=400))
def test_garbage_is_refused_or_awaited(garbage):
    try:
        for frames, num_fds in Deframer().feed(garbage):
            assert 1 <= len(frames) <= 11
            assert num_fds <= MAX_FDS
    except PeerProtocolError:
        pass
