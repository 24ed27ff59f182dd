"""Where the fused all-reduce is tried: ranks as processes with a GPU each, or as streams of one process on one GPU."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shared.engine.fused_pages import page_arena
from shared.kernels.allreduce_rmsnorm.arenas import Arena, local_arenas, torch_arena
from shared.kernels.allreduce_rmsnorm.fused import CudaFused, FusedSettings
from shared.kernels.allreduce_rmsnorm.plan import Algorithm
from shared.kernels.allreduce_rmsnorm.shapes import Engine

WAYS = [
    (Algorithm.ONE_SHOT, Engine.PLAIN),
    (Algorithm.ONE_SHOT, Engine.PUSH),
    (Algorithm.TWO_SHOT, Engine.PLAIN),
    (Algorithm.TWO_SHOT, Engine.BULK),
]
EPS = 1e-5
CAPTURE = "thread_local"  # NCCL's watchdog asks after its events meanwhile


@dataclass
class Bed:
    """Which ranks run in this process, and on what."""

    world: int
    local: list[int]
    device: torch.device
    budget: int  # SMs of a rank at most
    streams: dict[int, torch.cuda.Stream]
    virtual: bool
    folder: Path | None = None  # where ranks hand each other pages of our own; None: torch's symmetric memory

    def arenas(self, num_bytes: int) -> dict[int, Arena]:
        """Zeroed."""
        if self.virtual:
            return dict(enumerate(local_arenas(self.world, num_bytes, self.device)))
        rank = self.local[0]
        if self.folder is None:
            return {rank: torch_arena(num_bytes, self.device)}
        return {rank: page_arena(num_bytes, self.device, rank, self.world, self.folder)}

    def open(self, settings: FusedSettings, arenas: dict[int, Arena]) -> dict[int, CudaFused]:
        """One end a local rank, over arenas that are zeroed again."""
        self.meet()
        for arena in arenas.values():
            arena.own.zero_()
        self.meet()
        settings = replace(settings, max_ctas=self.budget)
        made = {rank: CudaFused(settings, arenas[rank], rank, self.device) for rank in self.local}
        for one in made.values():
            for _, engine in WAYS:
                one.driver.function(one.shape, f"fused_{engine}")
        self.meet()
        return made

    def meet(self) -> None:
        """All is done, everywhere."""
        torch.cuda.synchronize(self.device)
        if not self.virtual:
            dist.barrier()

    def each(self, work: Callable[[int], Any]) -> dict[int, Any]:
        """On every local rank's stream, then wait. `work` neither allocates nor waits: kernels wait for each other."""
        found = {}
        for rank in self.local:
            with torch.cuda.stream(self.streams[rank]):
                found[rank] = work(rank)
        torch.cuda.synchronize(self.device)
        return found

    def same(self, tensors: dict[int, torch.Tensor]) -> bool:
        """Whether all ranks hold the same bits."""
        first = tensors[self.local[0]].contiguous().view(torch.int16)
        good = all(torch.equal(first, tensors[rank].contiguous().view(torch.int16)) for rank in self.local)
        if self.virtual:
            return good
        sums = torch.stack(
            [
                first.long().sum(),
                (first.long() * torch.arange(first.numel(), device=self.device).view(first.shape)).sum(),
            ]
        )
        all_sums = [torch.empty_like(sums) for _ in range(self.world)]
        dist.all_gather(all_sums, sums)
        return good and all(torch.equal(sums, one) for one in all_sums)

    def all_good(self, good: bool) -> bool:
        """Every rank's word."""
        if self.virtual:
            return good
        word = torch.tensor([int(good)], device=self.device)
        dist.all_reduce(word, dist.ReduceOp.MIN)
        return bool(word.item())


def fits(fused: CudaFused, engine: Engine, num_tokens: int) -> bool:
    """Whether the engine takes so many."""
    return engine is not Engine.PUSH or num_tokens <= fused.push_tokens


def stock(
    bed: Bed, partials: list[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, gemma: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """All-reduce in the tensors' type and fused_add_rms_norm with vLLM's roundings."""
    if bed.virtual:
        total = partials[0].clone()
        for one in partials[1:]:
            total += one
    else:
        total = partials[bed.local[0]].clone()
        dist.all_reduce(total)
    total = total + residual
    scale = torch.rsqrt(total.float().square().mean(-1, keepdim=True) + EPS)
    scaled = total.float() * scale
    if gemma:
        return (scaled * (1.0 + weight.float())).to(weight.dtype), total
    return scaled.to(weight.dtype) * weight, total


def make(
    seed: int, world: int, num_tokens: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """(partials of all ranks, residual, weight), the same in every process."""
    made = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made, device=device).to(dtype)

    return [normal(num_tokens, hidden) for _ in range(world)], normal(num_tokens, hidden) * 2, normal(hidden)


def errors(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """(root mean square, largest) distance; no rows are no distance away."""
    if got.numel() == 0:
        return 0.0, 0.0
    gap = (got.double() - want).abs()
    return float(gap.square().mean().sqrt()), float(gap.max())


def say(bed: Bed, text: str) -> None:
    """Once a group."""
    if text and bed.local[0] == 0:
        print(text, flush=True)
