"""What memory an attachment may take, to be made before anything is decided about it. No I/O.

A space that the core has decided on cannot be taken back: engines, host memory behind it and the nine calls know of
it by then. So whoever attaches where memory cannot be made is refused first, as where descriptors are short.
"""

from services.mempool.core import space
from services.mempool.core.belonging import takes
from services.mempool.core.mempool import Mempool
from services.mempool.core.space import Plan
from shared.wire.mempool import Attach


def memory_ahead(core: Mempool, message: Attach) -> list[Plan]:
    """All that on_attach() could have made, perhaps more; none where it is there. Raises: PeerProtocolError."""
    if message.kind == "client":
        return []
    description = space.described(message)
    pools, key = list(core.pools.values()), description.content_key
    if message.memory_id:
        there = [pool for pool in pools if pool.memory_id == message.memory_id]
        if not there:
            return []  # it is refused: its memory is another by now
    else:
        there = [pool for pool in pools if takes(pool, message, key)]
    if there:
        wants = [pool for pool in there if core.dram.wants(pool, description)]
        return [core.dram.plan(pool, description) for pool in wants[:1]]
    front = space.plan(description, message, core.limits)
    if not front.num_pages:
        return []  # it is refused
    behind = core.limits.dram_bytes // (front.page_bytes * front.num_ranks)
    has_dram = behind > 0 and not description.only_lends
    return [front, *([Plan(behind, front.page_bytes, front.num_ranks)] if has_dram else [])]
