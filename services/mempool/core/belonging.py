"""Which space an engine or rank belongs to. No I/O."""

from collections.abc import Mapping

from services.mempool.core import space
from services.mempool.core.pool import Pool
from services.mempool.core.pools import Pools
from shared.wire import mempool as wire


def is_outdated(message: wire.Attach, pools: Mapping[int, Pool]) -> bool:
    """Whether a later engine of the instance is attached, in whichever space: its readers are where that is."""
    return any(
        pool.memory is not None and pool.memory.engines.has_later(message.instance, message.instance_epoch)
        for pool in pools.values()
    )


def is_taken(message: wire.Attach, process: int, pool: Pool | None, pools: Mapping[int, Pool]) -> bool:
    """Whether another process is attached under this instance's name in another space than its own.

    Two workers that were given one name: readers of one would get pages of the other's.
    """
    others = (each.memory for each in pools.values() if each is not pool)
    return any(
        memory is not None and memory.engines.has_other(message.instance, process) for memory in others
    )


def why_refused(
    message: wire.Attach,
    process: int,
    pool: Pool | None,
    pools: Pools,
    *,
    is_new: bool,
) -> tuple[str, str] | None:
    """(code, reason) where pool_for() found none for it. Args: is_new: the instance was in no space yet."""
    if is_taken(message, process, pool, pools):
        reason = (
            f"another process is attached as {message.instance}, in another space; give each worker a name"
        )
        return "instance.taken", reason
    if not (is_new and pools.is_full) or pool is None or pool.memory is None or message.memory_id:
        return None
    if takes(pool, message, space.described(message).content_key):
        return None
    reason = (
        f"all {pools.num_spaces} spaces of this mempool are other instances' that live, or that have left blocks there"
        " (until mempool.space_idle_ms): use one of their names, or raise mempool.max_spaces"
    )
    if pools.is_used_up:
        reason = "this mempool has no number left for another space: start it again"
    return "spaces.full", reason


def takes(pool: Pool, message: wire.Attach, content_key: str) -> bool:
    """Whether this pool's pages are where this engine or rank needs them."""
    memory = pool.memory
    if memory is None or memory.content_key != content_key or memory.is_behind:
        return False
    is_mine = memory.engines.knows(message.instance)
    if message.kind == "engine" and is_mine:
        return True
    if memory.pages_per_slab and not is_mine and message.rank not in memory.devices:
        return False  # the ranks of another instance are on their way
    return not space.other_device(memory, message)


def pool_for(
    message: wire.Attach, pools: Mapping[int, Pool], last: int | None, *, is_full: bool
) -> Pool | None:
    """The space of an engine or rank, perhaps one that refuses it; None: a new one.

    Args: last: of its instance, if that was anywhere.
    Raises: PeerProtocolError on an impossible description.
    """
    key = space.described(message).content_key
    fallback = pools[last if last is not None else min(pools)]
    if message.memory_id:
        return next((p for p in pools.values() if p.memory_id == message.memory_id), fallback)
    if last is not None and takes(fallback, message, key):
        return fallback
    for pool in pools.values():
        if takes(pool, message, key):
            return pool
    for pool in pools.values():
        if pool.memory is None:
            return pool
    return fallback if is_full else None
