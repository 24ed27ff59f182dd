"""The memory market's routes (shared/wire/lending.py). No policy here: check words, ask the market, answer."""

import math
from typing import Any

from fastapi import FastAPI, Request, Response
from msgspec import Struct

from services.coordinator.market_shell import MarketShell
from services.coordinator.replies import documented, json_reply, read_body
from shared.ids import InstanceId, LeaseId
from shared.wire.lending import (
    MAX_DURATION_MS,
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
    Pair,
    Placement,
    ReclaimOrder,
    ReclaimView,
    Renewed,
    ReportReply,
)
from shared.wire.lending_limits import MAX_COUNT, check_ids, check_key, check_range, check_report

MAX_REPORT_BYTES = 8 << 20
MAX_PAIRS = 1_024
MAX_PLACEMENT_BYTES = 4 << 20  # so many pairs with the longest ids, and all that the placer says beside them
MARKET_STRUCTS = (
    OfferMemory, OfferView, OfferList, AskLease, Grant, LeaseCall, LeaseList, Renewed, AskReclaim, ReclaimOrder,
    ReclaimView, MempoolReport, ReportReply, MarketView, Placement, LendingRefused,
)  # fmt: skip


class _SaidPair(Pair, frozen=True, kw_only=True):
    """One of the placer's (shared/wire/placer.py), or one without a word more."""

    why_not: str = ""


class _SaidPlacement(Struct, frozen=True, kw_only=True):
    """Placement, or the placer's whole answer."""

    pairs: list[_SaidPair] = []


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
        check_ids(producer=body.producer, mempool=body.mempool)
        check_range("producer_epoch", body.producer_epoch, 0, MAX_COUNT)
        check_range("boot_generation", body.boot_generation, 0, MAX_COUNT)
        check_range("space", body.space, 0, MAX_COUNT)
        check_range("length_bytes", body.length_bytes, 1, MAX_LENT_BYTES)
        return _answer(await market.offer(body, _key(request)))

    @app.get("/v1/offers", **documented("All offers", OfferList))
    async def offers() -> Response:
        return json_reply(OfferList(offers=market.view().offers))

    @app.post(
        "/v1/reclaims",
        **documented(
            "Take memory back; of one offer up to 64 at a time",
            ReclaimOrder,
            AskReclaim,
            400,
            404,
            409,
            503,
            keyed=True,
        ),
    )
    async def reclaim(request: Request) -> Response:
        body = await read_body(request, AskReclaim)
        check_ids(producer=body.producer, offer_id=body.offer_id)
        check_range("length_bytes", body.length_bytes, 0, MAX_LENT_BYTES)
        check_range("deadline_ms", body.deadline_ms, 0, MAX_DURATION_MS)
        return _answer(await market.reclaim(body, _key(request)))

    @app.get("/v1/reclaims/{reclaim_id}", **documented("How far a reclaim is", ReclaimView, None, 404))
    async def reclaim_state(reclaim_id: str) -> Response:
        return _answer(market.view_reclaim(reclaim_id))


def _add_consumer_routes(app: FastAPI, market: MarketShell) -> None:
    @app.post("/v1/leases", **documented("Ask for memory", Grant, AskLease, 400, 409, 503, keyed=True))
    async def lease(request: Request) -> Response:
        body = await read_body(request, AskLease)
        check_ids(consumer=body.consumer)
        check_range("consumer_epoch", body.consumer_epoch, 0, MAX_COUNT)
        check_range("length_bytes", body.length_bytes, 1, MAX_LENT_BYTES)
        check_range("min_bytes", body.min_bytes, 0, body.length_bytes)
        check_range("ttl_ms", body.ttl_ms, 0, MAX_DURATION_MS)
        check_range("spaces: their number", len(body.spaces), 1, MAX_SPACES)
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
        check_ids(mempool=mempool)
        check_report(body)
        return _answer(market.report(InstanceId(mempool), body))

    @app.put("/v1/placement", **documented("Who borrows from whom first", None, Placement, 400, 503))
    async def place(request: Request) -> Response:
        body = await read_body(request, _SaidPlacement, max_bytes=MAX_PLACEMENT_BYTES)
        pairs = [  # others' loans would all be refused, and their producers be kept from those whom they fit
            Pair(consumer=pair.consumer, producer=pair.producer) for pair in body.pairs if not pair.why_not
        ]
        check_range("pairs: their number", len(pairs), 0, MAX_PAIRS)
        for pair in pairs:
            check_ids(consumer=pair.consumer, producer=pair.producer)
        refused = await market.place(Placement(pairs=pairs))
        return Response(status_code=204) if refused is None else refusal(refused)

    @app.get("/v1/placement", **documented("Who borrows from whom first", Placement))
    async def placement() -> Response:
        return json_reply(market.placement())

    @app.get("/v1/market", **documented("Everything", MarketView))
    async def view() -> Response:
        return json_reply(market.view())


def _key(request: Request) -> str:
    key = request.headers.get("idempotency-key", "")
    check_key("Idempotency-Key", key)
    return key
