"""What few_tokens.py does, by torch's sort, on any device: what tests hold it against."""

import torch

from shared.kernels.nucleus import MOST


def kept_by_sort(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
    """Which tokens top-k, then top-p keep: bool, as `logits` [rows, vocabulary]. k: [rows]; p: [rows]."""
    ordered, index = logits.float().sort(dim=-1, descending=True, stable=True)
    keeps = ordered > -torch.inf
    if k is not None:
        last = k.long().clamp(1, logits.shape[1]) - 1
        keeps &= ordered >= ordered.gather(1, last.unsqueeze(1))
    if p is not None:
        shares = ordered.masked_fill(~keeps, -torch.inf).softmax(-1)
        rest = shares.flip(-1).cumsum(-1).flip(-1)
        within = rest > 1.0 - p.unsqueeze(1)
        within[:, 0] = True
        keeps &= within
    return torch.zeros_like(keeps).scatter_(1, index, keeps)


def settle_rows_with_few_tokens(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None, *, most: int = MOST
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """As the kernel's."""
    is_few = (logits > -torch.inf).sum(-1) <= most
    logits.masked_fill_(is_few.unsqueeze(1) & ~kept_by_sort(logits, k, p), -torch.inf)
    new_k = None if k is None else torch.where(is_few, logits.shape[1], k.int()).int()
    new_p = None if p is None else torch.where(is_few, 1.0, p.float())
    return new_k, new_p
