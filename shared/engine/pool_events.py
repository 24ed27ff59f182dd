"""What a block pool says about its prefix cache, for the prompt tree: few messages, and in order."""

from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, get_block_hash

from shared.ids import BlockHash


class PoolEvents:
    """Part of PageBlockPool. `on_cache_event`: ("stored" | "removed" | "cleared", hashes)."""

    def _emit_block_removed_events(self: Any, removed_hashes: list[BlockHashWithGroupId]) -> None:
        self.removed += removed_hashes

    def tell_removed(self: Any) -> None:
        """One event for all blocks that left the cache since the last: each costs a message, and a step waits for it.

        Before anything is said to be stored, before pages are unpinned, and with every step. Where another block of the
        same content stays, nothing left.
        """
        if self.removed:
            removed, self.removed = self.removed, []
            block_of = self.cached_block_hash_to_block.get_one_block
            gone = [BlockHash(get_block_hash(key)) for key in removed if block_of(key) is None]
            if gone:
                self.on_cache_event("removed", gone)

    def tell_stored(self: Any, hashes: list[BlockHash]) -> None:
        """These are in the cache now."""
        self.tell_removed()
        self.on_cache_event("stored", hashes)
