"""From token ids to running calls: block hashes, prompt-tree look-up, context check, one Call per prompt."""

import time
from collections.abc import Sequence
from functools import lru_cache

from services.gateway import metrics
from services.gateway.call import Call, Sink
from services.gateway.deps import Gateway
from shared.errors import ClusterError, PromptTooLong
from shared.ids import BlockHash, RequestId
from shared.kv.block_hash import chain_seed, hash_blocks, pack_tokens
from shared.observe.log import get_logger
from shared.observe.trace import Span, start_span
from shared.wire.placement import PrefixHit
from shared.wire.requests import SamplingSpec

_log = get_logger("gateway.submit")

_seed = lru_cache(maxsize=1024)(chain_seed)


def output_budget(num_prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> int:
    """How many tokens may be generated: what was asked for, by default what the context has left.

    Raises: PromptTooLong, with OpenAI's wording.
    """
    if num_prompt_tokens >= max_model_len:
        raise PromptTooLong(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt has "
            f"{num_prompt_tokens} tokens. Please reduce its length.",
            param="messages",
        )
    left = max_model_len - num_prompt_tokens
    if max_tokens is None:
        return left
    if max_tokens > left:
        raise PromptTooLong(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{num_prompt_tokens + max_tokens} tokens ({num_prompt_tokens} in the prompt, {max_tokens} in "
            "the completion). Please reduce one of them.",
            param="max_tokens",
        )
    return max_tokens


async def find_hits(gateway: Gateway, packed: bytes, tenant: str, span: Span) -> list[PrefixHit]:
    """Who holds how much of the prompt's KV, as far as the prompt tree knows. No answer in time: no hits."""
    found, tree = gateway.description, gateway.tree
    if found is None or tree is None or found.block_tokens < 1:
        return []
    hashes = hash_blocks(_seed(found.fingerprint, tenant), packed, found.block_tokens)
    if not hashes:
        return []
    del hashes[gateway.settings.tree_max_blocks :]
    return await _lookup(gateway, hashes, span)


async def _lookup(gateway: Gateway, hashes: Sequence[BlockHash], span: Span) -> list[PrefixHit]:
    tree = gateway.tree
    assert tree is not None
    began_ns = time.monotonic_ns()
    child = start_span("tree.lookup", parent=span.traceparent)
    hits: list[PrefixHit] = []
    try:
        found = await tree.lookup(hashes)
        hits = [PrefixHit(instance, tokens) for instance, tokens in found.items() if tokens > 0]
    except ClusterError as error:
        metrics.LOOKUP_FAILURES.inc()
        child.fail(str(error))
        _log.debug("tree_lookup_failed", error=str(error))
    metrics.LOOKUP.observe((time.monotonic_ns() - began_ns) / 1e6)
    child.set("quire.blocks", len(hashes))
    child.set("quire.hits", len(hits))
    child.end()
    return hits


def make_call(
    gateway: Gateway,
    request_id: str,
    sink: Sink,
    *,
    packed: bytes,
    sampling: SamplingSpec,
    hits: list[PrefixHit],
    session: str,
    tenant: str,
    span: Span,
) -> Call:
    """A call that is ready for Cluster.submit()."""
    return Call(
        RequestId(request_id),
        sink,
        prompt=packed,
        sampling=sampling,
        hits=hits,
        session=session,
        tenant=tenant,
        span=span,
        limits=gateway.cluster.limits,
    )


__all__ = ["find_hits", "make_call", "output_budget", "pack_tokens"]
