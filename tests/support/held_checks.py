"""What a direct copy's checks say of pages at one end, whatever the other end is."""

import numpy as np

from shared.mempool.direct_checks import CHECKS, IS_PINNED, NOT_HELD, OWNED, PINNED, PINS, Checks
from shared.mempool.held_pages import Columns, Stretch


def _good(count: int) -> tuple[np.ndarray, np.ndarray, Columns]:
    """As many pages that are owned and pinned."""
    columns = Columns(shared=False)
    columns.reach(count)
    columns.epochs[[OWNED, PINNED]] = 1
    columns.counts[PINS] = 1
    return np.arange(count), np.ones(count, np.uint64), columns


def _held(source, target, checks: Checks) -> int:
    sides = [(pages, epochs, columns.epochs, columns.counts) for pages, epochs, columns in (source, target)]
    how = checks.hold(*sides[0], *sides[1])
    if how != NOT_HELD:
        checks.leave(source[0], source[2].counts, target[0], target[2].counts)
    return how


def may_write(columns: Columns, stretch: Stretch, checks: Checks = CHECKS) -> bool:
    """They may be targets."""
    end = stretch.pages, stretch.epochs, columns
    return _held(_good(stretch.pages.size), end, checks) != NOT_HELD


def is_pinned(columns: Columns, stretch: Stretch, checks: Checks = CHECKS) -> bool:
    """They may be sources, for their pins."""
    end = stretch.pages, stretch.epochs, columns
    return _held(end, _good(stretch.pages.size), checks) == IS_PINNED
