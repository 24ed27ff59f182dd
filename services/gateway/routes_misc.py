"""Everything that is no completion: models, tokenizing, health, readiness, metrics."""

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from pydantic import BaseModel

from services.gateway import tally
from services.gateway.config import shared_metrics_folder
from services.gateway.deps import Gateway
from services.gateway.http_body import read_json_body
from services.gateway.metrics import IN_FLIGHT_NAME
from services.gateway.openai import DetokenizeBody, TokenizeBody, parse_body
from services.gateway.request import chat_text, check_model, one_place
from shared.errors import ModelNotFound, PromptTooLong
from shared.observe import metrics as observed

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

MAX_TOKENS = 1 << 20  # of /tokenize and /detokenize, or the context where it is longer

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
    if "in_flight" in details and (folder := shared_metrics_folder()):
        details["in_flight"] = max(details["in_flight"], _in_flight_of_all(folder))
    return _json({"ready": is_ready, **details}, 200 if is_ready else 503)


@router.get("/metrics", summary="Prometheus metrics.")
async def metrics() -> Response:
    """Of all processes of this gateway; what the others counted in the last half second may be missing."""
    tally.settle()
    folder = shared_metrics_folder()
    return Response(
        observed.render() if not folder else _render_shared(folder),
        headers={"content-type": observed.CONTENT_TYPE},
    )


def _registry_of_all(folder: str) -> "CollectorRegistry":
    """What all processes of this gateway have counted."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=folder)
    return registry


def _in_flight_of_all(folder: str) -> int:
    """As of half a second ago."""
    found = [each.samples for each in _registry_of_all(folder).collect() if each.name == IN_FLIGHT_NAME]
    return int(sum(sample.value for samples in found for sample in samples))


def _render_shared(folder: str) -> bytes:
    from prometheus_client import generate_latest

    return generate_latest(_registry_of_all(folder))


@router.get("/v1/models", summary="The models that this cluster serves.")
async def models(gateway: Here) -> Response:
    """OpenAI's list."""
    return _json({"object": "list", "data": [_card(gateway)]})


@router.get("/v1/models/{model:path}", summary="One model.")
async def model(model: str, gateway: Here) -> Response:
    """OpenAI's model object; behind a slash alone its list. Raises: ModelNotFound."""
    if not model:
        return await models(gateway)
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


def _documented(model: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI's requestBody of a body that the handler parses itself."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)  # shared with the completion routes, which app.py documents
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _check_count(gateway: Gateway, num_tokens: int, param: str) -> None:
    """Raises: PromptTooLong."""
    most = max(MAX_TOKENS, gateway.max_model_len)
    if num_tokens > most:
        raise PromptTooLong(
            f"At most {most} tokens are taken at a time; these are {num_tokens} or more.", param=param
        )


@router.post("/tokenize", summary="Token ids of a text or a chat.", openapi_extra=_documented(TokenizeBody))
async def tokenize(request: Request, gateway: Here) -> Response:
    """vLLM's form: {"count", "max_model_len", "tokens"}. Raises: PromptTooLong beyond MAX_TOKENS; as one_place()."""
    raw = await read_json_body(request.scope, request.receive, gateway.settings.max_body_bytes)
    body = parse_body(TokenizeBody, raw)
    with one_place(gateway, request.scope):
        return _json(await _tokenized(gateway, body, len(raw)))


async def _tokenized(gateway: Gateway, body: TokenizeBody, num_bytes: int) -> dict[str, Any]:
    if body.model is not None:
        check_model(gateway, body.model)
    text = gateway.text
    if body.prompt is not None:
        param, given = "prompt", body.prompt
        adds_special = body.add_special_tokens is not False
    else:
        param, adds_special = "messages", bool(body.add_special_tokens)
        given = await chat_text(gateway, body, num_bytes)
    _check_count(gateway, text.least_tokens(given), param)
    ids = await text.encode(given, add_special_tokens=adds_special)
    _check_count(gateway, len(ids), param)
    out: dict[str, Any] = {"count": len(ids), "max_model_len": gateway.max_model_len, "tokens": ids.tolist()}
    if body.return_token_strs:
        out["token_strs"] = await text.token_names(ids)
    return out


@router.post("/detokenize", summary="Text of token ids.", openapi_extra=_documented(DetokenizeBody))
async def detokenize(request: Request, gateway: Here) -> Response:
    """vLLM's form: {"prompt"}. Raises: PromptTooLong beyond MAX_TOKENS; as one_place()."""
    raw = await read_json_body(request.scope, request.receive, gateway.settings.max_body_bytes)
    body = parse_body(DetokenizeBody, raw)
    if body.model is not None:
        check_model(gateway, body.model)
    _check_count(gateway, len(body.tokens), "tokens")
    with one_place(gateway, request.scope):
        return _json({"prompt": await gateway.text.decode(body.tokens, skip_special_tokens=False)})
