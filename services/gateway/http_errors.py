"""Every error as OpenAI's body: {"error": {"message", "type", "param", "code"}}, always all four keys."""

from collections.abc import Iterable
from http import HTTPStatus

import msgspec

from shared.errors import ClusterError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}
_ENCODER = msgspec.json.Encoder()
RETRYABLE_STATUS = frozenset({408, 409, 429, 502, 503, 504})


def type_of(status: int) -> str:
    """OpenAI's `type` for a status."""
    return _TYPES.get(status, "server_error")


def error_body(message: str, kind: str, param: str | None, code: str | None) -> bytes:
    """JSON text of an error body."""
    return _ENCODER.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_event(code: str, message: str) -> bytes:
    """The SSE event that ends a begun stream which cannot go on."""
    return b"data: " + error_body(message, type_of(status_of(code)), None, code) + b"\n\n"


def _subclasses(cls: type[ClusterError]) -> Iterable[type[ClusterError]]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


_STATUS_OF_CODE = {cls.code: cls.http_status for cls in (ClusterError, *_subclasses(ClusterError))}
_STATUS_OF_CODE["rate_limit_exceeded"] = 429


def status_of(code: str) -> int:
    """HTTP status of a stable code; a code nobody knows is our failure."""
    return _STATUS_OF_CODE.get(code, 500)


def header_block(
    status: int, retry_after_ms: int | None = None, request_id: str = "", retryable: bool | None = None
) -> list[tuple[bytes, bytes]]:
    """Headers of an error response.

    openai-python obeys x-should-retry before it looks at the status.
    """
    headers = [(b"content-type", b"application/json")]
    if request_id:
        headers.append((b"x-request-id", request_id.encode("latin-1", "replace")))
    should_retry = status in RETRYABLE_STATUS if retryable is None else retryable
    headers.append((b"x-should-retry", b"true" if should_retry else b"false"))
    if status in (429, 503):
        headers.append((b"retry-after", str(-(-(retry_after_ms or 1_000) // 1000)).encode()))
        headers.append((b"retry-after-ms", str(retry_after_ms or 1_000).encode()))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def header_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """As they stand in a head, the last line's end included."""
    return b"".join([b"%b: %b\r\n" % pair for pair in headers])


class HttpFailure(ClusterError):
    """An answer that has no class in shared/errors.py: 404 and 405 of the router, 429, 431."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        retry_after_ms: int | None = None,
        headers: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        super().__init__(message, retry_after_ms=retry_after_ms)
        self.http_status = status
        self.code = code
        self.headers = headers or []


def describe(error: ClusterError) -> tuple[int, bytes]:
    """Status and body of an error."""
    status = error.http_status
    message = error.message if status != 500 or isinstance(error, HttpFailure) else "Internal error."
    return status, error_body(message, type_of(status), error.param, error.code)


def plain_http(status: int, method: str, path: str) -> HttpFailure:
    """Error of the router itself."""
    if status == 404:
        return HttpFailure(404, "unknown_url", f"Unknown request URL: {method} {path}.")
    if status == 405:
        return HttpFailure(405, "method_not_allowed", f"Not allowed to {method} on {path}.")
    phrase = HTTPStatus(status).phrase
    return HttpFailure(status, phrase.lower().replace(" ", "_"), f"{phrase}.")
