"""The fused call over torch.distributed, on the CPU: the same meaning, ownership and errors, no speed.

Partial sums go around by all-gather and are added in rank order in float32, so that every rank has the same bits. What
the GPU keeps scattered is kept scattered here too: rows that are not this rank's stay as they were.
"""

from datetime import timedelta

import torch
import torch.distributed as dist

from shared.errors import InvalidRequest, PeerTimeout
from shared.kernels.allreduce_rmsnorm.plan import (
    ELEMENT_BYTES,
    MIN_HIDDEN,
    Algorithm,
    Plan,
    check_call,
    check_shape,
    make_plan,
    pick,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class GlooFused:
    """See FusedAllReduceNorm. float32 and narrow rows too, so that engines can be compared token by token.

    Args:
        group: of the ranks, on a CPU backend; None is the default group.
        timeout_ms: how long one exchange may wait for a peer.
        one_shot_bytes: sums up to this size are kept whole on every rank; -1 leaves it to pick().
    """

    few_sms = 0  # a CPU has none
    links = ""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        hidden: int,
        max_tokens: int,
        dtype: torch.dtype,
        *,
        num_lanes: int = 1,
        timeout_ms: int = 10_000,
        whole_residual: bool = False,
        one_shot_bytes: int = -1,
    ) -> None:
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        check_shape(self.world, self.rank, max(hidden, MIN_HIDDEN), max_tokens)
        if dtype not in DTYPES:
            raise InvalidRequest(f"{dtype}: one of {DTYPES}")
        self.hidden, self.max_tokens, self.dtype, self.num_lanes = hidden, max_tokens, dtype, num_lanes
        self._group, self._timeout = group, timedelta(milliseconds=timeout_ms)
        self._one_shot_bytes = one_shot_bytes
        self._failure = ""
        shape = (num_lanes, max_tokens, hidden)
        self._input, self._out = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        self._whole = torch.zeros(shape, dtype=dtype) if whole_residual else None

    def plan(self, num_tokens: int, num_sms: int = 0) -> Plan:
        """See FusedAllReduceNorm. The same with every budget."""
        check_call(num_tokens, self.max_tokens, 0, 1, num_sms)
        num_bytes = num_tokens * self.hidden * ELEMENT_BYTES
        if self._one_shot_bytes < 0:
            algorithm = pick(num_bytes, self.world)
        else:
            small = num_bytes <= self._one_shot_bytes
            algorithm = Algorithm.ONE_SHOT if small else Algorithm.TWO_SHOT
        return make_plan(algorithm, num_tokens, self.world, self.rank)

    def input(self, num_tokens: int, lane: int = 0) -> torch.Tensor:
        """See FusedAllReduceNorm."""
        check_call(num_tokens, self.max_tokens, lane, self.num_lanes, 0)
        return self._input[lane, :num_tokens]

    def run(
        self,
        partial: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        lane: int = 0,
        num_sms: int = 0,
        gemma: bool = False,
        whole_residual: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See FusedAllReduceNorm. `num_sms` is checked and means nothing here."""
        check_call(partial.shape[0], self.max_tokens, lane, self.num_lanes, num_sms)
        self._check_tensors(partial, residual, weight)
        if whole_residual and self._whole is None:
            raise InvalidRequest("opened without whole_residual=True")
        plan = self.plan(partial.shape[0])
        own = slice(plan.start, plan.stop)
        summed = residual[own].float()
        total = torch.zeros_like(summed)
        for part in self._all_gather(partial.contiguous()):
            total += part[own].float()
        residual[own] = (total + summed).to(self.dtype)
        kept = residual[own].float()
        scale = torch.rsqrt(kept.square().mean(dim=-1, keepdim=True) + eps)
        normed = (kept * scale * (weight.float() + (1.0 if gemma else 0.0))).to(self.dtype)
        out = self._out[lane, : plan.num_tokens]
        self._collect(plan, normed, out)
        return out, self.gather_residual(residual, lane=lane) if whole_residual else residual

    def gather_residual(self, residual: torch.Tensor, *, lane: int = 0, num_sms: int = 0) -> torch.Tensor:
        """See FusedAllReduceNorm."""
        plan = self.plan(residual.shape[0], num_sms)
        check_call(plan.num_tokens, self.max_tokens, lane, self.num_lanes, 0)
        if self._whole is None:
            raise InvalidRequest("opened without whole_residual=True")
        if plan.algorithm is Algorithm.ONE_SHOT:
            return residual
        whole = self._whole[lane, : plan.num_tokens]
        self._collect(plan, residual[plan.start : plan.stop].clone(), whole)
        return whole

    def check(self) -> None:
        """See FusedAllReduceNorm."""
        if self._failure:
            raise PeerTimeout(self._failure)

    def close(self) -> None:
        """See FusedAllReduceNorm. The group is its maker's."""

    def _check_tensors(self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
        for name, tensor in (("partial", partial), ("residual", residual)):
            if tensor.dtype != self.dtype or tuple(tensor.shape) != (partial.shape[0], self.hidden):
                raise InvalidRequest(f"{name}: {tensor.dtype} {tuple(tensor.shape)}")
        if weight.dtype != self.dtype or tuple(weight.shape) != (self.hidden,):
            raise InvalidRequest(f"weight: {weight.dtype} {tuple(weight.shape)}")

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.check()
        parts = [torch.empty_like(tensor) for _ in range(self.world)]
        try:
            work = dist.all_gather(parts, tensor, group=self._group, async_op=True)
            assert work is not None
            work.wait(self._timeout)
        except RuntimeError as error:
            self._failure = f"rank {self.rank} of {self.world} waited for its peers in vain: {error}"
            raise PeerTimeout(self._failure) from error
        return parts

    def _collect(self, plan: Plan, own: torch.Tensor, target: torch.Tensor) -> None:
        """Rows of all owners, padded to the longest share: gloo gathers equal pieces only."""
        if plan.algorithm is Algorithm.ONE_SHOT:
            target.copy_(own)
            return
        longest = -(-plan.num_tokens // self.world)
        padded = torch.zeros((longest, self.hidden), dtype=self.dtype)
        padded[: own.shape[0]] = own
        for rank, part in enumerate(self._all_gather(padded)):
            theirs = make_plan(plan.algorithm, plan.num_tokens, self.world, rank)
            target[theirs.start : theirs.stop] = part[: theirs.stop - theirs.start]
