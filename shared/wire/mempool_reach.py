"""mempool -> client: whether its instance's blocks pass between hosts. One-way, no answer."""

from msgspec import Struct


class HostReach(Struct, frozen=True, kw_only=True, tag="host_reach"):
    """Blocks of the instance's space can go to other hosts and come from them: it lies in host memory, or has some
    behind its GPUs. Said when that becomes other than it was said last; after Attached they can."""

    crosses: bool
