"""What a model folder says about itself without loading it."""

import json
from pathlib import Path
from typing import Any

from shared.errors import SettingsError


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise SettingsError(f"{path} is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise SettingsError(f"{path} is no JSON object")
    return data


def read_config(model_dir: str) -> dict[str, Any]:
    """config.json; of a multi-modal model, its text part. Raises: SettingsError."""
    data = _read(Path(model_dir, "config.json"))
    text = data.get("text_config")
    return {**data, **text} if isinstance(text, dict) else data


def vocab_size(model_dir: str) -> int:
    """Token ids are below this. Raises: SettingsError when config.json does not say it."""
    size = read_config(model_dir).get("vocab_size")
    if not isinstance(size, int) or size <= 0:
        raise SettingsError(f"{model_dir}/config.json: vocab_size is {size!r}")
    return size


def eos_token_ids(model_dir: str) -> list[int]:
    """The ids that end a generation, as generation_config.json and config.json name them."""
    found: set[int] = set()
    generation = Path(model_dir, "generation_config.json")
    for data in (read_config(model_dir), _read(generation) if generation.is_file() else {}):
        value = data.get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        found.update(v for v in values if isinstance(v, int))
    return sorted(found)


def max_positions(model_dir: str) -> int:
    """Longest context that config.json allows; 0 when it does not say."""
    value = read_config(model_dir).get("max_position_embeddings")
    return value if isinstance(value, int) else 0


def heads(model_dir: str) -> tuple[int, int]:
    """(attention heads, KV heads) of the whole model. Raises: SettingsError when config.json does not say it."""
    config = read_config(model_dir)
    num_heads = config.get("num_attention_heads")
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    if not (
        isinstance(num_heads, int) and isinstance(num_kv_heads, int) and min(num_heads, num_kv_heads) > 0
    ):
        raise SettingsError(f"{model_dir}/config.json: num_attention_heads is {num_heads!r}")
    return num_heads, num_kv_heads


def check_split(model_dir: str, tp_size: int) -> None:
    """Raises: SettingsError when the model's heads do not divide over so many ranks."""
    if tp_size == 1:
        return
    num_heads, num_kv_heads = heads(model_dir)
    if num_heads % tp_size or max(num_kv_heads, tp_size) % min(num_kv_heads, tp_size):
        works = max(n for n in range(1, tp_size) if num_heads % n == 0 and num_kv_heads % n == 0)
        raise SettingsError(
            f"setting worker.tensor_parallel_size: the model's {num_heads} heads ({num_kv_heads} of KV) do not divide "
            f"over {tp_size} ranks; try {works}"
        )
