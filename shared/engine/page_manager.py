"""vLLM's KV cache manager over pages: allocation depends on the stock, a handed-off prompt may end in a held block."""

from collections.abc import Callable
from typing import Any, NamedTuple

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from shared.engine.page_pool import PageBlockPool

STOCK_WAIT_S = 0.05  # a running request would rather wait for the pool than be preempted


class LeasedTail(NamedTuple):
    """The leased block in which a prompt ends, and how many of the prompt's tokens the leased blocks cover."""

    block: KVCacheBlock
    valid_tokens: int


class PageKVCacheManager(KVCacheManager):
    """vLLM's manager; allocation fails, or waits a little, while the mempool has not granted enough pages."""

    block_pool: PageBlockPool
    unmet_blocks: int = 0  # what the last refused allocation lacked in stock
    tails: dict[str, LeasedTail]  # of waiting requests whose whole prompt is held
    make_way: Callable[[Request, int], None] | None = None  # called when so many blocks are not even cached
    ahead_tokens: int = 0  # blocks are allocated for so many tokens more (layouts that map them ahead)

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int, int]:
        """vLLM's whole blocks, and the held last block of a handed-off prompt but for its last token.

        vLLM copies that block before the step writes into it, as it does for partial hits of its own.
        """
        blocks, num_tokens, boundary = super().get_computed_blocks(request)
        tail = self.tails.get(request.request_id)
        if tail is None or request.skip_reading_prefix_cache:
            return blocks, num_tokens, boundary
        covered = min(tail.valid_tokens, request.num_tokens - 1)
        block_tokens = self.block_pool.hash_block_size
        if covered <= num_tokens or covered // block_tokens * block_tokens != num_tokens:
            return blocks, num_tokens, boundary
        return self.create_kv_cache_blocks(([*blocks.blocks[0], tail.block],)), covered, boundary

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> KVCacheBlocks | None:
        """vLLM's, if the blocks are in stock. Raises: nothing for lack of pages (None, as vLLM's)."""
        num_lookahead_tokens = max(num_lookahead_tokens, self.ahead_tokens)
        computed = request.num_computed_tokens + num_new_computed_tokens + num_external_computed_tokens
        end = min(computed + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        have = len(self.get_blocks(request.request_id).blocks[0])
        hits = len(new_computed_blocks.blocks[0]) if new_computed_blocks is not None else 0
        block_tokens = self.block_pool.hash_block_size
        missing = -(-end // block_tokens) - have - hits
        if hits and num_new_computed_tokens % block_tokens:
            missing += 1  # the private copy of a partial hit
        if self.make_way is not None:
            whole = (
                0 if request.status == RequestStatus.RUNNING else min(request.num_tokens, self.max_model_len)
            )
            wanted = max(missing, -(-whole // block_tokens) - have - hits)  # vLLM admits whole prompts only
            if wanted > self.block_pool.get_num_free_blocks():
                self.make_way(request, wanted)
        if missing > len(self.block_pool.stock) and not self._wait_for(request, missing):
            self.unmet_blocks = max(self.unmet_blocks, missing)
            return None
        blocks = super().allocate_slots(
            request,
            num_new_tokens,
            num_new_computed_tokens,
            new_computed_blocks,
            num_lookahead_tokens,
            num_external_computed_tokens,
            *args,
            **kwargs,
        )
        if blocks is None:  # vLLM admits nothing whose tokens do not all have room
            whole = min(request.num_tokens, self.max_model_len)
            self.unmet_blocks = max(self.unmet_blocks, -(-whole // block_tokens) - have)
        return blocks

    def _wait_for(self, request: Request, missing: int) -> bool:
        """A running request's next pages may be on their way: preempting it would cost far more."""
        pool = self.block_pool
        pool.refill(missing)
        if request.status != RequestStatus.RUNNING:
            return False
        while pool.num_expected and not pool.quota.lost:
            pool.quota.counters["stock_waits"] += 1
            if not pool.quota.wait_granted(STOCK_WAIT_S):
                pool.expect_none()
            pool.absorb()
            if missing <= len(pool.stock):
                return True
            pool.refill(missing)  # what came may have gone at once, to whom the pool owed it
        return False
