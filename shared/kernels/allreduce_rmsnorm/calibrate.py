"""Measures at start which way is the fastest at which size in a group: one-shot or two-shot, its engine and its CTAs.

All ranks have the same answer: of each replay the slowest rank's time counts.
"""

from collections.abc import Sequence
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from shared.kernels.allreduce_rmsnorm.fused import CudaFused
from shared.kernels.allreduce_rmsnorm.plan import (
    ELEMENT_BYTES,
    Algorithm,
    Engine,
    Times,
    Way,
    make_plan,
    num_ctas,
    times_from_rows,
)
from shared.kernels.allreduce_rmsnorm.timing import Clock

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
# Two-shot for sure, unless one-shot has won so far. Two-shot's engines and CTAs differ by a few percent there, so that
# few sizes do.
MORE_TOKENS = (1024, 2048, 4096, 8192, 16_384, 32_768)
BUDGETS = (4, 8, 16, 32)
BUDGET_TOKENS = 128  # parts of woven steps have more
ROUNDS = 3
EPS = 1e-5


def two_shot_ways(bulk: Engine) -> list[Way]:
    """What may be tried at a size, every SM first. Args: bulk: the engine of few SMs; PLAIN where there is no other."""
    whole = [Way(engine) for engine in dict.fromkeys((Engine.PLAIN, bulk))]
    return whole + [Way(bulk, num_sms) for num_sms in BUDGETS]


def one_shot_ways(num_tokens: int, push_tokens: int) -> list[Way]:
    """What may be tried at a size, every SM first. Args: push_tokens: the most that PUSH sums."""
    whole = [Way(Engine.PLAIN), *[Way(Engine.PUSH)] * (num_tokens <= push_tokens)]
    return whole + [Way(way.engine, num_sms) for way in whole for num_sms in BUDGETS]


def sizes(max_tokens: int, push_tokens: int = 0) -> tuple[list[int], list[int]]:
    """(of every algorithm, of two-shot unless one-shot has won so far): what a group's buffers hold.

    The most that PUSH sums is one of them: beyond it the next fastest way is another one, not a little slower.
    """
    few = sorted(n for n in {*TOKENS, push_tokens} if 1 <= n <= max_tokens)
    return few, [n for n in MORE_TOKENS if few[-1] < n <= max_tokens]


def calibration_rows(fused: CudaFused) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual and weight for calibrate(): memory that one rank alone may not have, so it is had before ranks meet.

    Raises: torch.OutOfMemoryError. Cost: a residual of the largest size (128 MiB of a hidden size of 8,192 and 8,192
        tokens).
    """
    few, many = sizes(fused.max_tokens, fused.push_tokens)
    residual = torch.zeros(max(few + many), fused.hidden, dtype=fused.dtype, device=fused.device)
    return residual, torch.ones(fused.hidden, dtype=fused.dtype, device=fused.device)


def calibrate(
    fused: CudaFused,
    group: dist.ProcessGroup | None = None,
    rows_given: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Times:
    """Times for FusedSettings; all ranks call it together, nothing else of the group runs.

    Args: rows_given: calibration_rows(), which is made here otherwise.
    Lane 0's input is read as it is, its output overwritten. Raises: PeerTimeout, torch.OutOfMemoryError.
    Cost: three to four seconds (about 130 ways at most, of about 30 ms), more where one-shot wins beyond 1024 tokens.
    """
    residual, weight = rows_given or calibration_rows(fused)
    clock = Clock(fused.device, group, rounds=ROUNDS)
    few, many = sizes(fused.max_tokens, fused.push_tokens)
    last = (*few, *many)[-1]
    bulk = fused.engine(Algorithm.TWO_SHOT)

    def measured(algorithm: Algorithm, count: int, tried: Sequence[Way]) -> dict[Way, float]:
        plan = make_plan(algorithm, count, fused.world, fused.rank)
        given = fused.input(count), residual[:count], weight, EPS
        has_budgets = count >= BUDGET_TOKENS or count == last
        us: dict[
            tuple[Engine, int], float
        ] = {}  # of a launch: small sums have as many CTAs with a budget as without
        found: dict[Way, float] = {}
        for way in tried:
            most = min(way.num_sms or fused.num_sms, fused.num_sms)
            launch = way.engine, num_ctas(algorithm, count, fused.world, most)
            if launch not in us and (has_budgets or not way.num_sms):
                call = partial(fused.run_as, plan, way.engine, *given, num_sms=way.num_sms)
                us[launch] = median(clock.measure(call))
            if launch in us:
                found[way] = us[launch]
        return found

    two_shot: list[tuple[int, dict[Way, float]]] = []
    one_shot: list[tuple[int, dict[Way, float]]] = []
    one_shot_won = False
    for count in (*few, *many):
        num_bytes = count * fused.hidden * ELEMENT_BYTES
        many_us = measured(Algorithm.TWO_SHOT, count, two_shot_ways(bulk))
        two_shot.append((num_bytes, many_us))
        if (
            count in few or one_shot_won
        ):  # a size beyond its last win, too: what lies between is no guess then
            few_us = measured(Algorithm.ONE_SHOT, count, one_shot_ways(count, fused.push_tokens))
            one_shot.append((num_bytes, few_us))
            one_shot_won = min(few_us.values()) < min(many_us.values())
    fused.check()
    few_sms_from_bytes = MORE_TOKENS[0] * fused.hidden * ELEMENT_BYTES
    return times_from_rows((), two_shot, one_shot, few_sms_from_bytes=few_sms_from_bytes)
