"""For measurements only: stock vLLM with its OffloadingConnector, its copies or ours, each transfer written down.

A line per transfer in the file that extra config `record` names: "end_s direction bytes seconds submit_us copies".
Seconds are of CUDA events around the copies (the bandwidth of vLLM PR 38460), submit_us is the call's own time.
"""

import time
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from shared.engine.offload_copies import CopyPagesOffloadingSpec

STORE, LOAD = "store", "load"


def transfer_config(engine: str, cpu_bytes: int, record: Path, costs: Path) -> KVTransferConfig:
    """Of `engine` stock or quire."""
    return KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "cpu_bytes_to_use": cpu_bytes,
            "spec_module_path": "shared.engine.measured_offload",
            "spec_name": {"stock": "RecordedStockSpec", "quire": "RecordedCopyPagesSpec"}[engine],
            "record": str(record),
            "copy_costs": str(costs),
        },
    )


def recorded(worker: Any, path: Path) -> Any:
    """The same worker; its submissions are timed, and what it finished is written down."""
    for handler, direction in ((worker._store_handler, STORE), (worker._load_handler, LOAD)):
        _record(handler, direction, path)
    return worker


def _record(handler: Any, direction: str, path: Path) -> None:
    submitted: dict[int, float] = {}
    start, finish = handler.transfer_async, handler.get_finished
    swap = handler._swap_blocks_batch
    copies: dict[int, int] = {}
    latest = 0

    def counted(sources: Any, targets: Any, sizes: Any, **options: Any) -> None:
        nonlocal latest
        latest = len(sizes)
        swap(sources, targets, sizes, **options)

    def transfer_async(job_id: int, source: Any, target: Any) -> bool:
        begin = time.perf_counter()
        done = start(job_id, source, target)
        submitted[job_id] = (time.perf_counter() - begin) * 1e6
        copies[job_id] = latest
        return done

    def get_finished() -> list[Any]:
        results = finish()
        if results:
            now = time.perf_counter()
            lines = [
                f"{now:.6f} {direction} {one.transfer_size} {one.transfer_time:.9f} "
                f"{submitted.pop(one.job_id, 0.0):.1f} {copies.pop(one.job_id, 0)}\n"
                for one in results
            ]
            with path.open("a") as file:
                file.writelines(lines)
        return results

    vars(handler).update(transfer_async=transfer_async, get_finished=get_finished, _swap_blocks_batch=counted)


class RecordedStockSpec(CPUOffloadingSpec):
    """vLLM's own copies."""

    def create_worker(self, kv_caches: Any) -> Any:
        """See recorded()."""
        return recorded(super().create_worker(kv_caches), Path(self.extra_config["record"]))


class RecordedCopyPagesSpec(CopyPagesOffloadingSpec):
    """Ours."""

    def create_worker(self, kv_caches: Any) -> Any:
        """See recorded()."""
        return recorded(super().create_worker(kv_caches), Path(self.extra_config["record"]))
