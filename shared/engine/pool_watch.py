"""What an engine's scheduler does beside its steps for the mempool: hear what it asks for, and whether it is there.

A thread of its own beside the engine core's, which waits for requests where there are none.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from shared.engine.page_pool import PageBlockPool
from shared.errors import ResourceError
from shared.ids import LeaseId
from shared.kv.words import u32_bytes, u64_bytes
from shared.mempool.page_quota import PageQuota
from shared.mempool.slab_unmaps import IDLE_S
from shared.transport.unix_framing import MAX_MESSAGE_BYTES
from shared.vital_thread import start_vital
from shared.wire.mempool import HeldLease, Holding

logger = logging.getLogger(__name__)

REATTACH_INTERVAL_S = 0.05
ASKED_NAP_S = 0.002  # between looks at whether what the pool asks for may be answered beside the steps
SPARED_PAGES = 256  # asked for at once, at most, if the stock is to give them while a step runs: a prompt's
MOST_HOLDING_BYTES = MAX_MESSAGE_BYTES - (64 << 10)  # for the rest of Attach; a sealed page takes 80
EXIT_MEMORY_LOST = 3  # of the engine core: the worker's front sees it die and starts anew


class PoolWatch:
    """Part of PageSchedulerMixin, which sets the fields."""

    quota: PageQuota
    pages: PageBlockPool
    requests: Mapping[str, Any]  # vLLM's: all that have not ended
    leases: Mapping[str, tuple[LeaseId, list[KVCacheBlock]]]
    _ended_leases: deque[tuple[int, LeaseId, list[KVCacheBlock]]]
    _turn: threading.RLock  # where pages change hands
    _stepped_s: float  # when the last step was scheduled, time.monotonic()

    def _watch_pool(self) -> None:
        start_vital(self._stay_attached, name="quire-reattach", loss="nobody hears the mempool any more")

    def _stay_attached(self) -> None:
        """Whether this engine is busy or idle: hear what the mempool asks for, and whether it is there."""
        while not self.quota.closed:
            asked = self.quota.wait_asked(REATTACH_INTERVAL_S)
            if self.quota.lost:
                time.sleep(REATTACH_INTERVAL_S)
            if asked and (self._is_idle() or self.quota.lost):
                self._answer_pool()
            elif asked and not self._spare():
                time.sleep(ASKED_NAP_S)  # two threads that share an interpreter: steps would take longer

    def _spare(self) -> bool:
        """While a step runs: few pages, and only empty ones. False: something is asked for yet.

        A prompt's blocks wait for these on their way from another GPU, for half a step in the mean without this.
        """
        if not 0 < self.quota.num_asked <= SPARED_PAGES:
            return False
        with self._turn:
            self.pages.give_spare()
        return not self.quota.wait_asked(0.0)

    def _is_idle(self) -> bool:
        """Whether no step minds who has the interpreter: there is no request, or none has got a step for a while.

        Who asks for pages is a reader that waits, often of the next request of a conversation: not a moment later.
        """
        return not self.requests or time.monotonic() - self._stepped_s >= IDLE_S

    def _answer_pool(self) -> None:
        """Give back what the mempool asks for; when it is lost, report to its successor. Meanwhile the stock serves."""
        with self._turn:
            self.pages.absorb()
            if not self.quota.lost:
                return
            self._end_if_lost()  # here: it may have been lost a moment ago
            leases = [self._held_lease(lease_id, blocks) for lease_id, blocks in self._all_leases()]
            try:
                holding = self.pages.holding(leases)
                _check_size(holding)
                if self.quota.reattach(holding):
                    logger.warning("attached to the mempool's successor with all pages")
            except ResourceError as error:
                logger.critical("the engine must begin anew: %s", error.message)
                os._exit(EXIT_MEMORY_LOST)

    def _end_if_lost(self) -> None:
        """Where the engine uses what went with the mempool, and can use nobody else's, it ends."""

    def _all_leases(self) -> list[tuple[LeaseId, list[KVCacheBlock]]]:
        ended = [(lease_id, blocks) for _, lease_id, blocks in self._ended_leases]
        return [*self.leases.values(), *ended]

    def _held_lease(self, lease_id: LeaseId, blocks: list[KVCacheBlock]) -> HeldLease:
        owned = [self.pages.own(block) for block in blocks]
        return HeldLease(
            lease_id=lease_id, pages=u32_bytes(p for p, _ in owned), epochs=u64_bytes(e for _, e in owned)
        )


def _check_size(holding: Holding) -> None:
    """Raises: ResourceError where one message cannot say all of it."""
    num_bytes = len(msgspec.msgpack.encode(holding))
    if num_bytes > MOST_HOLDING_BYTES:
        raise ResourceError(
            f"{len(holding.sealed_pages) // 4} sealed pages take {num_bytes} bytes to report, a message takes "
            f"{MOST_HOLDING_BYTES}: this engine cannot outlive its mempool with so many; larger blocks make fewer"
        )
