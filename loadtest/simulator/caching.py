"""What an instance keeps of what it computed, and who may read it: services/mempool/core/pd_caching.py's modes.

Going back to the prefill end, mode 3, is the cluster's (cluster.py)."""

from services.mempool.core.pd_caching import PdCaching
from shared.wire.reports import Role


def keeps(mode: PdCaching, role: Role) -> bool:
    """Whether a later request finds what this instance computed or took over. Decode instances: from mode 2 on."""
    return mode is not PdCaching.BASIC and (mode is not PdCaching.PREFILL or role != "decode")


def lends(mode: PdCaching, role: Role) -> bool:
    """Whether other instances may read it. What decode instances keep is theirs, but in mode 3."""
    return keeps(mode, role) and (mode is PdCaching.FULL or role != "decode")
