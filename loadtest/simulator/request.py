"""A request as the simulator sees it: lengths, and names of blocks with all that lies before them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shared.ids import BlockHash

HASH_BYTES = 16  # the part of a block hash that the prompt tree keeps


@dataclass(frozen=True, slots=True)
class SimRequest:
    """Equal names mean equal tokens up to the end of the block.

    blocks: of the prompt, the last one perhaps partial; a partial block has another name than the full one.
    output_blocks: those that decode completes, beginning with the one in which the prompt ends; () where the
        workload does not say what comes after an answer.
    depends_on: index of the request whose answer it waits for, and then think_ms; None: waits for nothing.
    """

    request_id: str
    arrival_ms: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[BlockHash, ...] = ()
    output_blocks: tuple[BlockHash, ...] = ()
    session: str = ""
    depends_on: int | None = None
    think_ms: float = 0.0


class BlockNames:
    """Names for chained ids: the same ids in the same order have the same names. Grows with every new block."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], int] = {}

    def of(self, ids: Iterable[int]) -> tuple[BlockHash, ...]:
        """One name an id."""
        parent, out = -1, []
        for each in ids:
            parent = self._known.setdefault((parent, each), len(self._known))
            out.append(BlockHash(parent.to_bytes(HASH_BYTES, "big")))
        return tuple(out)


def private_blocks(index: int, count: int) -> tuple[BlockHash, ...]:
    """Names that no other request has: of content that nobody repeats."""
    head = b"\xff" + index.to_bytes(7, "big")
    return tuple(BlockHash(head + n.to_bytes(HASH_BYTES - 8, "big")) for n in range(count))


@dataclass(frozen=True, slots=True)
class InfiniteCache:
    """What one cache without bounds that all requests share would have had: no policy and no memory does better."""

    prompt_tokens: int
    hit_tokens: int
    footprint_tokens: int  # distinct tokens of all prompts: what it would hold at the end

    @property
    def hit_ratio(self) -> float:
        """Cached of all prompt tokens."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def infinite_cache(requests: Sequence[SimRequest], block_tokens: int) -> InfiniteCache:
    """One pass in the order of arrival; a prompt is cached the moment it arrives."""
    seen: set[bytes] = set()
    total = hits = footprint = 0
    for request in requests:
        total += request.prompt_tokens
        matched = 0
        while matched < len(request.blocks) and request.blocks[matched] in seen:
            matched += 1
        hits += min(matched * block_tokens, request.prompt_tokens)
        for at, block in enumerate(request.blocks):
            if block not in seen:
                seen.add(block)
                footprint += min(block_tokens, request.prompt_tokens - at * block_tokens)
    return InfiniteCache(total, hits, footprint)
