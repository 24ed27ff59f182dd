"""Look-ups in the prompt tree, for the gateway. Hits are hints: whoever acts on them must bear wrong ones."""

import asyncio
import time
from collections.abc import Sequence

from shared.background_task import begin_task
from shared.errors import ClusterError
from shared.ids import BlockHash
from shared.observe.log import get_logger
from shared.observe.metrics import counter
from shared.prompttree.breaker import Breaker
from shared.prompttree.hits import as_hits, parse_reply, short_hashes
from shared.prompttree.lookup_cache import LookupCache
from shared.prompttree.scripts import LOOKUP
from shared.transport.redis_link import RedisLink
from shared.wire.placement import PrefixHit

DEADLINE_MS = 20
# Event loops count whole milliseconds, from when a turn began, and poll until the one after: a timer comes up to two
# late. That, and the turn in which it comes, are part of the deadline: 20 ms of waiting alone took up to 20.96.
# Whole milliseconds, as asyncio's own loop rounds up.
TIMER_SLACK_MS = 3.0
MAX_BLOCKS = 4096

_log = get_logger("prompttree")
_outcomes = counter(
    "quire_prompttree_lookups_total", "Look-ups, by outcome: ok, or why there were no hits.", ("outcome",)
)
_ok, _remembered, _down, _open, _failed = (
    _outcomes.labels(o) for o in ("ok", "remembered", "not_connected", "breaker_open", "failed")
)


class PromptTreeClient:
    """open() on the loop that will use it, lookup() per request, close() at the end.

    A Redis that is down costs a comparison per request; one that hangs costs `deadline_ms` for three requests
    in a row, then nothing until it answers a probe again, which needs no request.

    Args:
        deadline_ms: after so long a look-up has returned, with or without an answer; it waits for Redis for less, by
            what timers are late (TIMER_SLACK_MS; half of deadlines that are shorter than twice that).
        cache: of look-ups; without one every look-up asks Redis.
    """

    def __init__(
        self,
        redis_url: str,
        *,
        deadline_ms: int = DEADLINE_MS,
        max_blocks: int = MAX_BLOCKS,
        breaker: Breaker | None = None,
        cache: LookupCache | None = None,
    ) -> None:
        self.num_failures = 0  # look-ups that were asked and not answered in time
        self._wait_ms = max(deadline_ms - TIMER_SLACK_MS, deadline_ms / 2)
        self._max_blocks = max_blocks
        self._breaker = breaker or Breaker()
        self._cache = cache
        self._link = RedisLink(redis_url)
        self._is_closed = False
        self._probe: asyncio.Task[None] | None = None

    @property
    def up(self) -> bool:
        """Whether a look-up would ask Redis now."""
        return self._link.up and not self._breaker.is_open

    def skipped(self) -> None:
        """A look-up was not made because this is not `up`: counted."""
        (_open if self._link.up else _down).inc()

    def open(self) -> None:
        """Start connecting. Never waits."""
        self._link.open()

    async def wait_up(self, timeout_ms: int) -> bool:
        """Whether Redis is connected within the time."""
        return await self._link.wait_up(timeout_ms)

    async def close(self) -> None:
        """Look-ups from now on find nothing."""
        self._is_closed = True
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.gather(self._probe, return_exceptions=True)
        await self._link.close()

    async def lookup(self, hashes: Sequence[BlockHash], block_tokens: int) -> list[PrefixHit]:
        """As ask(), for whom no answer is as good as nobody."""
        return await self.ask(hashes, block_tokens) or []

    async def ask(self, hashes: Sequence[BlockHash], block_tokens: int) -> list[PrefixHit] | None:
        """Leading tokens within each instance's reach; instances with none are left out. None: no answer. Never raises.

        Args: hashes: of the prompt's full blocks, first block first; those beyond max_blocks are left out.
        Cost: one round trip, p50 55 us for 256 blocks and two owners on loopback; at most the deadline.
        """
        if not hashes:
            return []
        asked = hashes[: self._max_blocks]
        if self._cache is not None:
            known = self._cache.get(asked, now_ms=_now_ms())
            if known is not None:
                _remembered.inc()
                return as_hits(known.items(), block_tokens)
        if not self.up:
            self.skipped()
            return None
        try:
            reply = await self._link.run(LOOKUP, short_hashes(asked), timeout_ms=self._wait_ms)
            found, version = parse_reply(reply)
        except (ClusterError, ValueError, TypeError) as error:
            self._on_failure(error)
            return None
        self._breaker.on_success()
        _ok.inc()
        if self._cache is not None:
            self._cache.put(asked, found, version, now_ms=_now_ms())
        return as_hits(found.items(), block_tokens)

    def _on_failure(self, error: Exception) -> None:
        _failed.inc()
        self.num_failures += 1
        if not self._breaker.on_failure():
            return
        if not self._is_closed and (self._probe is None or self._probe.done()):
            self._probe = begin_task(self._probe_until_back(), "prompttree-probe")
        _log.warning("prompt_tree_given_up", error=str(error))

    async def _probe_until_back(self) -> None:
        while self._breaker.is_open:  # a look-up that was under way may close it too
            await asyncio.sleep(self._breaker.wait_ms / 1000)
            try:
                await self._link.call("PING", timeout_ms=self._wait_ms)
            except ClusterError:
                self._breaker.on_probe_failure()
            else:
                self._breaker.on_success()
        _log.info("prompt_tree_back")


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
