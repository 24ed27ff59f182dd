"""The kernel for rows with few tokens, run by Triton's interpreter, beside a sort."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
VOCABULARY, MOST, TILE = 200, 16, 64
LEFT = (0, 1, 5, 16, 17, 100)


@pytest.mark.slow
def test_rows_with_few_tokens_are_filtered_as_by_a_sort_and_others_are_left_alone():
    environment = os.environ | {"TRITON_INTERPRET": "1"}  # noqa: TID251  a fresh process: Triton reads it at its import
    words = [sys.executable, "-m", "shared.kernels.nucleus.test_nucleus_few_tokens"]
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split()[-2:] == ["0", "wrong"]


def main() -> None:
    """Every number of tokens with and without k and p, ties and negative zeros among them."""
    import torch

    from shared.kernels.nucleus import few_tokens, reference

    few_tokens.TILE = TILE
    torch.manual_seed(0)
    logits = torch.randn(2 * len(LEFT), VOCABULARY) * 3
    for row, left in enumerate(LEFT * 2):
        logits[row, torch.randperm(VOCABULARY)[left:]] = -torch.inf
        if row >= len(LEFT):  # half of them with ties
            logits[row] = logits[row].round() * 0.5
    shares = torch.tensor([0.5, 0.95, 0.99] * 4)
    first = torch.tensor([3, VOCABULARY, 10, 1] * 3, dtype=torch.int32)
    num_wrong = 0
    for k, p in ((None, shares), (first, None), (first, shares)):
        got, want = logits.clone(), logits.clone()
        said = few_tokens.settle_rows_with_few_tokens(got, k, p, most=MOST)
        meant = reference.settle_rows_with_few_tokens(want, k, p, most=MOST)
        num_wrong += int(((got > -torch.inf) != (want > -torch.inf)).any(-1).sum())
        for mine, right in zip(said, meant, strict=True):
            num_wrong += mine is not right and (mine is None or right is None or not torch.equal(mine, right))
    print(num_wrong, "wrong")


if __name__ == "__main__":
    main()
