"""From how many tokens on fusing, and weaving, pay: decided from times measured at an engine's start. No I/O.

What was measured is kept in a file, for the next start of the same engine on the same machine:

    {"version": 1, "key": "<24 hex>",
     "timings": [{"num_tokens": 1024, "off_us": 900.0, "fuse_us": 860.0, "full_us": 700.0}, ...],
     "tiles": [[256, 128], ...]}

`tiles`: [tokens, columns] that a CTA computes, of the products qkv, o, gate and up, down. `key` says what the times
belong to (the caller makes it: model, ranks, GPU, kernel); the rule is made from the times anew at each reading, so a
better rule needs no new measurement. Another version or key, or bytes that are no such file, count as no file.
full_us 0: not measured at this size, because it cannot be cut. It says nothing of weaving: such a step stays whole.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

FILE_VERSION = 1
NUM_TILES = 4
MARGIN_RATIO = 0.02  # what a way must win to be taken: two measurements of one thing differ by about that

Mode = Literal["off", "fuse", "full"]


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of the same layers for one number of tokens: stock, fused, woven."""

    num_tokens: int
    off_us: float
    fuse_us: float
    full_us: float = 0.0


class WeaveRule(msgspec.Struct, frozen=True, kw_only=True):
    """The least number of tokens from which each way pays; 0: never."""

    fuse_min_tokens: int = 0
    full_min_tokens: int = 0

    def mode(self, num_tokens: int) -> Mode:
        """Of a step with so many tokens."""
        if self.full_min_tokens and num_tokens >= self.full_min_tokens:
            return "full"
        if self.fuse_min_tokens and num_tokens >= self.fuse_min_tokens:
            return "fuse"
        return "off"


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What a start found out. `tiles`: (tokens, columns) of a layer's four products."""

    timings: list[Timing]
    tiles: list[tuple[int, int]]


class _ThresholdFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int
    key: str
    timings: list[Timing]
    tiles: list[tuple[int, int]]


def decide(timings: Sequence[Timing], margin_ratio: float = MARGIN_RATIO) -> WeaveRule:
    """The rule that the times ask for: a way is taken from the size on from which it wins at every larger one, too.

    Fusing must beat stock, weaving the better of both, by the margin. Of weaving only sizes count that can be cut:
    steps of others stay whole, whatever the rule. Raises: ValueError on times that are not positive or a size that is
    there twice.
    """
    ordered = sorted(timings, key=lambda timing: timing.num_tokens)
    sizes = [timing.num_tokens for timing in ordered]
    if len(set(sizes)) < len(sizes) or any(t.off_us <= 0 or t.fuse_us <= 0 or t.full_us < 0 for t in ordered):
        raise ValueError(f"no times to decide by: {ordered}")
    keep = 1.0 - margin_ratio
    return WeaveRule(
        fuse_min_tokens=_from_where(ordered, lambda t: t.fuse_us <= keep * t.off_us),
        full_min_tokens=_from_where(
            [timing for timing in ordered if timing.full_us],
            lambda t: t.full_us <= keep * min(t.off_us, t.fuse_us),
        ),
    )


def _from_where(ordered: Sequence[Timing], wins: Callable[[Timing], bool]) -> int:
    found = 0
    for timing in reversed(ordered):
        if not wins(timing):
            break
        found = timing.num_tokens
    return found


def pack_measured(key: str, found: Measured) -> bytes:
    """The file's bytes."""
    whole = _ThresholdFile(version=FILE_VERSION, key=key, timings=found.timings, tiles=found.tiles)
    return msgspec.json.format(msgspec.json.encode(whole), indent=2)


def unpack_measured(data: bytes, key: str) -> Measured | None:
    """What a file's bytes hold; None where they are of something else, or cannot be read."""
    try:
        found = msgspec.json.decode(data, type=_ThresholdFile)
        decide(found.timings)
    except (msgspec.MsgspecError, ValueError):
        return None
    if found.version != FILE_VERSION or found.key != key or len(found.tiles) != NUM_TILES:
        return None
    if min(min(tile) for tile in found.tiles) < 1:
        return None
    return Measured(timings=found.timings, tiles=found.tiles)
