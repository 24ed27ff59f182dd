"""Samples of what engines, ranks and their mempool say about far places."""

from shared.kv.words import u32_bytes, u64_bytes
from shared.wire.mempool import FROM_MEMPOOL, TO_MEMPOOL
from shared.wire.mempool_far import (
    NO_PLACE,
    FarDrop,
    FarMapped,
    FarMoved,
    FarOut,
    FarPlaced,
    MapFar,
    UnmapFar,
)

HASHES = b"\x11" * 32 + b"\x22" * 32

MEMPOOL_FAR_SAMPLES = {
    "far-out": (TO_MEMPOOL, FarOut(number=1, hashes=HASHES), ()),
    "far-placed": (FROM_MEMPOOL, FarPlaced(number=1, places=u32_bytes([5, NO_PLACE]), blocks_peer=1), ()),
    "far-moved": (FROM_MEMPOOL, FarMoved(places=u32_bytes([5, 6]), to=u32_bytes([7, NO_PLACE])), ()),
    "far-drop": (TO_MEMPOOL, FarDrop(places=u32_bytes([5, 6])), ()),
    "map-far": (
        FROM_MEMPOOL,
        MapFar(number=2, places=u32_bytes([5, 6]), offsets=u64_bytes([0, 1 << 33])),
        (),
    ),
    "unmap-far": (FROM_MEMPOOL, UnmapFar(number=3, places=u32_bytes([5])), ()),
    "far-mapped": (TO_MEMPOOL, FarMapped(number=3, is_ok=False), ()),
}
