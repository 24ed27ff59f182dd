"""ModelShape from a model's config.json."""

from collections.abc import Mapping
from typing import Any

import msgspec

from shared.errors import SettingsError
from shared.wire.cost import ModelShape

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def shape_of(config: Mapping[str, Any], dtype: str) -> ModelShape:
    """Args: config: as shared.kv.model_files.read_config gives it; dtype: "bfloat16", ...

    A mixture of experts counts with the experts of one token. Raises: SettingsError when a size is missing or below 1.
    """
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        experts = int(config.get("num_experts_per_tok") or 0)
        inner = config.get("intermediate_size") or 4 * hidden
        if experts:
            inner = experts * int(config.get("moe_intermediate_size") or inner)
        found = ModelShape(
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=hidden,
            intermediate_size=int(inner),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocab_size=int(config["vocab_size"]),
            dtype_bytes=DTYPE_BYTES.get(dtype, 2),
        )
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:  # 1e999 is infinite to json
        raise SettingsError(f"config.json does not say the model's sizes: {error!r}") from error
    for name, size in msgspec.structs.asdict(found).items():
        if isinstance(size, int) and size < 1:
            raise SettingsError(f"config.json does not say the model's sizes: {name} would be {size}")
    return found
