"""From token ids to running calls: block hashes, prompt-tree look-up, context check, one Call per prompt."""

import time
from functools import lru_cache

from services.gateway import metrics
from services.gateway.call import NOTHING_FOUND, Call, FoundPrefix, Sink
from services.gateway.deps import Gateway
from shared.errors import InvalidRequest, PromptTooLong
from shared.ids import RequestId
from shared.kv.block_hash import chain_seed
from shared.observe.trace import Span, start_span
from shared.wire.requests import SamplingSpec

_seed = lru_cache(maxsize=1024)(chain_seed)


def check_fits(num_prompt_tokens: int, max_model_len: int, field: str) -> None:
    """Raises: PromptTooLong, with OpenAI's wording, unless the context has room for a token behind the prompt."""
    if num_prompt_tokens >= max_model_len:
        raise PromptTooLong(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt has "
            f"{num_prompt_tokens} tokens. Please reduce its length.",
            param=field,
        )


def output_budget(
    num_prompt_tokens: int,
    max_tokens: int | None,
    max_model_len: int,
    *,
    is_chat: bool,
    max_tokens_field: str,
) -> int:
    """How many tokens may be generated: what was asked for, by default what the context has left.

    Args: max_tokens_field: the body's field with max_tokens; "": a default.
    Raises: PromptTooLong, with OpenAI's wording; InvalidRequest for no tokens (not for "" where texts begin with one).
    """
    field = "messages" if is_chat else "prompt"
    if num_prompt_tokens == 0:
        raise InvalidRequest(f"{field} must not be empty", param=field)
    check_fits(num_prompt_tokens, max_model_len, field)
    left = max_model_len - num_prompt_tokens
    if max_tokens is None:
        return left
    if max_tokens > left:
        raise PromptTooLong(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{num_prompt_tokens + max_tokens} tokens ({num_prompt_tokens} in the prompt, {max_tokens} in "
            "the completion). Please reduce one of them.",
            param=max_tokens_field or field,
        )
    return max_tokens


async def find_hits(gateway: Gateway, packed: bytes, tenant: str, span: Span, request_id: str) -> FoundPrefix:
    """Who holds how much of the prompt's KV, as far as the prompt tree knows. No answer in time: nothing found.

    What an answer lacks of the blocks that were asked for before was evicted (scheduler, core/pressure.py).
    """
    found, tree = gateway.description, gateway.tree
    if found is None or tree is None or found.block_tokens < 1:
        return NOTHING_FOUND
    if not tree.up:  # before the hashes, which would be for nothing
        tree.skipped()
        return NOTHING_FOUND
    hashes = gateway.hash_memory(found.block_tokens).hashes(_seed(found.fingerprint, tenant), packed)
    if not hashes:
        return NOTHING_FOUND
    num_seen = gateway.asked_before.ask(hashes[: gateway.settings.tree_max_blocks])
    began_ns = time.monotonic_ns()
    child = start_span("tree.lookup", parent=span.traceparent, attributes={"quire.request_id": request_id})
    hits = await tree.ask(hashes, found.block_tokens)  # has its own deadline and never raises
    metrics.LOOKUP.observe((time.monotonic_ns() - began_ns) / 1e6)
    if child.recording:
        child.set("quire.blocks", len(hashes))
        child.set("quire.hits", len(hits or ()))
    child.end()
    if hits is None:  # not that nobody holds what was seen
        return NOTHING_FOUND
    return FoundPrefix(hits, num_seen * found.block_tokens)


def make_call(
    gateway: Gateway,
    request_id: str,
    sink: Sink,
    *,
    packed: bytes,
    sampling: SamplingSpec,
    found: FoundPrefix,
    session: str,
    tenant: str,
    span: Span,
    wants_receipt: bool,
) -> Call:
    """A call that is ready for Cluster.submit()."""
    return Call(
        RequestId(request_id),
        sink,
        prompt=packed,
        sampling=sampling,
        found=found,
        session=session,
        tenant=tenant,
        weight=gateway.weights.get(tenant, 1.0),
        span=span,
        limits=gateway.cluster.limits,
        budget=gateway.cluster.retry_budget,
        explain=wants_receipt or span.recording,
    )
