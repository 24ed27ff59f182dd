"""The outermost layer of every HTTP request: key, request id, metrics, and errors as OpenAI's bodies."""

import os
import time
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Protocol

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from services.gateway import metrics
from services.gateway.auth import KeyRing
from services.gateway.http_body import ClientGone, Message, Receive, Scope, Send, check_body, header
from services.gateway.http_errors import HttpFailure, describe, header_block, plain_http
from services.gateway.http_protocol import NO_ROUTE, REFUSED_KEY, REFUSED_STATUS_KEY
from services.gateway.origins import Headers, Origins
from services.gateway.push import PUSH_KEY
from services.gateway.tally import CountTally
from shared.errors import ClusterError, InvariantBroken
from shared.observe.log import get_logger

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/docs", "/openapi.json"})
KNOWN_ROUTES = frozenset(
    {*OPEN_PATHS, "/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize"}
)
REQUEST_ID = "quire.request_id"
TENANT = "quire.tenant"
STATUS = "quire.status"
CLIENT_LEFT = 499  # nginx's status for a request that nobody waits for any more

_PREFIXES = {"/v1/chat/completions": "chatcmpl-", "/v1/completions": "cmpl-"}
_log = get_logger("gateway.http")


@lru_cache(maxsize=256)
def _requests_counter(route: str, status: int) -> CountTally:
    return CountTally(metrics.REQUESTS.labels(route, str(status)))


class Running(Protocol):
    """An answer that has begun."""

    def run_alone(self, on_end: Callable[[int], None]) -> None:
        """Nobody waits for it: `on_end` hears its status."""


class Endpoint(Protocol):
    """An ASGI application that can also be given a request whose body is whole."""

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """One request."""
        ...

    def begin(self, scope: Scope, raw: bytes, received_ns: int) -> Awaitable[Running]:
        """Start the answer. Raises: ClusterErrors."""
        ...


class Edge:
    """ASGI middleware. Handlers below raise ClusterErrors; what they answer themselves passes through.

    Args: origins: whose preflights are answered here, without a key: browsers send none with them.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing,
        origins: Origins | None = None,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self.app = app
        self._keys = keys
        self._origins = origins or Origins()
        self._random_bytes = random_bytes

    def _enter(self, scope: Scope) -> str:
        path: str = scope["path"]
        scope[REQUEST_ID] = _PREFIXES.get(path, "req-") + self._random_bytes(16).hex()
        scope[STATUS] = 0
        return path

    def _admit(self, scope: Scope) -> Headers | None:
        """What answers a preflight; None for all other requests. Raises: Unauthorized; HttpFailure 431."""
        if scope.get(REFUSED_KEY):
            raise HttpFailure(431, "header_too_large", "The request's headers are too large.")
        if scope["method"] == "OPTIONS" and (told := self._origins.preflight(scope["headers"])) is not None:
            return told
        if scope["path"] not in OPEN_PATHS:
            scope[TENANT] = self._keys.tenant_of(header(scope, b"authorization"))
        return None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = self._enter(scope)
        noting = _noting(scope, send)
        try:
            told = self._admit(scope)
            if told is None:
                await self.app(scope, receive, noting)
            else:
                await noting({"type": "http.response.start", "status": 204, "headers": told})
                await noting({"type": "http.response.body"})
        except Exception as error:  # noqa: BLE001 - the last resort of one request
            await _fail(error, scope, noting)
        finally:
            route = path if path in KNOWN_ROUTES else NO_ROUTE
            _requests_counter(route, scope[STATUS]).inc()


class DirectEdge(Edge):
    """The same for an endpoint whose requests came whole: nobody waits for their ends, callbacks see to them.

    ASGI's way for such a request is a queue, an event and a task that is woken once more at the end: 40 us.
    """

    def __init__(self, endpoint: Endpoint, keys: KeyRing, max_body_bytes: int) -> None:
        super().__init__(endpoint, keys)
        self._begin = endpoint.begin
        self._max_body_bytes = max_body_bytes

    async def direct(self, scope: Scope, body: bytes) -> None:
        """One request; returns when its answer runs. The connection's cycle is scope[PUSH_KEY]."""
        received_ns = time.monotonic_ns()
        path, cycle = self._enter(scope), scope[PUSH_KEY]
        try:
            self._admit(scope)
            check_body(scope, body, self._max_body_bytes)
            answer = await self._begin(scope, body, received_ns)
        except Exception as error:  # noqa: BLE001 - as above
            try:
                await _fail(error, scope, _noting(scope, cycle.send))
            except BaseException:
                cycle.transport.abort()
                raise
            _requests_counter(path, scope[STATUS]).inc()
            return
        answer.run_alone(lambda status: _requests_counter(path, status).inc())


def _noting(scope: Scope, send: Send) -> Send:
    """`send`, which names the request in the response's headers and notes its status."""

    async def send_and_note(message: Message) -> None:
        if message["type"] == "http.response.start":
            scope[STATUS] = message["status"]
            message["headers"] = [
                *message.get("headers", ()),
                (b"x-request-id", scope[REQUEST_ID].encode()),
            ]
        await send(message)

    return send_and_note


async def _fail(error: Exception, scope: Scope, send: Send) -> None:
    """What a handler raised, answered. Raises: InvariantBroken, as it is."""
    if isinstance(error, ClientGone):
        scope[STATUS] = scope.get(REFUSED_STATUS_KEY, 0)
        if not scope[STATUS]:
            metrics.ABORTS.inc()
            scope[STATUS] = CLIENT_LEFT
    elif isinstance(error, InvariantBroken):
        raise error
    elif isinstance(error, ClusterError):
        await _answer(error, scope, send)
    else:
        _log.error("request_failed", request=scope[REQUEST_ID], error=repr(error), exc_info=error)
        await _answer(HttpFailure(500, "cluster.error", "Internal error."), scope, send)


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
    failure = plain_http(error.status_code, request.method, request.scope["path"])
    status, body = describe(failure)
    metrics.ERRORS.labels(failure.code).inc()
    response = Response(body, status, media_type="application/json", headers=error.headers)
    for key, value in header_block(status)[1:]:
        response.headers[key.decode()] = value.decode()
    return response
