"""shared/transport/unix_framing.py: a stream is cut into the messages that were put in, or refused."""

import struct

import pytest

from shared.errors import PeerProtocolError
from shared.transport.unix_framing import MAX_FDS, MAX_MESSAGE_BYTES, Deframer, pack_message


def all_of(deframer, data):
    return list(deframer.feed(data))


def test_messages_come_back_whole_in_order_with_their_fd_counts():
    data = pack_message([b"schema", b"12345678", b"body"]) + pack_message([b"", b"x" * 70_000], num_fds=2)
    deframer = Deframer()
    assert all_of(deframer, data) == [([b"schema", b"12345678", b"body"], 0), ([b"", b"x" * 70_000], 2)]


@pytest.mark.parametrize(
    "head",
    [
        struct.pack("<IHH", MAX_MESSAGE_BYTES + 1, 3, 0),
        struct.pack("<IHH", 0xFFFFFFFF, 0xFFFF, 0xFFFF),
        struct.pack("<IHH", 100, 0, 0),
        struct.pack("<IHH", 100, 12, 0),
        struct.pack("<IHH", 100, 3, MAX_FDS + 1),
        struct.pack("<IHH", 15, 3, 0),
        struct.pack("<IHH3I", 17, 3, 0, 1, 1, 1) + b"x",
        struct.pack("<IHH3I", 16, 3, 0, 0, 0, 0xFFFFFFFF),
    ],
)
def test_a_head_that_cannot_be_right_is_refused_before_its_bytes_are_awaited(head):
    with pytest.raises(PeerProtocolError):
        all_of(Deframer(), head)


def test_what_the_other_side_would_refuse_is_not_packed():
    with pytest.raises(PeerProtocolError):
        pack_message([bytes(MAX_MESSAGE_BYTES)])
    with pytest.raises(PeerProtocolError):
        pack_message([b""] * 12)
    with pytest.raises(PeerProtocolError):
        pack_message([b"", b"", b""], num_fds=MAX_FDS + 1)
