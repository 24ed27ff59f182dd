"""FusedDriver for tests: acts fused.cu's kernels out on the CPU, over the addresses that a launch is given.

A launch of all ranks happens when the last of them has made it, as the meetings would have it: until then every
rank's tensors have to live, as on a GPU they do in the order of its stream. It reads and writes plain memory by the
parameters alone, so that a wrong offset, row or pointer shows as a wrong row.
"""

import ctypes
from dataclasses import dataclass, field
from typing import Any

import torch

from shared.kernels.allreduce_rmsnorm.driver import HostWord, Params
from shared.kernels.allreduce_rmsnorm.errors import FusedRefused
from shared.kernels.allreduce_rmsnorm.shapes import KernelShape, Launch


@dataclass
class ActedGroup:
    """What the drivers of all ranks share."""

    world: int
    waiting: dict[int, tuple[KernelShape, str, Params]] = field(default_factory=dict)
    launches: list[tuple[str, Launch]] = field(default_factory=list)

    def come(self, rank: int, shape: KernelShape, name: str, params: Params) -> None:
        """One rank's launch; the last one starts all."""
        if rank in self.waiting:
            raise FusedRefused(f"rank {rank} came twice to one call")
        self.waiting[rank] = (shape, name, params)
        if len(self.waiting) == self.world:
            calls, self.waiting = self.waiting, {}
            if len({(shape, name) for shape, name, _ in calls.values()}) != 1:
                raise FusedRefused(f"ranks launched different kernels: {calls}")
            for shape, name, params in calls.values():
                _act(shape, name, params)


class ActedDriver:
    """One rank's; see ActedGroup."""

    def __init__(self, group: ActedGroup) -> None:
        self.num_sms = 132
        self.shared_bytes = 227 << 10
        self.capability: tuple[int, int] = (9, 0)
        self.has_multicast = False
        self._group = group
        self._words: dict[int, Any] = {}

    def function(self, shape: KernelShape, name: str) -> tuple[KernelShape, str]:
        """See FusedDriver."""
        return shape, name

    def launch(self, function: tuple[KernelShape, str], launch: Launch, stream: int, params: Params) -> None:
        """See FusedDriver."""
        shape, name = function
        self._group.launches.append((name, launch))
        copied = Params.from_buffer_copy(params)
        if name == "add_norm":
            _act(shape, name, copied)
        else:
            self._group.come(params.rank, shape, name, copied)

    def allocate_word(self) -> HostWord:
        """See FusedDriver."""
        word = ctypes.c_uint32(0)
        address = ctypes.addressof(word)
        self._words[address] = word
        return HostWord(address, self)

    def free_word(self, address: int) -> None:
        """See FusedDriver."""
        del self._words[address]

    def synchronize(self) -> None:
        """See FusedDriver."""

    def close(self) -> None:
        """See FusedDriver."""


def _at(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """A view of plain memory."""
    memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


def _act(shape: KernelShape, name: str, params: Params) -> None:
    dtype = torch.bfloat16 if shape.bf16 else torch.float16
    row_bytes = shape.hidden * dtype.itemsize

    def row(base: int, number: int) -> torch.Tensor:
        return _at(base + number * row_bytes, shape.hidden, dtype)

    targets = [(params.rank + k) % shape.world for k in range(params.num_targets)]
    weight = _at(params.weight, shape.hidden, dtype).float() + params.gemma if params.weight else None
    for number in range(params.row_start, params.row_stop):
        residual = row(params.residual, number)
        if name == "gather_rows":
            for to in range(shape.world):
                row(params.whole[to], number).copy_(residual)
            continue
        inputs = [params.out[params.rank]] if name == "add_norm" else params.input[: shape.world]
        total = torch.zeros(shape.hidden)
        for base in inputs:
            total += row(base, number).float()
        residual.copy_((total + residual.float()).to(dtype))
        kept = residual.float()
        assert weight is not None
        normed = (kept * torch.rsqrt(kept.square().mean() + params.eps) * weight).to(dtype)
        for to in [params.rank] if name == "add_norm" else targets:
            row(params.out[to], number).copy_(normed)
            if params.whole[to]:
                row(params.whole[to], number).copy_(residual)
