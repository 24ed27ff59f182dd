"""Hashes of a request's blocks in the engine core: Quire's own chain, equal in every process of the cluster.

The front of a request that came with pages hashed its prompt to ask for them. Those of a long prompt are taken over:
the engine would need as long again, while the client waits. They come with a digest of them and of the tokens that they
were taken of; where that is not the digest of the tokens that are here, the engine hashes by itself.
"""

import logging
from typing import Any

from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from shared.engine.long_lists import TokenIds
from shared.ids import BlockHash
from shared.kv.block_hash import HASH_BYTES, chain_digest, chain_seed, hash_blocks, pack_tokens, split_hashes

logger = logging.getLogger(__name__)

EXTRA_ARGS_KEY = "quire"  # in SamplingParams.extra_args
LONG_BLOCKS = 128  # fewer are hashed in 0.1 ms


def given(request: Request | EngineCoreRequest) -> dict[str, Any]:
    """What the request's front sent along."""
    params = request.sampling_params
    return (params.extra_args or {}).get(EXTRA_ARGS_KEY, {}) if params is not None else {}


def seed_of(request: Request) -> BlockHash:
    """First link of the request's hash chain, as its front gave it."""
    return BlockHash(given(request).get("seed") or chain_seed("", ""))


def quire_block_hasher(block_tokens: int, _hash_function: Any) -> Any:
    """In place of vLLM's. Cost: 2 us a block, and half of it for those that the front hashed."""

    def hash_new_blocks(request: Request) -> list[BlockHash]:
        done = len(request.block_hashes)
        full = request.num_tokens // block_tokens
        if full <= done:
            return []
        out = [] if done else _of_front(request, block_tokens)
        link = BlockHash(request.block_hashes[-1]) if done else out[-1] if out else seed_of(request)
        tokens = _packed(request, (done + len(out)) * block_tokens, full * block_tokens)
        return out + hash_blocks(link, tokens, block_tokens)

    return hash_new_blocks


def _packed(request: Request, begin: int, end: int) -> bytes:
    """Its tokens `begin` to `end`. Cost: a copy where it is a TokenIds, else 20 to 40 us for 1,000."""
    ids = request.prompt_token_ids
    if isinstance(ids, TokenIds) and 4 * end <= len(ids.packed):
        return ids.packed[4 * begin : 4 * end]
    return pack_tokens(request.all_token_ids[begin:end])


def _of_front(request: Request, block_tokens: int) -> list[BlockHash]:
    """Of the prompt's first whole blocks."""
    params = given(request)
    num_tokens = min(params.get("handed_tokens") or request.num_prompt_tokens, request.num_prompt_tokens)
    raw = params.get("hashes", b"")[: num_tokens // block_tokens * HASH_BYTES]
    if len(raw) < LONG_BLOCKS * HASH_BYTES:
        return []
    found, tokens = split_hashes(raw), _packed(request, 0, request.num_prompt_tokens)
    is_same = chain_digest(tokens, params["hashes"]) == params.get("digest")
    # the digest knows no seed, the first link does
    if not is_same or hash_blocks(seed_of(request), tokens[: 4 * block_tokens], block_tokens) != found[:1]:
        logger.error("request %s came with hashes of other tokens", request.request_id)
        return []
    return found


def agreed_hashes(raw: bytes, own: list[BlockHash]) -> list[BlockHash]:
    """The leading ones of `raw` that are this engine's own too. Cost: one comparison where all are."""
    size = min(len(raw) // HASH_BYTES, len(own))
    mine = own[:size]
    if raw[: size * HASH_BYTES] == b"".join(mine):
        return mine
    agreed: list[BlockHash] = []
    for theirs, known in zip(split_hashes(raw), mine, strict=False):
        if theirs != known:
            break
        agreed.append(theirs)
    return agreed
