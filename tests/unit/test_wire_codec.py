"""Whatever arrives on a channel is a message or a PeerProtocolError, never anything else."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import PeerProtocolError
from shared.wire.codec import MAX_RAW_FRAMES
from shared.wire.cost import CostCoefficients, LinkRate, ModelShape
from shared.wire.reports import REPORTS
from shared.wire.requests import TO_WORKER, Abort, GatewayToWorker
from tests.support.control_plane import hello, report

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


def test_a_field_that_nobody_knows_of_arrays_in_arrays_is_a_protocol_error():
    """It ended the scheduler: RecursionError is no error of msgspec's own."""
    body = bytearray(msgspec.msgpack.encode({"type": "abort", "request_id": "r", "attempt": 1}))
    body[0] += 1  # a map of one field more
    body += msgspec.msgpack.encode("zz") + b"\x91" * 5_000 + b"\xc0"
    with pytest.raises(PeerProtocolError):
        TO_WORKER.unpack([GOOD[0], GOOD[1], bytes(body)])


SHAPE = ModelShape(
    num_layers=2, hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=4, head_dim=16, vocab_size=100
)  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, 0) for name in ("tile_columns", "tile_tokens", "num_processors", "max_batched_tokens", "tp", "pp")),
        *((("launch_ms", value)) for value in (float("nan"), float("inf"), -1.0)),
    ],
)  # fmt: skip
def test_costs_that_nobody_can_count_with_are_a_protocol_error(field, value):
    """Of a worker's Hello. Who divided by it was the scheduler."""
    good = hello("decode-0", cost=CostCoefficients(shape=SHAPE))
    assert REPORTS.unpack(REPORTS.pack(good))[1] == good
    bad = hello("decode-0", cost=CostCoefficients(shape=SHAPE, **{field: value}))
    with pytest.raises(PeerProtocolError):
        REPORTS.unpack(REPORTS.pack(bad))


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("field", ModelShape.__struct_fields__)
def test_a_model_of_sizes_below_one_is_a_protocol_error(field, value):
    """Of a worker's Hello. Its predictions fell below nothing, so that it got every request."""
    bad = CostCoefficients(shape=msgspec.structs.replace(SHAPE, **{field: value}))
    with pytest.raises(PeerProtocolError):
        REPORTS.unpack(REPORTS.pack(hello("decode-0", cost=bad)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("field", ["gb_per_s", "latency_ms"])
def test_links_that_nobody_can_count_with_are_a_protocol_error(field, value):
    """Of a worker's Report. Times that were no numbers were compared with, and added up."""
    good = report("decode-0", links={"remote": LinkRate(gb_per_s=5.0, latency_ms=1.0)})
    assert REPORTS.unpack(REPORTS.pack(good))[1] == good
    link = msgspec.structs.replace(good.links["remote"], **{field: value})
    with pytest.raises(PeerProtocolError):
        REPORTS.unpack(REPORTS.pack(report("decode-0", links={"remote": link})))


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
