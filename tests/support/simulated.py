"""Small workloads for the simulator, made by code."""

import json
from random import Random

from loadtest.simulator.prices import LinearPrices
from loadtest.simulator.request import SimRequest, block_name, from_workload
from loadtest.workloads.request import Answer, Request, Segment, content_id
from loadtest.workloads.tokens import planned_answer

BLOCK_TOKENS = 64
PRICES = LinearPrices(
    step_base_ms=2.0, token_ms=0.05, context_ms=2e-4, kv_bytes_per_token=1000, max_batched_tokens=512
)


def conversations(seed, *, sessions=6, turns=4, gap_ms=300.0):
    """Turns that repeat their conversation, each after the answer to the one before; some prompts are asked twice."""
    rng = Random(seed)
    requests, texts, last, at_ms = [], {}, {}, 0.0
    for number in range(sessions * turns):
        at_ms += rng.expovariate(1 / gap_ms)
        session = number % sessions
        prompt = (*texts.get(session, ()), Segment(content_id(seed, number), rng.randrange(5, 300)))
        output = rng.randrange(1, 40)
        requests.append(
            Request(
                request_id=number,
                arrival_ms=at_ms,
                session=f"s{session}",
                turn=number // sessions,
                prompt=prompt,
                output_tokens=output,
                depends_on=last.get(session),
                think_ms=rng.uniform(0, 200),
            )
        )
        texts[session] = (*prompt, Answer(number, output))
        last[session] = number
        if rng.random() < 0.3:
            again = 1000 + number
            at_ms += gap_ms
            requests.append(
                Request(again, at_ms, f"again-{number}", 0, prompt_of_nobody(prompt), rng.randrange(1, 40))
            )
    return from_workload(requests, BLOCK_TOKENS)


def prompt_of_nobody(prompt):
    """The same tokens without waiting for answers: what was planned stands for them."""
    return tuple(planned_answer(part) if isinstance(part, Answer) else part for part in prompt)


def plain(number, at_ms, prompt, output, *, blocks=False):
    """A request that shares nothing; without blocks nothing of it is ever cached."""
    names = tuple(block_name(1000 * number + n) for n in range(-(-prompt // BLOCK_TOKENS))) if blocks else ()
    return SimRequest(number, at_ms, prompt, output, names)


def names(*numbers):
    """Blocks by number."""
    return [block_name(number) for number in numbers]


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
