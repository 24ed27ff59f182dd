"""The outermost layer of every HTTP request: key, request id, metrics, and errors as OpenAI's bodies."""

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from services.gateway import metrics
from services.gateway.auth import KeyRing
from services.gateway.http_body import ClientGone, Message, Receive, Scope, Send
from services.gateway.http_errors import HttpFailure, describe, header_block, plain_http
from services.gateway.http_protocol import REFUSED_KEY
from shared.errors import ClusterError, InvariantBroken
from shared.observe.log import get_logger

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/docs", "/openapi.json"})
KNOWN_ROUTES = frozenset(
    {*OPEN_PATHS, "/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize"}
)
REQUEST_ID = "quire.request_id"
TENANT = "quire.tenant"
STATUS = "quire.status"

_PREFIXES = {"/v1/chat/completions": "chatcmpl-", "/v1/completions": "cmpl-"}
_log = get_logger("gateway.http")


@lru_cache(maxsize=256)
def _requests_counter(route: str, status: int) -> Any:
    return metrics.REQUESTS.labels(route, str(status))


class Edge:
    """ASGI middleware. Handlers below raise ClusterErrors; what they answer themselves passes through."""

    def __init__(
        self, app: ASGIApp, keys: KeyRing, random_bytes: Callable[[int], bytes] = os.urandom
    ) -> None:
        self.app = app
        self._keys = keys
        self._random_bytes = random_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        scope[REQUEST_ID] = _PREFIXES.get(path, "req-") + self._random_bytes(16).hex()
        scope[STATUS] = 0

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                scope[STATUS] = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", scope[REQUEST_ID].encode()),
                ]
            await send(message)

        try:
            if scope.get(REFUSED_KEY):
                raise HttpFailure(431, "header_too_large", "The request's headers are too large.")
            if path not in OPEN_PATHS:
                scope[TENANT] = self._keys.tenant_of(_authorization(scope))
            await self.app(scope, receive, send_and_note)
        except ClientGone:
            metrics.ABORTS.inc()
        except ClusterError as error:
            if isinstance(error, InvariantBroken):
                raise
            await _answer(error, scope, send_and_note)
        except Exception as error:  # noqa: BLE001 - the last resort of one request: logged, answered with 500
            _log.error("request_failed", request=scope[REQUEST_ID], error=repr(error), exc_info=True)
            await _answer(HttpFailure(500, "cluster.error", "Internal error."), scope, send_and_note)
        finally:
            route = path if path in KNOWN_ROUTES else "other"
            _requests_counter(route, scope[STATUS]).inc()


def _authorization(scope: Scope) -> bytes | None:
    for key, value in scope["headers"]:
        if key == b"authorization":
            return value
    return None


async def _answer(error: ClusterError, scope: Scope, send: Send) -> None:
    """Send an error, unless an answer has begun already (the connection is then cut by the server)."""
    metrics.ERRORS.labels(error.code).inc()
    if scope[STATUS]:
        _log.error("failed_after_start", request=scope[REQUEST_ID], code=error.code, error=str(error))
        return
    status, body = describe(error)
    headers = header_block(status, error.retry_after_ms)
    headers += [*getattr(error, "headers", ()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405, raised on to Edge's form."""
    assert isinstance(error, HTTPException)
    failure = plain_http(error.status_code, request.method, request.url.path)
    status, body = describe(failure)
    metrics.ERRORS.labels(failure.code).inc()
    response = Response(body, status, media_type="application/json", headers=error.headers)
    for key, value in header_block(status)[1:]:
        response.headers[key.decode()] = value.decode()
    return response
