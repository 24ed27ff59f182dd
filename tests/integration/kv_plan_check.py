"""Two workers that hold nothing alike: one computes a prompt, the other is told to fetch it or to compute it too."""

import asyncio
import random
from dataclasses import dataclass

from shared.testing.scripted_gateway import ScriptedGateway
from shared.wire.requests import Finished, KvPlan, StageReceipt

PROMPT_TOKENS = 330
MAX_TOKENS = 12


@dataclass
class Outcome:
    """What each worker answered."""

    first: list[int]
    second: list[int]
    receipt: StageReceipt  # of the second


def ask_both(holder: tuple[str, int], reader: tuple[str, int], plan: KvPlan, *, seed: int) -> Outcome:
    """A prompt nobody knows, first to the holder, then to the reader under this plan. (endpoint, epoch) each."""
    rng = random.Random(seed)
    prompt = [rng.randrange(100, 1_000) for _ in range(PROMPT_TOKENS)]

    async def run() -> Outcome:
        async with ScriptedGateway(*holder) as one, ScriptedGateway(*reader) as two:
            one.generate("first", prompt, max_tokens=MAX_TOKENS)
            assert isinstance(await one.end_of("first"), Finished)
            two.generate("second", prompt, max_tokens=MAX_TOKENS, kv=plan)
            end = await two.end_of("second")
            assert isinstance(end, Finished), end
            return Outcome(one.tokens["first", 0], two.tokens["second", 0], end.receipt)

    return asyncio.run(run())
