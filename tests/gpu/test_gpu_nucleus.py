"""vLLM's top-k and top-p in batches of eight and more, on a GPU, beside its own sort; `-s` prints the time."""

import importlib
import warnings

import pytest
import torch

from shared.engine import nucleus
from shared.kernels.nucleus import MOST

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

LEFT = (1, 2, 3, 5, 20, 300, 1_000, 1_100, 0)  # tokens that are not out; 0: all
SHARES = (0.3, 0.5, 0.8, 0.9, 0.95, 0.99)
NEAR = 1e-4  # of a sum of probabilities to the limit: both answers are right


def filters():
    """vLLM's sort, and its kernel as it is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, at its import
        sampler = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler")
    kernel = sampler.apply_top_k_top_p_triton
    return sampler.apply_top_k_top_p_pytorch, getattr(kernel, nucleus._MENDED, kernel)


def batch_of(vocabulary, seed):
    """Logits, k, p: every number of tokens left with every p, half with a top-k, in an order by chance."""
    torch.manual_seed(seed)
    rows = [(left, p) for left in LEFT for p in SHARES]
    logits = torch.randn(2 * len(rows), vocabulary, device="cuda") * 3
    for row, (left, _) in enumerate(rows * 2):
        if left:
            out = torch.randperm(vocabulary, device="cuda")[left:]
            logits[row, out] = -torch.inf
    k = torch.tensor([vocabulary] * len(rows) + [20] * len(rows), device="cuda", dtype=torch.int32)
    p = torch.tensor([p for _, p in rows * 2], device="cuda")
    order = torch.randperm(2 * len(rows), device="cuda")
    return logits[order], k[order], p[order]


def wrong_rows(before, want, got, k, p):
    """Rows that keep other tokens, where the sum of those kept is not just at the limit.

    Of many tokens vLLM's kernel tells two apart whose probabilities differ by a 2^17th of the greatest, not less.
    """
    found = []
    for row in ((want > -torch.inf) != (got > -torch.inf)).any(-1).nonzero().flatten().tolist():
        left = int((before[row] > -torch.inf).sum())
        first = before[row].topk(before.shape[1] if k is None else int(k[row])).values
        each = first.softmax(-1).double()
        counts = [int((kept[row] > -torch.inf).sum()) for kept in (want, got)]
        gaps = -each[max(0, min(counts) - 2) : max(counts) + 2].diff()
        near = float((each.cumsum(-1) - p[row]).abs().min())
        is_tie = left > MOST and bool((gaps < each[0] * 2**-17).any())
        if near > NEAR and not is_tie:
            asked = f"{left} left, k {'-' if k is None else int(k[row])}, p {float(p[row]):.3f}"
            found.append(
                f"{asked}: {counts} kept, {near:.1e} from p, gaps {gaps.tolist()[:6]} of {float(each[0]):.1e}"
            )
    return found


@pytest.mark.parametrize("vocabulary", [49_152, 128_256])
def test_large_batches_keep_what_the_sort_keeps(vocabulary):
    by_sort, kernel = filters()
    stock_wrong = 0
    for seed in range(24):
        logits, k, p = batch_of(vocabulary, seed)
        for given_k in (k, None):
            want = by_sort(logits.clone(), given_k, p)
            got = nucleus.mended(kernel)(logits.clone(), given_k, p)
            assert wrong_rows(logits, want, got, given_k, p) == []
            stock_wrong += len(wrong_rows(logits, want, kernel(logits.clone(), given_k, p), given_k, p))
    assert stock_wrong > 0, "vLLM's kernel keeps the least likely token now: shared/engine/nucleus.py can go"
    print(f"vocabulary {vocabulary}: {stock_wrong} rows of vLLM's kernel were wrong")


def took_us(work, repeats=50):
    for _ in range(5):
        work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / repeats


def test_what_mending_costs():
    by_sort, kernel = filters()
    for rows in (8, 64, 256):
        logits = torch.randn(rows, 128_256, device="cuda") * 3
        p = torch.full((rows,), 0.95, device="cuda")
        first = torch.full((rows,), 20, device="cuda", dtype=torch.int32)
        copy_us = took_us(logits.clone)
        words = []
        for name, work in (("kernel", kernel), ("mended", nucleus.mended(kernel)), ("sort", by_sort)):
            us = [took_us(lambda f=work, x=logits, p=p, k=k: f(x.clone(), k, p)) for k in (None, first)]
            words.append(f"{name} {us[0] - copy_us:.0f} us, with k {us[1] - copy_us:.0f}")
        print(f"{rows} rows: {', '.join(words)}")
