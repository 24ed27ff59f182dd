"""Requests that an engine does not take as they are, and how its output becomes what was asked for.

Two cases, both answered by one run of one choice: several greedy choices, which are all the same one and
which vLLM refuses; and `max_tokens` 0, the prompt alone, where an engine samples one token at least.
"""

import dataclasses

import msgspec

from shared.engine.interface import EngineDelta
from shared.wire.requests import SamplingSpec

GREEDY_BELOW = 1e-5  # vLLM's own border


def engine_spec(spec: SamplingSpec) -> tuple[SamplingSpec, int]:
    """What the engine is told, and of how many choices its one choice is the output. Cost: none if taken as is."""
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
