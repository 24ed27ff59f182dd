"""For measurements only: vLLM's paged kernels and our slot kernels behind one call, outside of an engine."""

import os
from types import SimpleNamespace
from typing import Any

import torch

from shared.engine.slot_attention import SlotCall, kernel_named
from shared.engine.slot_steps import Span

_SEGMENTS, _GRID = 16, 128  # vLLM's own choice for its Triton kernel in decode


def fork_cores() -> None:
    """Engine cores made here from now on are forked: a spawned one would import vLLM again."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # noqa: TID251  vLLM's setting, not ours


class Batch:
    """Queries of some requests, the last token of each at the end of its request.

    Args: query_lens, seq_lens: of each request; slots: where it lies (of slot caches only).
    """

    def __init__(
        self,
        query_lens: list[int],
        seq_lens: list[int],
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        slots: list[int] | None = None,
    ) -> None:
        starts = [0]
        for length in query_lens:
            starts.append(starts[-1] + length)
        self.query_lens, self.seq_lens_list = query_lens, seq_lens
        self.starts = torch.tensor(starts, dtype=torch.int32, device=device)
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
        self.query = torch.randn(starts[-1], num_heads, head_dim, device=device).to(dtype)
        self.out = torch.zeros_like(self.query)
        self.max_query, self.max_seq = max(query_lens), max(seq_lens)
        self.scale = head_dim**-0.5
        self.spans = [
            Span(starts[i], starts[i + 1], slots[i] if slots else i, seq_lens[i])
            for i in range(len(seq_lens))
        ]

    def slot_call(self, slot_tokens: int) -> SlotCall:
        """As slot_attention.py makes it for a step."""
        common: Any = SimpleNamespace(
            num_actual_tokens=self.query.shape[0], query_start_loc=self.starts, seq_lens=self.seq_lens,
            max_query_len=self.max_query, slot_mapping=None,
        )  # fmt: skip
        call = SlotCall(common, self.spans, slot_tokens)
        call.query, call.out, call.scale = self.query, self.out, self.scale
        return call


def slot_kernel(name: str) -> Any:
    """A function of slot_kernels.py. Raises: SettingsError."""
    return kernel_named(name)


def contiguous_flash3(batch: Batch, key: torch.Tensor, value: torch.Tensor) -> None:
    """FlashAttention-3 over plain memory, [tokens of all requests, heads, dim], equal requests: the ceiling."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    step = batch.seq_lens_list[0]
    bounds = torch.arange(0, len(batch.seq_lens_list) + 1, dtype=torch.int32, device=key.device) * step
    flash_attn_varlen_func(
        q=batch.query, k=key, v=value, out=batch.out, cu_seqlens_q=batch.starts, max_seqlen_q=batch.max_query,
        cu_seqlens_k=bounds, max_seqlen_k=batch.max_seq, softmax_scale=batch.scale, causal=True, fa_version=3,
    )  # fmt: skip


def paged_flash3(batch: Batch, key: torch.Tensor, value: torch.Tensor, block_table: torch.Tensor) -> None:
    """FlashAttention-3 with a block table, as vLLM calls it. key, value: [blocks, tokens, heads, dim]."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    flash_attn_varlen_func(
        q=batch.query, k=key, v=value, out=batch.out, cu_seqlens_q=batch.starts, max_seqlen_q=batch.max_query,
        seqused_k=batch.seq_lens, max_seqlen_k=batch.max_seq, softmax_scale=batch.scale, causal=True,
        block_table=block_table, fa_version=3,
    )  # fmt: skip


class PagedTriton:
    """vLLM's Triton kernel with a block table, with the buffers that vLLM gives it."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device) -> None:
        self._threshold = _GRID // num_kv_heads
        rows = (self._threshold, num_heads, _SEGMENTS)
        self._out = torch.empty(*rows, head_dim, dtype=torch.float32, device=device)
        self._max = torch.empty(rows, dtype=torch.float32, device=device)
        self._sum = torch.empty(rows, dtype=torch.float32, device=device)
        self._one = torch.ones(1, device=device).expand(4096, num_kv_heads)

    def __call__(
        self, batch: Batch, key: torch.Tensor, value: torch.Tensor, block_table: torch.Tensor
    ) -> None:
        """key, value: [blocks, tokens, heads, dim]."""
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention

        unified_attention(
            q=batch.query, k=key, v=value, out=batch.out, cu_seqlens_q=batch.starts,
            max_seqlen_q=batch.max_query, seqused_k=batch.seq_lens, max_seqlen_k=batch.max_seq,
            softmax_scale=batch.scale, causal=True, window_size=(-1, -1), block_table=block_table, softcap=0,
            q_descale=None, k_descale=self._one, v_descale=self._one, seq_threshold_3D=self._threshold,
            num_par_softmax_segments=_SEGMENTS, softmax_segm_output=self._out, softmax_segm_max=self._max,
            softmax_segm_expsum=self._sum,
        )  # fmt: skip


async def switch_kernel(engine: Any, name: str) -> None:
    """Another function of slot_kernels.py in a running VllmEngine with request slots."""
    await engine._llm.collective_rpc("quire_slot_kernel", args=(name,))


async def slot_counters(engine: Any) -> dict[str, float]:
    """Of its first rank; {} for an engine without request slots."""
    if not engine.settings.kv_layout.endswith("-major"):
        return {}
    return (await engine._llm.collective_rpc("quire_slot_counters"))[0]
