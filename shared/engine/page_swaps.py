"""Pages of blocks that leave an engine's memory and come back: the part of PageBlockPool that swaps need."""

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id

from shared.mempool.page_quota import Owned, SealedPage

UNKNOWN, STOCK, WRITING, SEALED, LEASED, FAR = range(6)  # what a block is: page_pool.py
GROUP = 0  # one KV cache group: the adapter refuses others


class SwapPages:
    """Methods of PageBlockPool."""

    def give(self: Any, count: int) -> list[Owned]:
        """Pages of the stock for the mempool: they are this engine's no more. There are so many."""
        blocks = [self.stock.pop() for _ in range(count)]
        owned = [self.own(block) for block in blocks]
        self._forget(blocks)
        return owned

    def leave(self: Any, blocks: Sequence[KVCacheBlock]) -> None:
        """Sealed blocks that a block table had, and has no more: their pages are the mempool's.

        But for those that a lease brought back meanwhile: they stay, for who came with it.
        """
        gone: list[KVCacheBlock] = []
        for block in blocks:
            assert self.kinds[block.block_id] == SEALED, block
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self._maybe_evict_cached_block(block)
                gone.append(block)
        self._let_go(gone)

    def place_far(self: Any, block_id: int) -> KVCacheBlock:
        """A block behind this engine's own ones, where its ranks map a copy, is in one block table."""
        block: KVCacheBlock = self.blocks[block_id]
        assert self.kinds[block_id] == UNKNOWN, block
        self.kinds[block_id] = FAR
        block.ref_cnt = 1
        return block

    def adopt(self: Any, page: SealedPage) -> KVCacheBlock:
        """A block that the mempool brought is this engine's, sealed, and in one block table."""
        block: KVCacheBlock = self.blocks[page.page + 1]
        assert self.kinds[block.block_id] in (UNKNOWN, LEASED), block  # a lease of it may have come first
        self.kinds[block.block_id] = SEALED
        self.epochs[block.block_id] = page.epoch
        self.sealed_pages[block.block_id] = page
        self.num_owned += 1
        block.ref_cnt += 1
        if block.block_hash is None:
            self._insert_block_hash(make_block_hash_with_group_id(page.block_hash, GROUP), block, None)
            self.tell_stored([page.block_hash])
        return block
