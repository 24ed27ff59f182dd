"""The FastAPI application: routes, documentation, error bodies."""

from collections.abc import Awaitable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.routing import Route

from services.gateway import routes_chat, routes_completions, routes_misc
from services.gateway.deps import Gateway
from services.gateway.edge import DirectEdge, Edge, Endpoint, http_exception
from services.gateway.http_body import Receive, Scope, Send
from services.gateway.origins import Origins


class Front:
    """ASGI application: the two completion routes by a dictionary, everything else through FastAPI.

    The way through FastAPI's middleware and router costs about 60 us of CPU, a tenth of a request's bar. `direct`:
    by path, what GatewayProtocol starts without ASGI where a request came whole. `origins`: what it tells pages of.
    """

    def __init__(self, app: FastAPI, hot: dict[str, DirectEdge], origins: Origins) -> None:
        self.app = app
        self.origins = origins
        self.direct = {path.encode(): edge.direct for path, edge in hot.items()}
        self._hot = hot

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """One request; a plain function, because a coroutine around a coroutine costs too."""
        found = (
            self._hot.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        )
        return (found or self.app)(scope, receive, send)


def create_app(gateway: Gateway) -> Front:
    """The application of one gateway. The two streaming routes are plain ASGI endpoints: their bodies are
    parsed once, by them, and their answers are written past the response machinery. FastAPI's router knows
    them too, for 405 and the documentation."""
    app = FastAPI(
        title="Quire gateway",
        description="OpenAI's HTTP API for a disaggregated cluster.",
        version="0.1.0",
        docs_url="/docs",
        redoc_url=None,
        openapi_url="/openapi.json",
        redirect_slashes=False,  # it would send clients, and what they send, to the host that the request names
        exception_handlers={HTTPException: http_exception},
    )
    app.state.gateway = gateway
    plain: dict[str, Endpoint] = {
        "/v1/chat/completions": routes_chat.ChatEndpoint(gateway),
        "/v1/completions": routes_completions.CompletionEndpoint(gateway),
    }
    for path, endpoint in plain.items():
        app.router.routes.append(Route(path, endpoint, methods=["POST"]))
    app.include_router(routes_misc.router)
    origins = Origins(gateway.settings.allowed_origins)
    app.add_middleware(Edge, keys=gateway.keys, origins=origins)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    largest = gateway.settings.max_body_bytes
    hot = {path: DirectEdge(endpoint, gateway.keys, largest) for path, endpoint in plain.items()}
    return Front(app, hot, origins)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, with the two plain routes added from their pydantic models."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = schema.setdefault("components", {}).setdefault("schemas", {})
        for path, summary, model in (routes_chat.DOCUMENTED, routes_completions.DOCUMENTED):
            body = model.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= body.pop("$defs", {})
            schemas[model.__name__] = body
            content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
            schema["paths"][path] = {
                "post": {
                    "summary": summary,
                    "requestBody": {"required": True, "content": content},
                    "responses": {
                        "200": {
                            "description": "A JSON object, or server-sent events when `stream` is true.",
                            "content": {"application/json": {}, "text/event-stream": {}},
                        },
                        "4XX": {"description": "OpenAI's error body."},
                        "5XX": {"description": "OpenAI's error body."},
                    },
                }
            }
        app.openapi_schema = schema
    return app.openapi_schema
