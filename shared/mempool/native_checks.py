"""direct_checks.py's rules for numba, a page at a time. Importing this costs 0.5 s."""

from typing import Any

import numpy as np
from numba import njit

from shared.kv.page import PageState
from shared.mempool.direct_checks import (
    FROMS,
    IS_OWNED,
    IS_PINNED,
    MEDIATED,
    NOT_HELD,
    OWNED,
    PINNED,
    PINS,
    READING,
    SOURCE_WORDS,
    TARGET_WORDS,
    TOS,
    WRITING,
)

_BITS = np.uint64(8)
_SEALED, _GRANTED, _MORE = np.uint64(PageState.SEALED), np.uint64(PageState.GRANTED), np.uint64(1)


@njit(cache=True)
def hold(
    sources: Any, source_epochs: Any, here_epochs: Any, here_counts: Any,
    targets: Any, target_epochs: Any, there_epochs: Any, there_counts: Any,
) -> int:  # fmt: skip
    """See direct_checks.Checks."""
    for i in range(targets.size):  # nothing else keeps an index within its array here
        page = targets[i]
        if not 0 <= page < there_epochs.shape[1] or there_epochs[OWNED, page] != target_epochs[i]:
            return NOT_HELD
        if there_counts[READING, page] | there_counts[WRITING, page] | there_counts[MEDIATED, page]:
            return NOT_HELD
    how = IS_PINNED
    for i in range(sources.size):
        page = sources[i]
        if not 0 <= page < here_epochs.shape[1]:
            return NOT_HELD
        if here_epochs[PINNED, page] != source_epochs[i] or here_counts[PINS, page] <= 0:
            how = IS_OWNED
    if how == IS_OWNED:
        for i in range(sources.size):
            page = sources[i]
            if here_epochs[OWNED, page] != source_epochs[i]:
                return NOT_HELD
            if here_counts[WRITING, page] | here_counts[MEDIATED, page]:
                return NOT_HELD
    for i in range(sources.size):
        here_counts[READING, sources[i]] += 1
    for i in range(targets.size):
        there_counts[WRITING, targets[i]] += 1
    return how


@njit(cache=True)
def look(
    source_table: Any, sources: Any, source_epochs: Any, target_table: Any, targets: Any, target_epochs: Any,
    how: int, source_base: Any, target_base: Any, page_bytes: Any, found: Any,
) -> bool:  # fmt: skip
    """See direct_checks.Checks."""
    state = _SEALED if how == IS_PINNED else _GRANTED
    fits = True
    for i in range(sources.size):
        if not 0 <= sources[i] < source_table.size:
            return False
        word = source_table[sources[i]]
        found[SOURCE_WORDS, i] = word
        found[FROMS, i] = np.uint64(sources[i]) * page_bytes + source_base
        fits &= word ^ (source_epochs[i] << _BITS) == state
    for i in range(targets.size):
        if not 0 <= targets[i] < target_table.size:
            return False
        word = target_table[targets[i]]
        found[TARGET_WORDS, i] = word
        found[TOS, i] = np.uint64(targets[i]) * page_bytes + target_base
        fits &= (word ^ (target_epochs[i] << _BITS)) - _GRANTED <= _MORE
    return fits


@njit(cache=True)
def leave(sources: Any, here_counts: Any, targets: Any, there_counts: Any) -> None:
    """See direct_checks.Checks."""
    for i in range(sources.size):
        here_counts[READING, sources[i]] -= 1
    for i in range(targets.size):
        there_counts[WRITING, targets[i]] -= 1
