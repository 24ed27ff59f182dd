"""A cluster whose spaces have host memory behind them, and a caller of the nine calls who swaps blocks out."""

import asyncio
from pathlib import Path

from shared.ids import InstanceId
from shared.kv.block_hash import chain_seed
from shared.mempool.api import MemPoolApi
from tests.support.local_cluster import LocalCluster

MANY = 1_000  # more than a test's space has
EMPTY_TIMEOUT_S = 60
DRAM_BYTES = 512 << 20
BLOCK_TOKENS = 32


def dram_behind_host_memory(home: Path) -> dict[str, str]:
    """Environment of a LocalCluster with this home."""
    return {
        "QUIRE_MEMPOOL_DRAM_BYTES": str(DRAM_BYTES),
        "QUIRE_MEMPOOL_DRAM_FOR_HOST": "true",
        "QUIRE_MEMPOOL_API_SOCKET": str(_socket(home)),
    }


async def swap_out(cluster: LocalCluster, instance: str, num_blocks: int) -> int:
    """How many of the instance's blocks have left for host memory."""
    seed = chain_seed("", "")  # nothing is named here
    api = MemPoolApi(_socket(cluster.home), InstanceId(instance), seed=seed, block_tokens=BLOCK_TOKENS)
    await api.connect()
    try:
        return len(await api.swap_out(num_blocks))
    finally:
        api.close()


async def empty(cluster: LocalCluster, instance: str) -> int:
    """Swap out, call after call, until the instance's own space holds nothing; how many blocks left for host memory."""
    count = 0
    async with asyncio.timeout(EMPTY_TIMEOUT_S):
        while True:
            count += await swap_out(cluster, instance, MANY)
            space = next(s for s in cluster.pool()["spaces"] if s["devices"] == [f"cpu:{instance}"])
            if not space["num_indexed"]:  # a lease that ends may have pinned some when they were asked for
                return count


def _socket(home: Path) -> Path:
    return home.parent / "api.sock"
