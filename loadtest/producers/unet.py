"""A diffusion UNet of SD-XL's shape with random weights, in plain PyTorch: noise comes out, at the model's cost.

Shape: Podell et al., "SDXL", section 2.1 and its released configuration: 2.57 billion parameters, latents of
4 x 128 x 128 for an image of 1,024 x 1,024, text of 77 x 2,048.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class UNetShape:
    """`depths`: transformer blocks at each level; 0: none. `latent`: side of an image's latents. `steps`: of one."""

    channels: tuple[int, ...] = (320, 640, 1280)
    depths: tuple[int, ...] = (0, 2, 10)
    head_dim: int = 64
    context_dim: int = 2048
    context_tokens: int = 77
    groups: int = 32
    added_dim: int = 2816  # pooled text and sizes
    latent: int = 128
    steps: int = 20


SDXL = UNetShape()
TINY = UNetShape((32, 64), (0, 1), 16, 32, 5, 8, 24, 8, 2)


class _Residual(nn.Module):
    def __init__(self, shape: UNetShape, num_in: int, num_out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(shape.groups, num_in), nn.Conv2d(num_in, num_out, 3, padding=1)
        self.time = nn.Linear(4 * shape.channels[0], num_out)
        self.norm2, self.conv2 = (
            nn.GroupNorm(shape.groups, num_out),
            nn.Conv2d(num_out, num_out, 3, padding=1),
        )
        self.skip = nn.Conv2d(num_in, num_out, 1) if num_in != num_out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class _Attention(nn.Module):
    def __init__(self, dim: int, context_dim: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q = nn.Linear(dim, dim, bias=False)
        self.k, self.v = (nn.Linear(context_dim, dim, bias=False) for _ in range(2))
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for t in (self.q(x), self.k(context), self.v(context))
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class _Block(nn.Module):
    def __init__(self, shape: UNetShape, dim: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3))
        self.own = _Attention(dim, dim, shape.head_dim)
        self.cross = _Attention(dim, shape.context_dim, shape.head_dim)
        self.up, self.down = nn.Linear(dim, 8 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        h = self.norms[0](x)
        x = x + self.own(h, h)
        x = x + self.cross(self.norms[1](x), context)
        value, gate = self.up(self.norms[2](x)).chunk(2, dim=2)
        return x + self.down(value * F.gelu(gate))


class _Transformer(nn.Module):
    def __init__(self, shape: UNetShape, dim: int, depth: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(shape.groups, dim)
        self.into, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(_Block(shape, dim) for _ in range(depth))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        h = self.into(self.norm(x).flatten(2).transpose(1, 2))
        for block in self.blocks:
            h = block(h, context)
        return x + self.out(h).transpose(1, 2).unflatten(2, x.shape[2:])


class _Level(nn.Module):
    """Residual blocks, the first `num_led` with a transformer behind each, and a change of size at the end."""

    def __init__(
        self,
        shape: UNetShape,
        ins: list[int],
        num_out: int,
        depth: int,
        resize: nn.Module | None,
        num_led: int = 3,
    ) -> None:
        super().__init__()
        self.residuals = nn.ModuleList(_Residual(shape, num_in, num_out) for num_in in ins)
        self.transformers = nn.ModuleList(
            _Transformer(shape, num_out, depth) if depth and i < num_led else nn.Identity()
            for i in range(len(ins))
        )
        self.resize = resize

    def step(self, i: int, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        x = self.residuals[i](x, time)
        attend = self.transformers[i]
        return attend(x, context) if isinstance(attend, _Transformer) else x


class UNet(nn.Module):
    """forward(latents [B, 4, H, H], times [B], context [B, T, C], added [B, A]) -> [B, 4, H, H]."""

    def __init__(self, shape: UNetShape = SDXL) -> None:
        super().__init__()
        self.shape = shape
        first, time_dim = shape.channels[0], 4 * shape.channels[0]
        self.time = nn.Sequential(nn.Linear(first, time_dim), nn.SiLU(), nn.Linear(time_dim, time_dim))
        self.added = nn.Sequential(
            nn.Linear(shape.added_dim, time_dim), nn.SiLU(), nn.Linear(time_dim, time_dim)
        )
        self.into = nn.Conv2d(4, first, 3, padding=1)
        kept, num_in, last = [first], first, len(shape.channels) - 1
        self.downs, self.ups = nn.ModuleList(), nn.ModuleList()
        for level, (size, depth) in enumerate(zip(shape.channels, shape.depths, strict=True)):
            resize = nn.Conv2d(size, size, 3, stride=2, padding=1) if level < last else None
            self.downs.append(_Level(shape, [num_in, size], size, depth, resize))
            kept += [size, size] + ([size] if resize is not None else [])
            num_in = size
        self.middle = _Level(shape, [num_in, num_in], num_in, shape.depths[-1], None, num_led=1)
        for level in range(last, -1, -1):
            size = shape.channels[level]
            ins = [(num_in if i == 0 else size) + kept.pop() for i in range(3)]
            resize = nn.Conv2d(size, size, 3, padding=1) if level else None
            self.ups.append(_Level(shape, ins, size, shape.depths[level], resize))
            num_in = size
        self.norm, self.out = nn.GroupNorm(shape.groups, first), nn.Conv2d(first, 4, 3, padding=1)

    def forward(self, x: Tensor, times: Tensor, context: Tensor, added: Tensor) -> Tensor:
        """One step of denoising."""
        time = self.time(_waves(times, self.shape.channels[0]).to(x.dtype)) + self.added(added)
        x = self.into(x)
        kept = [x]
        for level in self.downs:
            assert isinstance(level, _Level)
            for i in range(2):
                x = level.step(i, x, time, context)
                kept.append(x)
            if level.resize is not None:
                x = level.resize(x)
                kept.append(x)
        for i in range(2):
            x = self.middle.step(i, x, time, context)
        for level in self.ups:
            assert isinstance(level, _Level)
            for i in range(3):
                x = level.step(i, torch.cat([x, kept.pop()], dim=1), time, context)
            if level.resize is not None:
                x = level.resize(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.out(F.silu(self.norm(x)))


def _waves(times: Tensor, dim: int) -> Tensor:
    rates = torch.exp(-math.log(10_000) * torch.arange(dim // 2, device=times.device) / (dim // 2))
    angles = times[:, None].float() * rates[None]
    return torch.cat([angles.cos(), angles.sin()], dim=1)


@torch.inference_mode()
def images(model: UNet, batch: int, num_steps: int = 0) -> Tensor:
    """Latents of `batch` images, `steps` calls for twice as many (with and without text); num_steps: fewer, 0: all."""
    shape, weight = model.shape, model.into.weight
    make = {"device": weight.device, "dtype": weight.dtype}
    x = torch.randn(batch, 4, shape.latent, shape.latent, **make)
    context = torch.zeros(2 * batch, shape.context_tokens, shape.context_dim, **make)
    added = torch.zeros(2 * batch, shape.added_dim, **make)
    for step in range(shape.steps, shape.steps - (num_steps or shape.steps), -1):
        times = torch.full((2 * batch,), step * 1_000 / shape.steps, device=weight.device)
        free, led = model(torch.cat([x, x]), times, context, added).chunk(2)
        x = x - (free + 5.0 * (led - free)) / shape.steps
    return x
