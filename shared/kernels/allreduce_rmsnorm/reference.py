"""What the fused call means, in float64, and what one rounding of it may differ by. Tests ask for nearness to this."""

from collections.abc import Sequence

import torch


def reference(
    partials: Sequence[torch.Tensor],
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    gemma: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, residual) in float64 and without any rounding between.

    Args:
        partials: [num_tokens, hidden] of every rank.
        residual: [num_tokens, hidden].
        weight: [hidden]; with `gemma` it is the distance from one.
    """
    summed = residual.double()
    for partial in partials:
        summed = summed + partial.double()
    scale = torch.rsqrt(summed.square().mean(dim=-1, keepdim=True) + eps)
    return summed * scale * (weight.double() + (1.0 if gemma else 0.0)), summed
