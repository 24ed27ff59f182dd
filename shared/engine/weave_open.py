"""The fused operation of this rank, over gloo on a CPU and over symmetric memory on GPUs; shared/kernels has both."""

from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed import get_tp_group

from shared.errors import ClusterError
from shared.kernels.allreduce_rmsnorm.interface import FusedAllReduceNorm
from shared.kernels.allreduce_rmsnorm.plan import MAX_TOKENS

CPU_TIMEOUT_MS = 60_000  # of one exchange: ranks share cores with others
NUM_LANES = 2  # one for each part of a step

Opened = tuple[FusedAllReduceNorm, Callable[[], None]]


def open_fused(config: Any, device: torch.device) -> Opened:
    """And what closes it. All ranks call it at the same time. Raises: ClusterError when this rank cannot have it.

    Cost: on a GPU four buffers of a step's tokens (two lanes, what goes in and what comes out), a compilation of about
    a second, and 0.3 s to measure from which size on two-shot is faster.
    """
    max_tokens = min(config.scheduler_config.max_num_batched_tokens, MAX_TOKENS)
    opener = _on_cpu if device.type == "cpu" else _on_gpu
    return opener(config.model_config.get_hidden_size(), max_tokens, config.model_config.dtype, device)


def _on_cpu(hidden: int, max_tokens: int, dtype: torch.dtype, _device: torch.device) -> Opened:
    from shared.kernels.allreduce_rmsnorm.gloo import GlooFused

    fused = GlooFused(
        get_tp_group().cpu_group, hidden, max_tokens, dtype, num_lanes=NUM_LANES, timeout_ms=CPU_TIMEOUT_MS
    )
    return fused, fused.close


def _on_gpu(hidden: int, max_tokens: int, dtype: torch.dtype, device: torch.device) -> Opened:
    from shared.kernels.allreduce_rmsnorm.arenas import torch_arena
    from shared.kernels.allreduce_rmsnorm.calibrate import calibrate
    from shared.kernels.allreduce_rmsnorm.fused import CudaFused, FusedSettings

    group = get_tp_group()
    settings = FusedSettings(hidden, max_tokens, dtype, num_lanes=NUM_LANES)
    arena = torch_arena(settings.layout().num_bytes, device, group.device_group)
    try:
        fused = CudaFused(settings, arena, group.rank_in_group, device)
        fused.use(calibrate(fused, group.device_group))
    except ClusterError:
        arena.close()
        raise

    def close() -> None:
        fused.close()
        arena.close()

    return fused, close
