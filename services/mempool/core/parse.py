"""Raw lists out of wire messages, checked. Everything here comes from a socket and may be wrong."""

from dataclasses import dataclass

from shared.errors import PeerProtocolError
from shared.ids import BlockHash, PageId
from shared.kv.block_hash import split_hashes
from shared.kv.words import u32_list, u64_list
from shared.wire import mempool as wire


@dataclass(frozen=True, slots=True)
class SealedBlock:
    """One line of a Sealed message."""

    page: PageId
    epoch: int
    block_hash: BlockHash
    parent: BlockHash
    valid_tokens: int


def hashes(raw: bytes, max_blocks: int) -> list[BlockHash]:
    """Raises: PeerProtocolError on a broken or too long list."""
    try:
        out = split_hashes(raw)
    except ValueError as error:
        raise PeerProtocolError(str(error)) from error
    if len(out) > max_blocks:
        raise PeerProtocolError(f"{len(out)} blocks in one call; {max_blocks} at most")
    return out


def pages(page_words: bytes, epoch_words: bytes, max_blocks: int) -> list[tuple[PageId, int]]:
    """(page, epoch) pairs. Page numbers are not range-checked. Raises: PeerProtocolError."""
    try:
        page_list, epoch_list = u32_list(page_words), u64_list(epoch_words)
    except ValueError as error:
        raise PeerProtocolError(f"a list of pages or epochs is cut off: {error}") from error
    if len(page_list) != len(epoch_list) or len(page_list) > max_blocks:
        raise PeerProtocolError(f"{len(page_list)} pages and {len(epoch_list)} epochs; {max_blocks} at most")
    return [(PageId(page), epoch) for page, epoch in zip(page_list, epoch_list, strict=True)]


def sealed(message: wire.Sealed, block_tokens: int, max_blocks: int) -> list[SealedBlock]:
    """Lines of a Sealed message. Raises: PeerProtocolError on lists that do not fit or impossible values."""
    owned = pages(message.pages, message.epochs, max_blocks)
    block_hashes, parents = hashes(message.hashes, max_blocks), hashes(message.parents, max_blocks)
    try:
        valid = u32_list(message.valid_tokens)
    except ValueError as error:
        raise PeerProtocolError(f"Sealed: a list is cut off: {error}") from error
    if not len(owned) == len(block_hashes) == len(parents) == len(valid):
        raise PeerProtocolError("Sealed: lists of unequal length")
    if any(tokens < 1 or tokens > block_tokens for tokens in valid):
        raise PeerProtocolError(f"Sealed: valid_tokens outside 1 to {block_tokens}")
    if any(own == parent for own, parent in zip(block_hashes, parents, strict=True)):
        raise PeerProtocolError("Sealed: a block is its own parent")
    lines = zip(owned, block_hashes, parents, valid, strict=True)
    return [SealedBlock(page, epoch, h, parent, n) for (page, epoch), h, parent, n in lines]
