"""An audio transformer of AudioGen's and MusicGen's medium shape with random weights, in plain PyTorch.

Shape: Kreuk et al., "AudioGen", and Copet et al., "Simple and Controllable Music Generation", section 3: a decoder over
four codebooks at 50 steps a second of sound, cross-attention to text; 1.8 billion parameters.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class AudioShape:
    """`seconds`: of sound in a clip, at 50 steps each."""

    layers: int = 48
    dim: int = 1536
    heads: int = 24
    codebooks: int = 4
    cardinality: int = 2048
    text_tokens: int = 32
    seconds: float = 5.0

    @property
    def steps(self) -> int:
        """Of one clip."""
        return int(50 * self.seconds)


MEDIUM = AudioShape()
TINY = AudioShape(2, 32, 4, 2, 16, 3, 0.2)


class _Layer(nn.Module):
    def __init__(self, shape: AudioShape) -> None:
        super().__init__()
        dim = shape.dim
        self.heads = shape.heads
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3))
        self.qkv, self.own_out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.q, self.cross_out = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.text = nn.Linear(dim, 2 * dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, cache: Tensor, at: int, text: Tensor) -> Tensor:
        """x: [B, 1, D], step `at` of each clip; cache: [2, B, H, T, D/H], its row `at` is written."""
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, dim=2)
        cache[0, :, :, at : at + 1], cache[1, :, :, at : at + 1] = self.split(k), self.split(v)
        seen = cache[:, :, :, : at + 1]
        x = x + self.own_out(
            F.scaled_dot_product_attention(self.split(q), seen[0], seen[1]).transpose(1, 2).flatten(2)
        )
        k, v = self.text(text).chunk(2, dim=2)
        q = self.split(self.q(self.norms[1](x)))
        x = x + self.cross_out(
            F.scaled_dot_product_attention(q, self.split(k), self.split(v)).transpose(1, 2).flatten(2)
        )
        return x + self.down(F.gelu(self.up(self.norms[2](x))))


class AudioTransformer(nn.Module):
    """One step of all clips: forward(tokens [B, K], caches, at, text) -> logits [B, K, cardinality]."""

    def __init__(self, shape: AudioShape = MEDIUM) -> None:
        super().__init__()
        self.shape = shape
        self.embeddings = nn.ModuleList(
            nn.Embedding(shape.cardinality + 1, shape.dim) for _ in range(shape.codebooks)
        )
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.dim)
        self.heads = nn.ModuleList(
            nn.Linear(shape.dim, shape.cardinality, bias=False) for _ in range(shape.codebooks)
        )

    def forward(self, tokens: Tensor, caches: list[Tensor], at: int, text: Tensor) -> Tensor:
        """See the class."""
        x = sum(
            (embed(tokens[:, i]) for i, embed in enumerate(self.embeddings)),
            start=torch.zeros((), device=text.device),
        )
        x = x.to(text.dtype)[:, None]
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, at, text)
        x = self.norm(x)[:, 0]
        return torch.stack([head(x) for head in self.heads], dim=1)


@torch.inference_mode()
def clips(model: AudioTransformer, batch: int, num_steps: int = 0) -> Tensor:
    """Tokens [B, K, steps] of `batch` clips, drawn from the model's noise.

    Args: num_steps: so many in the middle of the clips alone, with the memory of whole ones; 0: all.
    """
    shape, weight = model.shape, model.norm.weight
    make = {"device": weight.device, "dtype": weight.dtype}
    text = torch.zeros(batch, shape.text_tokens, shape.dim, **make)
    head_dim = shape.dim // shape.heads
    caches = [torch.zeros(2, batch, shape.heads, shape.steps, head_dim, **make) for _ in range(shape.layers)]
    tokens = torch.full((batch, shape.codebooks), shape.cardinality, device=weight.device)
    out = []
    first = (shape.steps - num_steps) // 2 if num_steps else 0
    for at in range(first, first + (num_steps or shape.steps)):
        chances = model(tokens, caches, at, text).float().softmax(dim=2)
        tokens = torch.multinomial(chances.flatten(0, 1), 1).view(batch, shape.codebooks)
        out.append(tokens)
    return torch.stack(out, dim=2)
