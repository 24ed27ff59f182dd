"""Block hashes of token lists, remembered for prompts that begin alike. No I/O.

Hashing 4,096 tokens in blocks of 16 is 256 dependent SHA-256 steps, about 0.2 ms; finding the same prompt again is a
few comparisons of bytes. A memory of hashes is as good as the hashes: its keys are the tokens themselves.
"""

from collections import OrderedDict

from shared.ids import BlockHash
from shared.kv.block_hash import hash_blocks, hash_tail

CHUNK_BLOCKS = 32
MAX_CHUNKS = 4_096  # 32 blocks of 16 tokens: about 5 KiB each


class HashMemory:
    """Chained hashes of prompts, chunk by chunk; the least recently used chunks are forgotten."""

    def __init__(self, block_tokens: int, max_chunks: int = MAX_CHUNKS) -> None:
        self.block_tokens = block_tokens
        self._max_chunks = max_chunks
        self._chunks: OrderedDict[tuple[BlockHash, bytes], list[BlockHash]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chunks)

    def hashes(self, seed: BlockHash, tokens: bytes) -> list[BlockHash]:
        """What hash_blocks() returns for packed tokens. Cost: 0.03 ms for 4,096 tokens seen before."""
        step = 4 * self.block_tokens * CHUNK_BLOCKS
        whole = len(tokens) - len(tokens) % step
        out: list[BlockHash] = []
        link = seed
        for begin in range(0, whole, step):
            key = link, tokens[begin : begin + step]
            found = self._chunks.get(key)
            if found is None:
                found = self._chunks[key] = hash_blocks(link, key[1], self.block_tokens)
                if len(self._chunks) > self._max_chunks:
                    self._chunks.popitem(last=False)
            else:
                self._chunks.move_to_end(key)
            out += found
            link = found[-1]
        return out + hash_blocks(link, tokens[whole:], self.block_tokens)

    def with_tail(self, seed: BlockHash, tokens: bytes) -> list[BlockHash]:
        """As hashes(), and the hash of a partial last block if there is one."""
        out = self.hashes(seed, tokens)
        tail = tokens[4 * self.block_tokens * len(out) :]
        return [*out, hash_tail(out[-1] if out else seed, tail)] if tail else out
