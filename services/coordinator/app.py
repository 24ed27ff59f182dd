"""The coordinator's REST API.

Bodies are the structs of shared/wire/membership.py, byte for byte: msgspec parses and writes them, and the
OpenAPI page takes its schemas from them.
"""

import hmac
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from starlette.exceptions import HTTPException

from services.coordinator.core.membership import Full, Stale, Unknown
from services.coordinator.page import render
from services.coordinator.shell import Coordinator
from shared.errors import BodyTooLarge, ClusterError, InvalidRequest, Overloaded, StaleEpoch, Unauthorized
from shared.ids import Epoch, InstanceId
from shared.observe import metrics
from shared.wire.membership import Heartbeat, HeartbeatReply, InstanceList, Register, Registered

MAX_BODY_BYTES = 64 << 10
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/docs", "/openapi.json"})
JSON = "application/json"
INSTANCE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")  # it becomes a path segment, a Redis key, a label
STRUCTS = (Register, Registered, Heartbeat, HeartbeatReply, InstanceList)

T = TypeVar("T")


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """Every refusal. `code` is a stable code of shared/errors.py, or names the HTTP status."""

    code: str
    message: str


def create_app(coordinator: Coordinator, api_keys: list[str]) -> FastAPI:
    """The application. With api_keys, /v1 and / want `X-API-Key` or `Authorization: Bearer`."""
    app = FastAPI(
        title="Quire coordinator",
        description="Who is in the cluster, under which epoch.",
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
    _add_other_routes(app, coordinator)
    _require_keys(app, [key.encode() for key in api_keys])
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _add_instance_routes(app: FastAPI, coordinator: Coordinator) -> None:
    @app.post("/v1/instances", **_documented("Join, or come back: a new epoch", Registered, Register))
    async def register(request: Request) -> Response:
        body = await _body(request, Register)
        if not INSTANCE_ID.fullmatch(body.instance):
            raise InvalidRequest(
                f"instance {body.instance[:140]!r}: up to 128 letters, digits, '.', '_', '-'"
            )
        reply = coordinator.register(body)
        if isinstance(reply, Full):
            message = f"{reply.max_members} members are the most; raise coordinator.max_members"
            return _error(Overloaded.http_status, Overloaded.code, message)
        return _json(reply)

    @app.post(
        "/v1/instances/{instance}/heartbeat",
        **_documented("Still here; 404 and 409: register again", HeartbeatReply, Heartbeat, 404, 409),
    )
    async def heartbeat(instance: str, request: Request) -> Response:
        body = await _body(request, Heartbeat)
        reply = coordinator.heartbeat(InstanceId(instance), body)
        return _json(reply) if isinstance(reply, HeartbeatReply) else _refusal(reply)

    @app.delete("/v1/instances/{instance}", **_documented("Leave", None, None, 404, 409))
    async def remove(instance: str, epoch: int) -> Response:
        reply = coordinator.remove(InstanceId(instance), Epoch(epoch))
        return Response(status_code=204) if reply is None else _refusal(reply)

    @app.get("/v1/instances", **_documented("All members", InstanceList))
    async def listing() -> Response:
        return _json(coordinator.listing())


def _add_other_routes(app: FastAPI, coordinator: Coordinator) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(render(coordinator.listing()))

    @app.get("/health", summary="The process lives")
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.get("/ready", summary="It answers; the journal is not needed for that")
    async def ready() -> Response:
        is_ready, details = coordinator.readiness()
        return _json({"ready": is_ready, **details}, 200 if is_ready else 503)

    @app.get("/metrics", summary="Prometheus")
    async def prometheus() -> Response:
        return Response(metrics.render(), media_type=metrics.CONTENT_TYPE)


def _require_keys(app: FastAPI, keys: list[bytes]) -> None:
    @app.middleware("http")
    async def check(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        if keys and request.url.path not in OPEN_PATHS and not _known_key(request, keys):
            return _error(Unauthorized.http_status, Unauthorized.code, "X-API-Key is missing or unknown")
        return await go_on(request)


def _known_key(request: Request, keys: list[bytes]) -> bool:
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
    given = (request.headers.get("x-api-key") or bearer).encode()
    return any(hmac.compare_digest(given, key) for key in keys)


async def _body(request: Request, kind: type[T]) -> T:
    """Raises: BodyTooLarge, InvalidRequest."""
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > MAX_BODY_BYTES:
            raise BodyTooLarge(f"the body exceeds {MAX_BODY_BYTES} bytes")
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(str(error)) from error


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=JSON)


def _error(status: int, code: str, message: str) -> Response:
    return _json(ErrorBody(code=code, message=message), status)


def _refusal(reply: Unknown | Stale) -> Response:
    if isinstance(reply, Unknown):
        return _error(404, "instance.unknown", f"{reply.instance} is no member: register")
    message = f"{reply.instance} has epoch {reply.current}, not {reply.epoch}: register again"
    return _error(409, StaleEpoch.code, message)


async def _cluster_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ClusterError)
    return _error(error.http_status, error.code, error.message)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, f"http.{error.status_code}", str(error.detail))


async def _validation_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return _error(400, InvalidRequest.code, f"{where}: {first['msg']}")


def _documented(summary: str, reply: Any, body: Any = None, *errors: int) -> dict[str, Any]:
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
    if body is not None:
        out["openapi_extra"] = {"requestBody": {"required": True, "content": content(body)}}
    return out


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
