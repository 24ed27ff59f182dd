"""One word per page: `epoch << 8 | state`, in a table that only the mempool writes.

Readers map the table read-only and use it as a seqlock: read the word, copy the page, read the word
again; an unchanged word with the expected epoch proves that the bytes were not touched meanwhile
(ARCHITECTURE.md, rules 1 and 4).

An epoch starts at the mempool's boot generation (microseconds of wall time at its start) and grows by
one per reuse. A page cannot be reused once a microsecond, so a later boot always starts above every
epoch of an earlier one: epochs never restart.
"""

from enum import IntEnum

from shared.ids import Epoch

WORD_BYTES = 8
MAX_EPOCH = (1 << 56) - 1
STOCK_PART = 4  # of a space's pages: an engine keeps no more in stock for its next steps


class PageState(IntEnum):
    """Who may write the bytes; page_state.py in services/mempool/core has the table. 7 was never a page's state, and
    stays unused: a new mempool goes on from the words of an earlier version."""

    FREE = 0
    GRANTED = 1
    WRITING = 2
    SEALED = 3
    RETIRING = 4
    LEASED = 5
    QUARANTINED = 6
    WITHDRAWN = 8
    RELEASED = 9


def pack_word(epoch: Epoch, state: PageState) -> int:
    """The 64-bit word of a page."""
    assert 0 <= epoch <= MAX_EPOCH, epoch
    return (epoch << 8) | state


def unpack_word(word: int) -> tuple[Epoch, PageState]:
    """Raises: ValueError when the low byte is no state."""
    return Epoch(word >> 8), PageState(word & 0xFF)


SEALED_BYTE = int(PageState.SEALED)


def sealed_word(epoch: Epoch) -> int:
    """The word that a reader of a sealed page expects."""
    return pack_word(epoch, PageState.SEALED)
