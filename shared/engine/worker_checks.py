"""Whether a worker takes a Generate. Pure: the shell acts on the answer."""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import ClusterError, Draining, InvalidRequest, Overloaded, PromptTooLong, StaleEpoch
from shared.grammar_limits import too_large
from shared.ids import Epoch
from shared.kv.packed_ids import PackedIds, largest_id
from shared.wire.requests import (
    LARGEST_WEIGHT,
    LEAST_WEIGHT,
    MAX_SCORES,
    Generate,
    can_continue,
    num_scores,
    too_many,
)

MAX_INT32 = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Refusal:
    """Becomes a Failed message."""

    code: str
    message: str
    retryable: bool


def refusal(kind: type[ClusterError], message: str) -> Refusal:
    """A refusal with the code and the retryability of an error class."""
    return Refusal(kind.code, message, kind.retryable)


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What a worker can take, fixed at start."""

    vocab_size: int
    max_model_len: int
    max_inflight: int


def check_state(
    message: Generate, *, epoch: Epoch, draining: bool, num_inflight: int, limits: WorkerLimits
) -> Refusal | None:
    """May this worker take anything now? Epoch 0: not registered yet."""
    if epoch == 0 or message.instance_epoch != epoch:
        text = f"the request is for epoch {message.instance_epoch}, this instance runs epoch {epoch}"
        return refusal(StaleEpoch, text)
    if draining:
        return refusal(Draining, "the instance is shutting down")
    if num_inflight >= limits.max_inflight:
        return refusal(Overloaded, f"{num_inflight} requests are held already")
    return None


def check_prompt(message: Generate, raw: Sequence[bytes], *, limits: WorkerLimits) -> PackedIds | Refusal:
    """The prompt's token ids, or why this request can never run."""
    if len(raw) != 1 or not raw[0] or len(raw[0]) % 4:
        sizes = [len(frame) for frame in raw]
        return refusal(
            InvalidRequest, f"the prompt must be one frame of whole u32 token ids, got {sizes} bytes"
        )
    num_tokens = len(raw[0]) // 4
    if num_tokens >= limits.max_model_len:
        text = f"a prompt of {num_tokens} tokens leaves no room in a context of {limits.max_model_len}"
        return refusal(PromptTooLong, text)
    if (largest := largest_id(raw[0])) >= limits.vocab_size:
        return refusal(InvalidRequest, f"token id {largest} is not in a vocabulary of {limits.vocab_size}")
    if reason := _unfit(message, num_tokens, limits):
        return refusal(InvalidRequest, reason)
    if not LEAST_WEIGHT <= message.weight <= LARGEST_WEIGHT:
        return refusal(InvalidRequest, f"a weight of {message.weight} is not one of a tenant")
    if count := message.num_output_tokens:
        if not 0 < count < min(num_tokens, message.sampling.max_tokens):
            text = f"{count} of {num_tokens} tokens cannot be output of at most {message.sampling.max_tokens}"
            return refusal(InvalidRequest, text)
        if not can_continue(message.sampling):
            return refusal(InvalidRequest, "this request cannot go on behind output made elsewhere")
    if message.stage == "prefill" and message.handoff_to is None:
        return refusal(InvalidRequest, "a prefill stage must name who takes over")
    return PackedIds(bytes(raw[0]))


def _unfit(message: Generate, num_tokens: int, limits: WorkerLimits) -> str:
    """Why an engine cannot take what the request asks for; "": it can. What it does not look at itself is here.

    It would raise in a step, or write beside its logits, and end with all that it runs.
    """
    spec = message.sampling
    if spec.max_tokens < 0 or spec.n < 1:
        return "max_tokens must not be negative, n at least 1"
    if num_tokens + max(spec.max_tokens, spec.min_tokens) > MAX_INT32:
        return f"{num_tokens} prompt tokens and {spec.max_tokens} more cannot be counted"
    if found := too_many(spec):
        return found[1]
    if spec.structured is not None and (reason := too_large(spec.structured)):
        return f"{reason}."
    ids = spec.stop_token_ids
    if ids and not (min(ids) >= 0 and max(ids) < limits.vocab_size):
        return f"a stop token id is not in a vocabulary of {limits.vocab_size}"
    if max(spec.logprobs or 0, spec.prompt_logprobs or 0) > limits.vocab_size:
        return f"more alternatives than a vocabulary of {limits.vocab_size} has"
    if not all(-100 <= bias <= 100 for bias in spec.logit_bias.values()):
        return "a logit bias lies between -100 and 100"
    is_scored = message.handoff is None and not message.num_output_tokens  # else it was done before
    if is_scored and (cost := num_scores(spec, num_tokens)) > MAX_SCORES:
        return f"{cost} prompt log probabilities are asked for, at most {MAX_SCORES} are made"
    return ""
