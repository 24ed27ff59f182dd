"""What AsyncEngineArgs are told for an engine in the pool's pages, and for one that copies."""

from typing import Any

from vllm.platforms import current_platform

from shared.engine.slot_settings import slot_arguments
from shared.engine.worker_config import WorkerSettings, block_tokens, has_slots
from shared.kv.transfer_mode import TransferMode


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
        "async_scheduling": False,
        "kv_transfer_config": {
            "kv_connector": "QuireConnector",
            "kv_connector_module_path": "shared.engine.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {},
        },
    }
