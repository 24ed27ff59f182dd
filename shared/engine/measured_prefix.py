"""For measurements only: vLLM's prefix cache, its block pool and hasher, called as its KV cache manager does."""

from collections.abc import Sequence
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request

from shared.engine.vllm_setup import check_version


class VllmPrefixCache:
    """One KV cache group of full attention with `num_blocks` blocks; nothing is allocated on a device."""

    name = "vllm"

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        """Raises: SettingsError unless it is vLLM 0.26.0."""
        check_version()
        import torch

        kv_cache_utils.init_none_hash(sha256)
        self._block_tokens = block_tokens
        self._hasher = kv_cache_utils.get_request_block_hasher(block_tokens, sha256)
        self._spec = FullAttentionSpec(block_size=block_tokens, num_kv_heads=1, head_size=1, dtype=torch.int8)
        self._pool = BlockPool(
            num_blocks + 1, enable_caching=True, hash_block_size=block_tokens
        )  # and a null block

    def __len__(self) -> int:
        return len(self._pool.cached_block_hash_to_block)

    def prompt(self, tokens: Sequence[int]) -> Any:
        """A request as the engine core has it, not hashed yet."""
        return Request("bench", list(tokens), SamplingParams(max_tokens=1), None)

    def with_hashes(self, hashes: Sequence[bytes]) -> Any:
        """A request with these hashes instead of its own."""
        request = self.prompt([0] * (len(hashes) * self._block_tokens))
        request.block_hashes = [kv_cache_utils.BlockHash(h) for h in hashes]
        return request

    def hash(self, prompt: Any) -> None:
        """Of all its full blocks."""
        prompt.block_hashes = self._hasher(prompt)

    def match(self, prompt: Any) -> int:
        """Number of its leading blocks that are cached."""
        found, _ = FullAttentionManager.find_longest_cache_hit(
            prompt.block_hashes,
            max_length=len(prompt.block_hashes) * self._block_tokens,
            kv_cache_group_ids=[0],
            block_pool=self._pool,
            kv_cache_spec=self._spec,
            drop_eagle_block=False,
            alignment_tokens=self._block_tokens,
        )
        return len(found[0])

    def blocks(self, prompt: Any) -> Any:
        """New blocks for all of it."""
        return self._pool.get_new_blocks(len(prompt.block_hashes))

    def insert(self, prompt: Any, blocks: Any) -> None:
        """Name the blocks."""
        self._pool.cache_full_blocks(prompt, blocks, 0, len(blocks), self._block_tokens, 0)

    def forget(self, prompt: Any, blocks: Any) -> None:
        """Unname and free them."""
        self._pool.evict_blocks({block.block_id for block in blocks})
        self._pool.free_blocks(blocks)
