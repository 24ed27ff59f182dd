"""Decides every so often for the engines of this mempool, and says to the coordinator what the desk wishes."""

import asyncio
from typing import Any

from services.mempool.core.desk import Desk
from services.mempool.core.wishes import Answer, Wish
from services.mempool.shell import MempoolShell
from shared.background_task import begin_task
from shared.errors import PeerError
from shared.observe.log import get_logger
from shared.transport.lending_client import LendingClient
from shared.wire.lending import AskLease, OfferMemory

log = get_logger("mempool.desk")


class DeskLoop:
    """From open() to close(), on the mempool's loop. What takes effect in this mempool never waits for the coordinator.

    Args: interval_ms: between two decisions.
    """

    def __init__(self, url: str, key: str, shell: MempoolShell, desk: Desk, interval_ms: int) -> None:
        self._client = LendingClient(url, key=key)
        self._shell, self._desk, self._interval_s = shell, desk, interval_ms / 1000
        self._task: asyncio.Task[None] | None = None
        self._asking: set[asyncio.Task[None]] = (
            set()
        )  # a space has one offer and one ask under way, and its reclaims

    def open(self) -> None:
        """Begin. Never waits. What deciding raises is told to the loop: it is a bug."""
        self._task = begin_task(self._run(), "mempool-desk")

    async def close(self) -> None:
        """Stop; loans live on until their time is over."""
        tasks = [*self._asking, *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    def status(self) -> dict[str, Any]:
        """For /status."""
        copies = self._shell.pool.lending.copies
        spent = {str(number): count for number, count in copies.spent_bytes().items()}
        return {"spaces": self._desk.status(), "bytes_moved": spent, "copies_held": copies.num_held}

    async def _run(self) -> None:
        shell, interval_ms = self._shell, round(self._interval_s * 1_000)
        now_ms = shell.clock.now_ms()
        while True:
            due_ms = now_ms + interval_ms
            await asyncio.sleep(self._interval_s)
            now_ms = shell.clock.now_ms()
            if now_ms > due_ms:  # it stood still, and decides before it has read what fronts said meanwhile
                self._desk.excuse(now_ms - due_ms, now_ms)
            shell.pool.learn_rates(shell.spaces.pair_rates())
            wishes, actions = shell.pool.decide_market(now_ms)
            shell.perform(actions)
            self._log()
            for wish in wishes:
                task = begin_task(self._say(wish), "mempool-wish")
                self._asking.add(task)
                task.add_done_callback(self._asking.discard)

    async def _say(self, wish: Wish) -> None:
        answer: Answer = None
        try:
            if isinstance(wish.body, OfferMemory):
                answer = await self._client.offer(wish.body, key=wish.key)
            elif isinstance(wish.body, AskLease):
                answer = await self._client.lease(wish.body, key=wish.key)
            else:
                answer = await self._client.reclaim(wish.body, key=wish.key)
        except PeerError as error:
            log.warning("coordinator_unreachable", wish=type(wish.body).__name__, error=error.message)
        shell = self._shell
        shell.perform(shell.pool.on_wish_answered(wish, answer, shell.clock.now_ms()))
        self._log()

    def _log(self) -> None:
        words, self._desk.words = self._desk.words, []
        for word in words:
            log.info(word.event, **word.ids)
