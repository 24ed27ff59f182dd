"""A process lends memory of its device and takes it back, whatever it computes: AQUA's producers. No torch.

    lender = Lender(LenderSettings(..., device="cuda:<uuid>"))
    lender.lend(20 << 30)                 # idle: the mempool makes pages here and offers them
    lender.reclaim(deadline_ms=2_000)     # needed: what lay there is elsewhere, and the device has its memory again

The memory is the host's mempool's (decision 0018): it makes the pages, is their only writer, and frees them. This
process maps none of them, so that nothing of it can touch what is lent, and nothing of its consumers can touch it.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from shared.aqua.errors import AquaClosed
from shared.aqua.lender_name import check_name
from shared.aqua.loop_thread import LoopThread
from shared.aqua.own_space import OwnSpace, describe
from shared.aqua.settings import LenderSettings
from shared.errors import ClusterError, InvalidRequest, OutOfPages, Overloaded, PeerGone, PeerTimeout
from shared.ids import InstanceId, SpaceId
from shared.lending.budget import SLOWEST_BYTES_PER_S
from shared.lending.rules import DEFAULT_RULES
from shared.mempool.client import MempoolClient
from shared.observe.log import get_logger
from shared.transport.lending_client import LendingClient, new_key
from shared.wire.lending import (
    AskReclaim,
    LendingRefused,
    MarketView,
    Offer,
    OfferMemory,
    OfferView,
    ReclaimOrder,
)
from shared.wire.mempool import CallFailed
from shared.wire.mempool_lending import LendingDone

POLL_S = 0.01
LAYOUT = "layers-blocks"  # of the space
# refusals behind which the offer may have been noted all the same, by a leader whose store failed then
UNSURE = frozenset({"market.standby", "market.rebuilding", "journal.down", "journal.not_durable"})
ENDED = frozenset({"offer.ended", "epoch.stale"})  # refusals of an offer that was in force
log = get_logger("aqua.lender")
T = TypeVar("T")


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
        self._has_memory = False  # or may have: pages on the device
        self._asked: tuple[OfferMemory, str] | None = None  # with its key; perhaps an offer
        self._offer: Offer | None = None
        self._lent_bytes = 0
        self._is_shrinking = False  # a part was ordered back, and may not be home
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

        When it raises, nothing is lent and the device has its memory; where that cannot be had (nobody answers), the
        next lend(), reclaim() or close() sees to it first.
        Raises: InvalidRequest when something is lent already, for more than most_bytes, with fewer pages made, or while
        another process of this host lends under the name.
        Cost: the first time, or behind a reclaim(): the pages are made (0.05 s for 32 GiB on a GPU).
        """
        with self._lock:
            self._check_open()
            if self._lent_bytes:
                raise InvalidRequest(f"{self._lent_bytes} bytes are lent already; reclaim() them first")
            if not self._settings.page_bytes <= num_bytes <= self._settings.most_bytes:
                raise InvalidRequest(
                    f"{num_bytes} bytes; {self._settings.page_bytes} to {self._settings.most_bytes} can be lent"
                )
            self._clear(0)
            mempool, earlier = self._call(self._look())  # before memory is taken: it is often not known yet
            try:
                self._take_memory(num_bytes)
                self._call(self._end_earlier(earlier))
                self._lent_bytes = self._call(self._offer_memory(mempool, num_bytes))
                rest = self._settings.most_bytes - self._lent_bytes
                if rest >= self._settings.page_bytes:  # of the pages made: nobody gets these
                    wait_ms = self._settings.timeout_ms
                    self._call(self._client.release_memory(rest, wait_ms=wait_ms, space=self._space))
            except BaseException:
                self._lent_bytes = 0
                with contextlib.suppress(ClusterError):
                    self._clear(0)
                raise
            return self._lent_bytes

    def reclaim(self, deadline_ms: int, keep_bytes: int = 0) -> float:
        """Take everything back, or all but keep_bytes: what lies there leaves until the deadline, then the device has
        that memory again. lend() offers more only when nothing is lent.

        Args: keep_bytes: cut to whole pages; stays on offer.
        Returns: seconds that it took. Nothing happens when no more is lent, nor left by a lend() that failed.
        Raises: PeerTimeout when a copy held it up beyond the deadline and timeout_ms; call it again.
        """
        with self._lock:
            self._check_open()
            started_s, deadline_ms = time.monotonic(), max(0, deadline_ms)
            page_bytes = self._own.page_bytes if self._own is not None else self._settings.page_bytes
            num_kept = max(0, keep_bytes) // page_bytes
            offer, kept_bytes = self._offer, min(num_kept * page_bytes, self._lent_bytes)
            if not num_kept or (offer is not None and offer.boot_generation != self._client.boot_generation):
                self._clear(deadline_ms)  # what is on offer ends with its mempool
            elif offer is not None and (self._is_shrinking or kept_bytes < self._lent_bytes):
                self._call(self._shrink(offer, deadline_ms, kept_bytes, page_bytes), deadline_ms / 1000)
            return time.monotonic() - started_s

    def budget_bytes_per_s(self) -> int:
        """What the mempool lets through the lent pages now; 0: no limit, nothing is lent, or it does not say."""
        with self._lock:
            self._check_open()
            return self._budget()

    def _budget(self) -> int:
        answer = self._said_again()
        return answer.budget_bytes_per_s if isinstance(answer, LendingDone) else 0

    def still_offered_bytes(self) -> int | None:
        """Less than offered_bytes where the mempool began anew, or others took some back; None: it does not say now."""
        with self._lock:
            self._check_open()
            answer = self._said_again()
            if isinstance(answer, CallFailed):
                return 0 if answer.code in ENDED else None
            return answer.num_bytes if answer is not None else None

    def _said_again(self) -> LendingDone | CallFailed | None:
        """The mempool's answer to the offer, which is as before."""
        return self._call(self._client.present(self._offer)) if self._offer is not None else None

    def market(self) -> MarketView | LendingRefused:
        """Who lends what to whom, as the coordinator sees it."""
        with self._lock:
            self._check_open()
            return self._call(self._market.market())

    # -- parts ------------------------------------------------------------------------------------

    def _clear(self, deadline_ms: int) -> None:
        """Whatever is lent or may be, and the memory for it, comes back."""
        if self._offer is not None or self._asked is not None or self._has_memory:
            self._call(self._take_back(deadline_ms), deadline_ms / 1000)
            self._lent_bytes, self._is_shrinking = 0, False

    def _take_memory(self, num_bytes: int) -> None:
        """The pages, and what this Lender gave back of them, or one before it of the same name."""
        number = self._call(self._own.number(self._client)) if self._own is not None else None
        if number is None:
            own, self._own = self._own, None
            if own is not None:  # the mempool began anew, and knows nothing of this process
                own.close()
            self._attach()
        else:
            self._space = number
        self._has_memory = True
        wait_ms = self._settings.timeout_ms
        self._call(self._client.regain_memory(num_bytes, wait_ms=wait_ms, space=self._space))

    def _attach(self) -> None:
        settings, name = self._settings, InstanceId(self._settings.instance)
        description = describe(name, settings.page_bytes, LAYOUT, only_lends=True)
        self._call(check_name(self._client, description, 0))
        own = OwnSpace(
            settings.socket, name, settings.device, settings.page_bytes, settings.most_bytes, LAYOUT, only_lends=True
        )  # fmt: skip
        try:
            self._call(check_name(self._client, description, 1))  # two that began at once
            number = self._call(own.number(self._client))
            if number is None:
                raise PeerGone("the mempool does not say which pages are this process's")
            own.let_memory_go()
        except BaseException:
            own.close()
            raise
        self._own, self._space, self._has_memory = own, number, True

    async def _look(self) -> tuple[InstanceId, list[OfferView]]:
        """This host's mempool in the market, and what others of this name, which are gone, still offer there."""
        view = await self._market.market()
        boot, name = self._client.boot_generation, self._settings.instance
        if isinstance(view, LendingRefused):
            raise Overloaded(f"{view.code}: {view.message}")
        for mempool in view.mempools:
            if mempool.boot_generation == boot:
                mine = [o for o in view.offers if (o.offer.producer, o.offer.boot_generation) == (name, boot)]
                return mempool.mempool, [each for each in mine if each.state in ("proposed", "open")]
        raise Overloaded(
            "the coordinator has not heard of this host's mempool yet: it reports with mempool.coordinator_url alone, "
            "which `quire up --set memory_market=true` gives it"
        )

    async def _end_earlier(self, earlier: Sequence[OfferView]) -> None:
        """Nobody else takes these back, and a reclaim() would wait for their pages for ever."""
        for each in earlier:
            offer = each.offer
            deadline_ms = DEFAULT_RULES.deadline_ms(each.leased_bytes, SLOWEST_BYTES_PER_S)
            await self._order(offer, deadline_ms)
            ask = AskReclaim(offer_id=offer.offer_id, producer=offer.producer, deadline_ms=deadline_ms)
            await self._tell(self._market.reclaim(ask), offer)
            log.info("earlier_offer_taken_back", offer=offer.offer_id, num_bytes=each.limit_bytes)

    async def _offer_memory(self, mempool: InstanceId, num_bytes: int) -> int:
        """Known to the coordinator, in force at the mempool; so many bytes."""
        body = OfferMemory(
            producer=InstanceId(self._settings.instance), mempool=mempool,
            boot_generation=self._client.boot_generation, space=self._space, length_bytes=num_bytes,
        )  # fmt: skip
        self._asked = body, new_key()
        made = await self._made()
        if isinstance(made, LendingRefused):
            raise Overloaded(f"{made.code}: {made.message}", retry_after_ms=made.retry_after_ms or None)
        answer = await self._present(made)
        if not isinstance(answer, LendingDone):
            raise Overloaded(f"the mempool did not take the offer: {answer.code}")
        return answer.num_bytes

    async def _made(self) -> Offer | LendingRefused:
        """What became of what was asked. The same key: an answer that got lost is said again."""
        assert self._asked is not None
        body, key = self._asked
        made = await self._market.offer(body, key=key)
        if not isinstance(made, LendingRefused):
            self._offer, self._asked = made.offer, None
            return made.offer
        if made.code not in UNSURE:
            self._asked = None
        return made

    async def _present(self, what: Offer | ReclaimOrder) -> LendingDone | CallFailed:
        """Said until it is answered. Raises: PeerTimeout."""
        began_s = time.monotonic()
        while True:
            answer = await self._client.present(what)
            if answer is not None:
                return answer
            if time.monotonic() >= began_s + self._settings.timeout_ms / 1000:
                raise PeerTimeout(f"the mempool did not answer within {self._settings.timeout_ms} ms")
            await asyncio.sleep(POLL_S)

    async def _take_back(self, deadline_ms: int) -> None:
        """The coordinator is told, the mempool does it; without a coordinator it does so too."""
        unsure: ClusterError | None = None
        if self._offer is None and self._asked is not None:
            try:
                made = await self._made()
                if isinstance(made, LendingRefused) and self._asked is not None:
                    unsure = Overloaded(f"{made.code}: {made.message}")
            except (PeerGone, PeerTimeout) as error:
                unsure = error
        offer, telling = self._offer, None
        if offer is not None:
            await self._order(offer, deadline_ms)
            ask = AskReclaim(offer_id=offer.offer_id, producer=offer.producer, deadline_ms=deadline_ms)
            telling = asyncio.ensure_future(self._market.reclaim(ask))
        if self._own is not None and self._own.boot_generation != self._client.boot_generation:
            await asyncio.to_thread(self._own.come_back)  # a successor frees no page before it has heard so
        while leased := await self._leased_pages():
            if unsure is not None:  # it was taken, and only the coordinator knows its name
                raise unsure
            await asyncio.sleep(POLL_S)
        if leased is not None and self._has_memory:
            await self._release(self._settings.most_bytes)
        self._offer, self._has_memory = None, False
        if telling is not None and offer is not None:
            await self._tell(telling, offer)

    async def _shrink(self, offer: Offer, deadline_ms: int, kept_bytes: int, page_bytes: int) -> None:
        """The mempool does it; the coordinator hears of it by its next report, as a reclaim says how much less."""
        await self._order(offer, deadline_ms, kept_bytes)
        self._lent_bytes, self._is_shrinking = kept_bytes, True
        while (leased := await self._leased_pages()) is not None:  # None: the mempool began anew
            if 0 <= leased * page_bytes <= kept_bytes:
                await self._release(self._settings.most_bytes - kept_bytes)  # as much as nobody has
                break
            await asyncio.sleep(POLL_S)
        self._is_shrinking = False

    async def _tell(self, telling: Awaitable[object], offer: Offer) -> None:
        """The mempool knows; of a coordinator that does not answer it is enough that its next report says it."""
        try:
            await telling
        except (PeerGone, PeerTimeout) as error:
            log.info("coordinator_not_told", offer=offer.offer_id, error=error.message)

    async def _order(self, offer: Offer, deadline_ms: int, keep_bytes: int = 0) -> None:
        """The mempool takes the offer back, or what is beyond keep_bytes."""
        order = ReclaimOrder(
            reclaim_id=f"by {self._settings.instance}",
            offer_id=offer.offer_id,
            keep_bytes=keep_bytes,
            deadline_ms=deadline_ms,
        )
        answer = await self._present(order)
        if isinstance(answer, CallFailed) and answer.code == "offer.unknown":
            await self._present(
                offer
            )  # so that it remembers it as taken back: the coordinator may tell it yet
            answer = await self._present(order)
        if isinstance(answer, CallFailed) and answer.code != "offer.unknown":
            raise Overloaded(f"the mempool did not take the order: {answer.code}")

    async def _leased_pages(self) -> int | None:
        """Of this process's space; None: the mempool has none such, as it began anew; -1: it does not answer now."""
        status = await self._client.status()
        if status is None:
            return -1
        for space in status.spaces:
            mine = self._own is not None and space.content_key == self._own.description.content_key
            if mine and space.number == self._space:
                return space.pages_by_state.get("leased", 0)
        return None

    async def _release(self, num_bytes: int) -> None:
        wait_ms = self._settings.timeout_ms
        freed = await self._client.release_memory(num_bytes, wait_ms=wait_ms, space=self._space)
        if freed is None:
            raise OutOfPages("the mempool did not give the memory back to the device")

    def _call(self, call: Coroutine[Any, Any, T], more_s: float = 0.0) -> T:
        return self._loop.call(call, 2 * self._settings.timeout_ms / 1000 + more_s)

    def _check_open(self) -> None:
        if self._is_closed:
            raise AquaClosed("this Lender was closed")

    def end_soon(self, timeout_ms: int) -> None:
        """Nobody who does not answer is waited for longer than that from now on, by a call under way neither. Any
        thread; never waits."""
        self._settings = replace(self._settings, timeout_ms=min(timeout_ms, self._settings.timeout_ms))
        self._market.be_patient(self._settings.timeout_ms)

    def close(self, deadline_ms: int | None = None) -> None:
        """Take everything back, and end the connections. Idempotent.

        Args: deadline_ms: None: what the budget takes to move what is offered, and 2 s.
        """
        with self._lock:
            if self._is_closed:
                return
            try:
                if deadline_ms is None:
                    deadline_ms = DEFAULT_RULES.deadline_ms(self._lent_bytes, self._budget())
                self._clear(max(0, deadline_ms))
            finally:
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
