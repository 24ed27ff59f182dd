"""EngineDescription of a vLLM configuration: what this engine's KV bytes mean."""

from typing import Any

import torch

from shared.errors import SettingsError
from shared.kv.fingerprint import model_fingerprint
from shared.kv.layout import EngineDescription
from shared.vmm.geometry import KvShape


def _cache_dtype(config: Any) -> torch.dtype:
    if config.cache_config.cache_dtype not in ("auto", None):
        raise SettingsError(f"kv cache dtype {config.cache_config.cache_dtype!r} is not hosted; use auto")
    return config.model_config.dtype


def cuda_order(config: Any) -> str:
    """How a layer's block lies in a cache of vLLM's CUDA backends."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.utils import get_kv_cache_layout

    with set_current_vllm_config(config):
        return get_kv_cache_layout()


def why_not_in_pages(config: Any) -> str:
    """What of the model's cache is no plain stack of equal full-attention layers; "": nothing."""
    model = config.model_config
    if model.is_attention_free:
        return "it keeps state instead of attention's keys and values"
    if model.is_hybrid:
        return "its cache is a hybrid of attention and other state"
    if model.use_mla:
        return "its attention caches a latent (MLA)"
    if model.get_sliding_window() is not None:
        return "its attention has sliding windows"
    if model.attention_chunk_size is not None:
        return "its attention goes by chunks of the context"
    if model.has_noops:
        return "some of its layers have no attention"
    if getattr(model.hf_text_config, "param_sink_number", 0):
        return "its attention has sink tokens of its own"
    if model.is_encoder_decoder:
        return "its attention crosses to an encoder"
    if getattr(model.hf_text_config, "num_kv_shared_layers", 0):
        return "some of its layers share a cache"
    return ""


def kv_shape(config: Any) -> KvShape:
    """Keys and values of one rank, in the cache's own numbers."""
    model, parallel = config.model_config, config.parallel_config
    return KvShape(
        num_layers=model.get_num_layers(parallel),
        num_kv_heads=model.get_num_kv_heads(parallel),
        head_dim=model.get_head_size(),
        dtype_bytes=torch.empty((), dtype=_cache_dtype(config)).element_size(),
    )


def by_length(config: Any) -> str:
    """What of the keys' rotation follows from max_model_len in vLLM; "": nothing."""
    model, found = config.model_config, ""
    rope = getattr(model.hf_text_config, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):  # or one for each kind of layer
        kind = part.get("rope_type") if isinstance(part, dict) else None
        if kind == "longrope":
            found += "long " if model.max_model_len > part["original_max_position_embeddings"] else "short "
        elif kind == "dynamic":  # by the most positions, which in some models are as many
            found += f"{model.max_model_len} "
    return found


def describe_engine(
    config: Any, model_name: str, model_dir: str, kv_layout: str = "cross-layer"
) -> EngineDescription:
    """`kv_layout` "private": the cache is vLLM's own, and nobody else reads it."""
    model, parallel = config.model_config, config.parallel_config
    dtype, shape = _cache_dtype(config), kv_shape(config)
    block_tokens = config.cache_config.block_size
    # which CUDA backend vLLM chooses follows from dtype and device, both of which the key holds
    isa, backend = "", f"cuda:{config.attention_config.backend or 'auto'}"
    if config.device_config.device_type == "cpu":
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # only in CPU builds' reach

        isa, backend = _get_attn_isa(dtype, block_tokens, shape.head_dim, "auto"), "CPU_ATTN"
    layout = "layers-blocks"  # what "cross-layer" has always been called on the wire
    if kv_layout != "cross-layer":
        backend = "private" if kv_layout == "private" else "QUIRE_SLOTS"
        isa, layout, order = "", kv_layout, "NHD"
    else:
        order = "HND" if isa else cuda_order(config)
    return EngineDescription(
        model=model_name,
        fingerprint=model_fingerprint(model_dir, random_weights=config.load_config.load_format == "dummy"),
        dtype=str(dtype).removeprefix("torch."),
        layout=layout,
        backend=backend,
        isa=isa,
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_tokens=block_tokens,
        block_bytes=shape.token_bytes * block_tokens,
        max_model_len=model.max_model_len,
        total_kv_heads=model.get_total_num_kv_heads(),
        order=order,
        by_length=by_length(config),
    )
