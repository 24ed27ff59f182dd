"""ZeroMQ's bytes: whatever the cuts, what was encoded comes out; nonsense is refused, never a crash."""

import itertools
import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import PeerProtocolError
from shared.transport import zmtp

LIMIT = 70_000


def reader():
    return zmtp.Reader(max_frame_bytes=LIMIT, max_message_bytes=4 * LIMIT, max_frames=4)


def read_all(source, chunks):
    out = []
    for chunk in chunks:
        source.feed(chunk)
        while (found := source.next()) is not None:
            out.append(found)
    return out


def cut(data, places):
    borders = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(borders) if a < b]


frames = st.one_of(st.binary(max_size=20), st.sampled_from([bytes(255), bytes(256), bytes(LIMIT)]))
messages = st.lists(st.lists(frames, min_size=1, max_size=4), max_size=5)


@given(messages, st.lists(st.integers(0, 1 << 20), max_size=30))
def test_messages_come_out_whole_and_in_order_however_the_stream_is_cut(sent, places):
    data = b"".join(piece for message in sent for piece in zmtp.encode(message))
    assert read_all(reader(), cut(data, places)) == sent


@given(messages)
def test_bytes_one_by_one_are_enough(sent):
    sent = [[frame[:300] for frame in message] for message in sent]
    data = b"".join(piece for message in sent for piece in zmtp.encode(message))
    assert read_all(reader(), [bytes((byte,)) for byte in data]) == sent


@given(st.binary(max_size=16), st.lists(st.integers(0, 100), max_size=5))
def test_commands_stand_between_messages_and_a_ping_is_answered(context, places):
    ping = b"\x04\x16\x04PING\x00\x0f"[:1] + bytes((7 + len(context),)) + b"\x04PING\x00\x0f" + context
    data = b"".join(zmtp.encode([b"a", b"b"])) + ping + b"".join(zmtp.encode([b"c"]))
    first, command, last = read_all(reader(), cut(data, places))
    assert (first, last) == ([b"a", b"b"], [b"c"])
    assert zmtp.pong_for(command) == bytes((zmtp.COMMAND, 5 + len(context))) + b"\x04PONG" + context


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=5))
def test_any_bytes_give_messages_or_a_refusal(data, places):
    try:
        for found in read_all(reader(), cut(data, places)):
            if isinstance(found, bytes):
                zmtp.pong_for(found)
                zmtp.socket_type_of(found)
    except PeerProtocolError:
        pass


@given(st.binary(max_size=80))
def test_any_greeting_is_taken_or_refused(data):
    try:
        zmtp.check_greeting(data[:64])
    except PeerProtocolError:
        assert data[:64] != zmtp.GREETING[: len(data)]


@pytest.mark.parametrize(
    "data",
    [
        bytes((zmtp.LONG,)) + (LIMIT + 1).to_bytes(8, "big"),
        bytes((8, 0)),
        bytes((zmtp.COMMAND | zmtp.MORE, 0)),
        bytes((zmtp.COMMAND | zmtp.LONG,)) + (5_000).to_bytes(8, "big") + bytes(5_000),
    ],
)
def test_frames_beyond_the_bounds_break_the_stream(data):
    with pytest.raises(PeerProtocolError):
        read_all(reader(), [data])


@given(st.lists(st.integers(256, LIMIT), min_size=1, max_size=12), st.integers(0, 3))
def test_a_messages_bytes_are_bounded_however_many_frames_they_are_in(sizes, num_whole):
    whole = b"".join(zmtp.encode([bytes(LIMIT)] * 4)) * num_whole  # earlier messages do not count
    data = b"".join(bytes((zmtp.LONG | zmtp.MORE,)) + n.to_bytes(8, "big") + bytes(n) for n in sizes)
    source = reader()
    assert len(read_all(source, [whole])) == num_whole
    if sum(sizes) <= 4 * LIMIT:
        assert read_all(source, [data]) == []
    else:
        with pytest.raises(PeerProtocolError):
            read_all(source, [data])


@pytest.mark.parametrize("sizes", [[1], [2], [1, 4_096], [4_095]])
def test_a_frame_that_drips_in_takes_about_its_bytes(sizes):
    """Each read was an object of its own: reads of two bytes took 22 times as much."""
    num_bytes = 1 << 20
    body = random.Random(7).randbytes(num_bytes)
    ends = itertools.accumulate(itertools.cycle(sizes), initial=0)
    borders = [*itertools.takewhile(lambda end: end < num_bytes, ends), num_bytes]
    chunks = [body[a:b] for a, b in itertools.pairwise(borders)]
    source = zmtp.Reader(max_frame_bytes=num_bytes, max_message_bytes=num_bytes, max_frames=4)
    source.feed(bytes((zmtp.LONG,)) + num_bytes.to_bytes(8, "big"))
    assert source.next() is None
    last = chunks.pop()
    for chunk in chunks:
        source.feed(chunk)
    assert source.next() is None
    kept = sum(map(sys.getsizeof, source._pieces)) + sys.getsizeof(source._pieces)
    assert kept < 1.25 * num_bytes
    source.feed(last)
    assert source.next() == [body]


def test_of_a_message_with_too_many_frames_only_the_first_are_kept():
    data = b"".join(zmtp.encode([b"x"] * 1_000)) + b"".join(zmtp.encode([b"y"]))
    assert read_all(reader(), [data]) == [[b"x"] * 4, [b"y"]]


def test_the_greeting_is_that_of_zmtp_3_1_with_mechanism_null():
    assert len(zmtp.GREETING) == zmtp.GREETING_BYTES
    for length in range(65):
        zmtp.check_greeting(zmtp.GREETING[:length])
    for wrong in (
        b"GET / HTTP/1.1",
        zmtp.GREETING[:10] + b"\x01",
        zmtp.GREETING.replace(b"NULL", b"PLAIN"[:4]),
    ):
        with pytest.raises(PeerProtocolError):
            zmtp.check_greeting(wrong)


def test_ready_names_the_socket_type_among_other_properties():
    command = zmtp.ready(b"ROUTER")[2:]
    assert zmtp.socket_type_of(command) == b"ROUTER"
    other = b"\x05READY" + b"\x08Identity\x00\x00\x00\x02me" + b"\x0bsocket-TYPE\x00\x00\x00\x06DEALER"
    assert zmtp.socket_type_of(other) == b"DEALER"
    for wrong in (b"\x05ERROR\x03bad", b"\x05READY", b"\x05READY\x0bSocket-Type\x00\x00\x00\xff"):
        with pytest.raises(PeerProtocolError):
            zmtp.socket_type_of(wrong)
