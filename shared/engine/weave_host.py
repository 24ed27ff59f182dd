"""Opens the fused operation for a loaded model and puts it into its layers; on every rank, or on none.

Settings come in `additional_config["quire_weave"]`; see weave_settings.py. What cannot be had is said in one line of
the log, by the first rank, with the number of the rank that cannot, and the engine goes on with vLLM's own all-reduce
and norm: where it gave up compiling for ours, in another start (weave_restart.py).
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.distributed import get_tp_group

from shared.engine.weave_cuts import StepCuts
from shared.engine.weave_forward import OneAfterTheOther, Streams, TwoStreams, WovenForward
from shared.engine.weave_layers import FusedSums, fuse_layers
from shared.engine.weave_open import RanksCannot, open_fused, together
from shared.engine.weave_restart import refuse
from shared.engine.weave_settings import EXPERTS
from shared.engine.weave_support import why_not_fused, why_not_woven
from shared.engine.weave_tables import StepTables
from shared.weave.smart_split import SmartSplit, SplitRules, TokenSplit
from shared.weave.threshold import WeaveRule
from shared.weave.tiles import DEFAULT_TILE
from shared.weave.waves import Tile, layer_gemms

logger = logging.getLogger(__name__)

MAX_EXTRA_RATIO = (
    0.05  # of a layer's waves; a part's communication is more than that where weaving pays at all
)
DEFAULT_SMS = 16  # of a part's sum, where nothing was measured or said: TokenWeave's range is 2 to 16
CPU_MIN_TOKENS = 256  # nothing is won there, so nothing is measured
NEVER = 1 << 30  # tokens


class HostedWeave:
    """One rank's. `sums` is None where vLLM's own way is taken, `forward` where steps stay whole."""

    def __init__(self, model: Any, config: Any, device: torch.device) -> None:
        """Raises: StartsAnew where vLLM's own way needs another start of the engine; else nothing."""
        wanted: dict[str, Any] = config.additional_config["quire_weave"]
        self.model, self.config, self.device = model, config, device
        self.mode: str = wanted["mode"]
        self.num_sms: int = wanted["sms"] or DEFAULT_SMS
        self.sums: FusedSums | None = None
        self.cuts: StepCuts | None = None
        self.forward: WovenForward | None = None
        self._tables: StepTables | None = None
        self.rank = get_tp_group().rank_in_group
        self._close: Callable[[], None] = _nothing
        self._min_tokens = int(wanted["min_tokens"]) or NEVER
        if device.type == "cpu":
            self._min_tokens = int(wanted["min_tokens"]) or CPU_MIN_TOKENS
        if reason := why_not_fused(model, config) or self._open():
            refuse(wanted, reason)
            self._fall_back("vLLM's own all-reduce and norm are used", reason)
            return
        assert self.sums is not None
        self.num_sms = wanted["sms"] or self.sums.fused.few_sms or DEFAULT_SMS
        self.sums.min_tokens = wanted["fuse_min_tokens"]
        fuse_layers(model.model, self.sums, is_moe=type(model).__name__ in EXPERTS)
        if self.mode == "full":
            if reason := why_not_woven(model, config):
                self._fall_back("steps are fused and stay whole", reason)
                return
            self.cut_by([DEFAULT_TILE])
            self.cuts = StepCuts(self._choose)
            streams: Streams = OneAfterTheOther() if device.type == "cpu" else TwoStreams(device)
            self.forward = WovenForward(model, self.sums, self.cuts, streams, self.num_sms)
            model.forward = self.forward

    @property
    def min_tokens(self) -> int:
        """Steps of so many tokens are woven."""
        return self._min_tokens

    @property
    def is_measured(self) -> bool:
        """Whether from where on weaving pays is to be found out."""
        return self.forward is not None and self._min_tokens == NEVER

    @property
    def has_waves(self) -> bool:
        """Whether steps are cut by the tiles of the layers' products, which are to be found out."""
        return self.forward is not None and self.device.type != "cpu"

    def watch(self, attn_groups: Any, block_tokens: int) -> None:
        """Once the cache is there."""
        self._tables = StepTables(block_tokens)
        if self.cuts is not None and (reason := self.cuts.watch(attn_groups)):
            self._fall_back("steps are fused and stay whole", reason)
            self.forward = None

    def hear(self, scheduler_output: Any) -> None:
        """Before each step: it stays whole where a request in it reads what another one writes (weave_tables.py)."""
        if self.cuts is not None and self.forward is not None:
            assert self._tables is not None
            self.cuts.keeps_whole = self._tables.reads_own_blocks(scheduler_output)

    def cut_by(self, tiles: Sequence[Tile]) -> None:
        """Of the products of a layer; one for all, or one each."""
        rules = SplitRules(self._compute_sms(), max_extra_ratio=MAX_EXTRA_RATIO)
        self._split = SmartSplit(_gemms(self.config, tiles), rules)

    def follow(self, rule: WeaveRule) -> None:
        """From the next step on: what is fused, and what is woven. The same on every rank."""
        if self.sums is not None:
            self.sums.min_tokens = rule.fuse_min_tokens or NEVER
            self._min_tokens = rule.full_min_tokens or NEVER

    def split_of(self, num_tokens: int) -> TokenSplit | None:
        """Where a step with so many tokens is cut, if it is woven: also where fusing it whole would not pay yet."""
        if self.sums is None or not 2 <= num_tokens <= self.sums.fused.max_tokens:
            return None
        if self.device.type == "cpu":  # it has no waves; the order of work is what is tested there
            first = num_tokens // 2
            return TokenSplit(first, num_tokens - first, 0, 0, 0.0)
        return self._split.choose(num_tokens)

    def check(self) -> None:
        """After a step. Raises: PeerTimeout when a rank was awaited in vain."""
        if self.sums is not None:
            self.sums.fused.check()

    def close(self) -> None:
        """At the engine's end."""
        self._close()
        self._close = _nothing

    def _choose(self, num_tokens: int) -> TokenSplit | None:
        return self.split_of(num_tokens) if num_tokens >= self._min_tokens else None

    def _fall_back(self, what: str, reason: str) -> None:
        if self.rank == 0:
            logger.warning("worker.weave = %s: %s: %s", self.mode, what, reason)

    def _open(self) -> str:
        """Fills `sums`; or says which rank could not, and why: the same on every rank."""
        try:
            opened = together(lambda: open_fused(self.config, self.device), lambda made: made[1]())
        except RanksCannot as error:
            return error.message
        self.sums, self._close = FusedSums(opened[0]), opened[1]
        return ""

    def _compute_sms(self) -> int:
        if self.device.type == "cpu":
            return 1
        return max(1, torch.cuda.get_device_properties(self.device).multi_processor_count - self.num_sms)


def _nothing() -> None:
    """Nothing is open."""


def _gemms(config: Any, tiles: Sequence[Tile]) -> Any:
    model, parallel = config.model_config, config.parallel_config
    text = model.hf_text_config
    return layer_gemms(
        hidden=model.get_hidden_size(),
        intermediate=text.intermediate_size,
        num_heads=text.num_attention_heads,
        num_kv_heads=model.get_total_num_kv_heads(),
        head_dim=model.get_head_size(),
        tp=parallel.tensor_parallel_size,
        tiles=tiles,
    )
