"""A step's requests cut in two at a token: what each part holds of which request. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """`count` scheduled tokens of one request, from its `start`-th scheduled one on. `index`: its place in the step."""

    index: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class BatchCut:
    """Both parts in the step's order. A request that is cut is the first part's last and the second part's first:
    its prefix is in the first part, so where attention of the first part comes before that of the second in every
    layer, the second part finds the keys and values that it depends on (TokenWeave 3.1).
    """

    first: tuple[Part, ...]
    second: tuple[Part, ...]

    @property
    def is_mid_request(self) -> bool:
        """Whether a request is in both."""
        return self.first[-1].index == self.second[0].index


def cut_batch(scheduled_tokens: Sequence[int], first_tokens: int) -> BatchCut:
    """Cut behind the first `first_tokens` tokens.

    Args: scheduled_tokens: of each request, in the order in which the step's tokens lie.
    Raises: ValueError where either part would be empty, or a request has no token.
    """
    if any(count < 1 for count in scheduled_tokens):
        raise ValueError(f"a request without tokens in {list(scheduled_tokens)}")
    if not 0 < first_tokens < sum(scheduled_tokens):
        raise ValueError(f"{first_tokens} of {sum(scheduled_tokens)} tokens leave a part empty")
    first: list[Part] = []
    second: list[Part] = []
    left = first_tokens
    for index, count in enumerate(scheduled_tokens):
        before = min(count, left)
        left -= before
        if before:
            first.append(Part(index, 0, before))
        if before < count:
            second.append(Part(index, before, count - before))
    return BatchCut(tuple(first), tuple(second))
