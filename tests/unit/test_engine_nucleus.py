"""Top-k and top-p keep what a sort keeps where few tokens are left, whatever a kernel does with the least likely."""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.engine import nucleus
from shared.kernels.nucleus.reference import kept_by_sort, settle_rows_with_few_tokens

VOCABULARY = 64


def row_of(probabilities, at=None):
    """Logits of these at the first tokens, or where `at` says; all others are out."""
    row = torch.full((VOCABULARY,), -torch.inf)
    places = torch.tensor(at) if at is not None else torch.arange(len(probabilities))
    row[places] = torch.tensor(probabilities).log()
    return row


def keeps_above_the_least(logits, k, p, mask_value=-torch.inf):
    """A kernel with vLLM's fault: a limit is never below the least likely token. Top-k alone is right."""
    if p is None:
        return logits if k is None else logits.masked_fill_(~kept_by_sort(logits, k, None), mask_value)
    for row, share in zip(logits, p, strict=True):
        if share >= 1:
            continue
        left = row[row > -torch.inf]
        kept = kept_by_sort(row.unsqueeze(0), None, share.reshape(1))[0] & (row != left.min())
        row[~kept] = mask_value
    return logits


@pytest.mark.parametrize(
    ("probabilities", "p", "num_kept"),
    [
        ((0.6, 0.4), 0.95, 2),
        ((0.6, 0.4), 0.5, 1),
        ((1.0,), 0.1, 1),
        ((0.97, 0.03), 0.95, 1),
        ((0.9, 0.05, 0.05), 0.93, 2),
        ((0.9, 0.06, 0.04), 0.97, 3),
    ],
)
def test_the_least_likely_token_is_kept_where_it_is_needed(probabilities, p, num_kept):
    logits, share = row_of(probabilities).unsqueeze(0), torch.tensor([p])
    assert int((keeps_above_the_least(logits.clone(), None, share) > -torch.inf).sum()) < max(2, num_kept)
    got = nucleus.mended(keeps_above_the_least, settle_rows_with_few_tokens)(logits, None, share)
    assert int((got > -torch.inf).sum()) == num_kept


@given(
    st.lists(st.integers(1, 1_000), min_size=1, max_size=12, unique=True),
    st.integers(0, VOCABULARY - 12),
    st.sampled_from([0.05, 0.3, 0.5, 0.8, 0.9, 0.95, 0.99, 0.999]),
    st.integers(1, 14),
)
def test_what_is_kept_is_the_nucleus_of_the_first_k(weights, first, p, k):
    p = torch.tensor(p).item()  # as the sampler has it
    best = sorted(weights, reverse=True)[:k]
    sums = [sum(best[: n + 1]) / sum(best) for n in range(len(best))]
    if min(abs(one - p) for one in sums) < 1e-5:
        return  # a tie with the limit
    wanted = set(best[: 1 + next((n for n, one in enumerate(sums) if one >= p), len(best))])
    row = row_of([w / sum(weights) for w in weights], range(first, first + len(weights)))
    filtered = nucleus.mended(keeps_above_the_least, settle_rows_with_few_tokens)
    got = filtered(row.unsqueeze(0).clone(), torch.tensor([k]), torch.tensor([p]))[0]
    assert {weights[at - first] for at in (got > -torch.inf).nonzero().flatten().tolist()} == wanted


def test_of_many_tokens_all_are_kept_that_k_leaves_where_all_are_needed():
    logits, k, p = torch.randn(3, VOCABULARY), torch.tensor([4] * 3), torch.tensor([0.5, 0.9999, 1.0])
    few = partial(settle_rows_with_few_tokens, most=8)
    got = nucleus.mended(keeps_above_the_least, few)(logits.clone(), k, p)
    assert torch.equal(got > -torch.inf, kept_by_sort(logits, k, p))
    assert (got > -torch.inf).sum(-1).tolist()[1:] == [4, 4]


def test_rows_with_many_tokens_and_what_nobody_asked_for_are_left_to_the_kernel():
    logits = torch.stack([torch.randn(VOCABULARY), row_of((0.6, 0.4))])
    before, k, p = logits.clone(), torch.tensor([3, 1]), torch.tensor([0.5, 0.5])
    new_k, new_p = settle_rows_with_few_tokens(logits, k, p, most=2)
    assert (new_k.tolist(), new_p.tolist()) == ([3, VOCABULARY], [0.5, 1.0])
    assert torch.equal(logits[0], before[0])
    assert settle_rows_with_few_tokens(before, k, None, most=2)[1] is None
    calls = []
    filtered = nucleus.mended(lambda *args: calls.append(args) or args[0], settle_rows_with_few_tokens)
    for rows in (before, before[:0]):
        filtered(rows, None, None)
    assert [call[1:] for call in calls] == [(None, None)] * 2
    filtered(before.T.contiguous().T, k, p)
    assert calls[-1][0].stride(1) == 1


def test_a_sampler_is_mended_once_and_one_without_the_kernel_not_at_all(monkeypatch):
    calls = []
    module = SimpleNamespace(apply_top_k_top_p_triton=lambda *args: calls.append(args))
    few = SimpleNamespace(settle_rows_with_few_tokens=settle_rows_with_few_tokens)
    monkeypatch.setitem(sys.modules, nucleus._MODULE, module)
    monkeypatch.setitem(sys.modules, nucleus._FEW, few)
    assert nucleus.keep_whole_nuclei()
    once = module.apply_top_k_top_p_triton
    assert nucleus.keep_whole_nuclei()
    assert module.apply_top_k_top_p_triton is once
    once(row_of((0.6, 0.4)).unsqueeze(0), None, torch.tensor([0.95]))
    once(row_of((0.6, 0.4)).unsqueeze(0), torch.tensor([1]), None)
    assert [None if call[2] is None else call[2].tolist() for call in calls] == [[1.0], None]
    del module.apply_top_k_top_p_triton
    assert not nucleus.keep_whole_nuclei()
