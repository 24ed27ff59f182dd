"""What the mock engine says of a request, token by token: shared/testing/mock_tokens.py's, until something ends it."""

import asyncio
from dataclasses import dataclass, field

from shared.engine.interface import EngineDelta, EngineRequest, KvUse
from shared.errors import ClusterError
from shared.ids import BlockHash
from shared.testing.mock_tokens import MockVocabulary
from shared.wire.requests import TokenLogprob


@dataclass(slots=True)
class Running:
    """One request inside the engine."""

    request: EngineRequest
    hashes: list[BlockHash]
    states: list[int]  # one per choice
    submitted_at: float
    out: "asyncio.Queue[list[EngineDelta] | ClusterError]" = field(default_factory=asyncio.Queue)
    left_to_compute: int = 0
    made: int = 0
    ended: list[bool] = field(default_factory=list)
    use: KvUse = field(default_factory=KvUse)


class MockAnswers:
    """Args:
    max_model_len: tokens of a prompt and its answer together; the answer ends there by length, as vLLM's does.
    eos_after_tokens: an answer ends there by EOS, unless it ignores that; 0: never.
    """

    def __init__(self, vocabulary: MockVocabulary, *, max_model_len: int, eos_after_tokens: int) -> None:
        self._vocabulary = vocabulary
        self._max_model_len = max_model_len
        self._eos_after_tokens = eos_after_tokens

    def next(self, item: Running) -> list[EngineDelta]:
        """One more token of each choice that has not ended."""
        spec, deltas = item.request.sampling, []
        position, item.made = item.made, item.made + 1
        before = item.request.num_output_tokens
        most = min(spec.max_tokens, self._max_model_len - len(item.request.prompt_token_ids))
        if spec.max_tokens == 0:
            item.ended = [True] * spec.n
            deltas = [EngineDelta(index, [], "length") for index in range(spec.n)]
        for index, state in enumerate(item.states):
            if item.ended[index]:
                continue
            token = self._vocabulary.token(state, before + position)
            after = self._eos_after_tokens
            if after and before + item.made > after and not spec.ignore_eos:
                token = self._vocabulary.eos
            is_eos = token == self._vocabulary.eos and not spec.ignore_eos
            is_stop = item.made > spec.min_tokens and (is_eos or token in spec.stop_token_ids)
            reason = "stop" if is_stop else "length" if item.made >= most else None
            item.ended[index] = reason is not None
            deltas.append(
                EngineDelta(
                    index=index,
                    token_ids=[token],
                    finish_reason=reason,
                    stop_token_id=token if is_stop else None,
                    logprobs=None if spec.logprobs is None else [self._rows(token, spec.logprobs)],
                )
            )
        if position == 0 and spec.prompt_logprobs is not None:
            prompt = item.request.prompt_token_ids
            deltas[0].prompt_logprobs = [None, *(self._rows(t, spec.prompt_logprobs) for t in prompt[1:])]
        if position == 0:
            deltas[0].kv_use = item.use
        if all(item.ended):
            deltas[-1].request_done = True
            deltas[-1].kv_use = item.use
        return deltas

    def _rows(self, token: int, num_alternatives: int) -> list[TokenLogprob]:
        others = [v for v in self._vocabulary.visible if v != token][:num_alternatives]
        return [
            TokenLogprob(token, -0.25, 1),
            *(TokenLogprob(v, -1.0 - r, r + 2) for r, v in enumerate(others)),
        ]
