"""The memory market's routes (shared/wire/lending.py). No policy here: check words, ask the market, answer."""

import math
import re
from typing import Any

from fastapi import FastAPI, Request, Response

from services.coordinator.market_shell import MarketShell
from services.coordinator.replies import documented, json_reply, read_body
from shared.errors import InvalidRequest
from shared.ids import InstanceId, LeaseId
from shared.wire.lending import (
    MAX_DURATION_MS,
    MAX_ID_CHARS,
    MAX_LENT_BYTES,
    MAX_SPACES,
    AskLease,
    AskReclaim,
    Grant,
    LeaseCall,
    LeaseList,
    LendingRefused,
    MarketView,
    MempoolReport,
    OfferList,
    OfferMemory,
    OfferView,
    Placement,
    ReclaimOrder,
    ReclaimView,
    Renewed,
    ReportReply,
)

MAX_REPORT_BYTES = 8 << 20
MAX_PAIRS = 1_024
ID = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_ID_CHARS}}}")  # it becomes a path segment, a Redis field, a label
KEY = re.compile(r"[!-~]{0,128}")
MARKET_STRUCTS = (
    OfferMemory, OfferView, OfferList, AskLease, Grant, LeaseCall, LeaseList, Renewed, AskReclaim, ReclaimOrder,
    ReclaimView, MempoolReport, ReportReply, MarketView, Placement, LendingRefused,
)  # fmt: skip


def add_market_routes(app: FastAPI, market: MarketShell) -> None:
    """Offers, leases, reclaims, reports, placement, and all of it at once."""
    _add_producer_routes(app, market)
    _add_consumer_routes(app, market)
    _add_other_routes(app, market)


def refuse_standby(path: str, leader_url: str) -> Response | None:
    """While another coordinator leads, /v1 is answered with where it is."""
    if not leader_url or not path.startswith("/v1/"):
        return None
    message = f"this coordinator stands by; {leader_url} leads"
    return refusal(
        LendingRefused(code="market.standby", message=message, retry_after_ms=500, leader=leader_url)
    )


def refusal(refused: LendingRefused) -> Response:
    """503 with Retry-After where repeating helps, 404 for what is not known, else 409."""
    if refused.retry_after_ms:
        response = json_reply(refused, 503)
        response.headers["retry-after"] = str(math.ceil(refused.retry_after_ms / 1000))
        return response
    return json_reply(refused, 404 if refused.code.endswith(".unknown") else 409)


def _answer(value: Any) -> Response:
    return refusal(value) if isinstance(value, LendingRefused) else json_reply(value)


def _add_producer_routes(app: FastAPI, market: MarketShell) -> None:
    @app.post(
        "/v1/offers", **documented("Offer memory", OfferView, OfferMemory, 400, 404, 409, 503, keyed=True)
    )
    async def offer(request: Request) -> Response:
        body = await read_body(request, OfferMemory)
        _check_ids(producer=body.producer, mempool=body.mempool)
        _check_range("length_bytes", body.length_bytes, 1, MAX_LENT_BYTES)
        return _answer(await market.offer(body, _key(request)))

    @app.get("/v1/offers", **documented("All offers", OfferList))
    async def offers() -> Response:
        return json_reply(OfferList(offers=market.view().offers))

    @app.post(
        "/v1/reclaims",
        **documented("Take memory back", ReclaimOrder, AskReclaim, 400, 404, 409, 503, keyed=True),
    )
    async def reclaim(request: Request) -> Response:
        body = await read_body(request, AskReclaim)
        _check_ids(producer=body.producer, offer_id=body.offer_id)
        _check_range("length_bytes", body.length_bytes, 0, MAX_LENT_BYTES)
        _check_range("deadline_ms", body.deadline_ms, 0, MAX_DURATION_MS)
        return _answer(await market.reclaim(body, _key(request)))

    @app.get("/v1/reclaims/{reclaim_id}", **documented("How far a reclaim is", ReclaimView, None, 404))
    async def reclaim_state(reclaim_id: str) -> Response:
        return _answer(market.view_reclaim(reclaim_id))


def _add_consumer_routes(app: FastAPI, market: MarketShell) -> None:
    @app.post("/v1/leases", **documented("Ask for memory", Grant, AskLease, 400, 409, 503, keyed=True))
    async def lease(request: Request) -> Response:
        body = await read_body(request, AskLease)
        _check_ids(consumer=body.consumer)
        _check_range("length_bytes", body.length_bytes, 1, MAX_LENT_BYTES)
        _check_range("min_bytes", body.min_bytes, 0, body.length_bytes)
        _check_range("ttl_ms", body.ttl_ms, 0, MAX_DURATION_MS)
        _check_range("spaces: their number", len(body.spaces), 1, MAX_SPACES)
        return _answer(await market.lease(body, _key(request)))

    @app.get("/v1/leases", **documented("All leases", LeaseList))
    async def leases() -> Response:
        return json_reply(LeaseList(leases=market.view().leases))

    @app.post("/v1/leases/{lease_id}/renew", **documented("More time", Renewed, LeaseCall, 404, 409, 503))
    async def renew(lease_id: str, request: Request) -> Response:
        return _answer(market.renew(LeaseId(lease_id), await read_body(request, LeaseCall)))

    @app.post("/v1/leases/{lease_id}/release", **documented("Done with it", None, LeaseCall, 404, 409, 503))
    async def release(lease_id: str, request: Request) -> Response:
        refused = market.release(LeaseId(lease_id), await read_body(request, LeaseCall))
        return Response(status_code=204) if refused is None else refusal(refused)


def _add_other_routes(app: FastAPI, market: MarketShell) -> None:
    @app.put(
        "/v1/mempools/{mempool}/report",
        **documented("What a mempool lends; what it is to do", ReportReply, MempoolReport, 400, 409, 503),
    )
    async def report(mempool: str, request: Request) -> Response:
        body = await read_body(request, MempoolReport, max_bytes=MAX_REPORT_BYTES)
        _check_ids(mempool=mempool)
        return _answer(market.report(InstanceId(mempool), body))

    @app.put("/v1/placement", **documented("Who borrows from whom first", None, Placement, 400, 503))
    async def place(request: Request) -> Response:
        body = await read_body(request, Placement)
        _check_range("pairs: their number", len(body.pairs), 0, MAX_PAIRS)
        for pair in body.pairs:
            _check_ids(consumer=pair.consumer, producer=pair.producer)
        refused = await market.place(body)
        return Response(status_code=204) if refused is None else refusal(refused)

    @app.get("/v1/placement", **documented("Who borrows from whom first", Placement))
    async def placement() -> Response:
        return json_reply(market.placement())

    @app.get("/v1/market", **documented("Everything", MarketView))
    async def view() -> Response:
        return json_reply(market.view())


def _key(request: Request) -> str:
    key = request.headers.get("idempotency-key", "")
    if not KEY.fullmatch(key):
        raise InvalidRequest("Idempotency-Key: up to 128 printable ASCII characters without spaces")
    return key


def _check_ids(**words: str) -> None:
    for name, word in words.items():
        if not ID.fullmatch(word):
            raise InvalidRequest(
                f"{name} {word[:140]!r}: up to {MAX_ID_CHARS} letters, digits, '.', '_', '-'"
            )


def _check_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidRequest(f"{name}: {value} is not in {least} to {most}")
