"""vLLM's block pool over pages that the mempool grants: block id = page id + 1, block 0 is vLLM's null block.

Stock vLLM owns all of its blocks from the start. Here a block is

- unknown: its page belongs to somebody else, or to nobody;
- in stock: granted to this engine and in no block table;
- writing: granted, in a block table (or in the cache until its seal is sent);
- sealed: this engine's, pinned in the pool until unpinned; in a block table or in the engine's cache;
- leased: sealed by whichever engine, pinned by leases of requests that are here;
- far: a copy outside this engine's memory, mapped behind it for one request (far_scheduler.py).

Prefix hits, reference counts and LRU order are vLLM's own. A full block is sealed once the step that wrote it is
over. Aliasing a prefix, also one that another engine of this host computed, is the same block id in another
block table: no bytes move.
"""

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, FreeKVCacheBlockQueue, KVCacheBlock

from shared.engine.page_leases import PageLeases
from shared.engine.page_swaps import FAR, LEASED, SEALED, STOCK, UNKNOWN, WRITING, SwapPages
from shared.engine.pool_events import PoolEvents
from shared.ids import BlockHash, Epoch, PageId
from shared.kv.words import u32_bytes, u64_bytes
from shared.mempool.give_parts import give_parts
from shared.mempool.page_quota import Owned, PageQuota, SealedPage
from shared.wire.mempool import HeldLease, Holding

EVICT_PART = 256  # blocks that the mempool hears of at once: it takes their pages while the next are dropped
EXPECT_S = 0.02  # the mempool replaces an unpinned page in a fraction of this, if it does at all


@dataclass(slots=True)
class StepSeals:
    """Blocks that one step completes, in the order in which they were scheduled."""

    blocks: dict[int, SealedPage] = field(default_factory=dict)


class PageBlockPool(PageLeases, PoolEvents, SwapPages, BlockPool):
    """See the module. Everything runs on the engine core's thread, or in its place under its lock (PoolWatch).

    `on_cache_event`: ("stored" | "removed" | "cleared", hashes), for the prompt tree.
    """

    def __init__(
        self,
        quota: PageQuota,
        on_cache_event: Callable[[str, list[BlockHash]], None],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.quota = quota
        self.on_cache_event = on_cache_event
        for block in self.blocks:  # out of the queue that vLLM filled
            block.prev_free_block = block.next_free_block = None
        self.free_block_queue = FreeKVCacheBlockQueue([])  # only cached blocks that no request uses
        self.stock: deque[KVCacheBlock] = deque()
        self.kinds = bytearray(self.num_gpu_blocks)
        self.epochs = array("Q", [0]) * self.num_gpu_blocks
        self.seals = StepSeals()  # of the step that is being scheduled
        self.sealing: deque[tuple[int, StepSeals]] = deque()  # (step, seals) of steps under way
        # partial last blocks of prompts that go to another engine: (step, page); nobody writes them after it
        self.tails: dict[int, tuple[int, SealedPage]] = {}
        self.lease_counts: dict[int, int] = {}  # block id -> leases of requests that are here
        self.sealed_pages: dict[int, SealedPage] = {}  # this engine's sealed blocks, to report them
        self.num_owned = 0
        self.on_steps_done: Callable[[int], None] | None = None  # behind the seals
        self.keeps = True  # blocks that no request uses, for later hits
        self.far_room = 0  # blocks that could leave for far places
        self.far_freed: list[int] = []  # far block ids that no block table has any more
        self.num_expected = 0  # pages that were unpinned and whose replacement has not come
        self.clock: Callable[[], float] = time.monotonic  # seconds
        self._expected_until_s = 0.0
        self._written: list[Owned] = []
        self.removed: list[BlockHashWithGroupId] = []  # from the cache, and nobody was told yet
        self._begun = bytearray(self.num_gpu_blocks)  # 1: the mempool knows that the page is being written

    # -- pages come and go ----------------------------------------------------------------------------

    def absorb(self, *, answers: bool = True) -> None:
        """Take what the mempool granted meanwhile; give back what it asks for. Once per step. Not `answers`: what it
        asks for waits for the next one, as the step that comes counts on the stock.
        """
        granted = self.quota.take_granted()
        for page, epoch in granted:
            block = self.blocks[page + 1]
            assert self.kinds[block.block_id] == UNKNOWN, block
            self.kinds[block.block_id] = STOCK
            self.epochs[block.block_id] = epoch
            self._begun[block.block_id] = 0
            self.stock.append(block)
        self.num_owned += len(granted)
        self.num_expected = max(0, self.num_expected - len(granted))
        self._expect_nothing_late()
        if not answers:
            return
        if asked := self.quota.take_shrink():
            spare = min(asked, len(self.stock))
            self._give_back(spare)
            if asked > spare:
                self._evict(asked - spare, is_replaced=False)
                self.quota.give_back([], answers=asked - spare)  # though it be that fewer were cached
        self._evict(self.quota.take_uncache())
        numbers, pages = self.quota.take_vacates()
        if numbers:
            self._vacate(pages)
            self.quota.vacated(numbers)

    def give_spare(self) -> None:
        """Give back what the mempool asks for as far as it is in stock: no step, begun or to come, knows them."""
        self._give_back(self.quota.take_shrink(len(self.stock)))

    def _give_back(self, count: int) -> None:
        """Of the stock, as it was asked to."""
        for part in give_parts(count):
            self.quota.give_back(self.give(part), answers=part)

    def _vacate(self, pages: list[Owned]) -> None:
        """Let go of those that are in stock, or sealed and used by no request; they are not replaced."""
        mine = [self.blocks[page + 1] for page, epoch in pages if self.epochs[page + 1] == epoch]
        spare = {b.block_id for b in mine if self.kinds[b.block_id] == STOCK}
        if spare:
            given = [block for block in self.stock if block.block_id in spare]
            self.stock = deque(block for block in self.stock if block.block_id not in spare)
            owned = [self.own(block) for block in given]
            self._forget(given)
            self.quota.give_back(owned)
        unused = [b for b in mine if self.kinds[b.block_id] == SEALED and b.prev_free_block is not None]
        for block in unused:
            self.free_block_queue.remove(block)
            self._maybe_evict_cached_block(block)
        self._let_go(unused, is_replaced=False)

    def refill(self, wanted: int) -> None:
        """Let go of the least recently used cached blocks until `wanted` are in stock or on their way."""
        self._expect_nothing_late()
        short = wanted - len(self.stock) - self.num_expected
        if short > 0:
            self._evict(short)

    def _expect_nothing_late(self) -> None:
        if self.num_expected and self.clock() > self._expected_until_s:
            self.expect_none()

    def expect_none(self) -> None:
        """Unpinned pages were not replaced: another engine's part has grown, or somebody else pins them too."""
        self.num_expected = 0

    def _evict(self, count: int, *, is_replaced: bool = True) -> None:
        """Drop cached blocks that no request uses; the mempool gets their pages back."""
        left = min(count, self.free_block_queue.num_free_blocks)
        while left > 0:
            blocks = self.free_block_queue.popleft_n(min(left, EVICT_PART))
            left -= len(blocks)
            self.uncache(blocks)
            let_go: list[KVCacheBlock] = []
            for block in blocks:
                if (
                    self.kinds[block.block_id] == WRITING
                ):  # its seal was not sent: the page is still ours to write
                    self._cancel_seal(block)
                    self._to_stock(block)
                else:
                    let_go.append(block)
            self._let_go(let_go, is_replaced=is_replaced)

    def _forget(self, blocks: list[KVCacheBlock]) -> None:
        for block in blocks:
            self.kinds[block.block_id] = UNKNOWN
            self.sealed_pages.pop(block.block_id, None)
        self.num_owned -= len(blocks)

    def own(self, block: KVCacheBlock) -> Owned:
        """The block's page, under the epoch in which this engine knows it."""
        return PageId(block.block_id - 1), Epoch(self.epochs[block.block_id])

    def _to_stock(self, block: KVCacheBlock) -> None:
        self.kinds[block.block_id] = STOCK
        self.stock.appendleft(block)

    def holding(self, leases: list[HeldLease]) -> Holding:
        """Everything that this engine has, for the successor of its mempool. After absorb()."""
        writing = [self.own(b) for b in self.blocks if self.kinds[b.block_id] == WRITING]
        for block in self.stock:
            self._begun[block.block_id] = 0  # the successor hears of each that a step writes
        held = [*map(self.own, self.stock), *writing]
        sealed = list(self.sealed_pages.values())
        self.num_expected = 0
        return Holding(
            pages=u32_bytes(page for page, _ in held),
            epochs=u64_bytes(epoch for _, epoch in held),
            num_unwritten=len(self.stock),
            sealed_pages=u32_bytes(s.page for s in sealed),
            sealed_epochs=u64_bytes(s.epoch for s in sealed),
            sealed_hashes=b"".join(s.block_hash for s in sealed),
            sealed_parents=b"".join(s.parent for s in sealed),
            sealed_valid_tokens=u32_bytes(s.valid_tokens for s in sealed),
            leases=leases,
        )

    # -- what vLLM calls --------------------------------------------------------------------------------

    def get_num_free_blocks(self) -> int:
        """Blocks that are free or cached and unused, or that far places could make free, as vLLM counts.

        Allocation also needs them in stock.
        """
        return len(self.stock) + self.free_block_queue.num_free_blocks + self.far_room

    def get_usage(self) -> float:
        """Share of this engine's own pages that requests use: how full what it can allocate from is."""
        unused = len(self.stock) + self.free_block_queue.num_free_blocks
        return 1.0 - unused / self.num_owned if self.num_owned else 0.0

    def num_in_use(self) -> int:
        """Pages that requests use: this engine's own, and others' that leases pin for them. Cost: O(pages), in C."""
        unused = len(self.stock) + self.free_block_queue.num_free_blocks
        return self.num_owned - unused + self.kinds.count(LEASED)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """From the stock only. The caller has made sure that it suffices (PageKVCacheManager)."""
        if num_blocks > len(self.stock):
            raise ValueError(f"{num_blocks} blocks wanted, {len(self.stock)} in stock")
        blocks = [self.stock.popleft() for _ in range(num_blocks)]
        for block in blocks:
            assert block.ref_cnt == 0
            block.ref_cnt = 1
            self.kinds[block.block_id] = WRITING
            if not self._begun[block.block_id]:
                self._begun[block.block_id] = 1
                self._written.append(self.own(block))
            if self.metrics_collector:
                self.metrics_collector.on_block_allocated(block)
        return blocks

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Sealed and cached ones stay for later hits; what holds no full block goes back to the stock."""
        cached: list[KVCacheBlock] = []
        unpinned: list[KVCacheBlock] = []
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if block.ref_cnt or block.is_null:
                continue
            kind = self.kinds[block.block_id]
            if block.block_id in self.tails:
                continue  # until it is sealed and handed off
            if kind == LEASED:
                self._maybe_evict_cached_block(block)
                self.kinds[block.block_id] = UNKNOWN
            elif kind == FAR:
                self.kinds[block.block_id] = UNKNOWN
                self.far_freed.append(block.block_id)
            elif block.block_hash is not None:
                cached.append(block)
            elif kind == SEALED:
                unpinned.append(block)
            else:
                self._cancel_seal(block)
                self._to_stock(block)
        self.free_block_queue.append_n(cached)
        self._let_go(unpinned)
        if not self.keeps:
            self._evict(len(cached))

    def reset_prefix_cache(self) -> bool:
        """Unpin the whole cache; False, and nothing done, while requests use blocks."""
        if any(block.ref_cnt for block in self.blocks[1:]):
            return False
        self._evict(self.free_block_queue.num_free_blocks)
        self.on_cache_event("cleared", [])
        return True

    def cache_full_blocks(
        self,
        request: Any,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        """vLLM's, and a note that the step being scheduled completes these blocks."""
        super().cache_full_blocks(
            request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask
        )
        if request.quire_private:
            return  # never sealed: for this engine's own hits, and back in the stock once evicted
        hashes = request.block_hashes
        for index in range(num_cached_blocks, num_full_blocks):
            block = blocks[index]
            if self.kinds[block.block_id] != WRITING:
                continue
            page, epoch = self.own(block)
            parent = hashes[index - 1] if index else request.quire_seed
            self.seals.blocks[block.block_id] = SealedPage(page, epoch, hashes[index], parent, block_size)

    # -- steps --------------------------------------------------------------------------------------------

    def step_scheduled(self, step: int) -> None:
        """The step is about to run: say what it writes, keep what it seals until it is over."""
        self.tell_removed()
        written, self._written = self._written, []
        self.quota.writing(written)
        if self.seals.blocks:
            self.sealing.append((step, self.seals))
            self.seals = StepSeals()

    def step_over(self, step: int) -> None:
        """A step's output was taken in. With asynchronous scheduling that is also when a block turns out to be full:
        all of its tokens were input of steps that are over.
        """
        if self.seals.blocks:
            self.sealing.appendleft((step, self.seals))
            self.seals = StepSeals()
        self.steps_done(step)

    def steps_done(self, step: int) -> None:
        """This step and those before it are over on every rank: seal what they completed.

        The output of a step reaches the scheduler after all of its layers ran on the last rank. Each layer's
        output needs every tensor-parallel rank's share, which a rank computes after it has written its keys
        and values: so all ranks have written theirs.
        """
        tails = [(block_id, page) for block_id, (at, page) in self.tails.items() if at <= step]
        for block_id, page in tails:
            self.kinds[block_id] = SEALED
            self.sealed_pages[block_id] = page
        while self.sealing and self.sealing[0][0] <= step:
            _, seals = self.sealing.popleft()
            for block_id in seals.blocks:
                self.kinds[block_id] = SEALED
            self.sealed_pages.update(seals.blocks)
            self.quota.seal(list(seals.blocks.values()))
            self.tell_stored([sealed.block_hash for sealed in seals.blocks.values()])
        self.quota.seal([page for _, page in tails])
        if self.on_steps_done is not None:
            self.on_steps_done(step)

    def keep_tail(self, step: int, block: KVCacheBlock, page: SealedPage) -> None:
        """The step completes a prompt whose request ends with it: its last block is sealed as it is."""
        self.tails[block.block_id] = (step, page)

    def drop_tails(self, step: int) -> None:
        """Tails of steps that are over have been handed off: their pages are the mempool's."""
        done = [block_id for block_id, (at, _) in self.tails.items() if at <= step]
        for block_id in done:
            del self.tails[block_id]
        idle = [self.blocks[block_id] for block_id in done if not self.blocks[block_id].ref_cnt]
        self._let_go(idle)

    def _let_go(self, blocks: list[KVCacheBlock], *, is_replaced: bool = True) -> None:
        """Sealed blocks that nobody here uses: the mempool fills this engine's share up again, unless it asked."""
        self.tell_removed()
        if blocks:
            owned = [self.own(block) for block in blocks]
            self._forget(blocks)
            self.quota.unpin(owned)
            self.num_expected += len(blocks) if is_replaced else 0
            self._expected_until_s = self.clock() + EXPECT_S

    def _cancel_seal(self, block: KVCacheBlock) -> None:
        self.seals.blocks.pop(block.block_id, None)
        for _, seals in self.sealing:
            seals.blocks.pop(block.block_id, None)
