"""A process lends memory of its device and takes it back, whatever it computes: AQUA's producers. No torch.

    lender = Lender(LenderSettings(..., device="cuda:<uuid>"))
    lender.lend(20 << 30)                 # idle: the mempool makes pages here and offers them
    lender.reclaim(deadline_ms=2_000)     # needed: what lay there is elsewhere, and the device has its memory again

The memory is the host's mempool's (decision 0018): it makes the pages, is their only writer, and frees them. This
process maps none of them, so that nothing of it can touch what is lent, and nothing of its consumers can touch it.
"""

import asyncio
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from shared.aqua.errors import AquaClosed
from shared.aqua.loop_thread import LoopThread
from shared.aqua.own_space import OwnSpace
from shared.errors import InvalidRequest, OutOfPages, Overloaded, PeerGone, PeerTimeout
from shared.ids import InstanceId, SpaceId
from shared.mempool.client import MempoolClient
from shared.observe.log import get_logger
from shared.transport.lending_client import LendingClient
from shared.wire.lending import AskReclaim, LendingRefused, MarketView, Offer, OfferMemory, ReclaimOrder
from shared.wire.mempool import CallFailed
from shared.wire.mempool_lending import LendingDone

POLL_S = 0.01
log = get_logger("aqua.lender")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LenderSettings:
    """Args:
    socket: of the host's mempool. instance: name, unlike any other's on the host.
    device: as in wire.Attach: "cpu:" and a name, or "cuda:" and the GPU's UUID (local_memory.mempool_device()).
    most_bytes: that will ever be lent at once; the mempool makes the pages with the first lend().
    page_bytes: at least a consumer's.
    """

    socket: str
    instance: str
    device: str
    most_bytes: int
    coordinator_url: str
    coordinator_key: str = ""
    page_bytes: int = 8 << 20
    timeout_ms: int = 30_000


class Lender:
    """Methods may be called from any thread: one at a time is let in. close() takes everything back first.

    Raises, all methods: PeerGone, PeerTimeout when mempool or coordinator do not answer; Overloaded when they
    refuse for now; ResourceError when the mempool has no memory for the pages.
    """

    def __init__(self, settings: LenderSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._is_closed = False
        self._own: OwnSpace | None = None
        self._space = SpaceId(-1)
        self._offer: Offer | None = None
        self._lent_bytes = 0
        self._loop = LoopThread(f"lender-{settings.instance}")
        try:
            self._client, self._market = self._call(self._connect())
        except BaseException:
            self._loop.close()
            raise

    async def _connect(self) -> tuple[MempoolClient, LendingClient]:
        settings = self._settings
        client = MempoolClient(settings.socket, InstanceId(settings.instance))
        client.start()
        if not await client.wait_connected(settings.timeout_ms):
            await client.close()
            raise PeerGone(f"mempool {settings.socket} does not answer")
        market = LendingClient(
            settings.coordinator_url, key=settings.coordinator_key, patience_ms=settings.timeout_ms
        )
        return client, market

    @property
    def offered_bytes(self) -> int:
        """On offer now; 0 before lend() and behind reclaim()."""
        return self._lent_bytes

    def lend(self, num_bytes: int) -> int:
        """Offer memory until reclaim(); how much it became, a multiple of the page.

        Raises: InvalidRequest when something is lent already, or for more than most_bytes.
        Cost: the first time, or behind a reclaim(): the pages are made (0.05 s for 32 GiB on a GPU).
        """
        with self._lock:
            self._check_open()
            if self._offer is not None:
                raise InvalidRequest(f"{self._lent_bytes} bytes are lent already; reclaim() them first")
            if not self._settings.page_bytes <= num_bytes <= self._settings.most_bytes:
                raise InvalidRequest(
                    f"{num_bytes} bytes; {self._settings.page_bytes} to {self._settings.most_bytes} can be lent"
                )
            if self._own is None:
                self._attach()
            else:
                self._call(
                    self._client.regain_memory(
                        num_bytes, wait_ms=self._settings.timeout_ms, space=self._space
                    )
                )
            self._call(self._offer_memory(num_bytes))
            rest = self._settings.most_bytes - self._lent_bytes
            if rest >= self._settings.page_bytes:  # of the pages made: nobody gets these
                self._call(
                    self._client.release_memory(rest, wait_ms=self._settings.timeout_ms, space=self._space)
                )
            return self._lent_bytes

    def reclaim(self, deadline_ms: int) -> float:
        """Take everything back: what lies there leaves until the deadline, then the device has its memory again.

        Returns: seconds that it took. Nothing happens when nothing is lent.
        Raises: PeerTimeout when a copy held it up beyond the deadline and timeout_ms; call it again.
        """
        with self._lock:
            self._check_open()
            started_s = time.monotonic()
            if self._offer is not None:
                self._call(self._take_back(self._offer, max(0, deadline_ms)), deadline_ms / 1000)
                self._offer, self._lent_bytes = None, 0
            return time.monotonic() - started_s

    def market(self) -> MarketView | LendingRefused:
        """Who lends what to whom, as the coordinator sees it."""
        with self._lock:
            self._check_open()
            return self._call(self._market.market())

    # -- parts ------------------------------------------------------------------------------------

    def _attach(self) -> None:
        settings = self._settings
        own = OwnSpace(
            settings.socket, InstanceId(settings.instance), settings.device, settings.page_bytes,
            settings.most_bytes, only_lends=True,
        )  # fmt: skip
        number = self._call(own.number(self._client))
        if number is None:
            own.close()
            raise PeerGone("the mempool does not say which pages are this process's")
        own.let_memory_go()
        self._own, self._space = own, number

    async def _offer_memory(self, num_bytes: int) -> None:
        """Known to the coordinator, in force at the mempool."""
        assert self._own is not None
        view = await self._market.market()
        boot = self._client.boot_generation
        mine = (
            []
            if isinstance(view, LendingRefused)
            else [m for m in view.mempools if m.boot_generation == boot]
        )
        if not mine:
            raise Overloaded("the coordinator has not heard of this host's mempool yet")
        made = await self._market.offer(
            OfferMemory(
                producer=InstanceId(self._settings.instance), mempool=mine[0].mempool, boot_generation=boot,
                space=self._space, length_bytes=num_bytes,
            )
        )  # fmt: skip
        if isinstance(made, LendingRefused):
            raise Overloaded(f"{made.code}: {made.message}", retry_after_ms=made.retry_after_ms or None)
        answer = await self._client.present(made.offer, timeout_ms=self._settings.timeout_ms)
        if not isinstance(answer, LendingDone):
            raise Overloaded(f"the mempool did not take the offer: {answer!r}")
        self._offer, self._lent_bytes = made.offer, answer.num_bytes

    async def _take_back(self, offer: Offer, deadline_ms: int) -> None:
        """The coordinator is told, the mempool does it; without a coordinator it does so too."""
        order = ReclaimOrder(
            reclaim_id=f"by {self._settings.instance}",
            offer_id=offer.offer_id,
            keep_bytes=0,
            deadline_ms=deadline_ms,
        )
        answer = await self._client.present(order, timeout_ms=self._settings.timeout_ms)
        if isinstance(answer, CallFailed) and answer.code != "offer.unknown":
            raise Overloaded(f"the mempool did not take the order: {answer.code}")
        ask = AskReclaim(offer_id=offer.offer_id, producer=offer.producer, deadline_ms=deadline_ms)
        telling = asyncio.ensure_future(self._market.reclaim(ask))
        while await self._leased_pages():  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        freed = await self._client.release_memory(
            self._settings.most_bytes, wait_ms=self._settings.timeout_ms, space=self._space
        )
        if freed is None:
            raise OutOfPages("the mempool did not give the memory back to the device")
        try:
            await telling
        except (PeerGone, PeerTimeout) as error:
            log.info("coordinator_not_told", offer=offer.offer_id, error=error.message)

    async def _leased_pages(self) -> int:
        """Of this process's space; a mempool that does not answer says nothing yet."""
        status = await self._client.status()
        for space in status.spaces if status is not None else ():
            if space.number == self._space:
                return space.pages_by_state.get("leased", 0)
        return 1

    def _call(self, call: Coroutine[Any, Any, T], more_s: float = 0.0) -> T:
        return self._loop.call(call, 2 * self._settings.timeout_ms / 1000 + more_s)

    def _check_open(self) -> None:
        if self._is_closed:
            raise AquaClosed("this Lender was closed")

    def close(self, deadline_ms: int = 1_000) -> None:
        """Take everything back, and end the connections. Idempotent."""
        if self._is_closed:
            return
        try:
            self.reclaim(deadline_ms)
        finally:
            with self._lock:
                self._is_closed = True
                self._call(self._disconnect())
                self._loop.close()
                if self._own is not None:
                    self._own.close()

    async def _disconnect(self) -> None:
        await self._client.close()
        await self._market.close()

    def __enter__(self) -> "Lender":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
