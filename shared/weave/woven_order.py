"""In which order two parts of a step go through a model's layers, on two streams. No I/O.

    compute  attn0/A  attn0/B  mlp0/A  mlp0/B  attn1/A ...        A: the first part, B: the second
    comm              attn0/A  attn0/B  mlp0/A  mlp0/B ...        all-reduce + residual + RMSNorm

What one part sends is under way while the other part computes (TokenWeave 3.1.2, Figure 8). Each stream keeps its
order; across streams a communication waits for its own part's compute, and a compute for its own part's last
communication.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Stage = Literal["attn", "mlp"]
PARTS = (0, 1)


@dataclass(frozen=True, slots=True)
class WovenStep:
    """One block of one layer for one part: its compute, then its communication.

    `waits_for_own`: the compute needs what this part's communication before it made; False at the first block.
    """

    layer: int
    stage: Stage
    part: int
    waits_for_own: bool


def woven_order(first_layer: int, end_layer: int) -> Iterator[WovenStep]:
    """All blocks of layers [first_layer, end_layer), in the order in which a host enqueues them.

    Attention of part 0 comes before attention of part 1 in every layer, on the same stream: a request that was cut
    finds its prefix's keys and values written. A host that runs them one after the other does the same work.
    """
    for layer in range(first_layer, end_layer):
        for stage in ("attn", "mlp"):
            for part in PARTS:
                yield WovenStep(layer, stage, part, layer > first_layer or stage == "mlp")
