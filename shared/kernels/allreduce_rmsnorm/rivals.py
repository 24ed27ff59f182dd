"""What the fused kernel is measured beside: an all-reduce of somebody else and a fused add + RMSNorm, one rank each.

Multicast stays off everywhere (QUIET, before torch is loaded). What cannot be had here says why.
"""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shared.kernels.allreduce_rmsnorm.fused import CudaFused

QUIET = {  # NVLink multicast stays off; vLLM's look for peer access would start processes
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_SKIP_P2P_CHECK": "1",
}
EPS = 1e-5

Norm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Rival:
    """`call(num_tokens)` leaves normed rows where its next call finds its input; larger sums are not asked of it."""

    name: str
    call: Callable[[int], None]
    most_bytes: int
    capture: Callable[[], AbstractContextManager[None]] = nullcontext  # around a graph's capture


@dataclass(frozen=True, slots=True)
class Place:
    """What a rank works with; `rows` and `residual` have the most tokens."""

    fused: CudaFused
    rows: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Of the largest sum."""
        return self.rows.numel() * self.rows.element_size()


def norm_of(place: Place) -> tuple[str, Norm]:
    """vLLM's fused_add_rms_norm, or our kernel of the same meaning where vLLM has none for GPUs; and its name."""
    try:
        importlib.import_module("vllm._custom_ops")
        operator = torch.ops._C.fused_add_rms_norm
    except (ImportError, AttributeError, RuntimeError):
        return "our add_norm", lambda rows, residual, weight: place.fused.add_norm(
            rows, residual, weight, EPS
        )

    def norm(rows: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
        operator(rows, residual, weight, EPS)

    return "vLLM's fused_add_rms_norm", norm


def nccl(place: Place, norm: Norm) -> Rival:
    """NCCL without NVLS, in place."""

    def call(num_tokens: int) -> None:
        rows = place.rows[:num_tokens]
        dist.all_reduce(rows)
        norm(rows, place.residual[:num_tokens], place.weight)

    return Rival("nccl", call, place.num_bytes)


def torch_rivals(place: Place, norm: Norm) -> list[Rival]:
    """torch's symmetric memory without multicast: two-shot in place, one-shot into new memory."""
    symmetric: Any = importlib.import_module("torch.distributed._symmetric_memory")
    group = dist.group.WORLD
    assert group is not None
    own = symmetric.empty(place.rows.numel(), dtype=place.rows.dtype, device=place.rows.device)
    symmetric.rendezvous(own, group.group_name)
    shared = own.view_as(place.rows)
    shared.copy_(place.rows)
    operators = torch.ops.symm_mem

    def two_shot(num_tokens: int) -> None:
        rows = shared[:num_tokens]
        operators.two_shot_all_reduce_(rows, "sum", group.group_name)
        norm(rows, place.residual[:num_tokens], place.weight)

    def one_shot(num_tokens: int) -> None:
        out = operators.one_shot_all_reduce(shared[:num_tokens], "sum", group.group_name)
        norm(out, place.residual[:num_tokens], place.weight)

    return [Rival("torch two-shot", two_shot, place.num_bytes), Rival("torch one-shot", one_shot, 16 << 20)]


def vllm_custom(place: Place, norm: Norm, cpu_group: dist.ProcessGroup) -> Rival:
    """vLLM's custom all-reduce, its limit of 8 MB lifted. Raises: ImportError where it cannot be had."""
    module: Any = importlib.import_module("vllm.distributed.device_communicators.custom_all_reduce")
    made = module.CustomAllreduce(cpu_group, place.rows.device, max_size=place.num_bytes + (1 << 20))
    if made.disabled:
        raise ImportError("vLLM's custom all-reduce disabled itself")

    def call(num_tokens: int) -> None:
        rows = place.rows[:num_tokens]
        out = made.custom_all_reduce(rows)
        if out is None:
            raise RuntimeError(f"vLLM's custom all-reduce refuses {num_tokens} tokens")
        norm(out, place.residual[:num_tokens], place.weight)

    return Rival("vllm custom", call, place.num_bytes, made.capture)


def flashinfer(place: Place) -> Rival:
    """FlashInfer's fused kernel, TensorRT-LLM's way, whose workspace has no multicast. Raises: ImportError."""
    comm: Any = importlib.import_module("flashinfer.comm")
    mnnvl: Any = importlib.import_module("flashinfer.comm.mnnvl")
    group = dist.group.WORLD
    most_tokens, hidden = min(place.rows.shape[0], 4096), place.rows.shape[1]
    workspace = comm.create_allreduce_fusion_workspace(
        backend="trtllm", world_size=place.fused.world, rank=place.fused.rank, max_token_num=most_tokens,
        hidden_dim=hidden, dtype=place.rows.dtype, comm_backend=mnnvl.TorchDistBackend(group=group), group=group,
    )  # fmt: skip

    def call(num_tokens: int) -> None:
        rows, residual = place.rows[:num_tokens], place.residual[:num_tokens]
        comm.allreduce_fusion(
            input=rows, workspace=workspace, pattern=comm.AllReduceFusionPattern.kARResidualRMSNorm,
            launch_with_pdl=False, residual_out=residual, norm_out=rows, residual_in=residual,
            rms_gamma=place.weight, rms_eps=EPS, fp32_acc=True, trigger_completion_at_end=True,
        )  # fmt: skip

    return Rival("flashinfer", call, most_tokens * hidden * place.rows.element_size())


def all_rivals(
    place: Place, cpu_group: dist.ProcessGroup, *, with_flashinfer: bool
) -> tuple[list[Rival], dict[str, str]]:
    """Those that can be had, and for the others why not. Every rank must be able to have the same ones."""
    name, norm = norm_of(place)
    found, missing = [nccl(place, norm)], {"norm": name}
    tries: list[tuple[str, Callable[[], list[Rival]]]] = [
        ("torch", lambda: torch_rivals(place, norm)),
        ("vllm custom", lambda: [vllm_custom(place, norm, cpu_group)]),
    ]
    if with_flashinfer:
        tries.append(("flashinfer", lambda: [flashinfer(place)]))
    else:
        missing["flashinfer"] = "not asked for: its kernels are compiled at their first use, for minutes"
    for label, make in tries:
        rivals: list[Rival] = []
        reason = ""
        try:
            rivals = make()
        except (
            ImportError,
            RuntimeError,
            AttributeError,
            AssertionError,
            ValueError,
            TypeError,
            OSError,
        ) as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        here = torch.tensor([int(not reason)], device=place.rows.device)
        dist.all_reduce(here, dist.ReduceOp.MIN)
        if int(here.item()):
            found += rivals
        else:
            missing[label] = reason or "another rank has it not"
    return found, missing
