"""Top-p keeps all tokens that are left where all are needed, whatever a kernel does with the least likely one."""

import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.engine import nucleus

VOCABULARY = 64


def row_of(probabilities, at=None):
    """Logits of these at the first tokens, or where `at` says; all others are out."""
    row = torch.full((VOCABULARY,), -torch.inf)
    places = torch.tensor(at) if at is not None else torch.arange(len(probabilities))
    row[places] = torch.tensor(probabilities).log()
    return row


def kept_by_sort(row, p):
    """Tokens in the nucleus, as vLLM's sort has them."""
    ordered, index = row.sort()
    out = ordered.softmax(-1).cumsum(-1) <= 1 - p
    out[-1] = False
    return set(index[~out & (ordered > -torch.inf)].tolist())


def keeps_above_the_least(logits, k, p, mask_value=-torch.inf):
    """A kernel with vLLM's fault: a limit is never below the least likely token."""
    for row, share in zip(logits, p, strict=True):
        if share >= 1:
            continue
        left = row[row > -torch.inf]
        kept = kept_by_sort(row, float(share)) - {int(i) for i in (row == left.min()).nonzero()}
        row[[i for i in range(len(row)) if i not in kept]] = mask_value
    return logits


@pytest.mark.parametrize(
    ("probabilities", "p", "is_whole"),
    [
        ((0.6, 0.4), 0.95, True),
        ((0.6, 0.4), 0.5, False),
        ((1.0,), 0.1, True),
        ((0.97, 0.03), 0.95, False),
        ((0.9, 0.05, 0.05), 0.93, True),
    ],
)
def test_p_is_1_where_the_least_likely_is_needed(probabilities, p, is_whole):
    found = nucleus.limits(row_of(probabilities).unsqueeze(0), torch.tensor([p]))
    assert found.item() == pytest.approx(1.0 if is_whole else p)


def test_rows_without_any_token_or_any_limit_are_let_through():
    logits = torch.stack([torch.full((VOCABULARY,), -torch.inf), torch.randn(VOCABULARY)])
    before = logits.clone()
    assert nucleus.limits(logits, torch.tensor([0.9, 1.0]))[1] == 1.0
    assert torch.equal(logits, before)


@given(
    st.lists(st.integers(1, 1_000), min_size=1, max_size=12, unique=True),
    st.integers(0, VOCABULARY - 12),
    st.sampled_from([0.05, 0.3, 0.5, 0.8, 0.9, 0.95, 0.99, 0.999]),
)
def test_what_is_kept_is_the_nucleus(weights, first, p):
    p = torch.tensor(p).item()  # as the sampler has it: a sum may lie between that and the number itself
    total = sum(weights)
    least = min(weights) / total
    if abs(least - (1 - p)) < 1e-5:
        return  # a tie with the limit
    row = row_of([w / total for w in weights], range(first, first + len(weights)))
    got = nucleus.mended(keeps_above_the_least)(row.clone().unsqueeze(0), None, torch.tensor([p]))[0]
    assert set((got > -torch.inf).nonzero().flatten().tolist()) == kept_by_sort(row, p)


def test_a_sampler_is_mended_once_and_one_without_the_kernel_not_at_all(monkeypatch):
    calls = []
    module = SimpleNamespace(apply_top_k_top_p_triton=lambda *args: calls.append(args))
    monkeypatch.setitem(sys.modules, nucleus._MODULE, module)
    assert nucleus.keep_whole_nuclei()
    once = module.apply_top_k_top_p_triton
    assert nucleus.keep_whole_nuclei()
    assert module.apply_top_k_top_p_triton is once
    once(row_of((0.6, 0.4)).unsqueeze(0), None, torch.tensor([0.95]))
    once(row_of((0.6, 0.4)).unsqueeze(0), torch.tensor([1]), None)
    assert [None if call[2] is None else call[2].tolist() for call in calls] == [[1.0], None]
    del module.apply_top_k_top_p_triton
    assert not nucleus.keep_whole_nuclei()
