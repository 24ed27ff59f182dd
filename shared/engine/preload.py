"""Register a model's class with vLLM directly.

vLLM inspects model classes in a subprocess of their own, so that the inspection cannot initialise CUDA; that
import costs about 13 s on two cores. On the CPU there is nothing to initialise, and the class is used as is.
"""

import json
from pathlib import Path

from vllm import ModelRegistry
from vllm.platforms import current_platform


def preload_architecture(model_dir: str) -> None:
    """Do nothing for unknown architectures, remote ids and CUDA: vLLM then goes its own way."""
    config = Path(model_dir, "config.json")
    if not current_platform.is_cpu() or not config.is_file():
        return
    for name in json.loads(config.read_text()).get("architectures") or []:
        lazy = ModelRegistry.models.get(name)
        if lazy is not None and hasattr(lazy, "load_model_cls"):
            ModelRegistry.register_model(name, lazy.load_model_cls())
