"""Leases that a consumer holds: asked of the market, presented to its host's mempool, renewed. No torch.

What is reclaimed is not this class's to give back: the mempool takes it, and copies what lies there (AQUA 6 has the
library test every few iterations and copy by itself; a process that sleeps would hold up its lender).
"""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from shared.errors import PeerError
from shared.ids import InstanceId, LeaseId
from shared.mempool.client import MempoolClient
from shared.observe.log import get_logger
from shared.transport.lending_client import LendingClient
from shared.wire.lending import AskLease, Grant, LendingRefused, SpaceRef
from shared.wire.mempool import CallFailed
from shared.wire.mempool_lending import LendingDone

MAX_PAUSE_S = 60.0  # of a space whose grants the mempool refuses: what made it unfit may end

log = get_logger("aqua.borrower")
T = TypeVar("T")


class Borrower:
    """Keeps `wanted_bytes` borrowed, as far as peers of this host offer them. run() on a loop until cancelled.

    Args:
        on_change: called on the loop with the bytes that came (positive) or went (negative).
        min_bytes: that one lease must have.
    """

    def __init__(
        self,
        instance: InstanceId,
        client: MempoolClient,
        market: LendingClient,
        on_change: Callable[[int], None],
        *,
        wanted_bytes: int,
        min_bytes: int,
        ttl_ms: int,
        every_ms: int,
    ) -> None:
        self._instance, self._client, self._market, self._on_change = instance, client, market, on_change
        self._wanted_bytes, self._min_bytes = wanted_bytes, min_bytes
        self._ttl_ms, self._every_s = ttl_ms, every_ms / 1000
        self._held: dict[LeaseId, tuple[Grant, int]] = {}
        self._unanswered: Grant | None = None  # presented, and perhaps in force
        self._paused: dict[SpaceRef, tuple[float, float]] = {}  # not asked for until when, and for how long
        self._refused: dict[
            str, tuple[str, str]
        ] = {}  # code and message of each call's last answer, if refused

    @property
    def held_bytes(self) -> int:
        """Borrowed now, as last heard."""
        return sum(num_bytes for _, num_bytes in self._held.values())

    async def run(self) -> None:
        """Renew, and ask for what lacks, every so often."""
        while True:
            try:
                await self._renew()
                if self._wanted_bytes - self.held_bytes >= self._min_bytes:
                    await self._ask()
            except PeerError as error:
                log.info("market_unreachable", instance=self._instance, error=error.message)
            await asyncio.sleep(self._every_s)

    async def give_back(self) -> None:
        """Done with all of them; what is not heard ends with its time."""
        if self._unanswered is not None:
            await self._client.release_loan(self._unanswered.lease_id)
            self._unanswered = None
        while self._held:
            lease_id, _ = self._held.popitem()
            await self._client.release_loan(lease_id)

    async def _renew(self) -> None:
        for lease_id, (grant, num_bytes) in list(self._held.items()):
            answer = await self._client.renew_loan(lease_id, self._ttl_ms)
            if isinstance(answer, CallFailed):  # over, or on its way back
                del self._held[lease_id]
                self._on_change(-num_bytes)
            elif isinstance(answer, LendingDone) and answer.num_bytes != num_bytes:  # a part is
                self._held[lease_id] = grant, answer.num_bytes
                self._on_change(answer.num_bytes - num_bytes)

    async def _ask(self) -> None:
        """For one lease. A grant without an answer is presented again, before anything else is asked for."""
        grant = self._unanswered or await self._granted()
        if grant is None:
            return
        self._unanswered = grant
        taken = await self._client.present(grant)
        if taken is None:
            return
        self._unanswered = None
        if isinstance(taken, LendingDone):
            self._held[grant.lease_id] = grant, taken.num_bytes
            self._on_change(taken.num_bytes)
        else:
            log.info("grant_refused", instance=self._instance, lease=grant.lease_id, answer=repr(taken))
            self._pause(SpaceRef(mempool=grant.mempool, space=grant.space))
            await self._market.release(grant)  # else nobody gets these bytes until its time is over

    def _pause(self, space: SpaceRef) -> None:
        """Ask for none of it, twice as long as before: who asks again and again keeps it from who could borrow."""
        _, last_s = self._paused.get(space, (0.0, self._every_s))
        pause_s = min(2 * last_s, MAX_PAUSE_S)
        self._paused[space] = time.monotonic() + pause_s, pause_s

    def _is_paused(self, space: SpaceRef) -> bool:
        until_s, pause_s = self._paused.get(space, (0.0, 0.0))
        if time.monotonic() >= until_s + pause_s:  # long over: the next pause is short again
            self._paused.pop(space, None)
        return time.monotonic() < until_s

    async def _granted(self) -> Grant | None:
        """What the market grants of what lacks."""
        view = self._unless_refused("market", await self._market.market())
        if view is None:
            return None
        mine = {m.mempool for m in view.mempools if m.boot_generation == self._client.boot_generation}
        spaces = [
            SpaceRef(mempool=each.offer.mempool, space=each.offer.space)
            for each in view.offers
            if each.offer.mempool in mine and each.offer.producer != self._instance and each.state == "open"
            and each.limit_bytes - each.leased_bytes >= self._min_bytes
        ]  # fmt: skip
        spaces = [space for space in dict.fromkeys(spaces) if not self._is_paused(space)]
        if not spaces:
            return None
        ask = AskLease(
            consumer=self._instance, length_bytes=self._wanted_bytes - self.held_bytes,
            min_bytes=self._min_bytes, purpose="swap", spaces=spaces, ttl_ms=self._ttl_ms,
        )  # fmt: skip
        return self._unless_refused("lease", await self._market.lease(ask))

    def _unless_refused(self, call: str, answer: T | LendingRefused) -> T | None:
        """None: refused, which is logged where the answer before was another."""
        if not isinstance(answer, LendingRefused):
            self._refused.pop(call, None)
            return answer
        reason = answer.code, answer.message
        if self._refused.get(call) != reason:
            say = log.info if answer.retry_after_ms else log.warning  # 0: asking again cannot help
            say(
                "borrowing_refused",
                instance=self._instance,
                call=call,
                code=answer.code,
                error=answer.message,
            )
        self._refused[call] = reason
        return None
