"""Memory that the ranks of a group share: every rank's arena, mapped into every rank's address space."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shared.kernels.allreduce_rmsnorm.errors import FusedUnavailable


@dataclass(frozen=True, slots=True)
class Arena:
    """One rank's view of all arenas.

    Args:
        own: uint8, this rank's memory, zeros.
        bases: where each rank's arena is mapped here, in rank order; bases[rank] is own's address.
        multicast: address of all arenas at once, or 0 (always, unless the caller says that it may be used).
        close: gives the mappings back; the last thing that is called.
    """

    own: torch.Tensor
    bases: tuple[int, ...]
    multicast: int
    close: Callable[[], None]


def _nothing() -> None:
    return


def local_arenas(world: int, num_bytes: int, device: torch.device) -> list[Arena]:
    """All ranks in this process on one GPU: for tests and for trying a kernel where there is one GPU."""
    made = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(world)]
    bases = tuple(one.data_ptr() for one in made)
    torch.cuda.synchronize(device)
    return [Arena(one, bases, 0, _nothing) for one in made]


def torch_memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [num_bytes] of torch's symmetric memory, for mapped_arena(). This rank's alone: no other is waited for.

    Raises: FusedUnavailable when there is none to be had.
    """
    symmetric: Any = importlib.import_module("torch.distributed._symmetric_memory")
    try:
        return symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise FusedUnavailable(f"no symmetric memory: {error}") from error


def mapped_arena(
    own: torch.Tensor, group: dist.ProcessGroup | None = None, *, use_multicast: bool = False
) -> Arena:
    """This rank's torch_memory(), zeroed, and everybody's, mapped here.

    All ranks call it, and only once all have theirs: each waits for the others. Afterwards they meet once more by
    themselves before the first call, because zeros are written here and flags there.
    Multicast is touched neither here nor by torch when TORCH_SYMM_MEM_DISABLE_MULTICAST=1 is in the environment.
    Raises: FusedUnavailable when the GPUs cannot map each other's memory.
    """
    symmetric: Any = importlib.import_module("torch.distributed._symmetric_memory")
    group = group or dist.group.WORLD
    assert group is not None
    try:
        handle = symmetric.rendezvous(own, group.group_name)
    except RuntimeError as error:
        raise FusedUnavailable(f"no symmetric memory: {error}") from error
    own.zero_()
    torch.cuda.synchronize(own.device)
    multicast = int(handle.multicast_ptr) if use_multicast else 0
    shift = own.data_ptr() - int(
        handle.buffer_ptrs[dist.get_rank(group)]
    )  # inside its allocation, the same everywhere
    bases = tuple(int(base) + shift for base in handle.buffer_ptrs)

    def close() -> None:
        nonlocal handle
        handle = None

    return Arena(own, bases, multicast, close)


def torch_arena(num_bytes: int, device: torch.device, group: dist.ProcessGroup | None = None) -> Arena:
    """Both of torch's symmetric memory, ready for the first call: one rank a process and GPU; for benches and tests.

    A rank that raises stays away from the others, who wait for it: who serves asks first whether all have memory.
    Raises: FusedUnavailable.
    """
    arena = mapped_arena(torch_memory(num_bytes, device), group)
    dist.barrier(group)
    return arena


def rows_view(arena: Arena, offset: int, num_tokens: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """[num_tokens, hidden] at `offset` of the rank's own arena; no copy."""
    size = num_tokens * hidden * dtype.itemsize
    return arena.own[offset : offset + size].view(dtype).view(num_tokens, hidden)


def addresses(bases: Sequence[int], offset: int) -> list[int]:
    """The same place in every arena."""
    return [base + offset for base in bases]
