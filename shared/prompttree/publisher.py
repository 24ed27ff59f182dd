"""An owner's own entries in the prompt tree: a worker's engine, or a space of a mempool. Nothing here waits for Redis
but this: no engine, no page.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Literal

from shared.background_task import begin_task
from shared.errors import ClusterError, PeerProtocolError
from shared.ids import BlockHash, Epoch
from shared.observe.log import get_logger
from shared.observe.metrics import counter, gauge
from shared.prompttree.held_blocks import HeldBlocks
from shared.prompttree.scripts import BEAT, CLAIM, OWNERS, RELEASE, TAG_HEX, WRITE
from shared.transport.redis_link import RedisLink, Script

TTL_S = 120
BEAT_MS = 5_000
BATCH_WINDOW_MS = 10
CALL_DEADLINE_MS = 1_000
RETRY_MIN_MS = 200
RETRY_MAX_MS = 5_000
SWEEP_BEATS = 6  # every so many beats the rows of dead owners are dropped

_log = get_logger("prompttree")
_claims = counter("quire_prompttree_claims_total", "Publications begun; after the first, each is a resync.")
_failures = counter("quire_prompttree_publish_failures_total", "Calls that Redis did not answer in time.")
_held_blocks = gauge(
    "quire_prompttree_held_blocks", "Blocks that an owner holds, published or not.", ("owner",)
)
_ignored = gauge("quire_prompttree_ignored_blocks", "Blocks beyond the bound, never published.", ("owner",))

Verdict = Literal["ok", "lost", "stale", "covered"]


class PromptTreePublisher:
    """open() on the loop that calls stored(), removed() and cleared(); these only note and return.

    One call to Redis per batch, one at a time. Whatever makes Redis' state doubtful (an error, a reconnect, a
    count that differs, an evicted set) ends in a new publication of all that is held. An owner of the same name
    with a larger epoch ends this one for good: on_stale() runs once. While a mempool's space speaks for the owner
    (scripts.py, "covered") nothing is written, and each beat asks whether it still does.

    Args:
        owner: the instance, or the space's name, without spaces in it.
        row: the rest of its row: an instance's role, or what hits.py makes of a space.
        table: scripts.OWNERS or SPACES.
    """

    def __init__(
        self,
        redis_url: str,
        *,
        owner: str,
        epoch: Epoch,
        row: str,
        table: str = OWNERS,
        ttl_s: int = TTL_S,
        beat_ms: int = BEAT_MS,
        held: HeldBlocks | None = None,
        on_stale: Callable[[], None] | None = None,
    ) -> None:
        if ttl_s * 1000 < 3 * beat_ms:
            raise ValueError(f"ttl_s={ttl_s} must be at least three beats of {beat_ms} ms")
        self.held = held or HeldBlocks()
        self.stale = False
        self.covered = False
        self._owner = owner
        self._epoch = epoch
        self._table = table
        self._row = self._told_row = row
        self._ttl_s = ttl_s
        self._beat_s = beat_ms / 1000
        self._on_stale = on_stale
        self._tag = ""
        self._num_beats = 0
        self._is_telling = False  # a batch is on its way
        self._asks_again = False  # although it was covered
        self._held_blocks = _held_blocks.labels(owner)
        self._ignored = _ignored.labels(owner)
        self._link = RedisLink(redis_url, on_up=self._reconnected)
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def in_sync(self) -> bool:
        """Whether Redis has been told everything."""
        is_told = self.held.claimed and self.held.num_pending == 0 and not self._is_telling
        return self._link.up and (self.covered or is_told)

    def open(self) -> None:
        """Start connecting and publishing. Never waits."""
        if self._task is None:
            self._link.open()
            self._task = begin_task(self._run(), "prompttree-publish")

    async def close(self) -> None:
        """Withdraw the entries, if Redis answers, and stop."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if self._link.up and self._tag and not self.stale:
            try:
                await self._call(RELEASE, self._tag)
            except ClusterError as error:
                _log.info("prompt_tree_release_failed", error=str(error))  # the TTL ends them
        await self._link.close()

    def stored(self, hashes: Sequence[BlockHash]) -> None:
        """The engine's cache now holds these, parents before children."""
        self.held.stored(hashes)
        self._wake.set()

    def removed(self, hashes: Iterable[BlockHash]) -> None:
        """The engine evicted these."""
        self.held.removed(hashes)
        self._wake.set()

    def cleared(self) -> None:
        """The engine's cache is empty: one call ends all entries."""
        self.held.cleared()
        self._wake.set()

    def renew(self, epoch: Epoch) -> None:
        """The coordinator granted a larger epoch: publish under it. Raises: ValueError on a smaller one."""
        if epoch < self._epoch:
            raise ValueError(f"epoch {epoch} is below {self._epoch}")
        if epoch != self._epoch:
            self._epoch = epoch
            self.stale = False
            self._asks_again = True
            self.held.lost()
            self._wake.set()

    def set_row(self, row: str) -> None:
        """What others should know of this owner is another by now. Told soon, without a new publication."""
        if row != self._row:
            self._row = row
            self._wake.set()

    def _reconnected(self) -> None:
        self.held.lost()  # it may be another server, an empty one, or have missed the last call
        self._asks_again = True
        self._wake.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        retry_ms = RETRY_MIN_MS
        beat_at_s = loop.time() + self._beat_s
        while True:
            self._wake.clear()
            if self._link.up and not self.stale:
                try:
                    await self._catch_up()
                    retry_ms = RETRY_MIN_MS
                except ClusterError as error:
                    _failures.inc()
                    _log.warning("prompt_tree_publish_failed", error=str(error), retry_ms=retry_ms)
                    self.held.lost()
                    await asyncio.sleep(retry_ms / 1000)
                    retry_ms = min(RETRY_MAX_MS, 2 * retry_ms)
                    continue
            self._held_blocks.set(len(self.held))
            self._ignored.set(self.held.num_ignored)
            if loop.time() >= beat_at_s:  # also of an owner that always has news: its set must not expire
                await self._beat()
                beat_at_s = loop.time() + self._beat_s
            with suppress(TimeoutError):
                async with asyncio.timeout_at(beat_at_s):
                    await self._wake.wait()
                await asyncio.sleep(BATCH_WINDOW_MS / 1000)

    async def _catch_up(self) -> None:
        if not self.held.claimed:
            if self.covered and not self._asks_again:
                return
            self._asks_again = False
            if not await self._claim():
                return
        while (batch := self.held.next_batch()) is not None:
            self._is_telling, epoch = True, self._epoch
            try:
                verdict = await self._call(WRITE, self._tag, batch.stored, batch.removed)
            finally:
                self._is_telling = False
            if verdict != b"ok":
                self._end_publication(verdict, epoch)
                return
        if self._row != self._told_row:
            await self._beat()

    async def _claim(self) -> bool:
        self._tag = secrets.token_hex(TAG_HEX // 2)
        row, epoch = self._row, self._epoch
        verdict = await self._call(CLAIM, self._tag, self._ttl_s, row)
        if verdict != b"ok" or epoch != self._epoch:  # renewed meanwhile: claim again
            self._end_publication(verdict, epoch)
            return False
        self.covered = False
        self.held.on_claimed()
        self._told_row = row
        _claims.inc()
        _log.info("prompt_tree_claimed", epoch=self._epoch, owner=self._owner, num_blocks=len(self.held))
        return True

    async def _beat(self) -> None:
        if self.covered:
            self._asks_again = True
            self._wake.set()
        if not self._link.up or self.stale or not self.held.claimed:
            return
        self._num_beats += 1
        epoch, row, sweep = self._epoch, self._row, int(self._num_beats % SWEEP_BEATS == 0)
        try:
            reply = await self._call(BEAT, self._tag, self._ttl_s, row, sweep)
        except ClusterError as error:
            _failures.inc()
            _log.warning("prompt_tree_beat_failed", error=str(error))
            self.held.lost()
        else:
            if isinstance(reply, bytes):
                self._end_publication(reply, epoch)
                return
            self._told_row = row
            if self.held.claimed and not self.held.agrees(reply):
                _log.warning("prompt_tree_differs", num_in_redis=reply, num_held=len(self.held))
                self.held.lost()
        if not self.held.claimed:
            self._wake.set()

    async def _call(self, script: Script, *args: bytes | str | int) -> bytes | int:
        table, owner, epoch = self._table, self._owner, self._epoch
        reply = await self._link.run(script, table, owner, epoch, *args, timeout_ms=CALL_DEADLINE_MS)
        if not isinstance(reply, bytes | int):
            raise PeerProtocolError(f"a script of the prompt tree answered {reply!r}")
        return reply

    def _end_publication(self, verdict: bytes | int, epoch: Epoch) -> None:
        """`epoch`: that the call was sent with."""
        self.held.lost()
        was_covered, self.covered = self.covered, verdict == b"covered"
        if self.covered:
            if not was_covered:
                _log.info("prompt_tree_covered", owner=self._owner, num_blocks=len(self.held))
            return
        if verdict != b"stale" or epoch < self._epoch:  # renewed meanwhile: the next claim says
            self._wake.set()
            return
        self.stale = True
        _log.warning("prompt_tree_epoch_stale", owner=self._owner, epoch=self._epoch)
        if self._on_stale is not None:
            self._on_stale()
