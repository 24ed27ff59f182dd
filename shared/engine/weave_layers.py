"""A loaded model's layers with all-reduce, residual add and RMSNorm as one operation (TokenWeave 3.2, 3.3).

Row-parallel products stop reducing, and write where the fused operation reads; the norm behind them reduces. Instances
are changed, not classes, after vLLM has loaded them: what is no decoder layer of a known family (embedding, a vision
tower, q and k norms) keeps vLLM's own code, and an engine that cannot be hosted so is not touched at all.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed import tensor_model_parallel_all_reduce

from shared.kernels.allreduce_rmsnorm.interface import FusedAllReduceNorm


@dataclass(slots=True)
class FusedSums:
    """The fused operation of this rank, which lane of it is in use, and since when it is used.

    Steps of less than `min_tokens`, or more than it has room for, go vLLM's way. All layers of a step go one way, so a
    residual whose rows are with their owners is never read by the other one: a woven step's parts go this way however
    few tokens they have (`is_woven`).
    """

    fused: FusedAllReduceNorm
    min_tokens: int = 1
    lane: int = 0
    is_woven: bool = False  # while the parts of a step are computed
    is_alone: bool = False  # for measurements: what goes vLLM's way is not added up at all
    counters: dict[str, int] = field(default_factory=lambda: {"fused": 0, "woven": 0, "whole": 0})

    def takes(self, num_tokens: int) -> bool:
        """Whether a step, or a part of a woven one, with so many tokens is fused."""
        return (self.is_woven or self.min_tokens <= num_tokens) and num_tokens <= self.fused.max_tokens


class FusedNorm(torch.nn.Module):
    """In the place of an RMSNorm behind row-parallel products: reduces what they left unreduced.

    The parameter keeps its name. `is_last`: what it returns outlives the step's next sum, so it is a copy.
    """

    def __init__(self, plain: torch.nn.Module, sums: FusedSums, *, is_last: bool) -> None:
        super().__init__()
        self.weight = plain.weight
        self.eps: float = plain.variance_epsilon
        self._plain = (plain,)  # no submodule: its parameter is here
        self._sums = sums
        self._is_last = is_last

    @property
    def plain(self) -> torch.nn.Module:
        """vLLM's own."""
        return self._plain[0]

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """vLLM's. Without a residual there is nothing to reduce: the first layer's input is whole."""
        if residual is None:
            return self.plain(x)
        if not self._sums.takes(x.shape[0]):
            return self.plain(x if self._sums.is_alone else tensor_model_parallel_all_reduce(x), residual)
        normed, residual = self._sums.fused.run(x, residual, self.weight.data, self.eps, lane=self._sums.lane)
        self._sums.counters["fused"] += 1
        return (normed.clone() if self._is_last else normed), residual


def leave_unreduced(linear: Any, sums: FusedSums) -> None:
    """A RowParallelLinear whose output is left for a FusedNorm, on a GPU in the operation's own buffer."""
    linear.reduce_results = False
    plain = type(linear.quant_method).__name__ == "UnquantizedLinearMethod" and linear.bias is None
    if not plain or linear.weight.device.type == "cpu" or linear.weight.dtype != sums.fused.dtype:
        return  # run() copies it
    stock, weight = linear.forward, linear.weight

    def into_lane(x: torch.Tensor) -> Any:
        if not sums.takes(x.shape[0]):
            return stock(x)
        out = sums.fused.input(x.shape[0], sums.lane)
        torch.mm(x, weight.t(), out=out)
        return (out, None) if linear.return_bias else out

    linear.forward = into_lane


def fuse_layers(inner: Any, sums: FusedSums, *, is_moe: bool) -> None:
    """Change the layers of a model's trunk. `is_moe`: the second sum of a layer comes from its experts."""
    for layer in inner.layers[inner.start_layer : inner.end_layer]:
        leave_unreduced(layer.self_attn.o_proj, sums)
        if is_moe:
            layer.block_sparse_moe.experts.moe_config.skip_final_all_reduce = True
        else:
            leave_unreduced(layer.mlp.down_proj, sums)
        layer.input_layernorm = FusedNorm(layer.input_layernorm, sums, is_last=False)
        layer.post_attention_layernorm = FusedNorm(layer.post_attention_layernorm, sums, is_last=False)
    inner.norm = FusedNorm(inner.norm, sums, is_last=True)
