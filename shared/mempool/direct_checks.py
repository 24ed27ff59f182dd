"""What a direct copy (direct.py) checks and marks page by page, over columns: in numpy, or in machine code.

numba, which vLLM brings, makes the latter of the same rules: 3 us where numpy's calls take 18, of 224 that 64 MiB may
take at 300 GB/s. `CHECKS` works without it.
"""

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy import count_nonzero
from numpy.typing import NDArray

from shared.kv.page import PageState

OWNED, PINNED = 0, 1  # rows of held_pages.Columns.epochs
PINS, READING, WRITING, MEDIATED = 0, 1, 2, 3  # rows of its counts
NOT_HELD, IS_OWNED, IS_PINNED = 0, 1, 2  # hold(): nothing was done; how the sources are held
SOURCE_WORDS, TARGET_WORDS, FROMS, TOS = 0, 1, 2, 3  # rows of what look() fills
LOOK_ROWS = 4

_STATE_BITS = np.uint64(8)
_SEALED = np.uint64(PageState.SEALED)
_GRANTED = np.uint64(PageState.GRANTED)
_MORE = np.uint64(1)  # GRANTED to WRITING
assert PageState.WRITING == PageState.GRANTED + 1

Array = NDArray[Any]


class Checks(NamedTuple):
    """One way to do them; the arguments of all are C-contiguous.

    hold(source pages int64 [n], epochs uint64 [n], epochs [2, m] and counts [4, m] of their columns, and the same of
        the targets): NOT_HELD, or how; then the pages are marked as read and written. No page is named twice.
    look(sources' table uint64 [m], pages, epochs, targets' table, pages, epochs, what hold() said, addresses uint64 of
        page 0 of both, page size, uint64 [4, n] to fill): whether all words of the tables say what they should.
    same(table uint64 [m], pages, uint64 [n]): whether the words of the pages are these still.
    leave(source pages, their counts, target pages, their counts): takes hold()'s marks off.
    """

    hold: Callable[..., int]
    look: Callable[..., bool]
    same: Callable[..., bool]
    leave: Callable[..., None]


def _within(pages: Array, rows: Array) -> bool:
    return not count_nonzero(pages.view(np.uint64) >= rows.size)  # a negative page is a very large one


def _hold(
    sources: Array, source_epochs: Array, here_epochs: Array, here_counts: Array,
    targets: Array, target_epochs: Array, there_epochs: Array, there_counts: Array,
) -> int:  # fmt: skip
    # numpy's any() and all() cost a microsecond more than a count
    if not (_within(sources, here_epochs[OWNED]) and _within(targets, there_epochs[OWNED])):
        return NOT_HELD
    if count_nonzero(there_epochs[OWNED][targets] != target_epochs):
        return NOT_HELD
    busy = there_counts[READING][targets] | there_counts[WRITING][targets] | there_counts[MEDIATED][targets]
    if count_nonzero(busy):
        return NOT_HELD
    how = IS_PINNED
    if (
        count_nonzero(here_epochs[PINNED][sources] != source_epochs)
        or count_nonzero(here_counts[PINS][sources] > 0) < sources.size
    ):
        how = IS_OWNED
        if count_nonzero(here_epochs[OWNED][sources] != source_epochs):
            return NOT_HELD
        if count_nonzero(here_counts[WRITING][sources] | here_counts[MEDIATED][sources]):
            return NOT_HELD
    here_counts[READING][sources] += 1
    there_counts[WRITING][targets] += 1
    return how


def _look(
    source_table: Array, sources: Array, source_epochs: Array,
    target_table: Array, targets: Array, target_epochs: Array,
    how: int, source_base: np.uint64, target_base: np.uint64, page_bytes: np.uint64, found: Array,
) -> bool:  # fmt: skip
    if not (_within(sources, source_table) and _within(targets, target_table)):
        return False
    found[SOURCE_WORDS], found[TARGET_WORDS] = source_table[sources], target_table[targets]
    found[FROMS] = sources.view(np.uint64) * page_bytes + source_base
    found[TOS] = targets.view(np.uint64) * page_bytes + target_base
    # what is left of a word where its epoch is right is the state; else more than any state
    states = found[SOURCE_WORDS] ^ (source_epochs << _STATE_BITS)
    if count_nonzero(states != (_SEALED if how == IS_PINNED else _GRANTED)):
        return False
    states = found[TARGET_WORDS] ^ (target_epochs << _STATE_BITS)
    return not count_nonzero(states - _GRANTED > _MORE)


def _same(table: Array, pages: Array, words: Array) -> bool:
    return table[pages].tobytes() == words.tobytes()  # as np.array_equal, in a tenth of the time


def _leave(sources: Array, here_counts: Array, targets: Array, there_counts: Array) -> None:
    here_counts[READING][sources] -= 1
    there_counts[WRITING][targets] -= 1


CHECKS = Checks(_hold, _look, _same, _leave)


def native_checks() -> Checks | None:
    """The same in machine code; None without numba. Any thread. Cost: seconds where numba's cache has nothing, else
    0.3 s, and a compilation for each new kind of arguments, such as a table that is read-only."""
    if importlib.util.find_spec("numba") is None:
        return None
    from shared.mempool import native_checks as made

    return Checks(made.hold, made.look, made.same, made.leave)
