"""What AsyncEngineArgs are told for an engine in the pool's pages, and for one that copies."""

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from vllm.platforms import current_platform

from shared.engine.describe import kv_shape
from shared.engine.slot_settings import slot_arguments, slot_settings
from shared.engine.worker_config import (
    WorkerSettings,
    block_tokens,
    fair_rules,
    fair_swap,
    far_places,
    has_slots,
    works_in_pages,
)
from shared.errors import SettingsError
from shared.kv.layout import EngineDescription
from shared.kv.transfer_mode import TransferMode
from shared.observe.log import get_logger
from shared.vmm.request_layout import slot_block

logger = logging.getLogger(__name__)

VLLMS_GRAPH_TOKENS = 512  # vLLM records no larger step of its own accord


def by_layer(settings: WorkerSettings) -> bool:
    """Whether prompts leave layer by layer while they are computed."""
    return settings.transfer_mode == TransferMode.BY_LAYER and settings.role == "prefill"


def block_size(settings: WorkerSettings) -> int:
    """Tokens of a block, on what this process runs on."""
    return block_tokens(settings, on_cpu=current_platform.is_cpu())


def quota_pages(settings: WorkerSettings) -> int:
    """Enough for two steps that complete as many blocks as a step can."""
    return 2 * (settings.max_num_batched_tokens // block_size(settings) + settings.max_num_seqs)


def in_pages(settings: WorkerSettings) -> dict[str, Any]:
    """Of an engine whose cache is the pool's pages."""
    slots = slot_arguments() if has_slots(settings) else {}
    scheduler = "page_scheduler.{}PageScheduler"
    if by_layer(settings):
        scheduler = "layer_scheduler.{}LayerScheduler"
    elif settings.local_policy == "cfs" and settings.far_bytes:
        scheduler = "fair_far_scheduler.{}FairFarPageScheduler"
    elif settings.local_policy == "cfs":
        scheduler = "fair_scheduler.{}FairPageScheduler"
    elif settings.far_bytes:
        scheduler = "far_scheduler.{}FarPageScheduler"
    elif settings.role == "prefill" and settings.handoff_ahead and not slots:
        scheduler = "ahead_scheduler.{}AheadPageScheduler"
    if current_platform.is_cpu():
        return {
            "worker_cls": "shared.engine.page_worker_cpu.PageCPUWorker",
            "scheduler_cls": "shared.engine." + scheduler.format(""),
            "async_scheduling": False,
            **slots,
        }
    return {
        "worker_cls": "shared.engine.page_worker_gpu.PageGPUWorker",
        "scheduler_cls": "shared.engine." + scheduler.format("Async"),
        "async_scheduling": True,
        **slots,
    }


def by_copies() -> dict[str, Any]:
    """Of an engine with a cache of its own, whose blocks are copied to and from pages."""
    return {
        "scheduler_cls": "shared.engine.copy_scheduler.CopyScheduler",
        "async_scheduling": False,
        "kv_transfer_config": {
            "kv_connector": "QuireConnector",
            "kv_connector_module_path": "shared.engine.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {},
        },
    }


def in_memory(settings: WorkerSettings, *, with_pool: bool = True) -> dict[str, Any]:
    """Of an engine's cache: where it lies, and whose scheduler and workers know it."""
    if not with_pool:
        return {"async_scheduling": False}
    return in_pages(settings) if works_in_pages(settings) else by_copies()


def graphs(settings: WorkerSettings) -> dict[str, Any]:
    """Of steps that are recorded: vLLM's choice follows from how many requests run, ours from what prompts take, too.

    A step that is none is launched kernel by kernel: a prompt of 200 tokens, or its end behind a cached beginning, then
    takes 25 ms where 14 do (8B shape on an H200, docs/decisions/0055).
    """
    vllms = min(2 * settings.max_num_seqs, VLLMS_GRAPH_TOKENS)
    most = min(max(settings.graph_tokens, vllms), settings.max_num_batched_tokens)
    return {"compilation_config": {"max_cudagraph_capture_size": most}} if settings.graph_tokens else {}


def engine_arguments(settings: WorkerSettings, hosted: Mapping[str, Any]) -> dict[str, Any]:
    """All that vLLM is told of an engine; the short engines of worker.weave = auto are told the same (weave_probe.py).

    Args: hosted: of its cache (in_memory), and of its ranks' sums where those are ours (weave_arguments).
    """
    found = dict(hosted)
    if settings.kv_cache_bytes:
        found["kv_cache_memory_bytes"] = settings.kv_cache_bytes
    if settings.gpu_memory_utilization:
        found["gpu_memory_utilization"] = settings.gpu_memory_utilization
    is_eager = settings.enforce_eager or current_platform.is_cpu() or has_slots(settings)
    if not is_eager:
        found = graphs(settings) | found
    return {
        "model": settings.model_dir,
        "served_model_name": settings.model_name,
        "dtype": settings.dtype,
        "load_format": settings.load_format,
        "max_model_len": settings.max_model_len or None,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "block_size": block_size(settings),
        "enforce_eager": is_eager,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "sha256_cbor",
        "seed": 0,
        "structured_outputs_config": {
            "backend": settings.structured_backend,
            "disable_any_whitespace": not (
                settings.structured_any_whitespace or settings.structured_backend == "auto"
            ),
        },
        "disable_log_stats": False,
        "generation_config": "auto",
        **found,
    }


def for_the_core(
    settings: WorkerSettings, description: EngineDescription, events_address: str
) -> dict[str, Any]:
    """What Quire's scheduler and workers, or the connector, read beside vLLM's own configuration."""
    return {
        "description": msgspec.json.encode(description).decode(),
        "mempool_socket": settings.mempool_socket,
        "instance": settings.instance,
        "quota_pages": quota_pages(settings),
        "events_address": events_address,
        "handoff_ttl_ms": settings.handoff_ttl_ms,
        "follow_layers": by_layer(settings),
        "kv_space": settings.instance if settings.kv_space == "own" else settings.kv_space,
        "keeps_cache": settings.role != "decode" or settings.pd_caching in ("2", "3"),
        **(slot_settings(settings) if has_slots(settings) else {}),
        "fair": fair_rules(settings),
        "swap": fair_swap(settings),
        **far_places(settings, description.block_bytes),
    }


def with_slots(settings: WorkerSettings, config: Any) -> WorkerSettings:
    """Settings of an engine whose requests lie in slots on a GPU, with the tokens of a block; others as they are.

    Where no tokens were named they are those that waste least of a page: it depends on the model's shape, which only
    `config` (vLLM's) knows. Says in the log what that costs, and that CUDA graphs were not recorded.
    """
    if not has_slots(settings) or current_platform.is_cpu():
        return settings
    block = slot_block(settings.kv_layout, kv_shape(config), settings.block_tokens)
    log = get_logger("worker")
    log.info(
        "slot_blocks",
        kv_layout=settings.kv_layout,
        block_tokens=block.block_tokens,
        prefix_hit_step_tokens=block.block_tokens,
        page_bytes=block.page_bytes,
        waste_percent=round(100 * block.waste_ratio, 1),
        chosen_by="settings" if settings.block_tokens else "least waste",
    )
    if not settings.enforce_eager:
        log.info(
            "slots_run_eager", kv_layout=settings.kv_layout, reason="no CUDA graphs of attention from slots"
        )
    if settings.block_tokens:
        return settings
    return msgspec.structs.replace(settings, block_tokens=block.block_tokens)


def without_pool(settings: WorkerSettings, reason: str) -> WorkerSettings:
    """Settings of an engine with vLLM's own cache, as it is. Raises: SettingsError where pages were asked for."""
    if settings.kv_cache == "pages" or has_slots(settings):
        raise SettingsError(
            f"setting worker.kv_cache: {settings.model_name} cannot work in the pool's pages, {reason}; "
            "worker.kv_cache = auto hosts it with vLLM's own cache"
        )
    logger.warning(
        "%s: %s: vLLM's own cache is used, prompts are computed on both sides of a hand-off",
        settings.model_name,
        reason,
    )
    return msgspec.structs.replace(settings, mempool_socket="", kv_cache="copy")
