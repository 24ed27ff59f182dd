"""Measures at start from which size on two-shot is faster than one-shot in a group; all ranks have the same answer."""

from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from shared.kernels.allreduce_rmsnorm.fused import CudaFused
from shared.kernels.allreduce_rmsnorm.plan import ELEMENT_BYTES, Algorithm, Times, make_plan, times_from_rows
from shared.kernels.allreduce_rmsnorm.timing import Clock

TOKENS = (1, 4, 16, 32, 64, 128, 256, 512)
ROUNDS = 3
EPS = 1e-5


def calibrate(fused: CudaFused, group: dist.ProcessGroup | None = None) -> Times:
    """Times for FusedSettings; all ranks call it together, nothing else of the group runs.

    The residual and weights are its own; lane 0's input is read as it is, its output overwritten.
    Raises: PeerTimeout.
    Cost: about 0.3 s, and a residual of 512 tokens.
    """
    clock = Clock(fused.device, group, rounds=ROUNDS)
    tokens = [count for count in TOKENS if count <= fused.max_tokens]
    residual = torch.zeros(max(tokens), fused.hidden, dtype=fused.dtype, device=fused.device)
    weight = torch.ones(fused.hidden, dtype=fused.dtype, device=fused.device)
    rows = []
    for count in tokens:
        found: dict[Algorithm, float] = {}
        for algorithm in (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT):
            plan = make_plan(algorithm, count, fused.world, fused.rank)
            given = fused.input(count), residual[:count], weight, EPS
            call = partial(fused.run_as, plan, fused.engine(algorithm), *given)
            found[algorithm] = median(clock.measure(call))
        rows.append((count * fused.hidden * ELEMENT_BYTES, found))
    fused.check()
    return times_from_rows(rows)
