"""What bench_burst.py counts of a run besides times: why something was computed again, where blocks went, who waited.

In a result: `fair_*` of the engine's slices (shared/engine/fair_scheduler.py says what each is; `fair_swaps_in_us` over
`fair_swaps_in` is the mean time from asking for a request's blocks to having them, `fair_waited_for_blocks_us` over
`fair_waits_for_blocks` what slices began late by); `swap_*`, `dram_*` and `peer_*` of the mempool (swaps; overflow to
host memory, and to lent pages); `path_*` of its copies; `pinned_bytes`: so much host memory was page-locked meanwhile,
which holds up copies, `dram_spaces`: made meanwhile.
"""

from collections.abc import Mapping
from typing import Any

ENGINE = (
    "num_preempted", "num_kept_tokens", "num_recomputed_tokens", "swapped_out_bytes", "swapped_in_bytes",
    "swap_lost_blocks",
)  # fmt: skip
POOL = ("swap_", "dram_", "peer_", "lending_", "pages_evicted")


def totals(engine: Mapping[str, Any], pool: Mapping[str, Any]) -> dict[str, int]:
    """Since the start of both. Args: engine, pool: what the worker's and the mempool's /status say."""
    out = {name: int(engine.get(name, 0)) for name in ENGINE}
    out |= {f"fair_{name}": int(count) for name, count in engine.get("fair_counts", {}).items()}
    out |= {name: int(count) for name, count in pool.get("counters", {}).items() if name.startswith(POOL)}
    copies = pool.get("copies") or {}
    for path, each in copies.get("paths", {}).items():
        out |= {f"path_{path}_copies": int(each["copies"]), f"path_{path}_bytes": int(each["bytes"])}
    out |= {f"copy_failed_{code}": int(count) for code, count in copies.get("failures", {}).items()}
    out["pinned_bytes"] = int(copies.get("pinned_bytes", 0))
    out["dram_spaces"] = sum(space.get("devices") == ["cpu:dram"] for space in pool.get("spaces", ()))
    return out
