"""Layout of the page table's shared memory: one header, then one 8-byte word per page (shared/kv/page.py).

    0 magic | 8 version | 16 boot generation | 24 num_pages | 32 page_bytes | ... | 64 first word

All fields are native 64-bit unsigned words, because the table never leaves its host.

Behind the words lies what the mempool's index knows of each page, for its successor: one ENTRY per page, valid if
its epoch is the page's and the page is sealed. Readers do not map it.
"""

import struct
from typing import NamedTuple

from shared.ids import Epoch
from shared.kv.page import WORD_BYTES

MAGIC = int.from_bytes(b"quirepgt", "little")
VERSION = 1
HEADER_BYTES = 64
HEADER_WORDS = HEADER_BYTES // WORD_BYTES


ENTRY = struct.Struct("=QI4x32s32s")  # epoch, valid tokens, (unused), hash, hash of the block before


class TableHeader(NamedTuple):
    """What a reader checks before it trusts a word."""

    boot_generation: Epoch
    num_pages: int
    page_bytes: int


def table_bytes(num_pages: int) -> int:
    """Length of the shared memory."""
    return HEADER_BYTES + num_pages * WORD_BYTES


def write_header(words: memoryview, header: TableHeader) -> None:
    """Fill the header of a table mapped as words ("Q"); the magic comes last."""
    words[1] = VERSION
    words[2], words[3], words[4] = header
    words[0] = MAGIC


def read_header(words: memoryview) -> TableHeader:
    """Raises: ValueError when this is no page table of this version, or is cut off."""
    if len(words) < HEADER_WORDS or words[0] != MAGIC or words[1] != VERSION:
        raise ValueError("no page table of this version")
    header = TableHeader(Epoch(words[2]), words[3], words[4])
    if len(words) < HEADER_WORDS + header.num_pages:
        raise ValueError(f"a page table of {len(words)} words is too short for {header.num_pages} pages")
    return header


def file_bytes(num_pages: int) -> int:
    """Length of the memory that holds a table and its entries."""
    return table_bytes(num_pages) + num_pages * ENTRY.size
