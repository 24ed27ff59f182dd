"""gateway <-> worker: generate, abort, tokens. DEALER at the gateway, ROUTER at the worker.

Generate carries one raw frame: the prompt's token ids as little-endian u32. A worker answers each
attempt with any number of Tokens messages and exactly one of Prefilled, Finished or Failed. Replies name
the attempt: a gateway drops what belongs to an attempt that it gave up.
"""

from typing import Literal

from msgspec import Struct

from shared.ids import Epoch, HandoffId, InstanceId, RequestId
from shared.wire.codec import Channel
from shared.wire.handoff import HandoffState

Stage = Literal["prefill", "decode", "colocated"]
GREEDY_BELOW = 1e-5  # temperatures, which are 0 for the engine too
MAX_LOGIT_BIAS = 1_024  # entries: as many as vLLM has room for on a GPU
MAX_STOP_LIST = 1_024  # stop_token_ids: engines copy it for each choice and search it at each token; and
MAX_STOP_IDS = 100  # with min_tokens: it has room for 128, what the model itself ends with among them
# Of a prompt's log probabilities, by num_scores(): Python objects are made of them in one go, by vLLM on a worker's
# loop and by gateways on theirs, and a peer that is silent for 1.5 s is given up. So many take either less than 0.6 s.
# One alternative for 131,072 prompt tokens, or 20 for 22,795.
MAX_SCORES = 1 << 19


class StructuredSpec(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A grammar for the output; the engine's structured-output backend enforces it."""

    kind: Literal["json_schema", "json_object", "regex", "choice", "grammar"]
    value: str = ""  # JSON text of the schema, the pattern, the JSON list of choices, or the EBNF


class SamplingSpec(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to sample. Stop strings are not here: the gateway detokenizes and watches for them."""

    max_tokens: int  # 0: the prompt only, for its log probabilities; every choice ends at once with "length"
    min_tokens: int = 0
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int | None = None  # the gateway sets one for every request that samples
    seed_is_free: bool = False  # the gateway drew it: another seed is as good
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives per output token; 0: only the sampled token's
    prompt_logprobs: int | None = None
    structured: StructuredSpec | None = None


def can_continue(spec: SamplingSpec) -> bool:
    """Whether output may count as prompt: a request over the prompt and m output tokens, with m fewer to make, says
    what the first one would have gone on to say.

    Not so with several choices, with penalties (they count output apart), a grammar (it begins with the output), or the
    client's own seed (its draws are counted from the first token).
    """
    free = spec.temperature < GREEDY_BELOW or spec.seed_is_free
    penalized = spec.presence_penalty or spec.frequency_penalty or spec.repetition_penalty != 1.0
    return free and spec.n == 1 and not penalized and spec.structured is None


def too_many(spec: SamplingSpec) -> tuple[str, str] | None:
    """Of which field a request has more than an engine has room for, and the reason; None: of none.

    An engine would notice in a step, which ends it and whatever else it runs.
    """
    if (count := len(spec.logit_bias)) > MAX_LOGIT_BIAS:
        return "logit_bias", f"logit_bias has at most {MAX_LOGIT_BIAS} entries, got {count}."
    if (count := len(spec.stop_token_ids)) > MAX_STOP_LIST:
        return "stop_token_ids", f"stop_token_ids has at most {MAX_STOP_LIST} token ids, got {count}."
    if spec.min_tokens > 0 and (count := len(set(spec.stop_token_ids))) > MAX_STOP_IDS:
        reason = f"With min_tokens, stop_token_ids has at most {MAX_STOP_IDS} token ids, got {count}."
        return "stop_token_ids", reason
    return None


def num_scores(spec: SamplingSpec, num_prompt_tokens: int) -> int:
    """What a prompt's log probabilities cost, in entries; at most MAX_SCORES.

    A row has the token itself and `prompt_logprobs` alternatives, and costs as much as two more by itself.
    """
    if spec.prompt_logprobs is None:
        return 0
    return num_prompt_tokens * (spec.prompt_logprobs + 3) * spec.n


class HandoffTarget(Struct, frozen=True, kw_only=True):
    """Told to the prefill instance: who takes over, under which id its pages are to be leased."""

    handoff_id: HandoffId
    target: InstanceId


class KvPlan(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fetch or recompute (MemServe eq 2): how far pages of the prompt are brought from before it is computed.

    `reach` own: only what lies in the instance's own space; host: also from other spaces of its mempool; remote: also
    from the mempool at `source_mempool`. The rest says why: `source` holds so many leading tokens, as far as known,
    and they come by `path`, or are computed because that is quicker (`recompute`).
    """

    reach: Literal["own", "host", "remote"] = "host"
    source: InstanceId = InstanceId("")
    tokens: int = 0
    path: str = ""  # "peer": of the same mempool; "remote": of another host's; "dram"
    source_mempool: str = ""
    recompute: bool = False


LEAST_WEIGHT, LARGEST_WEIGHT = 0.001, 1_000.0  # of a tenant


class Generate(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="generate"):
    """Raw frame 0: prompt token ids, u32 little-endian, at least one.

    `num_output_tokens`: so many of the last ones were made for this request before, by a prefill stage that hands over
    with mode "continue" or by an attempt that was lost; only where can_continue(). `sampling` is the whole request's.
    """

    request_id: RequestId
    attempt: int
    stage: Stage
    instance_epoch: Epoch  # of the instance as the scheduler knew it; a worker refuses any other
    sampling: SamplingSpec
    handoff_to: HandoffTarget | None = None  # prefill only
    handoff: HandoffState | None = None  # decode only
    tenant_salt: str = ""
    priority: int = 0
    deadline_ms: int = 600_000  # a duration from receipt; then the worker aborts the request itself
    traceparent: str = ""
    kv: KvPlan | None = None  # prefill and colocated only; None: as with reach "host"
    weight: float = 1.0  # of its tenant in an engine's fair slices: LEAST_WEIGHT..LARGEST_WEIGHT
    num_output_tokens: int = 0


class Abort(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="abort"):
    """The client left or the attempt was given up. No answer.

    `handoff_id`: to the prefill instance, also when its stage has ended: nobody will claim these pages.
    """

    request_id: RequestId
    attempt: int
    handoff_id: HandoffId | None = None


class Alive(Struct, frozen=True, kw_only=True, tag="alive"):
    """Sent every ALIVE_INTERVAL_MS on every link to a worker. No answer.

    A ROUTER is not told when a peer goes. A gateway that has said Alive once and then nothing for
    ALIVE_TIMEOUT_MS is dead, or stood still: the worker ends what it runs for that connection, each with a
    retryable Failed for whoever still reads. A gateway that never says it
    is bounded by its requests' deadlines alone.
    """


ALIVE_INTERVAL_MS = 500
ALIVE_TIMEOUT_MS = 3_000

GatewayToWorker = Generate | Abort | Alive


class TokenLogprob(Struct, frozen=True, array_like=True):
    """One candidate token at one position."""

    token_id: int
    logprob: float
    rank: int


class StageReceipt(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a stage's KV came from and what it took. Durations in ms.

    Tokens are the prompt's, each counted once, as the first choice found them. Blocks and bytes are of all choices:
    the others find what the first brought (reused) and move what none shares, such as a partial last block.
    """

    instance: InstanceId
    stage: Stage
    queue_ms: float = 0.0
    fetch_ms: float = 0.0
    compute_ms: float = 0.0
    prompt_tokens: int = 0
    tokens_engine: int = 0  # found in the engine's own prefix cache
    tokens_pool: int = 0  # loaded from pages of the mempool; those that were brought for it are of these:
    tokens_peer: int = 0  # from another space of the same mempool
    tokens_dram: int = 0  # from host memory behind a GPU
    tokens_remote: int = 0  # from another host's mempool
    tokens_computed: int = 0
    blocks_moved: int = 0
    blocks_reused: int = 0
    bytes_moved: int = 0
    path: str = ""  # "memfd", or "cuda" for pages on a GPU
    handoff_mode: str = ""
    bytes_fetched: int = 0  # brought into the instance's space by its mempool, for this request
    fetch_path: str = ""  # "peer", "dram", "remote", or several with "+"
    room_wait_ms: float = 0.0  # decode: before its pages were fetched, for room in the engine's
    prefill_ms: float = 0.0  # colocated: of compute_ms, until the first token
    step_ms: float = 0.0  # of one choice: an output token after the first, on average; 0: there was none


class TokenChunk(Struct, frozen=True, array_like=True):
    """New tokens of one choice. finish_reason: "stop" | "length" | "abort" | "error" with the last ones."""

    request_id: RequestId
    attempt: int
    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_token_id: int | None = None  # the EOS or stop token that ended the choice; it is in token_ids
    logprobs: list[list[TokenLogprob]] | None = None  # per token: sampled first, then the alternatives
    # with a decode stage's first chunk, and where another choice found more: as far as it is known by then
    receipt: StageReceipt | None = None


class PromptScored(Struct, frozen=True, kw_only=True, tag="prompt_scored"):
    """The prompt's log probabilities, from a stage that streams: at most once, before the attempt's first chunk.

    One row a prompt token: the token itself, then the alternatives; None where nothing predicts it.
    """

    request_id: RequestId
    attempt: int
    prompt_logprobs: list[list[TokenLogprob] | None]


class Tokens(Struct, frozen=True, kw_only=True, tag="tokens"):
    """Everything that one engine step produced for one gateway."""

    chunks: list[TokenChunk]


class Prefilled(Struct, frozen=True, kw_only=True, tag="prefilled"):
    """End of a prefill stage. `handoff` None: the first token ended the request, `first` is all."""

    request_id: RequestId
    attempt: int
    first: TokenChunk
    receipt: StageReceipt
    handoff: HandoffState | None = None
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None


class Finished(Struct, frozen=True, kw_only=True, tag="finished"):
    """Every choice has ended; the last Tokens message came before this one."""

    request_id: RequestId
    attempt: int
    receipt: StageReceipt
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None  # always None: see PromptScored


class Failed(Struct, frozen=True, kw_only=True, tag="failed"):
    """The attempt ended without a result. `code` is a stable code of shared/errors.py."""

    request_id: RequestId
    attempt: int
    code: str
    message: str
    retryable: bool


WorkerToGateway = Tokens | PromptScored | Prefilled | Finished | Failed

TO_WORKER: Channel[GatewayToWorker] = Channel(b"quire.generate/1", GatewayToWorker)
TO_GATEWAY: Channel[WorkerToGateway] = Channel(b"quire.tokens/1", WorkerToGateway)
