"""What the spaces of this mempool hold, as entries of their own in the prompt tree.

The engines publish what they cache; here is what they cannot know: blocks that left their cache and are in the space
still, or in the host memory behind it, blocks that were copied in for them, and those of engines that are gone.
A retraction is noted before the page of its block can be free, and goes out within 10 ms; nobody waits for it, since
whoever uses a block finds it in the index, or not.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from services.mempool.core.audience import SpaceAudience
from services.mempool.core.entry import Entry
from services.mempool.core.mempool import Mempool
from shared.background_task import begin_task
from shared.prompttree.hits import pack_audience
from shared.prompttree.publisher import PromptTreePublisher
from shared.prompttree.scripts import IS_DRAM, NONE_BEHIND, SPACES
from shared.transport.clock import MonotonicClock

REFRESH_S = 0.5  # so late a new space, or an instance that comes to one, is told
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SpaceWatch:
    """Radix Watch of one space. Partial blocks are no prefix of anybody's prompt, so they are not told."""

    def __init__(self, publisher: PromptTreePublisher, block_tokens: int) -> None:
        self.publisher = publisher
        self._block_tokens = block_tokens

    def stored(self, entries: Sequence[Entry]) -> None:
        """Indexed now."""
        full = self._block_tokens
        self.publisher.stored([entry.block_hash for entry in entries if entry.valid_tokens >= full])

    def removed(self, entries: Sequence[Entry]) -> None:
        """Not indexed any more."""
        self.publisher.removed([entry.block_hash for entry in entries])


class TreePublishers:
    """One publisher for each space. open() on the mempool's loop, close() before the mempool's end.

    Args: peer_listen: tells this mempool from those of other hosts with the same instance name; without it the
        host's boot does.
    """

    def __init__(self, redis_url: str, instance: str, peer_listen: str, mempool: Mempool) -> None:
        self._redis_url = redis_url
        self._name = quote(f"{instance}@{peer_listen or _BOOT_ID.read_text().strip()}", safe="@:/[]")
        self._mempool = mempool
        self._clock = MonotonicClock()
        self._watches: dict[int, SpaceWatch] = {}  # by number of the space
        self._task: asyncio.Task[None] | None = None

    @property
    def in_sync(self) -> bool:
        """Whether Redis has been told everything."""
        return all(watch.publisher.in_sync for watch in self._watches.values())

    def open(self) -> None:
        """Begin, unless there is no Redis to tell. Never waits."""
        if self._redis_url and self._task is None:
            self._task = begin_task(self._run(), "mempool-tree")

    async def close(self) -> None:
        """Withdraw the entries, if Redis answers."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for number, watch in self._watches.items():
            if (pool := self._mempool.pools.get(number)) is not None:
                pool.index.watch = None
            await watch.publisher.close()

    async def _run(self) -> None:
        while True:
            now = self._mempool.audience.now(self._clock.now_ms())
            for number, audience in now.items():
                self._refresh(number, audience)
            for number in self._watches.keys() - now.keys():  # it has ended
                await self._watches.pop(number).publisher.close()
            await asyncio.sleep(REFRESH_S)

    def _refresh(self, number: int, audience: SpaceAudience) -> None:
        if audience.is_dram:
            row = f"{IS_DRAM} "
        else:
            named = pack_audience(audience.media, audience.remembered)
            row = f"{self._owner(audience.behind) if audience.behind else NONE_BEHIND} {named}"
        watch = self._watches.get(number)
        if watch is not None:
            watch.publisher.set_row(row)
            return
        pool = self._mempool.pools[number]
        assert pool.memory is not None
        publisher = PromptTreePublisher(
            self._redis_url,
            owner=self._owner(number),
            epoch=self._mempool.boot_generation,
            row=row,
            table=SPACES,
        )
        watch = self._watches[number] = SpaceWatch(publisher, pool.memory.block_tokens)
        watch.stored(list(pool.index.entries()))  # of an earlier mempool, or sealed since the last round
        pool.index.watch = watch
        publisher.open()

    def _owner(self, number: int) -> str:
        return f"{self._name}/{number}"
