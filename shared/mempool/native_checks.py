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
def _look_at(
    table: Any, pages: Any, epochs: Any, least: Any, more: Any, base: Any, page_bytes: Any, words: Any, addresses: Any
) -> bool:  # fmt: skip
    """One end: whether each word says its epoch and a state from `least` to `least + more`."""
    fits = True
    for i in range(pages.size):
        if not 0 <= pages[i] < table.size:
            return False
        word = table[pages[i]]
        words[i] = word
        addresses[i] = np.uint64(pages[i]) * page_bytes + base
        fits &= (word ^ (epochs[i] << _BITS)) - least <= more
    return fits


@njit(cache=True)
def look(
    source_table: Any, sources: Any, source_epochs: Any, target_table: Any, targets: Any, target_epochs: Any,
    how: int, source_base: Any, target_base: Any, page_bytes: Any, found: Any,
) -> bool:  # fmt: skip
    """See direct_checks.Checks."""
    state = _SEALED if how == IS_PINNED else _GRANTED
    return _look_at(
        source_table, sources, source_epochs, state, np.uint64(0), source_base, page_bytes,
        found[SOURCE_WORDS], found[FROMS],
    ) and _look_at(
        target_table, targets, target_epochs, _GRANTED, _MORE, target_base, page_bytes,
        found[TARGET_WORDS], found[TOS],
    )  # fmt: skip


@njit(cache=True)
def same(table: Any, pages: Any, words: Any) -> bool:
    """See direct_checks.Checks."""
    kept = True
    for i in range(pages.size):
        kept &= table[pages[i]] == words[i]
    return kept


@njit(cache=True)
def leave(sources: Any, here_counts: Any, targets: Any, there_counts: Any) -> None:
    """See direct_checks.Checks."""
    for i in range(sources.size):
        here_counts[READING, sources[i]] -= 1
    for i in range(targets.size):
        there_counts[WRITING, targets[i]] -= 1
