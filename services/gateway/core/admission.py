"""How many requests one gateway process serves at a time. No I/O: time comes in, a verdict goes out.

Beyond the bound a request is refused at once (503 for the gateway's own limit, 429 for a tenant's) with an
estimate of when a place will be free, so that overload costs microseconds and never memory.
"""

from dataclasses import dataclass, field

from msgspec import Struct

RETRY_AFTER_MIN_MS = 1_000
RETRY_AFTER_MAX_MS = 30_000
_SMOOTHING = 0.1  # weight of the newest duration


class Admitted(Struct, frozen=True):
    """Holds `cost` places until leave() is called with it, once."""

    tenant: str
    cost: int
    since_ms: int


@dataclass(frozen=True, slots=True)
class Shed:
    """Refused; the caller may try again after retry_after_ms."""

    http_status: int
    code: str
    reason: str
    retry_after_ms: int


@dataclass(slots=True)
class Admission:
    """Counts places. Sum of the costs of all Admitted that have not left <= max_concurrent, always.

    Args: max_per_tenant: 0 for no limit of its own.
    """

    max_concurrent: int
    max_per_tenant: int = 0
    draining: bool = False
    num_running: int = 0
    _per_tenant: dict[str, int] = field(default_factory=dict)
    _duration_ms: float = 1_000.0  # smoothed time that a place was held

    def enter(self, tenant: str, cost: int, *, now_ms: int) -> Admitted | Shed:
        """Take `cost` places (one per prompt) or be refused. Cost: O(1)."""
        if self.draining:
            return Shed(503, "draining", "The server is shutting down.", RETRY_AFTER_MIN_MS)
        if self.num_running + cost > self.max_concurrent:
            reason = f"The server is at its limit of {self.max_concurrent} concurrent requests."
            return Shed(503, "overloaded", reason, self._retry_after_ms(self.num_running))
        held = self._per_tenant.get(tenant, 0)
        if self.max_per_tenant and held + cost > self.max_per_tenant:
            reason = f"Your key is at its limit of {self.max_per_tenant} concurrent requests."
            return Shed(429, "rate_limit_exceeded", reason, self._retry_after_ms(held))
        self.num_running += cost
        self._per_tenant[tenant] = held + cost
        return Admitted(tenant, cost, now_ms)

    @property
    def largest(self) -> int:
        """Beyond so large a cost one request alone is refused at any time: there is no use in trying again."""
        return min(self.max_concurrent, self.max_per_tenant or self.max_concurrent)

    def leave(self, ticket: Admitted, *, now_ms: int, is_answer: bool = True) -> None:
        """Give the places back. `is_answer`: else how long they were held says nothing of when others will be free."""
        self.num_running -= ticket.cost
        assert self.num_running >= 0, "a ticket was given back twice"
        held = self._per_tenant[ticket.tenant] - ticket.cost
        if held:
            self._per_tenant[ticket.tenant] = held
        else:
            del self._per_tenant[ticket.tenant]
        if is_answer:
            self._duration_ms += _SMOOTHING * (now_ms - ticket.since_ms - self._duration_ms)

    def _retry_after_ms(self, num_held: int) -> int:
        """Time until one of so many places should be free again, rounded up to whole seconds."""
        wait_ms = self._duration_ms / max(1, num_held)
        whole_s = -(-int(wait_ms) // 1000)
        return min(RETRY_AFTER_MAX_MS, max(RETRY_AFTER_MIN_MS, whole_s * 1000))
