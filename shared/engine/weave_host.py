"""Opens the fused operation for a loaded model and puts it into its layers; on every rank, or on none.

Settings come in `additional_config["quire_weave"]`; see weave_settings.py. What cannot be had is said in one line of
the log, by the first rank, and the engine goes on with vLLM's own all-reduce and norm.
"""

import logging
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed import get_tp_group

from shared.engine.weave_cuts import StepCuts
from shared.engine.weave_forward import OneAfterTheOther, Streams, TwoStreams, WovenForward
from shared.engine.weave_layers import FusedSums, fuse_layers
from shared.engine.weave_settings import EXPERTS
from shared.engine.weave_support import why_not_fused, why_not_woven
from shared.errors import ClusterError, ResourceError
from shared.kernels.allreduce_rmsnorm.gloo import GlooFused
from shared.kernels.allreduce_rmsnorm.interface import FusedAllReduceNorm
from shared.weave.smart_split import SmartSplit, SplitRules, TokenSplit
from shared.weave.threshold import WeaveRule
from shared.weave.tiles import DEFAULT_TILE
from shared.weave.waves import layer_gemms

logger = logging.getLogger(__name__)

CPU_TIMEOUT_MS = 60_000  # of one exchange: ranks share cores with others
CPU_SMS = 1
MAX_EXTRA_RATIO = 0.05  # of a layer's waves; what one part's communication saves is more
NUM_LANES = 2
NEVER = 1 << 30  # tokens


class HostedWeave:
    """One rank's. `sums` is None where vLLM's own way is taken."""

    def __init__(self, model: Any, config: Any, device: torch.device) -> None:
        """Raises: nothing that a fallback can answer."""
        wanted: dict[str, Any] = config.additional_config["quire_weave"]
        self.mode: str = wanted["mode"]
        self.sums: FusedSums | None = None
        self.cuts: StepCuts | None = None
        self._rank = get_tp_group().rank_in_group
        self._min_tokens = max(2, int(wanted["min_tokens"]))
        if reason := why_not_fused(model, config) or self._open(config, device):
            self._fall_back("vLLM's own all-reduce and norm are used", reason)
            return
        assert self.sums is not None
        fuse_layers(model.model, self.sums, is_moe=type(model).__name__ in EXPERTS)
        if self.mode == "full":
            if reason := why_not_woven(model, config):
                self._fall_back("steps are fused and stay whole", reason)
                return
            split = SmartSplit(
                _gemms(config), SplitRules(_num_sms(device, wanted["sms"]), max_extra_ratio=MAX_EXTRA_RATIO)
            )
            self.cuts = StepCuts(self._choose(split, device))
            streams: Streams = OneAfterTheOther() if device.type == "cpu" else TwoStreams(device)
            self.forward = WovenForward(model, self.sums, self.cuts, streams, wanted["sms"])
            model.forward = self.forward

    def watch(self, attn_groups: Any) -> None:
        """Once the cache is there."""
        if self.cuts is not None and (reason := self.cuts.watch(attn_groups)):
            self._fall_back("steps are fused and stay whole", reason)

    def follow(self, rule: WeaveRule) -> None:
        """From the next step on: what is fused, and what is woven. The same on every rank."""
        if self.sums is not None:
            self.sums.min_tokens = rule.fuse_min_tokens or NEVER
            self._min_tokens = max(2, rule.full_min_tokens or NEVER)

    def check(self) -> None:
        """After a step. Raises: PeerTimeout when a rank was awaited in vain."""
        if self.sums is not None:
            self.sums.fused.check()

    def close(self) -> None:
        """At the engine's end."""
        if self.sums is not None:
            self.sums.fused.close()

    def _fall_back(self, what: str, reason: str) -> None:
        if self._rank == 0:
            logger.warning("worker.weave = %s: %s: %s", self.mode, what, reason)

    def _open(self, config: Any, device: torch.device) -> str:
        """Fills `sums`; or says why some rank could not."""
        reason = ""
        fused: FusedAllReduceNorm | None = None
        try:
            fused = _open_fused(config, device)
        except ClusterError as error:
            reason = error.message
        group = get_tp_group().cpu_group
        failed = torch.tensor([int(fused is None)])
        dist.all_reduce(failed, group=group)
        if not int(failed):
            assert fused is not None
            self.sums = FusedSums(fused)
            return ""
        if fused is not None:
            fused.close()
        return reason or "another rank cannot"

    def _choose(self, split: SmartSplit, device: torch.device) -> Any:
        def choose(num_tokens: int) -> TokenSplit | None:
            assert self.sums is not None
            if num_tokens < self._min_tokens or not self.sums.takes(num_tokens):
                return None
            if device.type == "cpu":  # nothing is won; the order of work is what is tested
                first = num_tokens // 2
                return TokenSplit(first, num_tokens - first, 0, 0, 0.0)
            return split.choose(num_tokens)

        return choose


def _open_fused(config: Any, device: torch.device) -> FusedAllReduceNorm:
    """Raises: ClusterError when this rank cannot have it."""
    if device.type != "cpu":
        raise ResourceError("no fused operation for GPUs is hosted yet")
    hidden = config.model_config.get_hidden_size()
    max_tokens = config.scheduler_config.max_num_batched_tokens
    dtype = config.model_config.dtype
    return GlooFused(
        get_tp_group().cpu_group, hidden, max_tokens, dtype, num_lanes=NUM_LANES, timeout_ms=CPU_TIMEOUT_MS
    )


def _gemms(config: Any) -> Any:
    model, parallel = config.model_config, config.parallel_config
    text = model.hf_text_config
    return layer_gemms(
        hidden=model.get_hidden_size(),
        intermediate=text.intermediate_size,
        num_heads=text.num_attention_heads,
        num_kv_heads=model.get_total_num_kv_heads(),
        head_dim=model.get_head_size(),
        tp=parallel.tensor_parallel_size,
        tiles=[DEFAULT_TILE],
    )


def _num_sms(device: torch.device, taken: int) -> int:
    if device.type == "cpu":
        return CPU_SMS
    return max(1, torch.cuda.get_device_properties(device).multi_processor_count - taken)
