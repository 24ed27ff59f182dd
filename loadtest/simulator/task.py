"""One stage of one attempt inside a simulated engine, and what the engine tells of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from loadtest.simulator.request import SimRequest
from services.mempool.core.entry import Entry
from shared.wire.requests import KvPlan, Stage


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """As the worker's settings of the same names. unit_tokens: the real block, below which nothing is cached."""

    max_running: int = 256
    max_batched_tokens: int = 8192
    unit_tokens: int = 16


@dataclass(slots=True, eq=False)
class Task:
    """One stage of one attempt. tokens_*: of the prompt, by source; they sum to the prompt once it is admitted."""

    key: tuple[str, int]
    stage: Stage
    request: SimRequest
    instance: int = -1
    hinted_tokens: int = 0  # what the scheduler believed to be cached here
    owner: Any = None  # whoever asked for it
    source: int = -1  # decode: the instance that holds the prompt's pages, and the stage that made them
    prior: "Task | None" = None
    kv: KvPlan | None = None  # the scheduler's verdict on fetching
    fetch_from: int = -1  # another instance whose blocks are copied here, and which: pinned meanwhile
    lent: list[Entry] = field(default_factory=list)
    tokens_local: int = 0
    tokens_dram: int = 0
    tokens_moved: int = 0  # from other instances
    tokens_computed: int = 0
    queued_at_ms: float = 0.0
    admitted_at_ms: float = -1.0
    entries: list[Entry] = field(default_factory=list)  # pinned
    private_tokens: int = 0
    done_tokens: int = 0  # positions whose KV is there
    goal_tokens: int = 0  # positions to compute before the next token
    promised_tokens: int = 0  # of memory that it may come to have here
    ahead_tokens: int = 0  # of a prefill's prompt, sent to its decode side before the prompt was done
    lost_tokens: int = 0  # that were computed before it was preempted
    made: int = 0  # output tokens
    joined_step: int = 0
    seq: int = 0  # order of admission
    state: str = "waiting"  # loading, prefilling, decoding, parked, held, gone

    @property
    def name(self) -> str:
        """Of no other on its engine."""
        call, attempt = self.key
        return f"{call}/{attempt}/{self.stage}"

    @property
    def wanted_tokens(self) -> int:
        """Output tokens that this stage makes: the first of a disaggregated request is prefill's."""
        return self.request.output_tokens - (self.stage == "decode")

    @property
    def final_tokens(self) -> int:
        """Of KV that this stage has at its end."""
        made_tokens = 0 if self.stage == "prefill" else self.request.output_tokens
        return self.request.prompt_tokens + made_tokens

    @property
    def end_step(self) -> int:
        """The engine's step with which a decode ends."""
        return self.joined_step + self.wanted_tokens - self.made


OnSteps = Callable[
    [float, float, int, int], None
]  # begin of a row of steps and its ms, steps, decodes in each
# the engine is named by its number
Sink = Callable[[int, Task], None]


@dataclass(slots=True)
class EngineHooks:
    """Whom the engine asks and tells. load: begins what a task needs from elsewhere; Engine.loaded() ends it."""

    find: Callable[
        [int, Task, int], int
    ]  # tokens that another instance holds behind so many blocks; notes which
    load: Callable[[int, Task, int, int], None]  # tokens from other instances, tokens from host memory
    first_token: Sink
    finished: Sink
    computed: Sink  # of a prefill: so much of its prompt is there, and more is to come
