"""Cases on which Quire must equal stock vLLM token for token. Prompts are real documentation text."""

import pydoc_data.topics
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

LENGTHS_TOKENS = [
    5, 9, 17, 31, 32, 33, 47, 63, 64, 65, 96, 100, 128, 161, 200, 257, 320, 400, 511, 640, 777, 1000, 1280, 1500,
]  # fmt: skip
SECOND_TURNS_AFTER = [33, 64, 100, 257, 777, 1500]
ANSWER_TOKENS, LONG_ANSWER_TOKENS = 24, 200
SCHEMA = (
    '{"type":"object","properties":{"name":{"type":"string","maxLength":12},"age":{"type":"integer"}},'
    '"required":["name","age"],"additionalProperties":false}'
)


def prompts(model_dir: Path) -> dict[int, list[int]]:
    """A prompt of each length, all different from their first block on."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    text = "\n".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics))
    ids = tokenizer.encode(text[:400_000], add_special_tokens=False).ids
    rng = random.Random(20)
    out = {}
    for length in LENGTHS_TOKENS:
        start = rng.randrange(0, len(ids) - length)
        out[length] = ids[start : start + length]
    return out


def long_answer(model_dir: Path) -> dict[str, Any]:
    """A case of its own, for tests that want an answer to go on for a while."""
    params = {"temperature": 0.0, "max_tokens": LONG_ANSWER_TOKENS, "ignore_eos": True}
    return {"id": "long-answer", "prompt": prompts(model_dir)[1500], "params": params}


# Sampling parameters that the model's generation_config.json also names are always given: the gateway applies its
# values where a request is silent, as `vllm serve` does and vLLM's offline API does not.
def build_cases(model_dir: Path, eos_token_id: int) -> list[dict[str, Any]]:
    """Every case of the claim "tokens equal stock vLLM's", in an order that resolves references."""
    texts = prompts(model_dir)
    greedy = {"temperature": 0.0, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    cases: list[dict[str, Any]] = [
        {"id": f"greedy-{n}", "prompt": texts[n], "params": dict(greedy)} for n in LENGTHS_TOKENS
    ]
    for n in SECOND_TURNS_AFTER:
        more = texts[47] if n != 47 else texts[63]
        cases.append(
            {"id": f"second-{n}", "after": f"greedy-{n}", "prompt": more[:40], "params": dict(greedy)}
        )
    return cases + sampling_cases(texts, greedy) + ending_cases(texts, greedy, eos_token_id)


SAMPLED = {"temperature": 0.9, "top_p": 0.95, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}


def sampling_cases(texts: dict[int, list[int]], greedy: dict[str, Any]) -> list[dict[str, Any]]:
    """Seeds, filters, log probabilities, penalties, grammars, several choices."""
    sampled = SAMPLED
    cases: list[dict[str, Any]] = [
        {"id": f"seeded-{n}", "prompt": texts[n], "params": {**sampled, "seed": seed + 1}}
        for seed, n in enumerate((31, 100, 400))
    ]
    return [
        *cases,
        {
            "id": "top-k-min-p",
            "prompt": texts[96],
            "params": {**sampled, "seed": 9, "top_k": 20, "min_p": 0.02},
        },
        {"id": "logprobs-greedy", "prompt": texts[65], "params": {**greedy, "logprobs": 3}},
        {"id": "logprobs-seeded", "prompt": texts[128], "params": {**sampled, "seed": 4, "logprobs": 2}},
        {
            "id": "penalties",
            "prompt": texts[161],
            "params": {
                **greedy,
                "presence_penalty": 1.2,
                "frequency_penalty": 0.7,
                "repetition_penalty": 1.1,
            },
        },
        {
            "id": "penalties-seeded",
            "prompt": texts[33],
            "params": {**sampled, "seed": 6, "presence_penalty": 0.9, "frequency_penalty": 0.4},
        },
        {
            "id": "json-schema",
            "prompt": texts[47],
            "structured": SCHEMA,
            "params": {"temperature": 0.0, "max_tokens": 60},
        },
        {
            "id": "json-schema-seeded",
            "prompt": texts[200],
            "structured": SCHEMA,
            "params": {"temperature": 0.7, "top_p": 1.0, "seed": 11, "max_tokens": 60},
        },
        {"id": "n3-seeded", "prompt": texts[320], "params": {**sampled, "seed": 21, "n": 3}},
        {"id": "n3-short", "prompt": texts[17], "params": {**sampled, "seed": 22, "n": 3}},
    ]


def ending_cases(
    texts: dict[int, list[int]], greedy: dict[str, Any], eos_token_id: int
) -> list[dict[str, Any]]:
    """Everything that may end an answer, on its first token too."""
    sampled = SAMPLED
    return [
        {"id": "stop-crossing", "stop_crossing": "greedy-64", "prompt": texts[64], "params": dict(greedy)},
        {
            "id": "stop-crossing-long",
            "stop_crossing": "greedy-257",
            "prompt": texts[257],
            "params": dict(greedy),
        },
        {
            "id": "eos-first",
            "prompt": texts[63],
            "params": {"temperature": 0.0, "max_tokens": 8, "logit_bias": {str(eos_token_id): 100.0}},
        },
        {"id": "max-tokens-1", "prompt": texts[100], "params": {**greedy, "max_tokens": 1}},
        {"id": "max-tokens-1-seeded", "prompt": texts[9], "params": {**sampled, "seed": 30, "max_tokens": 1}},
        {"id": "max-tokens-2", "prompt": texts[511], "params": {**greedy, "max_tokens": 2}},
        {"id": "eos-respected", "prompt": texts[5], "params": {"temperature": 0.0, "max_tokens": 64}},
        {
            "id": "min-tokens",
            "prompt": texts[32],
            "params": {
                "temperature": 0.0,
                "max_tokens": 12,
                "min_tokens": 4,
                "logit_bias": {str(eos_token_id): 100.0},
            },
        },
    ]
