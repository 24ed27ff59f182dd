"""What every route shares: bodies in, JSON out, one shape of refusal, a line in the OpenAPI page."""

import ipaddress
from collections.abc import Collection
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from fastapi import Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from shared.errors import BodyTooLarge, InvalidRequest
from shared.wire.codec import MALFORMED

MAX_BODY_BYTES = 64 << 10
JSON = "application/json"
CLIENT_LEFT = 499  # nobody reads it

T = TypeVar("T")


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """Every refusal. `code` is a stable code of shared/errors.py, or names the HTTP status."""

    code: str
    message: str


async def read_body(request: Request, kind: type[T], *, max_bytes: int = MAX_BODY_BYTES) -> T:
    """Raises: BodyTooLarge, InvalidRequest; HTTPException for another content type (an empty one is none), and when the
    client left inside its body."""
    said = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if said not in ("", JSON):
        raise HTTPException(415, f"content-type {said[:80]!r}: it must be {JSON}")
    raw = bytearray()
    try:
        async for piece in request.stream():
            raw += piece
            if len(raw) > max_bytes:
                raise BodyTooLarge(f"the body exceeds {max_bytes} bytes")
    except ClientDisconnect:
        raise HTTPException(CLIENT_LEFT, "the client left") from None
    try:
        return msgspec.json.decode(raw, type=kind)
    except MALFORMED as error:
        raise InvalidRequest(str(error)) from error


def is_foreign(request: Request, own_urls: Collection[str]) -> bool:
    """Whether a browser's page that is not from here would change something. From here are own_urls, and pages at an
    address or localhost: any other name may have been given this address (DNS rebinding)."""
    headers, origin = request.headers, request.headers.get("origin")
    if request.method in ("GET", "HEAD", "OPTIONS") or origin in own_urls:
        return False
    if origin is None:
        return headers.get("sec-fetch-site", "none") not in ("same-origin", "none")
    try:
        said = urlsplit(origin)
        if said.hostname != "localhost":
            ipaddress.ip_address(said.hostname or "")
    except ValueError:
        return True
    return said.netloc != headers.get("host")


def json_reply(value: Any, status: int = 200) -> Response:
    """A struct as JSON."""
    return Response(msgspec.json.encode(value), status, media_type=JSON)


def error_reply(status: int, code: str, message: str) -> Response:
    """A refusal."""
    return json_reply(ErrorBody(code=code, message=message), status)


def documented(
    summary: str, reply: Any, body: Any = None, *errors: int, keyed: bool = False
) -> dict[str, Any]:
    """Arguments of a route's decorator. reply None: 204; keyed: takes an Idempotency-Key."""

    def content(kind: Any) -> dict[str, Any]:
        return {JSON: {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}

    responses: dict[int, Any] = {
        code: {"description": "Refused", "content": content(ErrorBody)} for code in errors
    }
    if reply is None:
        responses[204] = {"description": "Done"}
    else:
        responses[200] = {"description": "Done", "content": content(reply)}
    out: dict[str, Any] = {"summary": summary, "responses": responses, "response_class": Response}
    if reply is None:
        out["status_code"] = 204
    extra: dict[str, Any] = {}
    if body is not None:
        extra["requestBody"] = {"required": True, "content": content(body)}
    if keyed:
        header = {"name": "Idempotency-Key", "in": "header", "schema": {"type": "string", "maxLength": 128}}
        extra["parameters"] = [header]
    if extra:
        out["openapi_extra"] = extra
    return out
