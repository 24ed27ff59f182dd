"""vLLM's KV cache manager over pages: allocation depends on the stock, a handed-off prompt may end in a held block."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        managers = self.coordinator.single_type_managers
        self._tables, self._num_cached = managers[0].req_to_blocks, managers[0].num_cached_block
        # one group, every token attended to, and blocks are named by their own size
        self._is_plain = (
            self.enable_caching and len(managers) == 1 and type(managers[0]) is FullAttentionManager
            and managers[0].block_size == self.block_pool.hash_block_size
        )  # fmt: skip

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
        if new_computed_blocks is None and self._has_slots(request, num_new_tokens, num_lookahead_tokens):
            return self.empty_kv_cache_blocks
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
            found = new_computed_blocks.blocks[0] if new_computed_blocks is not None else ()
            if wanted > self.block_pool.get_num_free_blocks() and not self._makes_way(request, wanted, found):
                self.unmet_blocks = max(self.unmet_blocks, missing)
                return None  # the next step looks for its hits anew
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

    def _makes_way(self, request: Request, wanted: int, hits: Sequence[KVCacheBlock]) -> bool:
        """False: what gave way was among its hits, e.g. leased for another request that waits."""
        assert self.make_way is not None
        hashes = [block.block_hash for block in hits]
        self.make_way(request, wanted)
        return hashes == [block.block_hash for block in hits]

    def _has_slots(self, request: Request, num_new_tokens: int, num_lookahead_tokens: int) -> bool:
        """Whether a running request computes its next tokens in blocks that it has, and fills none: vLLM's allocation
        then changes nothing. So it is with nearly every token of an answer, and vLLM's way takes longer to find out.
        """
        if request.status is not RequestStatus.RUNNING or not self._is_plain:
            return False
        cached = self._num_cached.get(request.request_id)
        if cached is None:
            return False
        block_tokens, end = self.block_pool.hash_block_size, request.num_computed_tokens + num_new_tokens
        filled = min(end, request.num_tokens)
        slots = len(self._tables[request.request_id]) * block_tokens
        needed = min(end + num_lookahead_tokens, self.max_model_len)
        return needed <= slots and filled < (cached + 1) * block_tokens

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
