"""worker -> scheduler: who I am, how busy I am. DEALER at the worker, ROUTER at the scheduler.

A worker says Hello, waits for Welcome, then sends a Report every report interval (its heartbeat). A scheduler
that gets a Report from an instance it does not know (it restarted) answers with Resync; the worker says Hello
again. A larger epoch for the same instance replaces a smaller one; a smaller one is refused.
"""

from typing import Literal

from msgspec import Struct

from shared.ids import Epoch, InstanceId, RequestId
from shared.kv.layout import EngineDescription
from shared.wire.codec import Channel
from shared.wire.cost import CostCoefficients, LinkRate

Role = Literal["prefill", "decode", "colocated"]


class PoolPlace(Struct, frozen=True, array_like=True):
    """Where an instance's pages lie: equal memory_id, no copy; equal boot_generation and address, the same host."""

    boot_generation: Epoch
    memory_id: Epoch  # of the space; 0: not known yet
    address: str = ""  # where mempools of other hosts reach its own; "": they do not
    crosses_hosts: bool = True  # with an address: blocks of the space can go there and come from there


class Room(Struct, frozen=True, array_like=True):
    """Of an engine that works in the mempool's pages: room for another request is free_blocks - owed_blocks."""

    num_blocks: int  # that it may have at all
    free_blocks: int  # of these free, or cached and used by nobody
    owed_blocks: int  # that the requests there may still need, those that wait for room too (shared/room)
    answer_tokens: int = 0  # of an answer without a bound, by those that were seen there; 0: not known


class Hello(Struct, frozen=True, kw_only=True, tag="hello"):
    """First message of an instance under an epoch that the coordinator granted."""

    instance: InstanceId
    epoch: Epoch
    role: Role
    endpoint: str
    description: EngineDescription
    max_running: int  # requests in one engine step at most
    max_batched_tokens: int
    num_kv_blocks: int
    cost: CostCoefficients | None = None  # None: this instance has not been profiled
    sends_ahead: bool = False  # blocks of a prompt leave for the decode side while the rest of it is computed


class Report(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="report"):
    """Load now. `seq` grows by one per report: a gap tells the scheduler that it missed some."""

    instance: InstanceId
    epoch: Epoch
    seq: int
    num_running: int = 0
    num_waiting: int = 0
    unfinished_prefill_tokens: int = 0
    running_context_tokens: int = 0
    kv_used_share: float = 0.0
    step_ms: float = 0.0  # smoothed
    draining: bool = False
    # factors by which predictions from Hello's coefficients are to be multiplied
    prefill_correction: float = 1.0
    decode_correction: float = 1.0
    queued_prefill_ms: float = (
        0.0  # predicted work of the unfinished prefills here, corrected; 0 without a model
    )
    links: dict[str, LinkRate] = {}  # measured here, by path
    pool: PoolPlace | None = None  # None: no mempool is connected
    served: dict[str, int] = {}  # tokens by tenant since the instance's start, where requests take turns
    room: Room | None = None  # None: not known
    # what the corrections are of, since the start: one that grows says that an unchanged correction still holds
    num_prefills_measured: int = 0
    num_decodes_measured: int = 0
    # (request, attempt) of prompts that came into the engine since the last report, and of hand-offs that came here:
    # from this one on they are in its numbers. None: it does not say
    arrived: list[tuple[RequestId, int]] | None = None


class Goodbye(Struct, frozen=True, kw_only=True, tag="goodbye"):
    """Orderly end: place nothing more here."""

    instance: InstanceId
    epoch: Epoch


WorkerToScheduler = Hello | Report | Goodbye


class Welcome(Struct, frozen=True, kw_only=True, tag="welcome"):
    """Hello accepted."""

    report_interval_ms: int


class Resync(Struct, frozen=True, kw_only=True, tag="resync"):
    """Say Hello: I do not know you, or not under this epoch, or have heard larger numbers of reports than yours."""


class Refused(Struct, frozen=True, kw_only=True, tag="refused"):
    """`code` epoch.stale: somebody with a larger epoch took your id; stop."""

    code: str
    reason: str


class ServedElsewhere(Struct, frozen=True, kw_only=True, tag="served_elsewhere"):
    """To a report with `served`: the like of the other live instances of its role and model, by instance and epoch."""

    served: dict[str, dict[str, int]]


SchedulerToWorker = Welcome | Resync | Refused | ServedElsewhere

REPORTS: Channel[WorkerToScheduler] = Channel(b"quire.report/1", WorkerToScheduler)
REPORT_REPLIES: Channel[SchedulerToWorker] = Channel(b"quire.report-reply/1", SchedulerToWorker)
