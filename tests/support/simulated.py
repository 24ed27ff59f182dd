"""Small workloads for the simulator, made by code."""

import json
from random import Random

from loadtest.simulator.prices import LinearPrices
from loadtest.simulator.request import BlockNames, SimRequest

BLOCK_TOKENS = 64
PRICES = LinearPrices(
    step_base_ms=2.0, token_ms=0.05, context_ms=2e-4, kv_bytes_per_token=1000, max_batched_tokens=512
)


def conversations(seed, *, sessions=6, turns=4, gap_ms=300.0, block_tokens=BLOCK_TOKENS):
    """Turns that repeat their conversation, each after the answer to the one before."""
    rng, names = Random(seed), BlockNames()
    requests, texts, last, at_ms = [], {}, {}, 0.0
    for number in range(sessions * turns):
        at_ms += rng.expovariate(1 / gap_ms)
        session = number % sessions
        text = texts.setdefault(session, [0])
        text.extend(rng.randrange(1 << 30) for _ in range(rng.randrange(5, 300)))
        prompt, output = len(text), rng.randrange(1, 40)
        answer = [rng.randrange(1 << 30) for _ in range(output)]
        whole = [*text, *answer[:-1]]
        chain = [hash(tuple(whole[at : at + block_tokens])) for at in range(0, len(whole), block_tokens)]
        of_prompt = [hash(tuple(text[at : at + block_tokens])) for at in range(0, prompt, block_tokens)]
        full = len(whole) // block_tokens
        requests.append(
            SimRequest(
                request_id=f"q{number}",
                arrival_ms=at_ms,
                prompt_tokens=prompt,
                output_tokens=output,
                blocks=names.of(of_prompt),
                output_blocks=names.of(chain[:full])[prompt // block_tokens :],
                session=f"s{session}",
                depends_on=last.get(session),
                think_ms=rng.uniform(0, 200),
            )
        )
        text += answer
        last[session] = number
    return requests


def mooncake_lines(seed, *, count=120, groups=5, gap_ms=40):
    """A trace in Mooncake's format: groups of requests that share a beginning."""
    rng, at_ms, ids, lines = Random(seed), 0, 0, []
    shared = [list(range(1000 * g, 1000 * g + rng.randrange(2, 6))) for g in range(groups)]
    for _ in range(count):
        at_ms += round(rng.expovariate(1 / gap_ms))
        own = rng.randrange(1, 4)
        hash_ids = [*rng.choice(shared), *range(100_000 + ids, 100_000 + ids + own)]
        ids += own
        length = 512 * (len(hash_ids) - 1) + rng.randrange(1, 513)
        row = {
            "timestamp": at_ms,
            "input_length": length,
            "output_length": rng.randrange(1, 60),
            "hash_ids": hash_ids,
        }
        lines.append(json.dumps(row))
    return lines
