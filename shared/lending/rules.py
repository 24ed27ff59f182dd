"""Settings of lending, and what a profile says of an engine. No I/O."""

from dataclasses import dataclass
from typing import Literal

import msgspec

from shared.errors import SettingsError
from shared.wire.codec import MALFORMED

GB, GIB, MIB = 1_000_000_000, 1 << 30, 1 << 20
AUTO_BUDGET = -1


@dataclass(frozen=True, slots=True)
class LendingRules:
    """When a space lends and borrows. Bytes are of all GPUs of its engine together.

    Args:
        threshold_bytes: nothing below is offered: a producer has more than this to spare (AQUA 4: 10 GB).
        reserve_share: of the space, kept beside what running requests hold; never less than the longest request needs.
        steady_ms: load must have been steady for so long before memory is offered.
        hold_ms: after taking memory back, nothing is offered for so long.
        window_ms: over which rates and queues are seen to rise.
        peak_ms: the most that requests held in it counts as what they need.
        rate_slack: above the profile's stable rate by more than this share, load rises.
        rate_rise: without a profile: above the rate at which memory was offered by more than this share.
        least_arrivals: fewer requests in a window say nothing about a rate.
        queue_limit: a queue that grew by more than this within a window rises; a longer one than this is not steady.
        silent_ms: an engine that reported nothing for so long gets its memory back.
        reclaim_deadline_ms: for lent memory to come home, beside what the budget takes.
        budget_bytes_per_s: copies from and to a producer's lent pages, at most (AQUA 5); AUTO_BUDGET: a share of what
            was measured (budget.py); 0: no limit. Reads in place, of far blocks by attention, are no copies: no limit.
        ask_bytes: what came back to a space from host memory within window_ms before it asks; asked for at least.
        borrow_bytes: most that one space borrows; 0: nothing. A consumer's profile says less.
        idle_ms: a loan into and out of which nothing moved for so long is returned.
        pause_ms: after a refusal or a loss nothing is asked for so long, twice as long each time up to max_pause_ms.
        ttl_ms: of a loan, since its last renewal; the coordinator's lease_ttl_ms at most.
    """

    threshold_bytes: int = 10 * GB
    reserve_share: float = 0.1
    steady_ms: int = 10_000
    hold_ms: int = 30_000
    window_ms: int = 10_000
    peak_ms: int = 60_000
    rate_slack: float = 0.2
    rate_rise: float = 0.5
    least_arrivals: int = 5
    queue_limit: int = 4
    silent_ms: int = 3_000
    reclaim_deadline_ms: int = 2_000
    budget_bytes_per_s: int = AUTO_BUDGET
    ask_bytes: int = 64 * MIB
    borrow_bytes: int = 1 << 40
    idle_ms: int = 60_000
    pause_ms: int = 1_000
    max_pause_ms: int = 30_000
    ttl_ms: int = 10_000

    def __post_init__(self) -> None:
        """Raises: SettingsError naming the rule and a value that works."""
        for name in (
            "threshold_bytes", "borrow_bytes", "steady_ms", "hold_ms", "queue_limit",
            "rate_slack", "rate_rise",
        ):  # fmt: skip
            if getattr(self, name) < 0:
                raise SettingsError(f"lending: {name} must be 0 or more, not {getattr(self, name)}")
        for name in (
            "window_ms", "peak_ms", "least_arrivals", "silent_ms", "reclaim_deadline_ms", "ask_bytes", "idle_ms",
            "pause_ms", "ttl_ms",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise SettingsError(f"lending: {name} must be at least 1, not {getattr(self, name)}")
        if self.budget_bytes_per_s < AUTO_BUDGET:
            raise SettingsError(
                f"lending: budget_bytes_per_s {self.budget_bytes_per_s} is no rate; "
                f"try {AUTO_BUDGET} (a share of what was measured), 0 (no limit) or e.g. 100000000000"
            )
        if not 0.0 <= self.reserve_share < 1.0:
            raise SettingsError(f"lending: reserve_share {self.reserve_share} is not in [0, 1); try 0.1")
        if self.max_pause_ms < self.pause_ms:
            raise SettingsError(
                f"lending: max_pause_ms {self.max_pause_ms} is below pause_ms {self.pause_ms}"
            )

    @property
    def fixed_budget_bytes_per_s(self) -> int:
        """Where nothing was measured; 0: no limit."""
        return max(0, self.budget_bytes_per_s)

    def deadline_ms(self, num_bytes: int, budget_bytes_per_s: int) -> int:
        """For so many lent bytes to come home: what this budget (0: none) takes to move them, and a step (AQUA 6)."""
        copied_ms = -(-num_bytes * 1_000 // budget_bytes_per_s) if budget_bytes_per_s else 0
        return min(MAX_DEADLINE_MS, copied_ms + self.reclaim_deadline_ms)


MAX_DEADLINE_MS = 3_600_000  # the wire's
DEFAULT_RULES = LendingRules()


class EngineProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of the file that `quire profile` writes. Bytes are of one GPU: surplus positive, need negative."""

    format: str
    model: str
    tp: int
    role: Literal["producer", "consumer", "neutral"]
    bytes_per_gpu: int
    stable_rate_per_s: float
    num_instances: int = 1  # that the rate was shared by
    settled: bool = True

    @property
    def rate_per_instance_per_s(self) -> float:
        """What one of them has of the rate."""
        return self.stable_rate_per_s / max(1, self.num_instances)

    @property
    def num_bytes(self) -> int:
        """Of all its GPUs."""
        return self.bytes_per_gpu * max(1, self.tp)


FORMAT = "quire-profile/1"


def decode_profile(data: bytes, source: str) -> EngineProfile:
    """Raises: SettingsError when it is no profile."""
    try:
        found = msgspec.json.decode(data, type=EngineProfile)
    except MALFORMED as error:
        raise SettingsError(f"{source} is no profile of `quire profile`: {error}") from error
    if found.format != FORMAT:
        raise SettingsError(f"{source} has the format {found.format!r}, not {FORMAT!r}")
    return found
