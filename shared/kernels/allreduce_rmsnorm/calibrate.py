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
    most_plain_bytes,
    times_from_rows,
)
from shared.kernels.allreduce_rmsnorm.shapes import Engine
from shared.kernels.allreduce_rmsnorm.timing import Clock

TOKENS = (1, 4, 16, 32, 64, 128, 256, 512)
ROUNDS = 3
EPS = 1e-5


def calibrate(fused: CudaFused, group: dist.ProcessGroup | None = None) -> Times:
    """Times for FusedSettings; all ranks call it together, nothing else of the group runs.

    The residual and weights are its own; lane 0's input is read as it is, its output overwritten.
    Raises: PeerTimeout.
    Cost: about half a second, and a residual of 512 tokens.
    """
    clock = Clock(fused.device, group, rounds=ROUNDS)
    tokens = [count for count in TOKENS if count <= fused.max_tokens]
    residual = torch.zeros(max(tokens), fused.hidden, dtype=fused.dtype, device=fused.device)
    weight = torch.ones(fused.hidden, dtype=fused.dtype, device=fused.device)
    ways = {(Algorithm.ONE_SHOT, Engine.PLAIN), (Algorithm.TWO_SHOT, Engine.PLAIN)}
    ways.add((Algorithm.TWO_SHOT, fused.engine(Algorithm.TWO_SHOT)))
    rows, engines = [], []
    for count in tokens:
        found: dict[tuple[Algorithm, Engine], float] = {}
        for algorithm, engine in sorted(ways):
            plan = make_plan(algorithm, count, fused.world, fused.rank)
            given = fused.input(count), residual[:count], weight, EPS
            call = partial(fused.run_as, plan, engine, *given)
            found[algorithm, engine] = median(clock.measure(call))
        num_bytes = count * fused.hidden * ELEMENT_BYTES
        fastest = {one: min(us for (of, _), us in found.items() if of is one) for one, _ in ways}
        rows.append((num_bytes, fastest))
        if (Algorithm.TWO_SHOT, Engine.BULK) in found:
            plain_us = found[Algorithm.TWO_SHOT, Engine.PLAIN]
            engines.append((num_bytes, plain_us, found[Algorithm.TWO_SHOT, Engine.BULK]))
    fused.check()
    return times_from_rows(rows, most_plain_bytes(engines))
