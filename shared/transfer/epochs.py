"""The reader's half of the seqlock (ARCHITECTURE.md, rule 4): after the copy, is each source page still the
one that was promised? The words are a read-only mapping of the owner's page table (shared/kv/page_table.py).
"""

from collections.abc import Sequence

from shared.ids import Epoch
from shared.kv.page import sealed_word
from shared.kv.page_table import HEADER_WORDS
from shared.transfer.interface import PageCheck


def sealed_check(words: memoryview, pages: Sequence[int], epochs: Sequence[int]) -> PageCheck:
    """A check for Link.pull: the positions whose page is no longer sealed under its epoch.

    Args: words: the table as 64-bit words ("Q"), header first; pages, epochs: as long as each other.
    Cost: 0.1 us a page.
    """
    expected = [
        (HEADER_WORDS + page, sealed_word(Epoch(epoch))) for page, epoch in zip(pages, epochs, strict=True)
    ]

    def stale() -> Sequence[int]:
        return [position for position, (at, word) in enumerate(expected) if words[at] != word]

    return stale
