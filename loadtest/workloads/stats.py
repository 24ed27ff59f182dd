"""What makes two workloads alike: distance of length distributions, cache hits, burstiness. No request is expanded."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from loadtest.workloads.distributions import Distribution
from loadtest.workloads.request import Answer, Part, Request
from loadtest.workloads.tokens import planned_answer

BLOCK_TOKENS = 512  # Mooncake's

Piece = tuple[int, int, int]  # content, offset, tokens


def ks_between(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Kolmogorov-Smirnov distance of two samples. Raises: ValueError on none."""
    if not ours or not theirs:
        raise ValueError("no values")
    left, right = sorted(ours), sorted(theirs)
    i = j = 0
    largest = 0.0
    while i < len(left) and j < len(right):
        value = min(left[i], right[j])
        while i < len(left) and left[i] == value:
            i += 1
        while j < len(right) and right[j] == value:
            j += 1
        largest = max(largest, abs(i / len(left) - j / len(right)))
    return largest


def ks_to(values: Sequence[float], stated: Distribution, steps: int = 2_000) -> float:
    """The same distance to a distribution, by its quantiles; lengths are whole numbers, so theirs are rounded too."""
    return ks_between(
        list(values), [max(1.0, round(stated.quantile((step + 0.5) / steps))) for step in range(steps)]
    )


def index_of_dispersion(times_ms: Sequence[float], window_ms: float) -> float:
    """Variance over mean of the counts of whole windows from 0 on: 1 for Poisson arrivals. Raises: ValueError."""
    num_windows = int(max(times_ms) // window_ms) if times_ms else 0
    if num_windows < 2:
        raise ValueError("less than two whole windows")
    counts = [0] * num_windows
    for at_ms in times_ms:
        if (window := int(at_ms // window_ms)) < num_windows:
            counts[window] += 1
    mean = sum(counts) / num_windows
    return sum((count - mean) ** 2 for count in counts) / num_windows / mean


def gap_variation(times_ms: Sequence[float]) -> float:
    """Coefficient of variation of the gaps between arrivals."""
    gaps = [after - before for before, after in pairwise(times_ms)]
    mean = sum(gaps) / len(gaps)
    return math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean


def blocks_of(prompt: Iterable[Part], block_tokens: int = BLOCK_TOKENS) -> list[tuple[Piece, ...]]:
    """A prompt's blocks, the last perhaps partial, each as the pieces it is made of. Equal pieces: equal tokens."""
    if block_tokens < 1:
        raise ValueError(f"no block has {block_tokens} tokens")
    blocks: list[tuple[Piece, ...]] = []
    pieces: list[Piece] = []
    room = block_tokens
    for part in prompt:
        segment = planned_answer(part) if isinstance(part, Answer) else part
        offset, left = segment.offset, segment.num_tokens
        while left:
            taken = min(left, room)
            if pieces and pieces[-1][0] == segment.content and pieces[-1][1] + pieces[-1][2] == offset:
                pieces[-1] = (segment.content, pieces[-1][1], pieces[-1][2] + taken)
            else:
                pieces.append((segment.content, offset, taken))
            offset, left, room = offset + taken, left - taken, room - taken
            if room == 0:
                blocks.append(tuple(pieces))
                pieces, room = [], block_tokens
    if pieces:
        blocks.append(tuple(pieces))
    return blocks


class BlockIds:
    """Numbers for blocks with all that lies before them: Mooncake's hash ids. Grows with every new block."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, tuple[Piece, ...]], int] = {}

    def of(self, prompt: Iterable[Part], block_tokens: int = BLOCK_TOKENS) -> list[int]:
        """One id a block; the same prefix of blocks always has the same ids."""
        out: list[int] = []
        parent = -1
        for block in blocks_of(prompt, block_tokens):
            parent = self._known.setdefault((parent, block), len(self._known))
            out.append(parent)
        return out


def cached_tokens(
    requests: Iterable[Request], block_tokens: int = BLOCK_TOKENS, *, answers: bool = False
) -> list[int]:
    """Of each prompt, how many leading tokens an infinite cache of all prompts before it holds, in whole blocks.

    A partial last block counts when all of it was the end of an earlier prompt, as in Mooncake's traces.
    Args: answers: what follows an earlier prompt as its (planned) answer is held too, as an engine's own cache has it.
    """
    ids, seen, out = BlockIds(), set[int](), []
    for request in requests:
        found = ids.of(request.prompt, block_tokens)
        hits = 0
        while hits < len(found) and found[hits] in seen:
            hits += 1
        seen.update(found)
        if answers:
            seen.update(
                ids.of((*request.prompt, Answer(request.request_id, request.output_tokens)), block_tokens)
            )
        out.append(min(hits * block_tokens, request.prompt_tokens))
    return out


def infinite_cache_hit_ratio(
    requests: Sequence[Request], block_tokens: int = BLOCK_TOKENS, *, answers: bool = False
) -> float:
    """Cached tokens of all prompt tokens: no cache of whole blocks can do better. See cached_tokens."""
    total = sum(request.prompt_tokens for request in requests)
    return sum(cached_tokens(requests, block_tokens, answers=answers)) / max(1, total)
