"""Everything that is no completion: models, tokenizing, health, readiness, metrics."""

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from services.gateway.config import shared_metrics_folder
from services.gateway.deps import Gateway
from shared.errors import ModelNotFound
from shared.observe import metrics as observed

router = APIRouter()


def _gateway(request: Request) -> Gateway:
    return request.app.state.gateway


Here = Annotated[Gateway, Depends(_gateway)]


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


@router.get("/health", summary="The process is alive.")
async def health() -> Response:
    """Always 200: whoever cannot answer does not."""
    return _json({"status": "ok"})


@router.get("/ready", summary="Whether a request could be served now.")
async def ready(gateway: Here) -> Response:
    """200 or 503 with what is missing."""
    is_ready, details = gateway.readiness()
    return _json({"ready": is_ready, **details}, 200 if is_ready else 503)


@router.get("/metrics", summary="Prometheus metrics.")
async def metrics() -> Response:
    """Of all processes of this gateway."""
    folder = shared_metrics_folder()
    return Response(
        observed.render() if not folder else _render_shared(folder),
        headers={"content-type": observed.CONTENT_TYPE},
    )


def _render_shared(folder: str) -> bytes:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=folder)
    return generate_latest(registry)


@router.get("/v1/models", summary="The models that this cluster serves.")
async def models(gateway: Here) -> Response:
    """OpenAI's list."""
    return _json({"object": "list", "data": [_card(gateway)]})


@router.get("/v1/models/{model:path}", summary="One model.")
async def model(model: str, gateway: Here) -> Response:
    """OpenAI's model object. Raises: ModelNotFound."""
    if model != gateway.settings.model_name:
        raise ModelNotFound(f"The model `{model}` does not exist.", param="model")
    return _json(_card(gateway))


def _card(gateway: Gateway) -> dict[str, Any]:
    return {
        "id": gateway.settings.model_name,
        "object": "model",
        "created": gateway.started_s,
        "owned_by": "quire",
        "root": gateway.settings.model_name,
        "parent": None,
        "max_model_len": gateway.max_model_len,
    }
