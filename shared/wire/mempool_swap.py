"""Swap space of an engine's parked requests (AQUA, section 7): whole blocks leave for lent pages or host memory.

What an engine that works in the pages says, and its answers. Everything is named by content: a swap is a number that
the engine chose, new for each SwapOut, and hashes. SwapOut and SwapIn are answered once while the connection lasts,
also after SwapDrop, and not in order. Nobody waits: an engine acts on an answer at one of its step boundaries.
"""

from msgspec import Struct

from shared.wire.mempool_far import FarDrop, FarMapped, FarMoved, FarOut, FarPlaced, MapFar, UnmapFar

NO_PAGE = 0xFFFFFFFF  # in SwappedIn: the block is nowhere any more


class SwapOut(Struct, frozen=True, kw_only=True, tag="swap_out"):
    """Keep these sealed blocks outside the engine's space until SwappedIn, SwapDrop or the engine's end.

    The engine goes on pinning them until the answer. Said after a mempool came back: keep what of them is there.
    """

    swap: int
    hashes: bytes  # 32 B each


class SwappedOut(Struct, frozen=True, kw_only=True, tag="swapped_out"):
    """Answer to SwapOut: of each hash whether it is kept; the engine may unpin those that are."""

    swap: int
    kept: bytes  # 1 or 0 each
    blocks_copied: int = 0  # the others were there already
    blocks_peer: int = 0  # of all, in lent pages; the others are in host memory


class SwapIn(Struct, frozen=True, kw_only=True, tag="swap_in"):
    """Bring these blocks of a swap back, into as many pages of the engine's own, which no step writes any more.

    The pages are given away with this message; others may come in their place.
    """

    swap: int
    hashes: bytes
    pages: bytes  # u32 each
    epochs: bytes  # u64 each


class SwappedIn(Struct, frozen=True, kw_only=True, tag="swapped_in"):
    """Answer to SwapIn, which ends the swap: of each hash its page, sealed and pinned by the engine, or NO_PAGE.

    Pages that were given and not needed are granted anew.
    """

    swap: int
    pages: bytes  # u32 each
    epochs: bytes  # u64 each
    blocks_peer: int = 0  # that came from lent pages
    blocks_dram: int = 0  # from host memory


class SwapDrop(Struct, frozen=True, kw_only=True, tag="swap_drop"):
    """Nobody wants these blocks back. Unknown swaps are ignored."""

    swap: int


SwapCall = SwapOut | SwapIn | SwapDrop | FarOut | FarDrop | FarMapped
FromSwaps = SwappedOut | SwappedIn | FarPlaced | FarMoved | MapFar | UnmapFar
