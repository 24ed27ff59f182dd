"""The pages that a request may start from: asked of the host's mempool, and only ever a help.

Whatever goes wrong here costs time, not correctness: without held pages the engine computes the prompt.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.background_task import begin_task
from shared.costmodel.transfer import CAREFUL_RATES
from shared.engine.interface import HeldPages
from shared.engine.page_waits import ComputeMs, PageWaits, unknown
from shared.engine.worker_config import WorkerSettings
from shared.engine.worker_links import MeasuredLinks
from shared.errors import ClusterError
from shared.ids import BlockHash, Epoch, HandoffId, LeaseId, PageId
from shared.kv.block_hash import hash_blocks, hash_tail
from shared.kv.layout import EngineDescription
from shared.kv.words import u32_list, u64_list
from shared.loop_timeout import loop_timeout
from shared.observe import metrics
from shared.observe.log import get_logger
from shared.wire.cost import LinkRate
from shared.wire.handoff import HandoffState
from shared.wire.mempool import Acquired, PoolStatus, SpaceStatus
from shared.wire.reports import PoolPlace
from shared.wire.requests import KvPlan

_log = get_logger("worker.pages")
_REPLY_MARGIN_MS = 250  # beyond what the pool itself was asked to wait
_TOKEN_BYTES = 4
_NO_EPOCH = Epoch(0)


class PageClient(Protocol):
    """What is asked of shared/mempool/client.py."""

    @property
    def connected(self) -> bool: ...

    memory_id: Epoch
    peer_address: str
    crosses_hosts: bool

    @property
    def boot_generation(self) -> Epoch: ...

    async def acquire(
        self,
        hashes: Sequence[BlockHash],
        *,
        handoff_id: HandoffId = ...,
        wait_ms: int = ...,
        ttl_ms: int = ...,
        traceparent: str = ...,
        until_release: bool = ...,
        source_mempool: str = ...,
        own_space_only: bool = ...,
    ) -> Acquired: ...

    def release(self, lease_id: LeaseId) -> None: ...

    def drop_handoff(self, handoff_id: HandoffId) -> None: ...

    def keep_handoff(self, handoff_id: HandoffId, ttl_ms: int) -> None: ...

    async def status(self) -> PoolStatus | None: ...


class LeaseHolder(Protocol):
    """An engine that works in the pages."""

    async def holds_lease(self, lease_id: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Brought:
    """What the mempool brought into the instance's space for one request; the same blocks may be of two."""

    blocks_peer: int = 0
    blocks_dram: int = 0
    blocks_remote: int = 0
    block_tokens: int = 0
    block_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """That moved."""
        return (self.blocks_peer + self.blocks_dram + self.blocks_remote) * self.block_bytes

    @property
    def path(self) -> str:
        """Paths with "+" between them."""
        found = {"peer": self.blocks_peer, "dram": self.blocks_dram, "remote": self.blocks_remote}
        return "+".join(name for name, count in found.items() if count)

    def tokens(self, tokens_pool: int) -> tuple[int, int, int]:
        """(peer, dram, remote) of the tokens that were loaded from pages: the later a block lies, the farther."""
        left, out = tokens_pool, []
        for blocks in (self.blocks_remote, self.blocks_dram, self.blocks_peer):
            out.append(min(left, blocks * self.block_tokens))
            left -= out[-1]
        return out[2], out[1], out[0]


NOTHING_BROUGHT = Brought()
NO_PLAN = KvPlan()


@dataclass(frozen=True, slots=True)
class PageLease:
    """Release it once, after the first output or at the end; settle() it with an engine that keeps leases."""

    lease_id: LeaseId
    held: HeldPages
    brought: Brought = NOTHING_BROUGHT


class PromptPages:
    """Finds and leases the pages of prompts. `client` None: there is no pool.

    Args: kept: the engine works in the pages, so its leases have no expiry. compute_ms: see page_waits.py.
    """

    def __init__(
        self,
        client: PageClient | None,
        description: EngineDescription,
        settings: WorkerSettings,
        *,
        kept: bool = False,
        compute_ms: ComputeMs = unknown,
    ) -> None:
        self._kept = kept
        self._waits = PageWaits(settings, compute_ms)
        self._first_memory = _NO_EPOCH
        self._settling: set[asyncio.Task[None]] = set()
        self._client = client
        self._description = description
        self._settings = settings
        self._leases: set[LeaseId] = set()
        self._links = MeasuredLinks()
        name = "quire_worker_page_lookups_total"
        self._outcomes = metrics.counter(name, "Requests by what the mempool gave them.", ("outcome",))

    @property
    def usable(self) -> bool:
        """There is a pool and it is connected."""
        return self._client is not None and self._client.connected

    @property
    def memory_replaced(self) -> bool:
        """Whether the pool that is connected now has other pages than the first that was."""
        if self._client is None or not self._client.connected:
            return False
        now = self._client.memory_id
        if self._first_memory == _NO_EPOCH:
            self._first_memory = now
        return now != self._first_memory

    @property
    def peer_address(self) -> str:
        """Where mempools of other hosts reach this one's; "": they do not."""
        return self._client.peer_address if self._client is not None else ""

    @property
    def place(self) -> PoolPlace | None:
        """Where this instance's pages lie, for whoever compares it with others'; None: there is no pool now."""
        client = self._client
        if client is None or not client.connected:
            return None
        return PoolPlace(client.boot_generation, client.memory_id, client.peer_address, client.crosses_hosts)

    @property
    def links(self) -> dict[str, LinkRate]:
        """Rates by path of what the pool brought for this instance; those that nothing came by are left out."""
        return self._links.rates()

    def links_status(self) -> dict[str, dict[str, float]]:
        """By path what eq 2 counts with, measured or not, and how many transfers said so. Empty: there is no pool."""
        return self._links.status() if self._client is not None else {}

    def update_gauges(self) -> None:
        """Of links, as they are now: what is not seen again fades."""
        self._links.update_gauges()

    @property
    def num_leases(self) -> int:
        """Leases taken and not released."""
        return len(self._leases)

    async def for_prompt(
        self, seed: BlockHash, prompt: bytes, traceparent: str, plan: KvPlan | None = None
    ) -> PageLease | None:
        """Blocks that the pool knows. One token must be computed: an engine that copies leaves its block out.

        Args: plan: how far they may be brought from; what it wants fetched is waited for, see page_waits.py.
        """
        if self._settings.pd_caching == "basic":
            return None
        spare_tokens = 0 if self._kept else 1
        num_tokens = len(prompt) // _TOKEN_BYTES
        whole = (num_tokens - spare_tokens) // self._description.block_tokens
        size_bytes = whole * self._description.block_tokens * _TOKEN_BYTES
        hashes = hash_blocks(seed, prompt[:size_bytes], self._description.block_tokens)
        plan = plan or NO_PLAN
        wait_ms = self._waits.fetch_ms(num_tokens, plan.tokens) if plan.source and not plan.recompute else 0
        source = plan.source_mempool if plan.reach == "remote" else ""
        return await self._acquire(
            hashes, size_bytes // _TOKEN_BYTES, HandoffId(""), wait_ms, traceparent, source,
            own_space_only=plan.reach == "own", planned_tokens=plan.tokens,
        )  # fmt: skip

    async def for_handoff(
        self, seed: BlockHash, prompt: bytes, handoff: HandoffState, traceparent: str
    ) -> PageLease | None:
        """The blocks that the prefill side leased for us, the partial last one included."""
        if handoff.description.family_key != self._description.family_key:
            self._outcomes.labels("description_differs").inc()
            _log.warning("handoff_description_differs", handoff_id=handoff.handoff_id, source=handoff.source)
            return None
        block_tokens = self._description.block_tokens
        valid = max(0, min(handoff.valid_tokens, len(prompt) // _TOKEN_BYTES))
        hashes = hash_blocks(seed, prompt[: valid * _TOKEN_BYTES], block_tokens)
        tail = prompt[len(hashes) * block_tokens * _TOKEN_BYTES : valid * _TOKEN_BYTES]
        if tail:
            hashes.append(hash_tail(hashes[-1] if hashes else seed, tail))
        wait_ms = self._waits.handoff_ms(valid)
        return await self._acquire(
            hashes, valid, handoff.handoff_id, wait_ms, traceparent, handoff.source_mempool,
            planned_tokens=valid,
        )  # fmt: skip

    async def _acquire(
        self,
        hashes: list[BlockHash],
        valid_tokens: int,
        handoff_id: HandoffId,
        wait_ms: int,
        traceparent: str,
        source_mempool: str = "",
        own_space_only: bool = False,
        planned_tokens: int = 0,
    ) -> PageLease | None:
        client = self._client
        if client is None or not hashes:
            return None
        if not client.connected:
            self._outcomes.labels("no_pool").inc()
            return None
        limit_ms = wait_ms + (_REPLY_MARGIN_MS if wait_ms else self._settings.acquire_timeout_ms)
        begin_s = time.perf_counter()
        try:
            async with loop_timeout(limit_ms / 1000):
                got = await client.acquire(
                    hashes,
                    handoff_id=handoff_id,
                    wait_ms=wait_ms,
                    ttl_ms=self._settings.lease_ttl_ms,
                    traceparent=traceparent,
                    until_release=self._kept,
                    source_mempool=source_mempool,
                    own_space_only=own_space_only,
                    timeout_ms=2 * limit_ms + _REPLY_MARGIN_MS,  # ours is the one that ends it
                )
            lease = self._lease(got, hashes, valid_tokens)
        except (ClusterError, TimeoutError, ValueError) as error:
            self._outcomes.labels("failed").inc()
            _log.warning("acquire_failed", handoff_id=handoff_id, error=str(error) or type(error).__name__)
            took_ms = (time.perf_counter() - begin_s) * 1e3
            is_far = source_mempool not in ("", self.peer_address)
            if isinstance(error, TimeoutError) and is_far and took_ms >= wait_ms > 0:
                planned_bytes = planned_tokens // self._description.block_tokens * self._block_bytes
                self._links.gave_up(source_mempool, planned_bytes, took_ms)
            return None
        brought = lease.brought if lease is not None else NOTHING_BROUGHT
        took_ms = (time.perf_counter() - begin_s) * 1e3
        self._measured(brought, got, source_mempool, took_ms, is_fetch=not handoff_id)
        return lease

    @property
    def _block_bytes(self) -> int:
        """On all ranks."""
        return self._description.block_bytes * max(1, self._description.tp_size)

    def _measured(
        self, brought: Brought, got: Acquired, source: str, took_ms: float, *, is_fetch: bool
    ) -> None:
        """What links do. The call's own time has the wait for pages in it, and of a hand-off that for the prompt's end
        and what came ahead.

        What is late of a remote path only the mempool knows: a wait that is over may have been for the holder's answer.
        """
        if got.blocks_late:
            self._links.gave_up(source, got.blocks_late * self._block_bytes, got.late_us / 1e3)
        elif brought.path == "remote":
            self._links.called(source, brought.num_bytes, took_ms)
        elif brought.path in CAREFUL_RATES and got.timed_us:  # by one path alone
            num_bytes = got.blocks_timed * brought.block_bytes
            is_whole = num_bytes >= brought.num_bytes  # else the call had other copies in it
            call_ms = took_ms if is_fetch and is_whole else None
            self._links.copied(brought.path, num_bytes, got.timed_us / 1e3, call_ms=call_ms)
        elif is_fetch and not brought.num_bytes:
            self._links.found(took_ms)

    def _lease(self, got: Acquired, hashes: list[BlockHash], valid_tokens: int) -> PageLease | None:
        """Raises: ValueError when the lists do not fit together."""
        pages = [PageId(page) for page in u32_list(got.pages)]
        epochs = [Epoch(epoch) for epoch in u64_list(got.epochs)]
        if got.num_blocks == 0 or not got.lease_id:
            self._outcomes.labels("miss").inc()
            return None
        self._leases.add(got.lease_id)
        if not len(pages) == len(epochs) == got.num_blocks <= len(hashes):
            self.release(got.lease_id)
            raise ValueError(f"{got.num_blocks} blocks, {len(pages)} pages, {len(epochs)} epochs")
        self._outcomes.labels("hit" if got.num_blocks == len(hashes) else "part").inc()
        valid = min(valid_tokens, got.num_blocks * self._description.block_tokens)
        held = HeldPages(
            pages=pages,
            epochs=epochs,
            hashes=hashes[: got.num_blocks],
            valid_tokens=valid,
            lease_id=got.lease_id,
        )
        brought = Brought(
            blocks_peer=got.blocks_peer,
            blocks_dram=got.blocks_dram,
            blocks_remote=got.blocks_remote,
            block_tokens=self._description.block_tokens,
            block_bytes=self._block_bytes,
        )
        return PageLease(got.lease_id, held, brought)

    def release(self, lease_id: LeaseId) -> None:
        """End a lease. Never fails: a pool that is gone has ended it already."""
        self._leases.discard(lease_id)
        if self._client is not None and self._client.connected:
            try:
                self._client.release(lease_id)
            except ClusterError as error:
                _log.info("release_failed", lease_id=lease_id, error=error.message)

    def drop_handoff(self, handoff_id: HandoffId) -> None:
        """Nobody will claim this handoff, come or still to come. Never fails: its time ends it otherwise."""
        if self._client is not None and self._client.connected:
            try:
                self._client.drop_handoff(handoff_id)
            except ClusterError as error:
                _log.info("drop_handoff_failed", handoff_id=handoff_id, error=error.message)

    def keep_handoff(self, handoff: HandoffState) -> None:
        """Its reader waits for room: it is held for another handoff_ttl_ms. Never fails."""
        if self._client is not None and self._client.connected:
            try:
                self._client.keep_handoff(handoff.handoff_id, self._settings.handoff_ttl_ms)
            except ClusterError as error:
                _log.info("keep_handoff_failed", handoff_id=handoff.handoff_id, error=error.message)

    def can_keep(self, handoff: HandoffState) -> bool:
        """Whether it is this host's mempool that holds it."""
        return handoff.source_mempool in ("", self.peer_address)

    async def space(self) -> SpaceStatus | None:
        """Of the engine. None: not known. Raises: nothing."""
        if self._client is None or not self._client.connected:
            return None
        try:
            status = await self._client.status()
        except (ClusterError, TimeoutError):
            return None
        mine = f"engine {self._settings.instance}:"  # as the mempool's status names engines
        spaces = status.spaces if status is not None else ()
        return next((s for s in spaces if any(name.startswith(mine) for name in s.engines)), None)

    def settle(self, lease_id: LeaseId, engine: LeaseHolder, engine_done: bool) -> None:
        """The request is over for the worker. An engine that had it releases the lease when its steps are over.

        Args: engine_done: the engine itself ended the request, so it had it.
        """
        if engine_done:
            self._leases.discard(lease_id)
            return
        task = begin_task(self._settle(lease_id, engine), "settle-lease")
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _settle(self, lease_id: LeaseId, engine: LeaseHolder) -> None:
        try:
            is_held = await engine.holds_lease(lease_id)
        except ClusterError as error:  # the engine died, and the pool sees that for itself
            _log.info("lease_left_to_the_pool", lease_id=lease_id, error=error.message)
            is_held = True
        if is_held:
            self._leases.discard(lease_id)
        else:
            self.release(lease_id)
