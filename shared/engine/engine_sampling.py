"""Requests that an engine does not take as they are, and how its output becomes what was asked for.

Two cases, both answered by one run of one choice: several greedy choices, which are all the same one and
which vLLM refuses; and `max_tokens` 0, the prompt alone, where an engine samples one token at least. And one that goes
on behind output made elsewhere: its draws must not be those of the tokens before.
"""

import dataclasses

import msgspec

from shared.engine.interface import EngineDelta
from shared.wire.requests import GREEDY_BELOW, SamplingSpec

SEED_STRIDE = 0x9E37_79B9_7F4A_7C15  # odd: no two lengths give one seed
SEED_MASK = (1 << 63) - 1


def going_on(spec: SamplingSpec, num_output_tokens: int) -> SamplingSpec:
    """What is left to make behind so many tokens, which the engine takes for prompt. Only where can_continue()."""
    if not num_output_tokens:
        return spec
    return msgspec.structs.replace(
        spec,
        max_tokens=spec.max_tokens - num_output_tokens,
        min_tokens=max(0, spec.min_tokens - num_output_tokens),
        prompt_logprobs=None,
    )


def engine_spec(spec: SamplingSpec, num_output_tokens: int = 0) -> tuple[SamplingSpec, int]:
    """What the engine is told, and of how many choices its one choice is the output. Cost: none if taken as is."""
    if num_output_tokens and spec.seed is not None:
        other = (spec.seed + num_output_tokens * SEED_STRIDE) & SEED_MASK
        spec = msgspec.structs.replace(spec, seed=other)
    if spec.max_tokens == 0:
        # the token is thrown away: nothing may depend on it, and no grammar is compiled for it
        plain = msgspec.structs.replace(
            spec, n=1, max_tokens=1, min_tokens=0, temperature=0.0, seed=None, logprobs=None, structured=None
        )
        return plain, spec.n
    if spec.n > 1 and spec.temperature < GREEDY_BELOW:
        return msgspec.structs.replace(spec, n=1), spec.n
    return spec, 1


def asked_deltas(deltas: list[EngineDelta], spec: SamplingSpec, copies: int) -> list[EngineDelta]:
    """The engine's deltas as `spec` wants them; the request is done with the last copy of the last."""
    if spec.max_tokens == 0:
        deltas = [_without_output(delta) for delta in deltas]
    if copies == 1:
        return deltas
    return [
        dataclasses.replace(delta, index=index, request_done=delta.request_done and index == copies - 1)
        for delta in deltas
        for index in range(copies)
    ]


def _without_output(delta: EngineDelta) -> EngineDelta:
    """The prompt has no end of its own: however the token ended it, the length was reached."""
    reason = delta.finish_reason
    reason = "length" if reason == "stop" else reason
    return dataclasses.replace(delta, token_ids=[], logprobs=None, stop_token_id=None, finish_reason=reason)
