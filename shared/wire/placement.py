"""gateway <-> scheduler: where a request runs. DEALER at the gateway, ROUTER at the scheduler."""

from typing import Literal

from msgspec import Struct

from shared.ids import Epoch, HandoffId, InstanceId, RequestId
from shared.wire.codec import Channel
from shared.wire.reports import Role
from shared.wire.requests import KvPlan

Medium = Literal["hbm", "dram"]


class PrefixHit(Struct, frozen=True, array_like=True):
    """A hint from the prompt tree: so many leading tokens are within this instance's reach.

    At most one of each medium for an instance, and of the two "dram" has more tokens, and comes later: the whole
    prefix when those that the instance lacks itself are copied from the host memory behind it.
    """

    instance: InstanceId
    tokens: int
    medium: Medium = "hbm"  # the slowest that the prefix needs; "hbm": the engine's own memory, on a CPU too


MAX_CHOICES = 128  # of a request


class Place(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="place"):
    """Answered by Placed or Rejected with the same request_id and attempt."""

    request_id: RequestId
    attempt: int
    num_prompt_tokens: int
    max_tokens: int = 0
    model: str = ""
    hits: list[PrefixHit] = []
    seen_tokens: int = 0  # leading ones that this gateway was asked for before; 0, too: not known
    session: str = ""  # the `user` field or a session header: the `session` policy sticks to it
    tenant: str = ""
    exclude: list[InstanceId] = []  # failed for this request already
    must_colocate: bool = False
    traceparent: str = ""
    explain: bool = True  # somebody will read the ways that were not taken
    continues: bool = False  # the prefill stage's token is final: no decode instance draws it again
    weight: float = 1.0  # of the tenant, where all instances are full
    num_choices: int = 1  # answers to the one prompt
    begun: bool = False  # its client has some of the answer already, and waits for the rest: it is never held


class Ended(Struct, frozen=True, kw_only=True, tag="ended"):
    """The request left an instance (finished, failed, aborted): the load view forgets it. No answer."""

    request_id: RequestId
    attempt: int


class GatewayHello(Struct, frozen=True, kw_only=True, tag="gateway_hello"):
    """First on every connection: whose it is. One that comes back is told from one that is gone by it. No answer.

    What is placed for a gateway that never says it counts until it ends, or is too old.
    """

    gateway: str  # unlike that of any other life of any gateway's process
    request_deadline_ms: int = 0  # after which it gives a request up; 0: not said


GatewayToScheduler = Place | Ended | GatewayHello


class Target(Struct, frozen=True, kw_only=True):
    """An instance as the scheduler knows it."""

    instance: InstanceId
    epoch: Epoch
    role: Role
    endpoint: str  # ZeroMQ address of its ROUTER


class Predicted(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the placement is expected to take, in ms; a stage that does not occur takes 0."""

    queue_ms: float = 0.0  # unfinished prefills of others on the first instance
    fetch_ms: float = 0.0
    compute_ms: float = 0.0
    transfer_ms: float = 0.0  # of the hand-off
    step_ms: float = 0.0  # one decode step with the request in the batch
    slowdown_ms: float = 0.0  # what all that decode already lose together, weighted
    evict_ms: float = 0.0  # of computing again what its new pages push out, weighted; nobody waits for it now
    total_ms: float = 0.0  # what was compared: all of it, with the expected number of decode steps


class Alternative(Struct, frozen=True, array_like=True):
    """A way that was not taken."""

    instance: InstanceId
    stage: str
    hit_tokens: int
    predicted_ms: float | None  # Predicted.total_ms; None: not predicted
    why: str  # it was not taken


class Placed(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="placed"):
    """`prefill` is None when the request is colocated on `decode`."""

    request_id: RequestId
    attempt: int
    kind: Literal["disaggregated", "colocated"]
    decode: Target
    prefill: Target | None = None
    handoff_id: HandoffId = HandoffId("")
    policy: str = ""
    reason: str = ""  # one sentence for the receipt
    prefill_hit_tokens: int = 0
    decode_hit_tokens: int = 0
    predicted_ttft_ms: float | None = None
    predicted: Predicted | None = None  # None: the instances sent no coefficients
    kv: KvPlan | None = None  # for the first stage's Generate
    alternatives: list[Alternative] = []  # the best ones first, a bounded number
    held_ms: float = 0.0  # that the scheduler kept the request until there was room in pages


class Held(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="held"):
    """No instance has room in its pages: the answer to Place comes later, at the latest after wait_ms."""

    request_id: RequestId
    attempt: int
    wait_ms: int
    reason: str = ""


class Rejected(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="rejected"):
    """No instance can take it now; try again after retry_after_ms."""

    request_id: RequestId
    attempt: int
    code: str
    reason: str
    retry_after_ms: int = 500


SchedulerToGateway = Placed | Rejected | Held

TO_SCHEDULER: Channel[GatewayToScheduler] = Channel(b"quire.place/1", GatewayToScheduler)
FROM_SCHEDULER: Channel[SchedulerToGateway] = Channel(b"quire.placed/1", SchedulerToGateway)
