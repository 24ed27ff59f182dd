"""What a tensor-parallel layer asks of the fused all-reduce + residual add + RMSNorm; see README.md beside this file.

    GEMM of rank r -> fused.input(T, lane) --run()--> normed [T, hidden] on every rank, residual where its owner is

Providers: `fused.CudaFused` (one kernel launch, GPUs that map each other's memory) and `gloo.GlooFused`
(torch.distributed on the CPU, the same meaning). Source: TokenWeave 3.2, 3.3.
"""

from typing import Protocol

import torch

from shared.kernels.allreduce_rmsnorm.plan import Plan


class FusedAllReduceNorm(Protocol):
    """One rank's end of a group. All ranks make the same calls in the same order, lane by lane.

    A lane is a set of buffers and flags of its own: two halves of a batch use lanes 0 and 1, so that the normed rows
    of one are read while the other is summed. Calls of one lane, and what reads and writes its buffers, are ordered
    by streams; calls of several lanes are given to the GPU in the same order on every rank, on one stream (else
    two kernels may wait for each other's places on the SMs).

    What run() and input() hand out are views of the lane's buffers: the normed rows are overwritten by the next run()
    of the lane, no earlier than every rank has come to it.
    """

    rank: int
    world: int
    hidden: int  # 1024..16384, a multiple of 8
    dtype: torch.dtype  # bfloat16 or float16; GlooFused takes float32 too
    max_tokens: int  # rows of a lane's buffers, at most 65,536
    num_lanes: int
    links: str  # by which the ranks reach each other, for who keeps times; "": not said, or no GPUs

    @property
    def few_sms(self) -> int:
        """From how many SMs run() is about as fast as from 32, as measured at start; 0: nothing was."""
        ...

    def plan(self, num_tokens: int, num_sms: int = 0) -> Plan:
        """Who owns what of a sum with that budget. Pure, cheap. Raises: InvalidRequest outside 1..max_tokens."""
        ...

    def input(self, num_tokens: int, lane: int = 0) -> torch.Tensor:
        """[num_tokens, hidden], where a GEMM writes this rank's part of the sum (`torch.mm(a, b, out=...)`).

        It may be written as soon as the lane's previous run() is done on this stream. Raises: InvalidRequest.
        """
        ...

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
        """(normed, residual): vLLM's fused_add_rms_norm of the sum of all ranks' `partial`.

            residual = round(sum over ranks of partial + residual)        float32 inside, one rounding
            normed   = round(residual * rsqrt(mean(residual^2) + eps) * (weight, or 1 + weight))

        Row by row one rank computes, in the order of ranks: `normed` has the same bits on every rank.

        Args:
            partial: [T, hidden], contiguous. input(T, lane) costs nothing; anything else is copied there first.
            residual: [T, hidden], contiguous; the rows of plan(T, num_sms) are read, and in place written.
            weight: [hidden], the same dtype.
            num_sms: at most so many SMs, 1..32; 0 means as many as help. The same on all ranks.
            whole_residual: also bring every row of the residual to every rank, in the lane's own buffer, which is
                then what is returned; costs the link half as much again. Needs `open_*(whole_residual=True)`.
        Returns: views of the lane ([T, hidden]; see the class) and `residual` itself, or the lane's whole one.
        Raises: InvalidRequest on a wrong shape, dtype, device, lane or budget, before anything starts; PeerTimeout
            once an earlier call's wait for a peer has run out (see check()).
        Cost: 2(n-1)/n * T * hidden * 2 bytes over each GPU's link; one launch; may be captured in a CUDA graph.
        """
        ...

    def gather_residual(self, residual: torch.Tensor, *, lane: int = 0, num_sms: int = 0) -> torch.Tensor:
        """Every row from its owner, in the lane's own buffer: a view, valid until the lane is used again.

        `residual` itself under ONE_SHOT. `num_sms`: the budget of the calls that it was carried through, which says who
        owns which rows; bringing them together keeps to none. Needs `open_*(whole_residual=True)`. Raises: as run().
        """
        ...

    def check(self) -> None:
        """Whether all waits of calls that are done have met their peers; costs a read of host memory, no sync.

        Raises: PeerTimeout, naming the rank that was awaited, once a wait ran longer than `timeout_ms`. What was
        computed since is void, every later call returns at once, and the group must be opened anew.
        """
        ...

    def close(self) -> None:
        """Give buffers back. All ranks; nothing of theirs runs any more."""
        ...
