"""Runs a calibration plan on an engine, through its own generate(): random prompts that nobody has asked before.

Every request is private: nobody else sees its blocks, and clear_cache() at the end takes them away.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import pairwise
from statistics import median
from typing import cast

from shared.costmodel.observation import LEAST_GAPS, CalibrationPlan, Observation, Point, ProfileLimits
from shared.engine.interface import Engine, EngineRequest
from shared.engine.run_delay import waited_ms
from shared.errors import ResourceError
from shared.kv.block_hash import chain_seed
from shared.wire.requests import SamplingSpec

BEHIND_TOKENS = (
    512  # of the prompt that runs while others come; long enough for all of them to come meanwhile
)
AHEAD_S = 0.004  # until it is in a step of its own
CLEAR_TRIES, CLEAR_PAUSE_S = 50, 0.02  # the blocks of the last request are free a step after its output
WARM_UP = (Point(((256, 0),), output_tokens=4), Point(((32, 0), (32, 0)), output_tokens=3))


class _Output:
    """When one request's outputs came, in ms, and how much of its prompt was cached."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.times_ms: list[float] = []
        self.cached_tokens = 0


class Profiler:
    """Measures points on an idle engine. Use it from one task.

    Args: vocab_size: of the tokens in prompts; seed: of their choice.
    """

    def __init__(self, engine: Engine, vocab_size: int, *, seed: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._rng = random.Random(seed)
        self._seed = chain_seed(engine.description.fingerprint, f"quire-profile-{seed}")
        self._longest: list[int] = []  # a prompt that was run, to be repeated in part
        self._number = 0

    def limits(self, budget_ms: float) -> ProfileLimits:
        """What the engine can take."""
        description, engine = self._engine.description, self._engine
        return ProfileLimits(
            max_model_len=description.max_model_len,
            max_batched_tokens=engine.max_batched_tokens,
            max_running=engine.max_running,
            kv_tokens=engine.num_kv_blocks * description.block_tokens,
            block_tokens=description.block_tokens,
            budget_ms=budget_ms,
        )

    async def run_plan(self, budget_ms: float) -> list[Observation]:
        """All points that the budget allows, after a warm-up. Raises: what the engine's generate() raises."""
        limits = self.limits(budget_ms)
        plan, seen = CalibrationPlan(limits), []
        for point in WARM_UP:
            if max(n for n, _ in point.prompts) < limits.max_model_len - point.output_tokens:
                await self.run(point)
        for point in plan:
            begin_ms = _now_ms()
            seen += await self.run(point)
            plan.took(point, _now_ms() - begin_ms)
        return seen

    async def run(self, point: Point) -> list[Observation]:
        """Measure one point: at most one prefill or batch, and one decode. Raises: as run_plan."""
        outputs = [_Output(num_tokens) for num_tokens, _ in point.prompts]
        prompts = [self._prompt(*sizes) for sizes in point.prompts]
        start_ms, waited_before = _now_ms(), waited_ms()
        spare = self._engine.description.max_model_len - 1
        async with asyncio.TaskGroup() as group:
            ahead = None
            if point.behind:
                ahead = _Output(min(spare, self._engine.max_batched_tokens))  # nothing fits into its step
                group.create_task(self._generate(self._random(ahead.num_tokens), 1, ahead))
                await asyncio.sleep(AHEAD_S)
            begin_ms = _now_ms()
            for prompt, output in zip(prompts, outputs, strict=True):
                group.create_task(self._generate(prompt, point.output_tokens, output))
        if ahead is not None:
            begin_ms = ahead.times_ms[0]
        self._longest = max([self._longest, *prompts], key=len)
        sizes = tuple((output.num_tokens, output.cached_tokens) for output in outputs)
        taken_ms = max(output.times_ms[0] for output in outputs) - begin_ms
        waited_ratio = (waited_ms() - waited_before) / max(1e-3, _now_ms() - start_ms)
        seen = []
        if point.behind or len(outputs) == 1:
            kind = "batch" if point.behind else "prefill"
            seen.append(Observation(kind, taken_ms, sizes, waited_ratio=waited_ratio))
        return seen + _decode(outputs, waited_ratio)

    async def clear(self) -> bool:
        """Take away what was cached. False when the engine would not. Raises: PeerGone."""
        for _ in range(CLEAR_TRIES):
            if await self._engine.clear_cache():
                return True
            await asyncio.sleep(CLEAR_PAUSE_S)
        return False

    async def _generate(self, prompt: list[int], output_tokens: int, output: _Output) -> None:
        self._number += 1
        request = EngineRequest(
            engine_request_id=f"quire-profile-{self._number}",
            stage="colocated",
            prompt_token_ids=prompt,
            sampling=SamplingSpec(
                max_tokens=output_tokens, min_tokens=output_tokens, temperature=0.0, ignore_eos=True
            ),
            chain_seed=self._seed,
            private=True,
        )
        stream = cast(AsyncGenerator, self._engine.generate(request))
        async with aclosing(stream):
            async for delta in stream:
                output.times_ms.append(_now_ms())
                if delta.kv_use is not None:
                    output.cached_tokens = delta.kv_use.tokens_engine + delta.kv_use.tokens_pool
                if delta.finish_reason in ("abort", "error"):
                    raise ResourceError(f"the engine ended a profile's request: {delta.finish_reason}")
        if not output.times_ms:
            raise ResourceError("the engine gave a profile's request no output")

    def _prompt(self, num_tokens: int, cached_tokens: int) -> list[int]:
        if len(self._longest) <= cached_tokens:
            return self._random(num_tokens)  # nothing to repeat: what was cached is measured, not assumed
        return self._longest[:cached_tokens] + self._random(num_tokens - cached_tokens)

    def _random(self, num_tokens: int) -> list[int]:
        low = min(10, self._vocab_size - 1)  # below are special tokens, in many vocabularies
        return self._rng.choices(range(low, self._vocab_size), k=num_tokens)


def _decode(outputs: list[_Output], waited_ratio: float) -> list[Observation]:
    """The median gap between outputs while every request decodes; [] when there are too few."""
    begin_ms = max(output.times_ms[0] for output in outputs)
    end_ms = min(output.times_ms[-1] for output in outputs)
    gaps: list[float] = []
    context_tokens = 0
    for output in outputs:
        times = [at for at in output.times_ms if begin_ms <= at <= end_ms]
        gaps += [b - a for a, b in pairwise(times)]
        context_tokens += output.num_tokens + len(output.times_ms) // 2
    if len(gaps) < LEAST_GAPS * len(outputs):
        return []
    return [Observation("decode", median(gaps), (), len(outputs), context_tokens, waited_ratio)]


def _now_ms() -> float:
    return time.perf_counter() * 1e3
