"""Whatever arrives on a channel is a message or a PeerProtocolError, never anything else."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import PeerProtocolError
from shared.wire.codec import MAX_RAW_FRAMES
from shared.wire.requests import TO_WORKER, Abort, GatewayToWorker

GOOD = TO_WORKER.pack(Abort(request_id="r", attempt=1), seq=7, raw=[b"abc"])


def test_what_was_packed_comes_out_again():
    assert TO_WORKER.unpack(GOOD) == (7, Abort(request_id="r", attempt=1), [b"abc"])


@given(st.lists(st.binary(max_size=64), max_size=5))
def test_nonsense_is_a_protocol_error(frames):
    with pytest.raises(PeerProtocolError):
        TO_WORKER.unpack(frames)


@given(st.binary(max_size=64))
def test_a_nonsense_body_is_a_protocol_error_or_a_message(body):
    try:
        _, message, _ = TO_WORKER.unpack([GOOD[0], GOOD[1], body])
    except PeerProtocolError:
        return
    assert isinstance(message, GatewayToWorker)


def test_bad_utf8_is_a_protocol_error():
    body = msgspec.msgpack.encode({"type": "abort", "request_id": "rr", "attempt": 1}).replace(
        b"rr", b"\xff\xfe"
    )
    with pytest.raises(PeerProtocolError):
        TO_WORKER.unpack([GOOD[0], GOOD[1], body])


@pytest.mark.parametrize(
    "frames",
    [
        [b"quire.generate/9", *GOOD[1:]],
        [GOOD[0], b"\0" * 7, GOOD[2]],
        [*GOOD[:3], *[b""] * (MAX_RAW_FRAMES + 1)],
        GOOD[:2],
    ],
)
def test_other_versions_and_wrong_frames_are_refused(frames):
    with pytest.raises(PeerProtocolError):
        TO_WORKER.unpack(frames)
