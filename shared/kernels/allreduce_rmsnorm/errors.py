"""The word that a kernel leaves when a peer did not come: where, who, at which meeting."""

from enum import IntEnum

from shared.errors import InvalidRequest, PeerTimeout, ResourceError

_SET = 1 << 31


class FusedUnavailable(ResourceError):
    """No GPU, driver, compiler or bindings for the fused kernel here."""

    code = "fused.unavailable"
    retryable = False


class FusedRefused(ResourceError):
    """The driver or the compiler refused a call."""

    code = "fused.refused"
    retryable = False


class Phase(IntEnum):
    """Which meeting of a call (fused.cu, Phase)."""

    ARRIVE = 1
    LEAVE = 2


def pack(phase: Phase, peer: int, cta: int) -> int:
    """As fused.cu's lose() does it. Raises: InvalidRequest."""
    if not 0 <= peer < 256 or not 0 <= cta < 65_536:
        raise InvalidRequest(f"peer {peer}, CTA {cta}")
    return _SET | phase << 24 | peer << 16 | cta


def error_of(word: int, rank: int, timeout_ms: int) -> PeerTimeout | None:
    """What a failed word says; None for 0."""
    if word == 0:
        return None
    phase, peer, cta = word >> 24 & 0x7F, word >> 16 & 0xFF, word & 0xFFFF
    when = "never came to" if phase == Phase.ARRIVE else "came to, but never left,"
    return PeerTimeout(
        f"rank {rank} waited {timeout_ms} ms for rank {peer}, which {when} a fused all-reduce (CTA {cta}); "
        "open the group anew"
    )
