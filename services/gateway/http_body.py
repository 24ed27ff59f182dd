"""Request heads and bodies: the few headers that matter, and a body that cannot be too large."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from shared.errors import BodyTooLarge, InvalidRequest, Overloaded

MAX_UNFINISHED_BYTES = 256 << 20  # in all, or one of the largest; then a body that goes on is refused
MAX_LENGTH_DIGITS = 20  # of 2^64, the most that any HTTP parser counts to

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Unfinished:
    """Bodies, of all connections."""

    num_bytes = 0


class ClientGone(Exception):
    """The connection ended before its request was whole; nobody is there to be answered."""


def header(scope: Scope, name: bytes) -> bytes | None:
    """Value of the first header of that (lower-case) name."""
    for key, value in scope["headers"]:
        if key == name:
            return value
    return None


def is_on(value: bytes | None) -> bool:
    """Whether a header's value means yes; anything unknown does not."""
    return value is not None and value.strip().lower() in (b"1", b"true", b"yes", b"on")


def check_headers(scope: Scope, max_bytes: int) -> None:
    """Raises: BodyTooLarge by the announced length; InvalidRequest on another content type. An empty one is none."""
    for key, value in scope["headers"]:
        if key == b"content-length":
            if not value.isdigit():
                raise InvalidRequest("The content-length header is no number.")
            digits = value.lstrip(b"0")  # the parser lets through as many as a head holds; int() takes 4,300
            if len(digits) > MAX_LENGTH_DIGITS:
                raise BodyTooLarge(f"The request body exceeds {max_bytes} bytes.")
            if int(digits or b"0") > max_bytes:
                raise BodyTooLarge(
                    f"The request body has {int(digits)} bytes; at most {max_bytes} are allowed."
                )
        elif key == b"content-type":
            if value.partition(b";")[0].strip().lower() not in (b"", b"application/json"):
                raise InvalidRequest("The content-type must be application/json.")
        elif key == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise InvalidRequest("Compressed request bodies are not supported.")


def check_body(scope: Scope, body: bytes, max_bytes: int) -> None:
    """For a body that is whole. Raises: as check_headers(); BodyTooLarge."""
    check_headers(scope, max_bytes)
    if len(body) > max_bytes:
        raise BodyTooLarge(f"The request body exceeds {max_bytes} bytes.")


async def read_json_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The whole body, not parsed.

    Raises: as check_headers(); BodyTooLarge while reading; Overloaded beyond MAX_UNFINISHED_BYTES; ClientGone.
    """
    check_headers(scope, max_bytes)
    parts: list[bytes] = []
    num_bytes, has_more = 0, True
    try:
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part, has_more = message.get("body", b""), message.get("more_body", False)
            num_bytes += len(part)
            Unfinished.num_bytes += len(part)
            if num_bytes > max_bytes:
                raise BodyTooLarge(f"The request body exceeds {max_bytes} bytes.")
            if has_more and Unfinished.num_bytes > max(MAX_UNFINISHED_BYTES, max_bytes):
                raise Overloaded("Too many large request bodies are under way.")
            parts.append(part)
    finally:
        Unfinished.num_bytes -= num_bytes
    return b"".join(parts)
