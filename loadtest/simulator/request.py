"""A request as the simulator sees it: lengths, and names of blocks with all that lies before them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from loadtest.workloads.request import Answer, Request
from loadtest.workloads.stats import BlockIds
from shared.ids import BlockHash

HASH_BYTES = 16  # the part of a block hash that the prompt tree keeps
MOST_PER_S = 1e12  # at more, arrivals are nearer to each other than clocks tell: all at once


@dataclass(frozen=True, slots=True)
class SimRequest:
    """Equal names mean equal tokens up to the end of the block.

    blocks: of the prompt, the last one perhaps partial; a partial block has another name than the full one.
    output_blocks: those that decode completes, beginning with the one in which the prompt ends.
    depends_on: index of the request whose answer it waits for, and then think_ms; None: waits for nothing.
    """

    request_id: int
    arrival_ms: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[BlockHash, ...] = ()
    output_blocks: tuple[BlockHash, ...] = ()
    session: str = ""
    turn: int = 0
    depends_on: int | None = None
    think_ms: float = 0.0


def from_workload(requests: Sequence[Request], block_tokens: int) -> list[SimRequest]:
    """Requests of loadtest/workloads, cut into blocks. Where a history repeats an answer, its blocks are shared.

    Cost: some microseconds a block.
    """
    ids, index_of, out = BlockIds(), {}, []
    for index, request in enumerate(requests):
        index_of[request.request_id] = index
        prompt_tokens = request.prompt_tokens
        num_whole, num_done = (
            prompt_tokens // block_tokens,
            (prompt_tokens + request.output_tokens - 1) // block_tokens,
        )
        chain: list[int] = []
        if num_done > num_whole:  # the last token's KV is never computed
            answer = Answer(request.request_id, request.output_tokens - 1)
            chain = ids.of((*request.prompt, answer), block_tokens)[num_whole:num_done]
        out.append(
            SimRequest(
                request_id=request.request_id,
                arrival_ms=request.arrival_ms,
                prompt_tokens=prompt_tokens,
                output_tokens=request.output_tokens,
                blocks=tuple(block_name(each) for each in ids.of(request.prompt, block_tokens)),
                output_blocks=tuple(block_name(each) for each in chain),
                session=request.session,
                turn=request.turn,
                depends_on=None if request.depends_on is None else index_of[request.depends_on],
                think_ms=request.think_ms,
            )
        )
    return out


def block_name(number: int) -> BlockHash:
    """A number of BlockIds as a hash."""
    return BlockHash(number.to_bytes(HASH_BYTES, "big"))


def densest(requests: Sequence[SimRequest], most: int) -> list[SimRequest]:
    """The stretch of `most` consecutive requests with most tokens a second, from 0 ms: sharing and bursts stay.

    Requests whose predecessor lies outside wait for nothing.
    """
    if len(requests) <= most:
        return list(requests)
    tokens = [0]
    for request in requests:
        tokens.append(tokens[-1] + request.prompt_tokens + request.output_tokens)

    def rate(at: int) -> float:
        span_ms = requests[at + most - 1].arrival_ms - requests[at].arrival_ms
        return (tokens[at + most] - tokens[at]) / max(1.0, span_ms)

    best = max(range(0, len(requests) - most + 1, max(1, most // 4)), key=rate)
    return [
        replace(
            request,
            arrival_ms=request.arrival_ms - requests[best].arrival_ms,
            depends_on=None
            if request.depends_on is None or request.depends_on < best
            else request.depends_on - best,
        )
        for request in requests[best : best + most]
    ]


def faster(requests: Sequence[SimRequest], factor: float) -> list[SimRequest]:
    """The same requests at `factor` times the rate."""
    return [replace(request, arrival_ms=request.arrival_ms / factor) for request in requests]


def mean_rate_per_s(requests: Sequence[SimRequest]) -> float:
    """Arrivals a second; 0 for one request, or for all at once (over MOST_PER_S, too). Of a trace whose times are ticks
    each tick lasts until the next, the last one as long as the others: 60 every 3 s are 20/s, however few ticks."""
    span_ms = requests[-1].arrival_ms - requests[0].arrival_ms
    num, num_ticks = len(requests), len({request.arrival_ms for request in requests})
    rate_per_s = (num - num / num_ticks) / span_ms * 1000 if span_ms else 0.0
    return rate_per_s if rate_per_s <= MOST_PER_S else 0.0


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
    """One pass in the order of arrival; a prompt is cached the moment it arrives, answers are not."""
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
