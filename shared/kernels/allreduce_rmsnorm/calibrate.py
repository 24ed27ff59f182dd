"""Measures at start which way is the fastest at which size in a group: one-shot, or two-shot and through which engine.

All ranks have the same answer: of each replay the slowest rank's time counts.
"""

from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from shared.kernels.allreduce_rmsnorm.fused import CudaFused
from shared.kernels.allreduce_rmsnorm.plan import (
    ELEMENT_BYTES,
    Algorithm,
    Times,
    make_plan,
    times_from_rows,
)
from shared.kernels.allreduce_rmsnorm.shapes import Engine
from shared.kernels.allreduce_rmsnorm.timing import Clock

TOKENS = (1, 4, 16, 32, 64, 128, 256, 512)
MORE_TOKENS = (1024, 2048, 4096, 8192)  # two-shot for sure; its engines differ by a few percent either way
ROUNDS = 3
EPS = 1e-5


def calibrate(fused: CudaFused, group: dist.ProcessGroup | None = None) -> Times:
    """Times for FusedSettings; all ranks call it together, nothing else of the group runs.

    The residual and weights are its own; lane 0's input is read as it is, its output overwritten.
    Raises: PeerTimeout.
    Cost: about a second, and a residual of MORE_TOKENS (128 MiB of a hidden size of 8,192) where there are two engines.
    """
    clock = Clock(fused.device, group, rounds=ROUNDS)
    tokens = [count for count in TOKENS if count <= fused.max_tokens]
    bulk = fused.engine(Algorithm.TWO_SHOT)
    more = [count for count in MORE_TOKENS if count <= fused.max_tokens] if bulk is not Engine.PLAIN else []
    residual = torch.zeros(max(tokens + more), fused.hidden, dtype=fused.dtype, device=fused.device)
    weight = torch.ones(fused.hidden, dtype=fused.dtype, device=fused.device)
    two_shot = {(Algorithm.TWO_SHOT, Engine.PLAIN), (Algorithm.TWO_SHOT, bulk)}
    rows, engines = [], []
    for count in (*tokens, *more):
        found: dict[tuple[Algorithm, Engine], float] = {}
        ways = two_shot if count in more else two_shot | {(Algorithm.ONE_SHOT, Engine.PLAIN)}
        for algorithm, engine in sorted(ways):
            plan = make_plan(algorithm, count, fused.world, fused.rank)
            given = fused.input(count), residual[:count], weight, EPS
            call = partial(fused.run_as, plan, engine, *given)
            found[algorithm, engine] = median(clock.measure(call))
        num_bytes = count * fused.hidden * ELEMENT_BYTES
        fastest = {one: min(us for (of, _), us in found.items() if of is one) for one, _ in ways}
        if count in tokens:
            rows.append((num_bytes, fastest))
        if (Algorithm.TWO_SHOT, Engine.BULK) in found:
            plain_us = found[Algorithm.TWO_SHOT, Engine.PLAIN]
            engines.append((num_bytes, plain_us, found[Algorithm.TWO_SHOT, Engine.BULK]))
    fused.check()
    return times_from_rows(rows, engines)
