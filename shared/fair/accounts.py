"""What each tenant and each of its requests was served, in virtual time. No I/O.

A tenant's virtual time grows by served tokens / weight: the tenant that is furthest behind comes next, so that
tenants who all want more get shares like their weights. Within a tenant, requests of one phase (prefill or decode)
are ordered by the tokens that they were served in it (AQUA 7: least prefill computed, least generated).

Who comes starts level with the least served of those that run, and who wants nothing, or gets all that it wants,
earns nothing meanwhile: idleness is not saved up.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

MAX_IDLE_TENANTS = (
    4096  # of those that were served more than their share; the least of these is forgotten first
)


@dataclass(slots=True)
class Account:
    """One request. `virtual`: tokens of its phase, from where the phase began."""

    request_id: str
    tenant: str
    arrival: int
    prompt_left: int
    virtual: float = 0.0
    running: bool = False
    ready: bool = True
    pages: int = 0  # that it needs in the engine's memory to run
    resident: int = 0  # that it has there
    away: int = 0  # that have left and must come back before it runs
    waiting_since: int = 0  # slice

    @property
    def in_prefill(self) -> bool:
        """Whether prompt tokens are left to compute."""
        return self.prompt_left > 0


@dataclass(slots=True)
class Tenant:
    """All requests of one tenant that are here."""

    name: str
    weight: float
    virtual: float = 0.0
    ran_at: int = 0  # the last slice in which a request of it had a slot
    turn_at: int = 0  # the last slice in which it got one because it was the least served
    requests: dict[str, Account] = field(default_factory=dict)


class Accounts:
    """Of one engine."""

    def __init__(self) -> None:
        self.requests: dict[str, Account] = {}
        self.tenants: dict[str, Tenant] = {}
        self.prompt_left = 0  # tokens of all prompts that are here
        self.pages = self.resident = 0  # of all requests that are here
        self._idle: dict[str, float] = {}  # tenants without requests, that are ahead of the floor
        self._floor = 0.0  # where the least served tenant was when somebody last left
        self._arrivals = 0

    def add(self, request_id: str, tenant: str, weight: float, prompt_tokens: int, now_slice: int) -> None:
        """A request came. Raises: ValueError for a weight that is not positive, or a request that is here."""
        if not weight > 0.0 or request_id in self.requests:
            raise ValueError(f"request {request_id}: weight {weight}, or it is here already")
        account = Account(request_id, tenant, self._arrivals, prompt_tokens, waiting_since=now_slice)
        self._arrivals += 1
        owner = self.tenants.get(tenant)
        if owner is None:
            virtual = max(self._idle.pop(tenant, 0.0), self._least())
            owner = Tenant(tenant, weight, virtual, now_slice, now_slice)
            self.tenants[tenant] = owner
        owner.weight = weight
        account.virtual = _least_of_phase(owner.requests.values(), account)
        owner.requests[request_id] = self.requests[request_id] = account
        self.prompt_left += account.prompt_left

    def remove(self, request_id: str) -> None:
        """It is over, or aborted; also when it is not here."""
        account = self.requests.pop(request_id, None)
        if account is None:
            return
        self.prompt_left -= account.prompt_left
        self.pages -= account.pages
        self.resident -= account.resident
        owner = self.tenants[account.tenant]
        del owner.requests[request_id]
        if owner.requests:
            return
        self._floor = max(self._floor, self._least())
        del self.tenants[owner.name]
        if owner.virtual > self._floor:
            self._idle[owner.name] = owner.virtual
        self._forget()

    def served(self, request_id: str, tokens: int, prompt_left: int) -> None:
        """A step computed so many of its tokens; so many of its prompt are left."""
        account = self.requests[request_id]
        owner = self.tenants[account.tenant]
        owner.virtual += tokens / owner.weight
        account.virtual += tokens
        was_prefill, before = account.in_prefill, account.prompt_left
        account.prompt_left = max(0, prompt_left)
        self.prompt_left += account.prompt_left - before
        if was_prefill and not account.in_prefill:
            account.virtual = _least_of_phase(owner.requests.values(), account)

    def served_elsewhere(self, tenant: str, tokens: int) -> None:
        """Another engine served the tenant. Who has no request here is not charged: it will start level."""
        owner = self.tenants.get(tenant)
        if owner is not None:
            owner.virtual += tokens / owner.weight

    def forgive(self, tenant: str) -> None:
        """It waited long enough for what others served it: level with the least served here from now on.

        Engines begin to hear of each other at different times, and so disagree by a constant about how far a tenant
        is ahead. Nothing else would ever make up for that: one engine would serve it all of its share, another none.
        """
        owner = self.tenants[tenant]
        owner.virtual = min(owner.virtual, self._least())

    def level(self, backlogged: Iterable[str] | None) -> None:
        """Tenants with nobody waiting had all that they wanted: they keep no claim from it.

        Args: backlogged: tenants that have somebody waiting; None: nobody waits at all, and nobody owes anything, those
            included that have left.
        """
        waiting = [self.tenants[name] for name in backlogged] if backlogged is not None else []
        if waiting:
            least = min(tenant.virtual for tenant in waiting)
        else:
            least = max((tenant.virtual for tenant in self.tenants.values()), default=0.0)
        names = {tenant.name for tenant in waiting}
        for tenant in self.tenants.values():
            if tenant.name not in names:
                tenant.virtual = max(tenant.virtual, least)
        if backlogged is None:
            self._floor = max(self._floor, least)
            self._idle.clear()

    def _least(self) -> float:
        return min((tenant.virtual for tenant in self.tenants.values()), default=self._floor)

    def _forget(self) -> None:
        if len(self._idle) > MAX_IDLE_TENANTS:
            self._idle = {name: at for name, at in self._idle.items() if at > self._floor}
        if len(self._idle) > MAX_IDLE_TENANTS:
            del self._idle[min(self._idle, key=lambda name: (self._idle[name], name))]


def _least_of_phase(others: Iterable[Account], account: Account) -> float:
    """Virtual time of the least served in the account's phase: of those that run, else of all, else 0."""
    same = [a for a in others if a is not account and a.in_prefill == account.in_prefill]
    running = [a.virtual for a in same if a.running]
    return min(running or [a.virtual for a in same], default=0.0)
