"""A step's attention metadata in two parts, made when vLLM makes the whole. Both of vLLM's runners.

vLLM asks a metadata builder once per step; ours asks two builders of the same kind for the parts behind it, with
vLLM's own function that cuts what all backends have in common, also within a request. The model takes the parts only
where the whole that it was given is the one they were cut from: a step that is replayed from a graph, a dummy run, or a
step that never reached the model leaves parts that nobody takes.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.forward_context import ForwardContext
from vllm.v1.worker.ubatch_utils import UBatchSlice, split_attn_metadata

from shared.weave.batch_cut import BatchCut, Part, cut_batch
from shared.weave.smart_split import TokenSplit


@dataclass(slots=True)
class CutStep:
    """`tokens`: of each part; `contexts`: for its layers."""

    tokens: tuple[slice, slice]
    contexts: tuple[ForwardContext, ForwardContext]


@dataclass(slots=True)
class _Parts:
    whole: Any
    parts: list[Any]
    tokens: tuple[slice, slice]
    num_tokens: int


class StepCuts:
    """`keeps_whole`: the step that is made now is not cut.

    Args: choose: where a step with so many tokens is cut; None: nowhere.
    """

    def __init__(self, choose: Callable[[int], TokenSplit | None]) -> None:
        self.choose = choose
        self.keeps_whole = False
        self._now: _Parts | None = None
        self._layers: list[str] = []
        self._builders: list[Any] = []
        self._capturing = False

    def watch(self, attn_groups: Sequence[Sequence[Any]]) -> str:
        """Once, when the cache is there. Returns why this engine's steps cannot be cut; "": they can."""
        groups = [group for one in attn_groups for group in one]
        if len(groups) != 1:
            return f"{len(groups)} kinds of attention"
        builder = groups[0].get_metadata_builder(0)
        self._layers = list(groups[0].layer_names)
        with set_current_vllm_config(builder.vllm_config):
            self._builders = [
                type(builder)(builder.kv_cache_spec, builder.layer_names, builder.vllm_config, builder.device)
                for _ in range(2)
            ]
        stock, capture = builder.build, builder.build_for_cudagraph_capture

        def build(common_prefix_len: int, common_attn_metadata: Any, **kwargs: Any) -> Any:
            whole = stock(
                common_prefix_len=common_prefix_len, common_attn_metadata=common_attn_metadata, **kwargs
            )
            self._now = None if self._capturing else self._cut(whole, common_attn_metadata)
            return whole

        def build_for_capture(*args: Any, **kwargs: Any) -> Any:
            self._capturing = True
            try:
                return capture(*args, **kwargs)
            finally:
                self._capturing = False

        builder.build, builder.build_for_cudagraph_capture = build, build_for_capture
        return ""

    def take(self, context: ForwardContext, num_rows: int) -> CutStep | None:
        """The parts of the step that the model is about to compute; None: it is computed whole."""
        now, self._now = self._now, None
        if now is None or num_rows != now.num_tokens or not isinstance(context.attn_metadata, dict):
            return None
        if context.attn_metadata.get(self._layers[0]) is not now.whole:
            return None
        if context.cudagraph_runtime_mode != CUDAGraphMode.NONE or not isinstance(context.slot_mapping, dict):
            return None
        contexts = []
        for tokens, metadata in zip(now.tokens, now.parts, strict=True):
            one = copy.copy(context)
            one.attn_metadata = dict.fromkeys(self._layers, metadata)
            one.slot_mapping = {name: slots[tokens] for name, slots in context.slot_mapping.items()}
            contexts.append(one)
        return CutStep(now.tokens, (contexts[0], contexts[1]))

    def _cut(self, whole: Any, common: Any) -> _Parts | None:
        split = None if self.keeps_whole else self.choose(common.num_actual_tokens)
        if split is None or common.causal is not True:
            return None
        starts = common.query_start_loc_cpu[: common.num_reqs + 1]
        counts = (starts[1:] - starts[:-1]).tolist()
        if min(counts) < 1 or sum(counts) != common.num_actual_tokens:
            return None  # padded
        slices = _slices(cut_batch(counts, split.first), split)
        parts = [
            builder.build(common_prefix_len=0, common_attn_metadata=metadata)
            for builder, metadata in zip(self._builders, split_attn_metadata(slices, common), strict=True)
        ]
        tokens = (slices[0].token_slice, slices[1].token_slice)
        return _Parts(whole, parts, tokens, common.num_actual_tokens)


def _slices(cut: BatchCut, split: TokenSplit) -> list[UBatchSlice]:
    def requests(part: tuple[Part, ...]) -> slice:
        return slice(part[0].index, part[-1].index + 1)

    return [
        UBatchSlice(requests(cut.first), slice(0, split.first)),
        UBatchSlice(requests(cut.second), slice(split.first, split.first + split.second)),
    ]
