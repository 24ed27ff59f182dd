"""Top-k and top-p in large batches on a GPU are exact where few tokens are left, which vLLM 0.26.0's kernel is not.

From eight sequences on (in every batch on a CPU that has Triton) vLLM filters by a Triton kernel in place of a sort. It
gathers the tokens above a limit that it estimates from the first 8,192, searches a second limit among their
probabilities, and keeps what lies above that. The least likely of those gathered is dropped even if it is needed to
reach p. Where a grammar, min_p or a bias leaves few tokens that happens: if all of them are needed, or if one that is
needed is the only one in the first 8,192, which the estimate then is. "Yes" or "no" at 0.6 and 0.4 with top_p 0.95 is
then never "no", and what a seed draws depends on how many others are in the batch. Rows with up to 1,024 tokens, or as
many by top-k, are filtered by a kernel of ours that sorts them (shared/kernels/nucleus), and vLLM's is asked for
nothing there.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

Settle = Callable[
    [torch.Tensor, torch.Tensor | None, torch.Tensor | None], tuple[torch.Tensor | None, torch.Tensor | None]
]
_FEW = "shared.kernels.nucleus.few_tokens"
_MODULE, _KERNEL, _MENDED = (
    "vllm.v1.sample.ops.topk_topp_sampler",
    "apply_top_k_top_p_triton",
    "_quire_mended",
)


def keep_whole_nuclei() -> bool:
    """From now on vLLM's samplers in this process, of both runners, filter so. False: they have no such kernel.

    For the process of every rank, whatever its worker, before vLLM finds out what a step takes: this is part of that.
    rank_processes.py calls it.
    """
    module = import_module(_MODULE)
    kernel = getattr(module, _KERNEL, None)
    if kernel is None:
        return False
    if not hasattr(kernel, _MENDED):
        setattr(module, _KERNEL, mended(kernel))
    return True


def mended(kernel: Callable[..., torch.Tensor], settle: Settle | None = None) -> Callable[..., torch.Tensor]:
    """The same filter behind `settle`, by default the kernel of shared/kernels/nucleus, which needs Triton."""

    def apply(
        logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        nonlocal settle
        if settle is None:  # not before: Triton takes its time, and not every engine filters
            settle = import_module(_FEW).settle_rows_with_few_tokens
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        if logits.shape[0] and not (k is None and p is None):
            k, p = settle(logits, k, p)
            if k is not None and p is not None:
                logits, k = kernel(logits, k, None, *args, **kwargs), None
                _, p = settle(logits, None, p)  # by k few are left
        return kernel(logits, k, p, *args, **kwargs)

    setattr(apply, _MENDED, kernel)
    return apply
