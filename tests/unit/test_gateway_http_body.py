"""services/gateway/http_body.py: what a body's announced length says."""

import pytest

from services.gateway import http_body
from services.gateway.http_body import ClientGone, check_headers
from shared.errors import BodyTooLarge, InvalidRequest, Overloaded


def announced(length: bytes) -> dict:
    return {"headers": [(b"content-length", length)]}


@pytest.mark.parametrize("length", [b"0", b"100", b"0" * 5_000 + b"100", b"0" * 5_000])
def test_a_length_is_its_number_whatever_zeros_stand_before_it(length):
    check_headers(announced(length), 100)


@pytest.mark.parametrize("length", [b"101", b"0" * 5_000 + b"101", b"9" * 20, b"9" * 21, b"9" * 5_000])
def test_a_length_beyond_the_limit_is_too_large_however_many_digits_it_has(length):
    with pytest.raises(BodyTooLarge) as refusal:
        check_headers(announced(length), 100)
    assert len(refusal.value.message) < 200


@pytest.mark.parametrize("length", [b"", b"-1", b"+1", b"1 1", b"0x1"])
def test_a_length_that_is_no_number_is_invalid(length):
    with pytest.raises(InvalidRequest):
        check_headers(announced(length), 100)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (b"content-type", value)
            for value in (b"", b" ", b"application/json", b"Application/JSON ; charset=utf-8")
        ),
        *((b"content-encoding", value) for value in (b"", b" ", b"identity", b" Identity ")),
    ],
)
def test_an_empty_header_is_none_and_one_that_says_the_usual_is_taken(name, value):
    check_headers({"headers": [(name, value)]}, 100)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (b"content-type", value)
            for value in (b"application/jsonlines", b"application/json-patch+json", b"text/plain")
        ),
        *((b"content-encoding", value) for value in (b"gzip", b"identity, gzip")),
    ],
)
def test_another_type_or_encoding_is_refused(name, value):
    with pytest.raises(InvalidRequest):
        check_headers({"headers": [(name, value)]}, 100)


@pytest.mark.parametrize(
    ("bound", "largest", "end"), [(100, 20, Overloaded), (20, 100, Overloaded), (101, 20, ClientGone)]
)
async def test_bodies_that_are_not_whole_are_bounded_together_and_count_no_longer(
    monkeypatch, bound, largest, end
):
    """Beside others of 91 bytes; the bound has room for one of the largest."""
    monkeypatch.setattr(http_body, "MAX_UNFINISHED_BYTES", bound)
    monkeypatch.setattr(http_body.Unfinished, "num_bytes", 91)
    parts = iter([{"type": "http.request", "body": b"12345", "more_body": True}] * 2)

    async def receive():
        return next(parts, {"type": "http.disconnect"})

    with pytest.raises(end):
        await http_body.read_json_body({"headers": []}, receive, largest)
    assert http_body.Unfinished.num_bytes == 91
