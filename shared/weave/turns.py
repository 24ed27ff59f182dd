"""In which order ways are measured that shall be compared: a machine that grows slower favours none. No I/O."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def turns(ways: Sequence[T], number: int) -> list[T]:
    """All of `ways` in the order of the round `number`, from 0.

    Every second round goes backwards, so that over two rounds each way's mean place is the same: a drift that is
    straight in time cancels. Each pair of rounds begins with another way, so that none always follows the same one.
    """
    if not ways:
        return []
    first = number // 2 % len(ways)
    order = [*ways[first:], *ways[:first]]
    return order[::-1] if number % 2 else order
