"""What is simulated, and what comes of it."""

from dataclasses import dataclass, field

from loadtest.outcomes import Outcome
from loadtest.simulator.frontend import Delays
from loadtest.simulator.links import Rate
from loadtest.simulator.local import Local
from loadtest.simulator.task import EngineLimits
from services.gateway.core.request_flow import Limits
from services.mempool.core.pd_caching import PdCaching
from services.scheduler.core.instances import InstanceLimits
from services.scheduler.core.limits import PlacementLimits
from services.scheduler.core.policies import PolicyName
from services.scheduler.core.predict import CostSettings
from shared.wire.reports import Role

ROOM_WAIT_MS = 5_000  # of a scheduler, by default: for room anywhere
HANDOFF_ROOM_MS = 60_000.0  # of a worker


@dataclass(frozen=True, slots=True)
class Death:
    """An instance is gone from then on."""

    at_ms: float
    instance: int


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """What is simulated. Tokens of memory are of each instance.

    room_wait_ms: so long a handed-over prompt waits at its decode instance for room in the pages;
    0: nobody says what room there is. handoff_ahead: as the worker's setting.
    noise: standard deviation of the factor by which each step's time differs; drawn from `seed`.
    """

    roles: tuple[Role, ...]
    block_tokens: int = 512
    memory_tokens: int = 1 << 20
    dram_tokens: int = 0
    policy: PolicyName = "cost"
    cost: CostSettings = field(default_factory=CostSettings)
    placement: PlacementLimits = field(default_factory=lambda: PlacementLimits(room_wait_ms=ROOM_WAIT_MS))
    room_wait_ms: float = HANDOFF_ROOM_MS
    handoff_ahead: bool = True
    limits: EngineLimits = field(default_factory=EngineLimits)
    local: Local = field(default_factory=Local)
    pd_caching: PdCaching = PdCaching.FULL
    instances_per_host: int = 1
    peer: Rate = field(default_factory=Rate)  # on one host
    remote: Rate = field(default_factory=Rate)  # between hosts
    dram: Rate = field(default_factory=lambda: Rate(0.05, 40e6))
    delays: Delays = field(default_factory=Delays)
    flow: Limits = field(default_factory=Limits)
    instances: InstanceLimits = field(default_factory=InstanceLimits)
    deaths: tuple[Death, ...] = ()
    noise: float = 0.0
    seed: int = 0

    @property
    def counts_room(self) -> bool:
        """Whether instances say what room their pages have, as engines in order of arrival do: nobody asks where
        nothing is handed over."""
        return {"prefill", "decode"} <= {*self.roles} and self.local.policy == "fcfs"

    def sends_ahead(self, number: int) -> bool:
        """Whether blocks of a long prompt leave this instance before all of it is computed: within a host only."""
        moves = self.peer.bytes_per_ms > 0.0 and self.instances_per_host > 1
        return (
            self.handoff_ahead and moves and self.roles[number] == "prefill" and self.local.policy == "fcfs"
        )


def roles_of(num_prefill: int, num_decode: int, num_colocated: int = 0) -> tuple[Role, ...]:
    """Prefill instances first, then decode, then colocated."""
    counts: tuple[tuple[Role, int], ...] = (
        ("prefill", num_prefill),
        ("decode", num_decode),
        ("colocated", num_colocated),
    )
    return tuple(role for role, number in counts for _ in range(number))


@dataclass(frozen=True, slots=True)
class Turns:
    """What local policies did. num_recomputed_tokens: computed before and lost; peak_swap_bytes: of one engine."""

    num_parked: int = 0
    num_recomputed_tokens: int = 0
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    peak_swap_bytes: int = 0


@dataclass(slots=True)
class Simulated:
    """A run: one record a request, in their order."""

    outcomes: list[Outcome]
    num_events: int
    num_steps: int
    num_preempted: int
    num_evicted: int
    num_rejected: int
    num_retries: int
    peer_bytes: int
    end_ms: float
    busy_ms: list[float]  # of each instance
    turns: Turns
