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
    times_from_rows,
)
from shared.kernels.allreduce_rmsnorm.timing import Clock

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
# Two-shot for sure. Its engines and CTAs differ by a few percent either way there, so that few sizes do.
MORE_TOKENS = (1024, 2048, 4096, 8192, 16_384, 32_768)
BUDGETS = (4, 8, 16, 32)
ROUNDS = 3
EPS = 1e-5


def two_shot_ways(bulk: Engine, *, is_large: bool) -> list[Way]:
    """What is tried at a size. Args: bulk: the engine of few SMs; PLAIN where there is no other."""
    ways = [Way(engine) for engine in dict.fromkeys((Engine.PLAIN, bulk))]
    return ways + [Way(bulk, num_sms) for num_sms in BUDGETS] if is_large else ways


def one_shot_ways(num_tokens: int, push_tokens: int) -> list[Way]:
    """What is tried at a size. Args: push_tokens: the most that PUSH sums."""
    return [Way(Engine.PLAIN), *[Way(Engine.PUSH)] * (num_tokens <= push_tokens)]


def sizes(max_tokens: int) -> tuple[list[int], list[int]]:
    """(of every algorithm, of two-shot alone): what a group's buffers hold."""
    return [n for n in TOKENS if n <= max_tokens], [n for n in MORE_TOKENS if n <= max_tokens]


def calibration_rows(fused: CudaFused) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual and weight for calibrate(): memory that one rank alone may not have, so it is had before ranks meet.

    Raises: torch.OutOfMemoryError. Cost: a residual of the largest size (128 MiB of a hidden size of 8,192 and 8,192
        tokens).
    """
    few, many = sizes(fused.max_tokens)
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
    Cost: two to three seconds (76 ways at most, of about 30 ms).
    """
    residual, weight = rows_given or calibration_rows(fused)
    clock = Clock(fused.device, group, rounds=ROUNDS)
    few, many = sizes(fused.max_tokens)
    bulk = fused.engine(Algorithm.TWO_SHOT)

    def measured(algorithm: Algorithm, count: int, tried: Sequence[Way]) -> dict[Way, float]:
        plan = make_plan(algorithm, count, fused.world, fused.rank)
        given = fused.input(count), residual[:count], weight, EPS
        return {
            way: median(clock.measure(partial(fused.run_as, plan, way.engine, *given, num_sms=way.num_sms)))
            for way in tried
        }

    rows: list[tuple[int, dict[Algorithm, float]]] = []
    ways: list[tuple[int, dict[Way, float]]] = []
    few_ways: list[tuple[int, dict[Way, float]]] = []
    for count in (*few, *many):
        num_bytes = count * fused.hidden * ELEMENT_BYTES
        two_shot = measured(Algorithm.TWO_SHOT, count, two_shot_ways(bulk, is_large=count in many))
        ways.append((num_bytes, two_shot))
        if count in few:
            one_shot = measured(Algorithm.ONE_SHOT, count, one_shot_ways(count, fused.push_tokens))
            few_ways.append((num_bytes, one_shot))
            fastest = {
                Algorithm.ONE_SHOT: min(one_shot.values()),
                Algorithm.TWO_SHOT: min(two_shot.values()),
            }
            rows.append((num_bytes, fastest))
    fused.check()
    return times_from_rows(rows, ways, few_ways)
