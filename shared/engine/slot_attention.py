"""vLLM's attention over request slots: a backend that knows no block table.

New keys and values go through the identity window to the blocks that vLLM named (`slot_mapping`); the kernel reads a
request's keys and values as one tensor [tokens, heads, dim] in its slot. Which kernel: slot_kernels.py.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from vllm import _custom_ops
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)

from shared.engine import slot_kernels
from shared.engine.slot_steps import SlotSteps, Span
from shared.errors import SettingsError

Kernel = Callable[["SlotCall"], None]


class SlotReader:
    """What a worker's attention layers share: the steps, each layer's view of the slots, the kernel.

    Args:
        views: of each layer, [slots, tokens, 2, heads, dim].
        request_ids: of the batch that vLLM is preparing, in the order of its rows.
    """

    def __init__(
        self, steps: SlotSteps, views: dict[str, torch.Tensor], request_ids: Callable[[], Sequence[str]]
    ) -> None:
        self.steps = steps
        self.caches = {name: (view[:, :, 0], view[:, :, 1]) for name, view in views.items()}
        self.request_ids = request_ids
        self.slot_tokens = next(iter(views.values())).shape[1]


class _Process:
    """vLLM makes backends from class names: what they share is found here."""

    reader: SlotReader | None = None
    kernel: Kernel = staticmethod(slot_kernels.torch_sdpa)


def use_reader(reader: SlotReader) -> None:
    """Before the runner makes its metadata builders."""
    _Process.reader = reader


def kernel_named(name: str) -> Kernel:
    """A function of slot_kernels.py, its library loaded. Raises: SettingsError."""
    kernel = getattr(slot_kernels, name, None)
    if kernel is None or getattr(kernel, "__module__", "") != slot_kernels.__name__:
        raise SettingsError(f"worker.slot_kernel {name!r}: slot_kernels.py has no such kernel")
    if name == "flash3":
        try:
            importlib.import_module("vllm.vllm_flash_attn")  # registers its operators with torch
        except ImportError as error:
            raise SettingsError(
                f"worker.slot_kernel {name!r} is not here: {error}; use torch_sdpa"
            ) from error
    return kernel


def use_kernel(name: str) -> None:
    """From the next layer on. Raises: SettingsError."""
    _Process.kernel = staticmethod(kernel_named(name))


class SlotCall:
    """One attention layer of a step; also vLLM's attention metadata of the step, each layer filling in its tensors.

    query, out: [rows, heads, dim]. key, value: [slots, tokens, kv_heads, dim]. On the device, int32: query_start
    [requests + 1], seq_lens, slots [requests], key_start [requests + 1] (a slot's first token in the flattened cache).
    `spans` says the same on the host. Without spans it is a dummy run.
    """

    query: torch.Tensor
    out: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float

    def __init__(self, common: CommonAttentionMetadata, spans: list[Span], slot_tokens: int) -> None:
        self.spans = spans
        self.num_actual_tokens = common.num_actual_tokens
        self.query_start = common.query_start_loc
        self.seq_lens = common.seq_lens
        self.max_query = common.max_query_len
        self.max_seq = max((row.tokens for row in spans), default=0)
        self.slot_mapping = common.slot_mapping
        self._masks: dict[tuple[int, int], torch.Tensor] = {}
        device = common.seq_lens.device
        if spans and device.type != "cpu":
            numbers = torch.tensor([row.slot for row in spans], dtype=torch.int32, pin_memory=True)
            self.slots = numbers.to(device, non_blocking=True)
            starts = torch.tensor(
                [*(row.slot * slot_tokens for row in spans), 0], dtype=torch.int32, pin_memory=True
            )
            self.key_start = starts.to(device, non_blocking=True)

    def cache(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all slots, their first tokens."""
        return self.key[:, :num_tokens], self.value[:, :num_tokens]

    def flat_cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all slots as [slots * tokens, heads, dim]: a view, the slots lie side by side."""
        return self.key.flatten(0, 1), self.value.flatten(0, 1)

    def each(
        self,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]]:
        """Query, K, V, mask and output of each request, [1, heads, rows or tokens, dim]; the mask: which row sees which
        token, the last row the last token; None when all see all.
        """
        for row in self.spans:
            rows = slice(row.begin, row.end)
            parts = (
                self.query[rows], self.key[row.slot, : row.tokens], self.value[row.slot, : row.tokens], self.out[rows]
            )  # fmt: skip
            query, key, value, out = (part.transpose(0, 1)[None] for part in parts)
            yield query, key, value, self._mask(row), out

    def _mask(self, row: Span) -> torch.Tensor | None:
        num_rows = row.end - row.begin
        if num_rows == 1:
            return None
        size = (num_rows, row.tokens)
        if size not in self._masks:
            ones = torch.ones(size, dtype=torch.bool, device=self.query.device)
            self._masks[size] = ones.tril(row.tokens - num_rows)
        return self._masks[size]


class SlotMetadataBuilder(AttentionMetadataBuilder[Any]):
    """Waits for the step's pages, when its inputs are ready, and looks its requests' slots up."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SlotCall:
        """See AttentionMetadataBuilder."""
        reader = _Process.reader
        assert reader is not None
        if not reader.steps.under_way:
            return SlotCall(common_attn_metadata, [], reader.slot_tokens)
        reader.steps.wait_mapped()
        spans = reader.steps.spans(reader.request_ids()[: common_attn_metadata.num_reqs])
        return SlotCall(common_attn_metadata, spans, reader.slot_tokens)


class SlotAttentionImpl(AttentionImpl[Any]):
    """One layer. Raises (constructor): SettingsError for what the kernels are not told of."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        special = alibi_slopes, sliding_window, logits_soft_cap, kv_sharing_target_layer_name
        if (
            any(special)
            or sinks is not None
            or attn_type != AttentionType.DECODER
            or kv_cache_dtype != "auto"
        ):
            raise SettingsError(
                "request slots serve plain causal attention only; use worker.kv_layout = cross-layer"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: SlotCall | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See AttentionImpl. The step's keys and values are in the cache already (do_kv_cache_update)."""
        if attn_metadata is None or not attn_metadata.spans:
            return output.fill_(0)  # profiling, or a dummy run
        reader = _Process.reader
        assert reader is not None
        call, rows = attn_metadata, attn_metadata.num_actual_tokens
        call.query, call.out, call.scale = query[:rows], output[:rows], self.scale
        call.key, call.value = reader.caches[layer.layer_name]
        _Process.kernel(call)
        return output

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the step's keys and values to their blocks. kv_cache: [blocks, tokens, 2, heads, dim]."""
        if kv_cache.device.type != "cpu":
            _custom_ops.reshape_and_cache_flash(
                key,
                value,
                kv_cache[:, :, 0],
                kv_cache[:, :, 1],
                slot_mapping,
                "auto",
                layer._k_scale,
                layer._v_scale,
            )
            return
        rows = (slot_mapping >= 0).nonzero().squeeze(1)  # padding has no place
        at = slot_mapping[rows]
        block, token = at // kv_cache.shape[1], at % kv_cache.shape[1]
        kv_cache[block, token] = torch.stack((key[rows], value[rows]), dim=1)


class SlotAttentionBackend(AttentionBackend):
    """Registered over vLLM's own: CPU_ATTN on the CPU, CUSTOM on a GPU."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        """A name that vLLM's registry has; see AttentionBackend."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[SlotAttentionImpl]:
        """See AttentionBackend."""
        return SlotAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[SlotMetadataBuilder]:
        """See AttentionBackend."""
        return SlotMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """As the layers' views of the identity window; their strides are the layout's (slot_worker.py)."""
        return (num_blocks, block_size, 2, num_kv_heads, head_size)
