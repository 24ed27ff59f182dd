"""Samples of what an engine and its mempool say about parked requests' blocks."""

from shared.kv.words import u32_bytes, u64_bytes
from shared.wire.mempool import FROM_MEMPOOL, TO_MEMPOOL
from shared.wire.mempool_swap import NO_PAGE, SwapDrop, SwapIn, SwapOut, SwappedIn, SwappedOut

HASHES = b"\x11" * 32 + b"\x22" * 32

MEMPOOL_SWAP_SAMPLES = {
    "swap-out": (TO_MEMPOOL, SwapOut(swap=1, hashes=HASHES), ()),
    "swapped-out": (FROM_MEMPOOL, SwappedOut(swap=1, kept=b"\x01\x00", blocks_copied=1, blocks_peer=1), ()),
    "swap-in": (
        TO_MEMPOOL,
        SwapIn(swap=1, hashes=HASHES, pages=u32_bytes([5, 6]), epochs=u64_bytes([9, 10])),
        (),
    ),
    "swapped-in": (
        FROM_MEMPOOL,
        SwappedIn(swap=1, pages=u32_bytes([6, NO_PAGE]), epochs=u64_bytes([11, 0]), blocks_peer=1),
        (),
    ),
    "swap-drop": (TO_MEMPOOL, SwapDrop(swap=1), ()),
}
