"""Top-k and top-p of rows with few tokens left, exactly as a sort gives them: one Triton kernel, one program a row.

    logits [rows, vocabulary] -> tokens that are not -inf, gathered in order -> sorted -> what k and p drop is -inf

A row with more than MOST tokens is left as it is, and found out by its first tiles as a rule: of a batch without masks
almost nothing is read. Source of the nucleus: Holtzman et al., The Curious Case of Neural Text Degeneration, 3.1.
"""

import torch
import triton
import triton.language as tl

from shared.kernels.nucleus import MOST

TILE = 4096  # tokens that a program looks at in one go


@triton.jit
def _settle(
    LOGITS,
    STRIDE,
    K,
    P,
    NEW_K,
    NEW_P,
    VALUES,
    TOKENS,
    VOCABULARY,
    HAS_K: tl.constexpr,
    HAS_P: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    logits = LOGITS + row.to(tl.int64) * STRIDE
    values, tokens = VALUES + row * CAPACITY, TOKENS + row * CAPACITY
    count = 0
    start = 0
    while (start < VOCABULARY) & (count <= CAPACITY):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(logits + at, mask=at < VOCABULARY, other=-float("inf")).to(tl.float32)
        left = (value > -float("inf")).to(tl.int32)
        place = count + tl.cumsum(left) - 1
        fits = (left > 0) & (place < CAPACITY)
        tl.store(values + place, value, mask=fits)
        tl.store(tokens + place, at, mask=fits)
        count += tl.sum(left)
        start += BLOCK
    is_few = count <= CAPACITY
    if is_few:
        tl.debug_barrier()  # other threads of the program wrote what this one reads
        rank = tl.arange(0, CAPACITY)
        value = tl.load(values + rank, mask=rank < count, other=-float("inf")) + 0.0  # -0.0 is 0.0
        token = tl.load(tokens + rank, mask=rank < count, other=0)
        # one number that orders by value, then by token: the least one first
        bits = value.to(tl.int32, bitcast=True)
        order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
        key = tl.sort(order * 4294967296 + (2147483647 - token), descending=True)
        order = (key >> 32).to(tl.int32)
        value = tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)
        token = 2147483647 - (key & 0x7FFFFFFF).to(tl.int32)
        keeps = rank < count
        if HAS_K:
            last = tl.minimum(tl.load(K + row).to(tl.int32), count) - 1
            least = tl.min(tl.where(rank <= last, value, float("inf")))
            keeps = keeps & (value >= least)
        if HAS_P:
            weight = tl.where(keeps, tl.exp(value - tl.max(value)), 0.0)
            share = weight / tl.sum(weight)
            rest = tl.cumsum(share, reverse=True)  # of it and all that are less likely
            keeps = keeps & ((rest > 1.0 - tl.load(P + row)) | (rank == 0))
        tl.store(logits + token, -float("inf"), mask=(rank < count) & (keeps == 0))
    if HAS_K:
        tl.store(NEW_K + row, tl.where(is_few, VOCABULARY, tl.load(K + row).to(tl.int32)))
    if HAS_P:
        tl.store(NEW_P + row, tl.where(is_few, 1.0, tl.load(P + row)))


def settle_rows_with_few_tokens(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None, *, most: int = MOST
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Top-k, then top-p, in place, in the rows in which at most `most` tokens are not -inf.

    Args:
        logits: [rows, vocabulary] of float32, bfloat16 or float16, a row's tokens side by side.
        k: [rows], at least 1. p: [rows] of float32. None: not asked for.
        most: a power of two.

    Returns: k and p for whoever filters the other rows: of these the vocabulary's size and 1.0, which drop nothing.
    Tokens as likely as the k-th are all kept, as by a sort; of those as likely as the nucleus's last the first ones.
    Cost: 8 B of memory for each of rows * most; a row of n tokens reads until `most` are found. No synchronization.
    """
    rows, vocabulary = logits.shape
    assert logits.stride(1) == 1, "a row's tokens lie side by side"
    values = torch.empty((rows, most), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((rows, most), dtype=torch.int32, device=logits.device)
    new_k = None if k is None else torch.empty(rows, dtype=torch.int32, device=logits.device)
    new_p = None if p is None else torch.empty(rows, dtype=torch.float32, device=logits.device)
    _settle[(rows,)](
        logits, logits.stride(0), logits if k is None else k, logits if p is None else p.to(torch.float32),
        logits if new_k is None else new_k, logits if new_p is None else new_p, values, tokens, vocabulary,
        HAS_K=k is not None, HAS_P=p is not None, CAPACITY=most, BLOCK=TILE,
        num_warps=8,  # pyright: ignore[reportCallIssue]  Triton's, of every kernel
    )  # fmt: skip
    return new_k, new_p
