"""What an engine with request slots tells vLLM; see slot_worker.py."""

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from shared.engine.worker_config import WorkerSettings

# Blocks are allocated, and mapped in the background, so long before their first token. On a GPU a kernel loads behind
# a request's end, too: it fetches keys in tiles and masks the rest, so a step waits for the places that its last tile
# reaches, and they must not change while it is under way. The 32 tokens between the two are steady decoding's lead.
CPU_AHEAD_TOKENS = 16
GPU_AHEAD_TOKENS = 256
GPU_TILE_TOKENS = 224  # FlashAttention-3's longest


def install_backend() -> None:
    """In every process that names or runs it, before the model is made. vLLM's CPU platform knows only CPU_ATTN."""
    kind = AttentionBackendEnum.CPU_ATTN if current_platform.is_cpu() else AttentionBackendEnum.CUSTOM
    register_backend(kind, "shared.engine.slot_attention.SlotAttentionBackend")


def slot_settings(settings: WorkerSettings) -> dict[str, Any]:
    """For `additional_config["quire"]`."""
    on_cpu = current_platform.is_cpu()
    kernel = settings.slot_kernel
    if kernel == "auto":
        kernel = "torch_sdpa" if on_cpu or settings.dtype == "float32" else "flash3"
    return {"slot_kernel": kernel, "ahead_tokens": CPU_AHEAD_TOKENS if on_cpu else GPU_AHEAD_TOKENS}


def slot_arguments() -> dict[str, Any]:
    """For AsyncEngineArgs, over those of an engine in pages."""
    install_backend()
    if current_platform.is_cpu():
        return {"worker_cls": "shared.engine.slot_worker_cpu.SlotCPUWorker"}
    return {"worker_cls": "shared.engine.slot_worker_gpu.SlotGPUWorker", "attention_backend": "CUSTOM"}
