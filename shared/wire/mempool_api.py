"""The nine calls of MemServe's memory pool (Table 1): client -> mempool, and mempool <-> mempool for remote ids.

A page address names instance, medium, space, page and epoch in 24 bytes; lists of them travel as one `bytes`
field. An address of a page that was reused since does not resolve: its epoch is old. Prompts travel as chained
block hashes (shared/kv/block_hash.py), which the caller makes from tokens. Calls carry `call_id` and are answered
once, by Addresses, Counted or ApiFailed; Delivered comes unasked to who receives for an instance.

    word 0   version << 56 | medium << 48 | space << 32 | page       word 1   instance key       word 2   epoch
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from enum import IntEnum, IntFlag
from itertools import groupby, repeat
from typing import Literal, NamedTuple, cast

from msgspec import Struct

from shared.errors import PeerProtocolError
from shared.ids import BlockHash, Epoch, InstanceId, PageId, SpaceId
from shared.wire.codec import Channel

ADDRESS_BYTES = 24
ADDRESS_VERSION = 1
MAX_PRIVATE_BYTES = 1 << 20
MemType = Literal["hbm", "dram", "mixed", "leased"]  # leased: a peer's pages, see AllocMem


class Medium(IntEnum):
    """Where a page is."""

    HBM = 1
    DRAM = 2
    LEASED = 3  # in a peer's memory, under a lease
    REMOTE = 4  # another mempool's; a hint


class PageAddress(NamedTuple):
    """One page at one time. `instance_key`: see instance_key()."""

    instance_key: int
    medium: Medium
    space: SpaceId
    page: PageId
    epoch: Epoch

    def to_bytes(self) -> bytes:
        """24 bytes. Raises: OverflowError when a field does not fit."""
        return pack_addresses(self.instance_key, self.medium, self.space, [self.page], [self.epoch])

    @classmethod
    def from_bytes(cls, raw: bytes) -> "PageAddress":
        """Raises: PeerProtocolError on anything that is not one address."""
        found = unpack_addresses(raw)
        if len(found) != 1:
            raise PeerProtocolError(f"{len(found)} addresses instead of one")
        return found[0]


class AddressStretch(NamedTuple):
    """Consecutive addresses of one space as columns of one length: what costs per list is paid once."""

    instance_key: int
    medium: Medium
    space: SpaceId
    pages: list[PageId]
    epochs: list[Epoch]

    def addresses(self) -> Iterable[PageAddress]:
        """One by one."""
        return map(
            PageAddress,
            repeat(self.instance_key), repeat(self.medium), repeat(self.space), self.pages, self.epochs,
        )  # fmt: skip

    def first(self, count: int) -> "AddressStretch":
        """The first `count`."""
        return self._replace(pages=self.pages[:count], epochs=self.epochs[:count])

    def behind(self, count: int) -> "AddressStretch":
        """Without the first `count`."""
        return self._replace(pages=self.pages[count:], epochs=self.epochs[count:])


def instance_key(instance: InstanceId) -> int:
    """64 bits that stand for an instance in addresses; a pool refuses two instances of one key."""
    return int.from_bytes(hashlib.sha256(b"quire-instance-1" + instance.encode()).digest()[:8], "little")


def pack_addresses(
    key: int, medium: Medium, space: SpaceId, pages: Sequence[PageId], epochs: Sequence[Epoch]
) -> bytes:
    """Addresses of pages of one space, in order. Raises: OverflowError when a field does not fit.

    Cost: about 50 ns a page.
    """
    if not 0 <= space < 1 << 16 or (pages and max(pages) >= 1 << 32):
        raise OverflowError(f"space {space}, pages up to {max(pages, default=0)}")
    head = ADDRESS_VERSION << 56 | medium << 48 | space << 32
    words = array("Q", bytes(ADDRESS_BYTES * len(pages)))
    words[0::3] = array("Q", [head | page for page in pages])
    words[1::3] = array("Q", [key]) * len(pages)
    words[2::3] = array("Q", epochs)
    return words.tobytes()


def pack_list(addresses: Sequence[PageAddress]) -> bytes:
    """Any addresses, in order. Raises: OverflowError when a field does not fit. Cost: 0.2 us a page of one space."""
    if not addresses:
        return b""
    keys, media, spaces, pages, epochs = zip(*addresses, strict=True)
    count = len(pages)
    if spaces.count(spaces[0]) == keys.count(keys[0]) == media.count(media[0]) == count:
        return pack_addresses(keys[0], media[0], spaces[0], pages, epochs)
    return b"".join([address.to_bytes() for address in addresses])


def unpack_stretches(raw: bytes) -> list[AddressStretch]:
    """Addresses by space, in order. Raises: PeerProtocolError on a broken list, an unknown version or medium.

    Cost: 0.1 us a page, as long as the space is the same.
    """
    if len(raw) % ADDRESS_BYTES:
        raise PeerProtocolError(f"{len(raw)} bytes are no whole number of addresses")
    if not raw:
        return []
    words = array("Q")
    words.frombytes(raw)
    heads, keys, epochs = words[0::3], words[1::3], words[2::3].tolist()
    base = heads[0] >> 32 << 32
    pages = [head - base for head in heads]
    if min(pages) >= 0 and max(pages) < 1 << 32 and keys == keys[:1] * len(keys):
        return [_stretch(heads[0] >> 32, keys[0], pages, epochs)]
    out: list[AddressStretch] = []
    rows = zip(heads, keys, epochs, strict=True)
    for (top, key), group in groupby(rows, key=lambda row: (row[0] >> 32, row[1])):
        found = list(group)
        out.append(_stretch(top, key, [row[0] & 0xFFFFFFFF for row in found], [row[2] for row in found]))
    return out


def _stretch(top: int, key: int, pages: list[int], epochs: list[int]) -> AddressStretch:
    medium = _MEDIA.get(top >> 16)
    if medium is None:
        raise PeerProtocolError(f"no address of version {ADDRESS_VERSION}: {top << 32:#x}")
    return AddressStretch(
        key, medium, SpaceId(top & 0xFFFF), cast(list[PageId], pages), cast(list[Epoch], epochs)
    )


def unpack_addresses(raw: bytes) -> list[PageAddress]:
    """Raises: PeerProtocolError on a broken list, an unknown version or medium."""
    return one_by_one(unpack_stretches(raw))


def one_by_one(stretches: Iterable[AddressStretch]) -> list[PageAddress]:
    """All addresses, in order."""
    return [address for stretch in stretches for address in stretch.addresses()]


def behind(stretches: Sequence[AddressStretch], count: int) -> list[AddressStretch]:
    """Without the first `count` addresses."""
    out: list[AddressStretch] = []
    for stretch in stretches:
        skipped = min(count, len(stretch.pages))
        count -= skipped
        if skipped < len(stretch.pages):
            out.append(stretch.behind(skipped) if skipped else stretch)
    return out


_MEDIA = {ADDRESS_VERSION << 8 | medium: medium for medium in Medium}


class InsertFlags(IntFlag):
    """PIN: the caller keeps a pin on every block, also on those that were known; free_mem ends it."""

    NONE = 0
    PIN = 1


class MatchFlags(IntFlag):
    """PIN: the blocks stay until free_mem of their addresses. Without it the answer is a hint."""

    NONE = 0
    PIN = 1


class TransferFlags(IntFlag):
    """Where pages are taken at the target when no list of targets is given; HBM if none is named.

    FREE_SOURCE: after the last byte the caller gives up the source pages (or its pins): a move.
    """

    NONE = 0
    HBM = 1
    DRAM = 2
    MIXED = 3
    FREE_SOURCE = 4


class ApiHello(Struct, frozen=True, kw_only=True, tag="api_hello"):
    """First message where nothing else has said who calls. `receives`: Delivered messages of its instance too."""

    instance: InstanceId
    receives: bool = False
    is_mempool: bool = False  # of a peer: calls with the rights of its own callers


class AllocMem(Struct, frozen=True, kw_only=True, tag="api_alloc"):
    """Take pages of an instance, here or remote. Answered by Addresses, all of them or none.

    "leased": pages that a peer lends to this instance, which must be of this mempool. As many pages in DRAM come
    behind them in the answer: when a leased page goes back, its bytes are copied to its own first (Evacuated).
    """

    call_id: int
    num_blocks: int
    mem_type: MemType
    instance: InstanceId


class FreeMem(Struct, frozen=True, kw_only=True, tag="api_free"):
    """Give pages or pins back. Answered by Counted: how many the caller had held."""

    call_id: int
    addresses: bytes


class InsertBlocks(Struct, frozen=True, kw_only=True, tag="api_insert"):
    """Name pages that the caller allocated and filled. Answered by Addresses: where each block is now."""

    call_id: int
    parent: BlockHash  # hash before the first block; the chain's seed for a first block
    hashes: bytes
    addresses: bytes
    last_tokens: int = 0  # valid tokens of the last block; 0: it is full
    flags: int = 0


class MatchBlocks(Struct, frozen=True, kw_only=True, tag="api_match"):
    """Answered by Addresses of the longest known prefix."""

    call_id: int
    hashes: bytes
    instance: InstanceId
    flags: int = 0


class DeleteBlocks(Struct, frozen=True, kw_only=True, tag="api_delete"):
    """Answered by Counted: pages that are free now."""

    call_id: int
    hashes: bytes
    instance: InstanceId


class SwapOut(Struct, frozen=True, kw_only=True, tag="api_swap_out"):
    """HBM -> DRAM. Answered by Addresses in DRAM, fewer than asked when fewer could go."""

    call_id: int
    num_blocks: int
    instance: InstanceId


class SwapIn(Struct, frozen=True, kw_only=True, tag="api_swap_in"):
    """DRAM -> HBM. Answered by Addresses in the order asked; a block that could not come keeps its own."""

    call_id: int
    addresses: bytes  # pinned by the caller: its pins pass to the pages in HBM


class Transfer(Struct, frozen=True, kw_only=True, tag="api_transfer"):
    """Copy pages to an instance. Answered by Addresses at the target after the last byte.

    With `hashes` the target inserts them before the answer (transfer_with_insert): only what it lacks moves.
    """

    call_id: int
    target: InstanceId
    sources: bytes
    targets: bytes = b""  # addresses; empty: the target allocates, as `flags` say
    flags: int = 0
    private: bytes = b""
    insert: bool = False
    parent: BlockHash = BlockHash(b"")
    hashes: bytes = b""
    last_tokens: int = 0
    timeout_ms: int = 10_000


class CopiedDirectly(Struct, frozen=True, kw_only=True, tag="api_copied"):
    """Now and then, unanswered: what the caller copied by itself since it last said so (shared/mempool/direct.py), and
    how many transfers with given targets it left to the mempool."""

    transfers: int
    num_bytes: int
    mediated: int = 0


class PullPages(Struct, frozen=True, kw_only=True, tag="api_pull"):
    """mempool -> mempool: the source's word that these pages are pinned; pull them. Answered as a Transfer."""

    call_id: int
    source: InstanceId
    order: Transfer


class Addresses(Struct, frozen=True, kw_only=True, tag="api_addresses"):
    """`num_known`: of an insert or transfer, blocks that were there before, for which nothing was taken."""

    call_id: int
    addresses: bytes
    num_known: int = 0


class Counted(Struct, frozen=True, kw_only=True, tag="api_counted"):
    """Answer of a number."""

    call_id: int
    count: int


class ApiFailed(Struct, frozen=True, kw_only=True, tag="api_failed"):
    """Nothing has changed. `code`: of an error class in shared/errors.py."""

    call_id: int
    code: str
    reason: str


class Delivered(Struct, frozen=True, kw_only=True, tag="api_delivered"):
    """Pages have arrived for your instance, complete. Not inserted ones are yours now: free_mem them."""

    source: InstanceId
    addresses: bytes
    private: bytes
    inserted: bool
    hashes: bytes = b""


class Evacuated(Struct, frozen=True, kw_only=True, tag="api_evacuated"):
    """Leased pages of yours went back to their owner; each one's bytes are in the page in DRAM that came with it.
    `lost`: so did these, without: their page in DRAM was given up before, or could not be written."""

    addresses: bytes
    lost: bytes = b""


ApiCall = AllocMem | FreeMem | InsertBlocks | MatchBlocks | DeleteBlocks | SwapOut | SwapIn | Transfer
ApiReply = Addresses | Counted | ApiFailed
ToMempoolApi = ApiHello | ApiCall | CopiedDirectly | PullPages
FromMempoolApi = ApiReply | Delivered | Evacuated

TO_MEMPOOL_API: Channel[ToMempoolApi] = Channel(b"quire.mempool-api/1", ToMempoolApi)
FROM_MEMPOOL_API: Channel[FromMempoolApi] = Channel(b"quire.mempool-api-reply/1", FromMempoolApi)
