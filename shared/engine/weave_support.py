"""What of an engine cannot be fused or woven, in words for one line of its log; "": nothing."""

from typing import Any

from shared.engine.weave_settings import DENSE, EXPERTS

_NORMS = ("input_layernorm", "post_attention_layernorm")


def why_not_fused(model: Any, config: Any) -> str:
    """Args: model: as loaded; config: vLLM's."""
    name = type(model).__name__
    parallel = config.parallel_config
    if parallel.tensor_parallel_size == 1:
        return "one rank has nothing to add up"
    if name not in DENSE + EXPERTS:
        return f"{name} is none of {', '.join(DENSE + EXPERTS)}"
    if parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1:
        return "pipeline and data parallel ranks hand on residuals that are not whole"
    if config.lora_config is not None or config.speculative_config is not None:
        return "adapters and draft models read what is not reduced yet"
    if config.compilation_config.pass_config.enable_sp or parallel.enable_expert_parallel:
        return "sequence and expert parallelism reduce elsewhere"
    return _odd_layer(model.model, is_moe=name in EXPERTS)


def why_not_woven(model: Any, config: Any) -> str:
    """What keeps an engine that is fused from being woven."""
    if type(model).__name__ in EXPERTS:
        return "experts get too few tokens from half a step (TokenWeave 4.2.1)"
    if config.kv_transfer_config is not None and config.kv_transfer_config.kv_connector != "QuireConnector":
        return "a connector may count each layer once"
    backends = {
        layer.self_attn.attn.get_attn_backend().get_name() for layer in model.model.layers if _is_here(layer)
    }
    known = {"CPU_ATTN", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"}
    return f"attention {sorted(backends)} is not known to be cut" if not backends <= known else ""


def _is_here(layer: Any) -> bool:
    return hasattr(layer, "self_attn")


def _odd_layer(inner: Any, *, is_moe: bool) -> str:
    norms = [inner.norm]
    for layer in inner.layers[inner.start_layer : inner.end_layer]:
        norms += [getattr(layer, name) for name in _NORMS]
        rows = [layer.self_attn.o_proj] if is_moe else [layer.self_attn.o_proj, layer.mlp.down_proj]
        if any(type(row).__name__ != "RowParallelLinear" or not row.reduce_results for row in rows):
            return "a row-parallel product is not vLLM's plain one"
        if getattr(layer, "ada_rms_norm_t_cond", None) is not None:
            return "its norms depend on a condition"
    if any(
        type(norm).__name__ != "RMSNorm" or not norm.has_weight or norm.variance_size_override is not None
        for norm in norms
    ):
        return "a norm is no plain RMSNorm"
    return ""
