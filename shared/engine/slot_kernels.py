# fmt: off
"""Attention over slots, a function a library: unmodified kernels, no block table. `c` is a SlotCall."""
from typing import Any

from torch import nn, ops


def torch_sdpa(c: Any) -> None:  # a call per request, on any device
    for q, k, v, mask, out in c.each():
        out.copy_(nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=c.scale, enable_gqa=True))

def flash3(c: Any) -> None:  # FlashAttention-3 as vLLM brings it: all requests at once, each in the slot of its number
    ops._vllm_fa3_C.fwd(c.query, *c.cache(c.max_seq), *[None] * 3, c.out, c.query_start, *[None] * 3, c.seq_lens,
                        c.max_query, c.max_seq, None, c.slots, *[None] * 7, c.scale, True, -1, -1, 0.0, True,
                        None, 0, None, 0, None, 1, 0, None)

def torch_flash2(c: Any) -> None:  # torch's FlashAttention-2: all requests at once, each at its slot's first token
    c.out.copy_(ops.aten._flash_attention_forward(c.query, *c.flat_cache(), c.query_start, c.key_start, c.max_query,
                c.max_seq, 0.0, True, False, scale=c.scale, seqused_k=c.seq_lens)[0])
