"""Leased blocks in the block pool: a handed-over prompt comes with a thousand of them, while its client waits.

What vLLM does for each block through several calls is done here in one loop over plain fields, for blocks of which
nothing was known before and nothing is left after; every other block goes the way of vLLM.
"""

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    KVCacheBlock,
    make_block_hash_with_group_id,
)

from shared.engine.page_swaps import GROUP, LEASED, STOCK, UNKNOWN, WRITING
from shared.ids import BlockHash

_NO_HASH = BlockHash(b"")
GROUP_KEY = bytes(make_block_hash_with_group_id(_NO_HASH, GROUP))  # what vLLM puts behind a block's hash


class PageLeases:
    """Part of PageBlockPool, and as that on the engine core's thread."""

    def lease(
        self: Any, pages: list[int], epochs: list[int], hashes: Sequence[BlockHash]
    ) -> list[KVCacheBlock]:
        """A request came with pages that a lease pins: they are prefix hits from now on, until unlease().

        Returns: as many leading ones as are usable.
        """
        kinds, here, counts, most = self.kinds, self.epochs, self.lease_counts, self.num_gpu_blocks - 1
        all_blocks, cache = self.blocks, self.cached_block_hash_to_block
        blocks: list[KVCacheBlock] = []
        for page, epoch, block_hash in zip(pages, epochs, hashes, strict=True):
            if not 0 <= page < most:
                break
            block_id = page + 1
            block, kind = all_blocks[block_id], kinds[block_id]
            if kind in (STOCK, WRITING) or (kind != UNKNOWN and here[block_id] != epoch):
                break  # the lease is older than what the page is now
            key = BlockHashWithGroupId(block_hash + GROUP_KEY)
            if kind == UNKNOWN:
                kinds[block_id] = LEASED
                here[block_id] = epoch
                block.ref_cnt = 1
                block.set_block_hash(key)
                cache.insert(key, block)
            else:
                self.touch([block])
                if block.block_hash is None:
                    self._insert_block_hash(key, block, None)
            counts[block_id] = counts.get(block_id, 0) + 1
            blocks.append(block)
        return blocks

    def may_unlease(self: Any, blocks: Sequence[KVCacheBlock]) -> bool:
        """False while a request that came without a lease of its own uses a block that only this one pins."""
        counts, kinds = self.lease_counts, self.kinds
        return all(b.ref_cnt == 1 or kinds[b.block_id] != LEASED or counts[b.block_id] > 1 for b in blocks)

    def unlease(self: Any, blocks: Sequence[KVCacheBlock]) -> None:
        """The request is over, with the steps that it was in, and may_unlease(). Then release the lease."""
        kinds, counts = self.kinds, self.lease_counts
        last: list[KVCacheBlock] = []
        rest: list[KVCacheBlock] = []
        for block in reversed(blocks):
            block_id = block.block_id
            left = counts[block_id] - 1
            if left:
                counts[block_id] = left
            else:
                del counts[block_id]
            if block.ref_cnt != 1 or kinds[block_id] != LEASED:
                rest.append(block)
                continue
            block.ref_cnt = 0
            kinds[block_id] = UNKNOWN
            last.append(block)
        self.uncache(last)
        self.free_blocks(rest)

    def uncache(self: Any, blocks: Sequence[KVCacheBlock]) -> None:
        """As vLLM's _maybe_evict_cached_block() of each. Cost: a third of that."""
        cache, others, removed = (
            self.cached_block_hash_to_block,
            self.cached_block_hashes_by_block,
            self.removed,
        )
        for block in blocks:
            key = block.block_hash
            if key is None or block.block_id in others or self.metrics_collector:
                self._maybe_evict_cached_block(block)
                continue
            block.reset_hash()
            if cache.pop(key, block.block_id) is not None:
                removed.append(key)

    def get_cached_block(
        self: Any, block_hash: BlockHash, kv_cache_group_ids: list[int]
    ) -> list[KVCacheBlock] | None:
        """vLLM's, for the one group that there is."""
        assert len(kv_cache_group_ids) == 1
        block = self.cached_block_hash_to_block.get_one_block(block_hash + GROUP_KEY)
        return None if block is None else [block]
