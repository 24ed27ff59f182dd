"""caller of the nine calls <-> mempool: the memory of a space, to copy by itself. Part of mempool.py's channels.

AttachCaller, first on a connection -> CallerAttached with descriptors, or AttachRefused ("caller.unsupported",
"memory.replaced") -> SlabsCall, Unmap, MapSlabs, Mapped, Unmapped as of a rank -> Detach -> Detached
"""

from msgspec import Struct

from shared.ids import Epoch, InstanceId, SpaceId


class AttachCaller(Struct, frozen=True, kw_only=True, tag="attach_caller"):
    """Descriptors of one space, please. The caller writes only pages that its connection to the nine calls allocated.

    With `memory_id` it had attached to an earlier mempool: none of its process's copies of then runs any more.
    """

    instance: InstanceId  # the caller's
    pages_of: InstanceId  # an instance that has pages in the space
    space: SpaceId  # as in addresses
    reads_only: bool = False
    memory_id: Epoch = Epoch(0)


class CallerAttached(Struct, frozen=True, kw_only=True, tag="caller_attached"):
    """Two fds come with it: pages (read-only if asked so) and table (read-only). On a GPU only the latter."""

    boot_generation: Epoch
    num_pages: int
    page_bytes: int
    pages_per_slab: int = 0  # 0: in host memory
    memory_id: Epoch = Epoch(0)
    absent_slabs: bytes = b""  # have no memory now, or lose it; u32 each
    device: str = "cpu"  # as in Attach
    content_key: str = ""  # copies are between spaces of one


class Detached(Struct, frozen=True, kw_only=True, tag="detached"):
    """The caller's Detach was read, and no successor of this mempool will wait for it."""
