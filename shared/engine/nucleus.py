"""Top-p in large batches on a GPU keeps the least likely of few tokens, where vLLM 0.26.0 drops it.

From eight sequences on (in every batch on a CPU that has Triton) vLLM filters by a Triton kernel in place of a sort. It
searches a limit between the least and the greatest probability and keeps what lies above it: where a grammar, min_p or
a bias leaves few tokens and all of them are needed to reach p, the least likely is dropped, for whichever limit it
tries. "Yes" or "no" at 0.6 and 0.4 with top_p 0.95 is then never "no", and what a seed draws depends on how many others
are in the batch. Where the nucleus (Holtzman et al., The Curious Case of Neural Text Degeneration, 3.1) is everything
that is left, p = 1 is the same question, and the kernel does nothing.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

_MODULE, _KERNEL, _MENDED = (
    "vllm.v1.sample.ops.topk_topp_sampler",
    "apply_top_k_top_p_triton",
    "_quire_mended",
)


def keep_whole_nuclei() -> bool:
    """From now on vLLM's samplers in this process, of both runners, filter so. False: they have no such kernel.

    For the process of every rank, whatever its worker, before vLLM finds out what a step takes: the rows and a copy of
    them are part of that. rank_processes.py calls it.
    """
    module = import_module(_MODULE)
    kernel = getattr(module, _KERNEL, None)
    if kernel is None:
        return False
    if not hasattr(kernel, _MENDED):
        setattr(module, _KERNEL, mended(kernel))
    return True


def mended(kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same filter, that is asked for p = 1 where that is meant."""

    def apply(
        logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        return kernel(logits, k, p if p is None else limits(logits, p), *args, **kwargs)

    setattr(apply, _MENDED, kernel)
    return apply


def limits(logits: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """p, 1 where no token that is left may be dropped: the least likely ones have more than 1 - p together.

    Args: logits: [rows, vocabulary], -inf for tokens that are out. p: [rows]. Neither is changed.
    Cost: some eight passes over the logits and a copy of them; no synchronization. That top-k comes first changes
    nothing: of fewer tokens each has a greater share.
    """
    shares = logits.softmax(-1, dtype=torch.float32)
    shares.masked_fill_(shares == 0.0, 2.0)  # no token's: they are out, or as good as
    least = shares.amin(-1)
    ties = (shares == least.unsqueeze(-1)).sum(-1)
    return torch.where(least * ties > 1.0 - p, 1.0, p)
