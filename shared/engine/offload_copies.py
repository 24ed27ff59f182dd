"""vLLM's OffloadingConnector with its swap copies made by copy_pages, as an offloading spec that vLLM loads by name.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config":
        {"cpu_bytes_to_use": ..., "spec_name": "CopyPagesOffloadingSpec",
         "spec_module_path": "shared.engine.offload_copies"}}'

Everything but the copies stays vLLM's: which blocks, when, its streams and events (vLLM PR 38460 put the one call there
that is replaced here).
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker, SingleDirectionOffloadingHandler
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from shared.engine.vllm_setup import check_version
from shared.errors import InvariantBroken
from shared.kernels.copy_pages.calibrate import open_copier
from shared.kernels.copy_pages.copier import Copier
from shared.kernels.copy_pages.copies import Copies, Direction, Order
from shared.kernels.copy_pages.cuda_copier import CudaCopier
from shared.kernels.copy_pages.driver import CudaDriver


class CopyPagesSwap:
    """Stands for vLLM's swap_blocks_batch in one direction. Returns once the copies are in the stream."""

    def __init__(self, copier: Copier, direction: Direction, *, kernels: bool = False) -> None:
        """`kernels`: host memory is page-locked, and this process computes on this GPU."""
        self._copier = copier
        self._direction = direction
        self._kernels = kernels

    def __call__(
        self,
        sources: torch.Tensor,
        targets: torch.Tensor,
        sizes: torch.Tensor,
        *,
        is_src_access_order_any: bool = False,
    ) -> None:
        """Work of the current stream: later work there sees the targets written.

        Args: int64 addresses and bytes, one row a copy; they may be reused at once.
        Raises: CopyFailed, InvalidCopies, CopyQueueFull.
        """
        columns = (column.numpy().view(np.uint64) for column in (sources, targets, sizes))
        self._copier.submit(
            Copies(*columns),
            self._direction,
            stream=current_stream(),
            order=Order.ANY if is_src_access_order_any else Order.STREAM,
            kernels=self._kernels,
        )


def current_stream() -> int:
    """CUDA's handle of torch's current stream."""
    return int(torch.cuda.current_stream().cuda_stream)


def with_copies(worker: CPUOffloadingWorker, copier: CudaCopier) -> CPUOffloadingWorker:
    """The same worker, its copies made by `copier`; no copy runs over the end of one of its tensors.

    Raises: InvariantBroken when vLLM's worker is not built as 0.26.0 builds it.
    """
    handlers = (
        (worker._store_handler, Direction.DEVICE_TO_HOST),
        (worker._load_handler, Direction.HOST_TO_DEVICE),
    )
    for handler, direction in handlers:
        if not hasattr(handler, "_swap_blocks_batch"):
            raise InvariantBroken("vLLM's offloading handler has no swap function to replace")
        copier.add_boundaries(edges(handler))
        vars(handler)["_swap_blocks_batch"] = CopyPagesSwap(copier, direction, kernels=is_locked(handler))
    return worker


def is_locked(handler: SingleDirectionOffloadingHandler) -> bool:
    """Whether all of the handler's host memory is page-locked."""
    host = [tensor for tensor in (*handler.src_tensors, *handler.dst_tensors) if not tensor.is_cuda]
    return bool(host) and all(tensor.is_pinned() for tensor in host)


def edges(handler: SingleDirectionOffloadingHandler) -> list[int]:
    """Where the bytes of each tensor [blocks, bytes] begin and end."""
    out: list[int] = []
    for tensor in (*handler.src_tensors, *handler.dst_tensors):
        rows, columns = tensor.shape
        first = tensor.data_ptr()
        out += [first, first + ((rows - 1) * tensor.stride(0) + columns) * tensor.element_size()]
    return out


class CopyPagesOffloadingSpec(CPUOffloadingSpec):
    """vLLM's CPU offloading; extra config `copy_costs`: folder of the measured cost table, none by default."""

    def __init__(self, config: Any) -> None:
        """Raises: SettingsError unless it is vLLM 0.26.0."""
        check_version()
        super().__init__(config)

    def create_worker(self, kv_caches: CanonicalKVCaches) -> CPUOffloadingWorker:
        """In the worker process, once. Raises: CopyUnavailable without CUDA's driver. Cost: 2 s to measure costs."""
        worker = super().create_worker(kv_caches)
        folder = self.extra_config.get("copy_costs")
        driver = CudaDriver(torch.cuda.current_device())
        return with_copies(worker, open_copier(driver, Path(folder) if folder else None))
