"""A small Llama in plain PyTorch, saved under the names that `LlamaForCausalLM` loads.

Only what training needs: full-sequence causal attention, no cache. Inference is vLLM's job.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of the demo model. `head_size` is a multiple of 32, as vLLM's CPU attention asks."""

    vocabulary: int = 4096
    hidden: int = 192
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    intermediate: int = 512
    max_positions: int = 4096
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-5

    def hf_config(self, *, end_ids: list[int], pad_id: int) -> dict[str, object]:
        """config.json for `LlamaForCausalLM`."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_epsilon,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": end_ids,
            "pad_token_id": pad_id,
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
        }


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * (wide * scale).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_size, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_size, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        size = self.shape.head_size
        q = self.q_proj(x).view(rows, tokens, self.shape.heads, size).transpose(1, 2)
        k = self.k_proj(x).view(rows, tokens, self.shape.kv_heads, size).transpose(1, 2)
        v = self.v_proj(x).view(rows, tokens, self.shape.kv_heads, size).transpose(1, 2)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        # Repeating the few kv heads lets every backend take its fused kernel.
        repeat = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, tokens, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Attention, then feed-forward, each behind a norm and added to its input."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.norm_epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.norm_epsilon)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Token ids int64 [rows, tokens] to logits [rows, tokens, vocabulary]; the embeddings are tied."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList([DecoderLayer(shape) for _ in range(shape.layers)])
        self.norm = RMSNorm(shape.hidden, shape.norm_epsilon)
        cos, sin = _rotary_tables(shape)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Residual writers start smaller, so that the sum over layers keeps its scale.
                shrink = (
                    (2 * shape.layers) ** -0.5
                    if name.endswith(("o_proj.weight", "down_proj.weight"))
                    else 1.0
                )
                nn.init.normal_(parameter, std=0.02 * shrink)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]].to(x.dtype), self.sin[: ids.shape[1]].to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return functional.linear(self.norm(x), self.embed_tokens.weight)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def save_safetensors(model: Llama, path: Path) -> None:
    """Write the weights as bfloat16 in the safetensors format (u64 header length, JSON header, raw bytes).

    Written by hand so that training needs torch alone. lm_head is left out: it is tied to the embedding.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    payload: list[bytes] = []
    offset = 0
    for name, tensor in model.state_dict().items():
        raw = tensor.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()
        span = [offset, offset + len(raw)]
        header[f"model.{name}"] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": span}
        payload.append(raw)
        offset += len(raw)
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)  # the format wants the data aligned to eight bytes
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(payload))


def _rotary_tables(shape: LlamaShape) -> tuple[Tensor, Tensor]:
    exponents = torch.arange(0, shape.head_size, 2, dtype=torch.float32) / shape.head_size
    angles = torch.outer(torch.arange(shape.max_positions, dtype=torch.float32), shape.rope_theta**-exponents)
    both = torch.cat([angles, angles], dim=-1)
    return both.cos(), both.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
