"""The producers by name, and each as a function of a batch's size, for `quire profile --callable`.

Weights are random, and made on the first call: on a GPU where PyTorch has one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from loadtest.producers import audio, unet


@dataclass(frozen=True, slots=True)
class Kind:
    """`make` builds the model, `run` computes one batch of `unit`s with it: (model, batch, steps of each; 0: all)."""

    make: Callable[[], torch.nn.Module]
    run: Callable[..., object]
    unit: str


KINDS = {
    "sdxl": Kind(lambda: unet.UNet(unet.SDXL), unet.images, "images"),
    "tiny-unet": Kind(lambda: unet.UNet(unet.TINY), unet.images, "images"),
    "audiogen": Kind(lambda: audio.AudioTransformer(audio.MEDIUM), audio.clips, "clips"),
    "tiny-audio": Kind(lambda: audio.AudioTransformer(audio.TINY), audio.clips, "clips"),
}


@cache
def build(name: str, device: str = "") -> torch.nn.Module:
    """The model, on the device ("": a GPU where there is one), in bfloat16 on GPUs. The same one each time."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with where:
            return KINDS[name].make().train(False)
    finally:
        torch.set_default_dtype(before)


def sdxl(batch: int) -> object:
    """Images of 1,024 x 1,024."""
    return KINDS["sdxl"].run(build("sdxl"), batch)


def tiny_unet(batch: int) -> object:
    """The same program, small enough for a test."""
    return KINDS["tiny-unet"].run(build("tiny-unet"), batch)


def audiogen(batch: int) -> object:
    """Clips of five seconds."""
    return KINDS["audiogen"].run(build("audiogen"), batch)


def tiny_audio(batch: int) -> object:
    """The same program, small enough for a test."""
    return KINDS["tiny-audio"].run(build("tiny-audio"), batch)
