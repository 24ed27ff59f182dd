"""The KV of one request inside an engine: its block-hash chain, what is saved, what may be loaded.

No vLLM import: the connector's scheduler side drives it with plain values.
"""

from dataclasses import dataclass, field

from shared.ids import BlockHash
from shared.kv.block_hash import hash_blocks, hash_tail, pack_tokens, split_hashes


@dataclass(slots=True)
class Loadable:
    """Sealed pages that a lease pins for this request, in block order, verified against its tokens."""

    pages: list[int]
    epochs: list[int]
    hashes: list[BlockHash]
    valid_tokens: int


@dataclass(slots=True)
class RequestKv:
    """Grows with the request's tokens; owned by the connector's scheduler side."""

    block_tokens: int
    seed: BlockHash
    num_prompt_tokens: int
    handoff_id: str = ""
    loadable: Loadable | None = None
    chain: list[BlockHash] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    num_saved_blocks: int = 0
    load_tried: bool = False
    handed_off: bool = False
    tokens_offered: int = (
        0  # prompt tokens, local ones included, that the last offer to the scheduler covered
    )
    tokens_loaded: int = 0
    blocks_loaded: int = 0
    blocks_local: int = 0
    is_told: bool = False  # what was loaded, to the front

    def extend_chain(self, all_tokens: list[int], num_tokens: int) -> None:
        """Hash the full blocks among the first num_tokens tokens. Cost: only the new blocks."""
        done = len(self.chain)
        full = num_tokens // self.block_tokens
        if full > done:
            start = done * self.block_tokens
            packed = pack_tokens(all_tokens[start : full * self.block_tokens])
            link = self.chain[-1] if done else self.seed
            self.chain.extend(hash_blocks(link, packed, self.block_tokens))

    def parent_of(self, index: int) -> BlockHash:
        """Hash before block `index`."""
        return self.chain[index - 1] if index else self.seed

    def tail_hash(self, all_tokens: list[int]) -> BlockHash | None:
        """Hash of the prompt's partial last block, or None when the prompt ends with a full block."""
        full = self.num_prompt_tokens // self.block_tokens
        start = full * self.block_tokens
        if start == self.num_prompt_tokens:
            return None
        self.extend_chain(all_tokens, start)
        return hash_tail(self.parent_of(full), pack_tokens(all_tokens[start : self.num_prompt_tokens]))

    def offer(
        self, pages: list[int], epochs: list[int], hashes: bytes, valid_tokens: int, prompt: list[int]
    ) -> None:
        """Accept held pages as far as their hashes equal those recomputed from the prompt (rule 10)."""
        self.extend_chain(prompt, self.num_prompt_tokens)
        expected = list(self.chain)
        tail = self.tail_hash(prompt)
        if tail is not None:
            expected.append(tail)
        agreed = 0
        for given, wanted in zip(split_hashes(hashes), expected, strict=False):
            if given != wanted:
                break
            agreed += 1
        agreed = min(agreed, len(pages), len(epochs))
        if agreed:
            covered = min(valid_tokens, agreed * self.block_tokens, self.num_prompt_tokens)
            self.loadable = Loadable(pages[:agreed], epochs[:agreed], expected[:agreed], covered)

    def num_loadable_tokens(self, still_sealed: int) -> int:
        """Prompt tokens that the first `still_sealed` of the held pages cover."""
        if self.loadable is None:
            return 0
        return min(self.loadable.valid_tokens, still_sealed * self.block_tokens)
