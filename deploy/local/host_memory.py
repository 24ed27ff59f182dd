"""Host memory behind the engines' pages: how much of it the mempool is told to take, and what is said of that.

Who borrows in the memory market has some: what finds no lent page goes there, and what has to leave one. Where a
cluster has several machines, blocks on GPUs leave one and come to the other through it (docs/mempool.md, "Other
hosts"): without it every hand-off and fetch between them is a miss, and the prompt is computed anew.
"""

import os

from deploy.local import config
from deploy.local.cluster_settings import ClusterSettings

DEFAULT_BYTES = 1 << 30  # the mempool's own capacity
# Between machines: a prompt's blocks have to fit, or it is a miss. 65,000 tokens of an 8B model (128 KiB each).
CROSSING_BYTES = 8 << 30
MOST_SHARE = 4  # of a machine's memory: this part of it by default, at most


def dram_bytes(found: ClusterSettings, device: str) -> int:
    """What the mempool is told; 0: nothing, so that its own setting counts. Raises: SettingsError of that."""
    if found.dram_bytes:
        return found.dram_bytes
    if _crosses(found, device) and found.dram_bytes is None and not _own_bytes():
        return min(found.mempool_bytes or CROSSING_BYTES, _machine_bytes() // MOST_SHARE)
    return (found.mempool_bytes or DEFAULT_BYTES) if found.memory_market else 0


def said(found: ClusterSettings, device: str) -> str:
    """Of memory that is taken without having been asked for, or that lacks. "": nothing. Raises: SettingsError."""
    if not _crosses(found, device) or found.dram_bytes or _own_bytes():
        return ""
    if taken := dram_bytes(found, device):
        gib = taken / (1 << 30)
        return f"{gib:.1f} GiB of host memory for blocks between machines and their GPUs (cluster.dram_bytes)"
    return (
        "cluster.dram_bytes = 0: hand-offs between machines are computed anew, as blocks on GPUs pass through "
        "host memory only"
    )


def _crosses(found: ClusterSettings, device: str) -> bool:
    """Whether blocks on GPUs of this machine can be wanted on another."""
    return bool(found.address) and device == "cuda"


def _own_bytes() -> int:
    """The mempool's own setting, which is not overruled by a default."""
    own = config.settings_of("mempool")["dram_bytes"]
    assert isinstance(own, int)
    return own


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
