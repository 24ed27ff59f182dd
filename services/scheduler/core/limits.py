"""When an instance is full, who waits for room, and for how long."""

from dataclasses import dataclass

FORGET_MS = 900_000
FORGET_BEHIND_MS = 300_000  # behind a gateway's deadline
MOST_MS = 7 * 24 * 3_600_000


def forget_after(request_deadline_ms: int) -> int:
    """When what was placed for such a gateway is surely over, in ms from its placement."""
    return max(FORGET_MS, min(request_deadline_ms, MOST_MS) + FORGET_BEHIND_MS)


@dataclass(frozen=True, slots=True)
class PlacementLimits:
    """When an instance is full, and what is said then."""

    overload_factor: float = 4.0  # requests on an instance / requests in one step of it
    excess_factor: float = 2.0  # of overload_factor: the bound for tenants that have less than their share
    max_prefill_tokens: int = 1 << 20  # waiting on one instance
    overloaded_retry_ms: int = 250
    no_instance_retry_ms: int = 300
    max_open: int = 100_000  # attempts whose end is awaited
    forget_ms: int = FORGET_MS  # an older one's is not: its gateway has given it up; see forget_after()
    room_wait_ms: int = 0  # for room in decode's pages; then a request is placed anyway
    max_held: int = 1_024  # that wait for it
