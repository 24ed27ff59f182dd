"""What a rank is told to map at far places, with which descriptors; docs/decisions/0022."""

import os

from services.mempool.core.actions import MapFarPages
from services.mempool.memory import PoolMemory
from services.mempool.takeover import SpaceMeta
from shared.kv.words import u32_bytes, u64_bytes
from shared.wire.mempool_far import MapFar


def far_in_slabs(action: MapFarPages, meta: SpaceMeta) -> tuple[MapFar, list[int]]:
    """Of pages on a GPU: the message, and the slabs whose descriptors go with it, in order."""
    places = u32_bytes(action.places)
    if meta.pages_per_slab == 1:
        return MapFar(number=action.number, places=places), list(action.pages)
    of_pages = [divmod(page, meta.pages_per_slab) for page in action.pages]
    slabs = [slab for slab, _ in of_pages]
    told = MapFar(
        number=action.number, places=places, slabs=u32_bytes(slabs), memory_id=meta.memory_id,
        offsets=u64_bytes(nth * meta.page_bytes for _, nth in of_pages),
        slab_bytes=meta.pages_per_slab * meta.page_bytes,
    )  # fmt: skip
    return told, list(dict.fromkeys(slabs))


def far_in_host(action: MapFarPages, memory: PoolMemory) -> tuple[MapFar, list[int]]:
    """Of pages in host memory: the message, and one descriptor for reading, the caller's to close."""
    first = action.rank * memory.num_pages
    offsets = u64_bytes((first + page) * memory.page_bytes for page in action.pages)
    fd = os.open(f"/proc/self/fd/{memory.page_fd}", os.O_RDONLY | os.O_CLOEXEC)
    return MapFar(number=action.number, places=u32_bytes(action.places), offsets=offsets), [fd]
