"""What a worker asks of its engine. The vLLM adapter (vllm_engine.py) and the mock engine
(shared/testing/mock_engine.py) implement it; the worker shell knows nothing else of them."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias

from shared.ids import BlockHash, Epoch, HandoffId, InstanceId, PageId
from shared.kv.layout import EngineDescription
from shared.room.growth import Need
from shared.wire.cost import CostCoefficients
from shared.wire.requests import SamplingSpec, Stage, TokenLogprob


@dataclass(frozen=True, slots=True)
class HeldPages:
    """Sealed pages that a mempool lease pins for one request, first block first.

    The engine copies those it lacks and checks each page's epoch after its copy; a page that fails the
    check is a miss, and its tokens are computed. The holder of the lease releases it after the first output.
    """

    pages: list[PageId]
    epochs: list[Epoch]
    hashes: list[BlockHash]
    valid_tokens: int  # prompt tokens that these pages cover; the last block may be partial
    lease_id: str = ""  # for an engine that keeps_leases


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One attempt of one stage."""

    engine_request_id: str  # unique per attempt and instance
    stage: Stage
    prompt_token_ids: Sequence[int]  # a list, or PackedIds, which become one when the engine takes them
    sampling: SamplingSpec
    chain_seed: BlockHash  # first link of the block-hash chain (fingerprint, tenant salt)
    tenant_salt: str = ""
    held: HeldPages | None = None
    held_digest: bytes = b""  # chain_digest() of the prompt and the held pages' hashes
    handoff_id: HandoffId | None = None  # prefill: lease the prompt's blocks under this id when sealed
    traceparent: str = ""
    handoff_target: InstanceId | None = None  # prefill: who takes over, where that is known
    weight: float = 1.0  # of its tenant, where requests take turns
    private: bool = False  # nobody else ever sees its blocks; they go with the next clear_cache()
    # of prompt_token_ids, so many last ones are output already; `sampling` is of the rest
    num_output_tokens: int = 0
    packed_prompt: bytes = b""  # prompt_token_ids as packed u32, where the caller has them
    handed_tokens: int = 0  # decode: how many tokens a hand-off covers, a partial last block too; 0: all


class Swapped(NamedTuple):
    """Blocks of a request without a slot left the engine's memory, or came back."""

    way: str  # "out" | "in"
    begin_ns: int  # since the epoch: asked
    end_ns: int  # done
    num_blocks: int


@dataclass(frozen=True, slots=True)
class KvUse:
    """Where the prompt's KV came from, known with the first output."""

    tokens_engine: int = 0
    tokens_pool: int = 0
    tokens_computed: int = 0
    blocks_moved: int = 0
    blocks_reused: int = 0
    bytes_moved: int = 0
    fetch_ms: float = 0.0
    failed_blocks: int = 0  # a changed epoch or a lost pool: recomputed
    queue_ms: float = 0.0  # from generate() to the first step that ran it, where the engine says so
    times_parked: int = 0  # its slot was another's for a while; with the last delta, as those below
    swaps: Sequence[Swapped] = ()
    preempted_ns: Sequence[int] = ()  # since the epoch: when its slot, or its pages, became another's


@dataclass(slots=True)
class EngineDelta:
    """What one step produced for one choice of one request."""

    index: int
    token_ids: list[int]
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
    stop_token_id: int | None = None
    logprobs: list[list[TokenLogprob]] | None = None
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None  # with the first delta, if asked for
    request_done: bool = False  # every choice has ended
    kv_use: KvUse | None = None  # with the first delta, and with the last one, which may know more


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Now, as far as the front knows."""

    num_running: int = 0
    num_waiting: int = 0
    unfinished_prefill_tokens: int = 0
    running_context_tokens: int = 0
    kv_used_share: float = (
        0.0  # of its own blocks, without those that leases pin; of all, as a worker says it (worker_kv.py)
    )
    num_pages_in_use: int | None = None  # by requests, those that leases pin too; None: nobody counts them
    step_ms: float = 0.0
    num_preempted: int = 0  # since the start: how often a running request gave its slot up to another
    num_kept_tokens: int = 0  # of these requests, each time: KV that stayed for when they go on
    num_recomputed_tokens: int = 0  # computed again, where the engine counts them
    swapped_out_bytes: int = 0  # of requests without a slot, since the start
    swapped_in_bytes: int = 0
    swap_lost_blocks: int = 0  # computed again
    # by tenant, since the start, where requests take turns
    served_tokens: Mapping[str, int] = field(default_factory=dict)
    # of fair slices, since the start: why requests were computed again, how long they waited (fair_scheduler.py)
    fair_counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineRoom:
    """Of an engine that works in the mempool's pages, in pages."""

    unused: int  # its own: in stock, or cached and used by nobody
    own: int  # its own that requests use
    in_use: int  # with what others sealed and leases pin for its requests
    needs: list[Need]  # of its requests
    answer_tokens: int  # of an answer without a bound, by those that it has seen (shared/room/answers.py)


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step in which the same requests decoded as in the one before it, and nothing else ran."""

    ms: float
    num_requests: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class PromptStep:
    """A step behind another one that computed the whole of one prompt, and a token of each of `num_decodes` others."""

    ms: float  # with the step before
    new_tokens: int
    past_tokens: int  # of the prompt, found
    num_decodes: int
    context_tokens: int  # of those who decoded
    decodes_before: int = 0  # requests that decoded in the step before; 0: ms is without it


EngineStep: TypeAlias = DecodeStep | PromptStep


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """A change of the engine's own prefix cache, in Quire's hashes."""

    kind: Literal["stored", "removed", "cleared"]
    hashes: list[BlockHash] = field(default_factory=list)


class Engine(Protocol):
    """Lifecycle: start() once; generate() and abort() concurrently; close() once, last."""

    description: EngineDescription
    max_running: int
    max_batched_tokens: int
    graph_tokens: int  # of the largest step that a CUDA graph holds; 0: none does
    num_kv_blocks: int
    num_pages: (
        int  # of these, in its own memory: those of its space, which others may be in, without far places
    )
    uses_pool: bool  # False: a cache of its own, of which nobody else reads a block
    device: str  # "cpu", a GPU's name, "mock"
    known_cost: CostCoefficients | None  # None: to be measured
    keeps_leases: bool  # works in the pages: leases are made until_release and end with holds_lease() False

    async def holds_lease(self, lease_id: str) -> bool:
        """Whether the engine has a lease, or had it: it releases that itself. Ask after the request's iterator ended.

        Raises: PeerGone when the engine died: its leases end with its processes.
        """
        ...

    @property
    def alive(self) -> bool:
        """False once the engine has died: nothing will ever come from it again."""
        ...

    async def ping(self) -> None:
        """Returns when the engine is between two steps. Raises: PeerGone when it died."""
        ...

    async def start(self) -> None:
        """Load the model; returns when the first request can run. Raises: SettingsError, ClusterError."""
        ...

    def send_early(self, request: EngineRequest) -> None:
        """A request whose lease is still to come: what takes time with a long prompt is done meanwhile.

        generate() of the same id follows, with `held` as it is then and all else unchanged, or drop_early(). Nothing
        happens where nothing would be gained.
        """
        ...

    def drop_early(self, engine_request_id: str) -> None:
        """No generate() follows. Ids that are not waiting for one are ignored."""
        ...

    def generate(self, request: EngineRequest) -> AsyncIterator[EngineDelta]:
        """Deltas of a request until one has request_done. Closing the iterator aborts the request.

        Raises: InvalidRequest when the engine refuses the parameters; PeerGone when the engine died; ClusterError when
        it cannot run this one.
        """
        ...

    async def abort(self, engine_request_id: str) -> None:
        """End a request; unknown ids are ignored."""
        ...

    def load(self) -> EngineLoad:
        """Cheap; called for every report."""
        ...

    async def room(self) -> EngineRoom | None:
        """Behind every request sent to it before. None: not known, or its requests take turns in less memory.

        Raises: PeerGone when the engine died.
        """
        ...

    def served_elsewhere(self, served: Mapping[str, Mapping[str, int]]) -> None:
        """The like of `served_tokens` of other instances, by instance. Cheap."""
        ...

    def on_cache_event(self, callback: Callable[[CacheEvent], None]) -> None:
        """The callback runs on the event loop, in order."""
        ...

    def on_step(self, callback: Callable[[EngineStep], None]) -> None:
        """The callback runs on the event loop, once for each step that qualifies."""
        ...

    async def clear_cache(self) -> bool:
        """Forget every cached block that no request uses. False, and nothing done, while requests use any.

        Raises: PeerGone when the engine died.
        """
        ...

    async def close(self) -> None:
        """Stop the engine's processes."""
        ...
