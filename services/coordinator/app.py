"""The coordinator's REST API: members here, the memory market in routes_market.py.

Bodies are the structs of shared/wire, byte for byte: msgspec parses and writes them, and the
OpenAPI page takes its schemas from them.
"""

import base64
import hmac
import re
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from starlette.exceptions import HTTPException

from services.coordinator.core.membership import Full, Stale, Unknown
from services.coordinator.page import render
from services.coordinator.replies import ErrorBody, documented, error_reply, is_foreign, json_reply, read_body
from services.coordinator.routes_market import MARKET_STRUCTS, add_market_routes, refuse_standby
from services.coordinator.shell import Coordinator
from shared.errors import ClusterError, InvalidRequest, Overloaded, StaleEpoch, Unauthorized
from shared.ids import Epoch, InstanceId
from shared.observe import metrics
from shared.wire.membership import Heartbeat, HeartbeatReply, InstanceList, Register, Registered

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/docs", "/openapi.json"})
INSTANCE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")  # it becomes a path segment, a Redis key, a label
DESCRIPTION = """Who is in the cluster, under which epoch; who lends memory to whom.

A refusal is JSON with a stable `code` and a `message`; `retry_after_ms` says when the same call may help.
Calls that make something take an `Idempotency-Key` header: the same key brings the same answer, and nothing twice.
A grant lends nothing by itself: its consumer presents it to the owning mempool, which checks it against its own
pages, its fence (`token`) and its boot generation. Durations are milliseconds, sizes bytes."""
PAGE = "/"
STRUCTS = (Register, Registered, Heartbeat, HeartbeatReply, InstanceList, *MARKET_STRUCTS)


def create_app(coordinator: Coordinator, api_keys: list[str], own_urls: Collection[str] = ()) -> FastAPI:
    """The application. With api_keys, /v1 and / want `X-API-Key` or `Authorization: Bearer`; for the page a browser
    asks its user: any name, and a key as the password. Without, pages that are not from own_urls change nothing."""
    app = FastAPI(
        title="Quire coordinator",
        description=DESCRIPTION,
        version="0.1.0",
        redoc_url=None,
        exception_handlers={
            ClusterError: _cluster_error,
            HTTPException: _http_error,
            RequestValidationError: _validation_error,
        },
        telemetry={
            "tracing": False,
            "metrics": False,
            "logs": False,
        },  # of newer FastAPI; older ones ignore it
    )
    _add_instance_routes(app, coordinator)
    add_market_routes(app, coordinator.lending)
    _add_other_routes(app, coordinator)
    _guard(app, coordinator, [key.encode() for key in api_keys], own_urls)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _add_instance_routes(app: FastAPI, coordinator: Coordinator) -> None:
    @app.post("/v1/instances", **documented("Join, or come back: a new epoch", Registered, Register))
    async def register(request: Request) -> Response:
        body = await read_body(request, Register)
        if not INSTANCE_ID.fullmatch(body.instance):
            raise InvalidRequest(
                f"instance {body.instance[:140]!r}: up to 128 letters, digits, '.', '_', '-'"
            )
        reply = coordinator.register(body)
        if isinstance(reply, Full):
            message = f"{reply.max_members} members are the most; raise coordinator.max_members"
            return error_reply(Overloaded.http_status, Overloaded.code, message)
        return json_reply(reply)

    @app.post(
        "/v1/instances/{instance}/heartbeat",
        **documented("Still here; 404 and 409: register again", HeartbeatReply, Heartbeat, 404, 409),
    )
    async def heartbeat(instance: str, request: Request) -> Response:
        body = await read_body(request, Heartbeat)
        reply = coordinator.heartbeat(InstanceId(instance), body)
        return json_reply(reply) if isinstance(reply, HeartbeatReply) else _refusal(reply)

    @app.delete("/v1/instances/{instance}", **documented("Leave", None, None, 404, 409))
    async def remove(instance: str, epoch: int) -> Response:
        reply = coordinator.remove(InstanceId(instance), Epoch(epoch))
        return Response(status_code=204) if reply is None else _refusal(reply)

    @app.get("/v1/instances", **documented("All members", InstanceList))
    async def listing() -> Response:
        return json_reply(coordinator.listing())


def _add_other_routes(app: FastAPI, coordinator: Coordinator) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(
            render(coordinator.listing(), coordinator.lending.view(), leader_url=coordinator.leader_url)
        )

    @app.get("/health", summary="The process lives")
    async def health() -> Response:
        return json_reply({"status": "ok"})

    @app.get("/ready", summary="It answers; the journal is not needed for that")
    async def ready() -> Response:
        is_ready, details = coordinator.readiness()
        return json_reply({"ready": is_ready, **details}, 200 if is_ready else 503)

    @app.get("/metrics", summary="Prometheus")
    async def prometheus() -> Response:
        return Response(metrics.render(), media_type=metrics.CONTENT_TYPE)


def _guard(app: FastAPI, coordinator: Coordinator, keys: list[bytes], own_urls: Collection[str]) -> None:
    """Keys first; then, while this coordinator stands by, where the leader is."""

    @app.middleware("http")
    async def check(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        # not of request.url: in older Starlettes the Host header decides which one that has
        if keys and request.scope["path"] not in OPEN_PATHS and not _known_key(request, keys):
            reply = error_reply(
                Unauthorized.http_status, Unauthorized.code, "X-API-Key is missing or unknown"
            )
            if request.scope["path"] == PAGE:
                reply.headers["www-authenticate"] = 'Basic realm="Quire coordinator", charset="UTF-8"'
            return reply
        if not keys and is_foreign(request, own_urls):
            return error_reply(
                403, "origin.foreign", "the page is not of this URL, nor of coordinator.advertise"
            )
        return refuse_standby(request.scope["path"], coordinator.leader_url) or await go_on(request)


def _known_key(request: Request, keys: list[bytes]) -> bool:
    said = request.headers.get("authorization", "")
    bearer = said.removeprefix("Bearer ")
    if request.scope["path"] == PAGE and said.startswith("Basic "):  # nowhere else: browsers send it unasked
        bearer = _password(said.removeprefix("Basic "))
    given = (request.headers.get("x-api-key") or bearer).encode()
    return any(hmac.compare_digest(given, key) for key in keys)


def _password(encoded: str) -> str:
    """Of a browser's name and password; "" where there is none."""
    try:
        return base64.b64decode(encoded, validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def _refusal(reply: Unknown | Stale) -> Response:
    if isinstance(reply, Unknown):
        return error_reply(404, "instance.unknown", f"{reply.instance} is no member: register")
    message = f"{reply.instance} has epoch {reply.current}, not {reply.epoch}: register again"
    return error_reply(409, StaleEpoch.code, message)


async def _cluster_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ClusterError)
    return error_reply(error.http_status, error.code, error.message)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_reply(error.status_code, f"http.{error.status_code}", str(error.detail))


async def _validation_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return error_reply(400, InvalidRequest.code, f"{where}: {first['msg']}")


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        _, components = msgspec.json.schema_components(
            (*STRUCTS, ErrorBody), ref_template="#/components/schemas/{name}"
        )
        schema.setdefault("components", {}).setdefault("schemas", {}).update(components)
        app.openapi_schema = schema
    return app.openapi_schema
