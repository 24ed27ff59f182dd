"""Loads of bench_offload.py on any stream of tokens: a pool of prompts that outgrows the GPU's cache; decode beside it.

reuse    clients ask for pool prompts in a circle: when one comes again, the GPU's cache has forgotten it, host memory
         has not
new      clients ask for prompts that nobody has seen: everything is stored, nothing loaded
quiet    a batch decodes alone
control  beside short prompts, one after another, that compute as much as a loaded one
swap     beside pool prompts, one after another
"""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from loadtest.pages_engine import Stream, one


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens and requests. The pool has to outgrow the GPU's cache, and to fit into host memory."""

    pool: int = 40
    prompt_tokens: int = 2048
    answer_tokens: int = 32
    clients: int = 8
    seconds: float = 6.0
    streams: int = 16
    stream_prompt_tokens: int = 256
    stream_tokens: int = 256
    block_tokens: int = 16
    vocabulary: int = 128_256


class Phases:
    """One engine's loads. The pool is seeded: every engine gets the same one."""

    def __init__(self, stream: Stream, sizes: Sizes, seed: int = 11) -> None:
        self._stream = stream
        self._sizes = sizes
        self._rng = random.Random(seed)
        self._pool = [self._prompt(sizes.prompt_tokens) for _ in range(sizes.pool)]
        self._circle = itertools.cycle(range(sizes.pool))
        self._number = 0

    async def run(self, name: str) -> dict[str, Any]:
        """One sample: begin_s and end_s by this machine's monotonic clock, and what the phase is about."""
        begin = time.perf_counter()
        if name in ("warm", "fill"):
            found = await self._fill(2 if name == "warm" else self._sizes.pool)
        elif name in ("reuse", "new"):
            found = await self._clients(self._pooled if name == "reuse" else self._fresh)
        else:
            beside = {"quiet": None, "control": self._short, "swap": self._pooled}[name]
            found = await self._decode(beside)
        return {"load": name, "begin_s": round(begin, 6), "end_s": round(time.perf_counter(), 6), **found}

    def _prompt(self, tokens: int) -> list[int]:
        return [self._rng.randrange(10, self._sizes.vocabulary) for _ in range(tokens)]

    def _pooled(self) -> list[int]:
        return self._pool[next(self._circle)]

    def _fresh(self) -> list[int]:
        return self._prompt(self._sizes.prompt_tokens)

    def _short(self) -> list[int]:
        """As many tokens as a loaded prompt still computes: its last block."""
        return self._prompt(self._sizes.block_tokens)

    async def _ask(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        self._number += 1
        return await one(self._stream, f"offload-{self._number}", prompt, max_tokens)

    async def _fill(self, count: int) -> dict[str, Any]:
        """Every prompt once, in order, so that the pool is in host memory; then some steps that end the stores."""
        for first in range(0, count, self._sizes.clients):
            await asyncio.gather(
                *(
                    self._ask(prompt, 1)
                    for prompt in self._pool[first : min(first + self._sizes.clients, count)]
                )
            )
        await self._ask(self._short(), 8)
        return {}

    async def _clients(self, prompt: Callable[[], list[int]]) -> dict[str, Any]:
        end = time.perf_counter() + self._sizes.seconds
        done: list[dict[str, Any]] = []

        async def client() -> None:
            while time.perf_counter() < end:
                done.append(await self._ask(prompt(), self._sizes.answer_tokens))

        await asyncio.gather(*(client() for _ in range(self._sizes.clients)))
        return {
            "requests": len(done),
            "ttft_ms": [each["ttft_ms"] for each in done],
            "tpot_ms": [tpot for each in done if (tpot := tpot_ms(each)) is not None],
        }

    async def _decode(self, beside: Callable[[], list[int]] | None) -> dict[str, Any]:
        """TPOT of every stream; requests beside them come one after another, the same way in every case."""
        sizes = self._sizes
        streams = [
            asyncio.ensure_future(self._ask(self._prompt(sizes.stream_prompt_tokens), sizes.stream_tokens))
            for _ in range(sizes.streams)
        ]
        count = 0
        while beside is not None and not all(each.done() for each in streams):
            await self._ask(beside(), 1)
            count += 1
        done = await asyncio.gather(*streams)
        tpots = [tpot for each in done if (tpot := tpot_ms(each)) is not None]
        return {
            "requests": count,
            "tpot_ms": tpots,
            "gaps_ms": list(_some(g for d in done for g in d["gaps_ms"])),
        }


def tpot_ms(done: dict[str, Any]) -> float | None:
    """(last token - first) / (tokens - 1); None for a single token."""
    if done["tokens"] < 2:
        return None
    return round(sum(done["gaps_ms"]) / (done["tokens"] - 1), 4)


def _some(gaps: Iterator[float], most: int = 5000) -> Iterator[float]:
    found = list(gaps)
    return iter(found[:: max(1, len(found) // most)])
