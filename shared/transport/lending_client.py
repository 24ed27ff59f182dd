"""The memory market from the other side: LendingClient for lenders and borrowers, MempoolReporter for
mempools.

What LendingClient answers is an intention (shared/wire/lending.py): a Grant lends nothing before the owning
mempool took it. An expected refusal is an answer, LendingRefused; exceptions are for a coordinator that does
not answer.
"""

import asyncio
import uuid
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import quote

import msgspec
from httpx import Response

from shared.errors import PeerError, PeerGone, PeerProtocolError, PeerTimeout
from shared.ids import InstanceId, LeaseId
from shared.transport.coordinator_api import CoordinatorApi, decode
from shared.transport.membership_client import MIN_INTERVAL_S, Background, Event
from shared.wire.codec import MALFORMED
from shared.wire.lending import (
    AskLease,
    AskReclaim,
    Grant,
    LeaseCall,
    LendingRefused,
    MarketView,
    MempoolReport,
    OfferMemory,
    OfferView,
    Placement,
    ReclaimOrder,
    ReclaimView,
    Renewed,
    ReportReply,
)

RETRY_S = 0.1
REPORT_RETRY_S = 0.25  # while no coordinator answers

T = TypeVar("T")


def new_key() -> str:
    """An idempotency key for one wish. Keep it as long as the wish is repeated."""
    return uuid.uuid4().hex


class LendingClient:
    """Calls of one process. Each repeats itself until it has an answer or `patience_ms` is over, always under
    one key: what was done by a call whose answer got lost is not done twice, by whichever coordinator leads
    then.

    Raises, every call: PeerGone or PeerTimeout when nobody answered in time; PeerProtocolError.
    """

    def __init__(self, coordinator_url: str, *, key: str = "", patience_ms: int = 3_000) -> None:
        self._api = CoordinatorApi(coordinator_url, key)
        self._patience_s = patience_ms / 1000

    def be_patient(self, patience_ms: int) -> None:
        """So long from now on, calls under way too. Any thread."""
        self._patience_s = patience_ms / 1000

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()

    async def offer(self, offer: OfferMemory, *, key: str = "") -> OfferView | LendingRefused:
        """Offer memory. key: "": a new one."""
        return await self._ask("POST", "/v1/offers", OfferView, offer, key or new_key())

    async def lease(self, ask: AskLease, *, key: str = "") -> Grant | LendingRefused:
        """Ask for memory; then present the grant to the mempool that it names. key: "": a new one."""
        return await self._ask("POST", "/v1/leases", Grant, ask, key or new_key())

    async def renew(self, grant: Grant) -> Renewed | LendingRefused:
        """More time, and whether something is to be given back. Count Renewed.consumer_ttl_ms from before
        this call."""
        return await self._ask("POST", _lease(grant.lease_id, "renew"), Renewed, _call(grant))

    async def release(self, grant: Grant) -> LendingRefused | None:
        """Done with it; None when noted."""
        return await self._do("POST", _lease(grant.lease_id, "release"), _call(grant))

    async def reclaim(self, ask: AskReclaim, *, key: str = "") -> ReclaimOrder | LendingRefused:
        """Take memory back; the order may be presented to the mempool too, which is sooner. key: "": a new
        one."""
        return await self._ask("POST", "/v1/reclaims", ReclaimOrder, ask, key or new_key())

    async def reclaim_state(self, reclaim_id: str) -> ReclaimView | LendingRefused:
        """How far it is."""
        return await self._ask("GET", f"/v1/reclaims/{quote(reclaim_id, safe='')}", ReclaimView)

    async def place(self, placement: Placement) -> LendingRefused | None:
        """Say who borrows from whom first; None when noted."""
        return await self._do("PUT", "/v1/placement", placement)

    async def market(self) -> MarketView | LendingRefused:
        """Everything."""
        return await self._ask("GET", "/v1/market", MarketView)

    async def report(self, mempool: InstanceId, report: MempoolReport) -> ReportReply | LendingRefused:
        """One report of a mempool, without repeating it: the next one says more."""
        response = await self._api.request("PUT", _mempool(mempool), report)
        if not response.is_success:
            return _refused(response)
        return decode(response, ReportReply, "report")

    async def _ask(
        self, method: str, path: str, reply: type[T], body: msgspec.Struct | None = None, key: str = ""
    ) -> T | LendingRefused:
        response = await self._patiently(method, path, body, key)
        return decode(response, reply, path) if response.is_success else _refused(response)

    async def _do(self, method: str, path: str, body: msgspec.Struct) -> LendingRefused | None:
        response = await self._patiently(method, path, body, "")
        return None if response.is_success else _refused(response)

    async def _patiently(self, method: str, path: str, body: msgspec.Struct | None, key: str) -> Response:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while True:
            try:
                return await self._api.request(method, path, body, idempotency_key=key)
            except (PeerGone, PeerTimeout):
                if loop.time() + RETRY_S > began_s + self._patience_s:
                    raise
                await asyncio.sleep(RETRY_S)


class MempoolReporter(Background):
    """Reports one mempool for as long as it is open, at the pace that the coordinator asks for.

    Args:
        make_report: the next MempoolReport from a seq; called on the loop, must not wait.
        on_reply: runs with each answer to the newest report (rule 4 of the wire is kept here, but for the term).
        on_event: event name and ids, for the caller's log.
    """

    def __init__(
        self,
        coordinator_url: str,
        mempool: InstanceId,
        *,
        key: str = "",
        make_report: Callable[[int], MempoolReport],
        on_reply: Callable[[ReportReply], None],
        on_event: Event | None = None,
    ) -> None:
        super().__init__(on_event)
        self._client = LendingClient(coordinator_url, key=key)
        self._mempool = mempool
        self._make_report = make_report
        self._on_reply = on_reply
        self._seq = 0
        self._hurry = asyncio.Event()

    def hurry(self) -> None:
        """Report now, or MIN_INTERVAL_S after the last answer: something was lent, given back, or reclaimed."""
        self._hurry.set()

    async def close(self) -> None:
        """Stop."""
        await self._stop()
        await self._client.close()

    async def _run(self) -> None:
        interval_s = REPORT_RETRY_S
        while True:
            self._hurry.clear()
            self._seq += 1
            try:
                answer = await self._client.report(self._mempool, self._make_report(self._seq))
            except PeerError as error:
                self._set_reachable(False, error.message)
                interval_s = REPORT_RETRY_S
            else:
                if isinstance(answer, LendingRefused):
                    self._set_reachable(False, f"{answer.code}: {answer.message}")
                    interval_s = REPORT_RETRY_S
                elif answer.seq == self._seq:
                    self._set_reachable(True)
                    interval_s = max(MIN_INTERVAL_S, answer.interval_ms / 1000)
                    self._on_reply(answer)
            await asyncio.sleep(MIN_INTERVAL_S)
            try:
                async with asyncio.timeout(interval_s):
                    await self._hurry.wait()
            except TimeoutError:
                continue


def _call(grant: Grant) -> LeaseCall:
    return LeaseCall(consumer=grant.consumer, token=grant.token)


def _lease(lease_id: LeaseId, verb: str) -> str:
    return f"/v1/leases/{quote(lease_id, safe='')}/{verb}"


def _mempool(mempool: InstanceId) -> str:
    return f"/v1/mempools/{quote(mempool, safe='')}/report"


def _refused(response: Response) -> LendingRefused:
    try:
        return msgspec.json.decode(response.content, type=LendingRefused)
    except MALFORMED:
        raise PeerProtocolError(f"{response.status_code} {response.text[:200]}") from None
