"""What an engine whose ranks fuse or weave tells vLLM; see weave_host.py."""

import logging
from collections.abc import Mapping
from typing import Any

from vllm.platforms import current_platform

from shared.engine.weave_auto import auto_choice
from shared.engine.worker_config import WorkerSettings
from shared.kv.model_files import read_config

logger = logging.getLogger(__name__)

# By the name that vLLM's model classes have; weave_support.py looks at their layers, too.
DENSE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
EXPERTS = ("MixtralForCausalLM",)
_CPU, _GPU = "shared.engine.weave_worker_cpu.{}", "shared.engine.weave_worker_gpu.{}"
_WORKERS = {  # what an engine would have else, to what it has
    "shared.engine.page_worker_cpu.PageCPUWorker": _CPU.format("WeavePageCPUWorker"),
    "shared.engine.page_worker_gpu.PageGPUWorker": _GPU.format("WeavePageGPUWorker"),
    "shared.engine.slot_worker_cpu.SlotCPUWorker": _CPU.format("WeaveSlotCPUWorker"),
    "shared.engine.slot_worker_gpu.SlotGPUWorker": _GPU.format("WeaveSlotGPUWorker"),
}


def why_not(settings: WorkerSettings) -> str:
    """Known before the model is loaded; "": nothing is."""
    if settings.tensor_parallel_size == 1:
        return "one rank has nothing to add up"
    names = list(read_config(settings.model_dir).get("architectures") or [])
    if not set(names) & {*DENSE, *EXPERTS}:
        return f"{' '.join(names) or 'a model without a name'} is none of {', '.join(DENSE + EXPERTS)}"
    return ""


def weave_arguments(settings: WorkerSettings, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """For AsyncEngineArgs, over `arguments`; {} where vLLM's way is taken, said in one line of the log if unasked for.

    Steps are not compiled: what the fused operation returns lies in buffers of its own, which a compiler would give to
    others. Decode steps are captured whole, without a compiler. Ranks that find out that they cannot have the operation
    end such a start, and the engine starts again without it (weave_restart.py).
    """
    if settings.weave == "off":
        return {}
    reason, fuse_min_tokens = why_not(settings), 1
    mode, min_tokens = settings.weave, settings.weave_min_tokens
    if settings.weave == "auto":
        choice = auto_choice(settings, arguments, reason)
        if choice is None:
            return {}
        mode, fuse_min_tokens, min_tokens = choice.mode, choice.fuse_min_tokens, choice.full_min_tokens
    elif reason:
        logger.warning(
            "worker.weave = %s: vLLM's own all-reduce and norm are used: %s", settings.weave, reason
        )
        return {}
    on_cpu = current_platform.is_cpu()
    gives_up_compiling = not on_cpu and not settings.enforce_eager
    own = _CPU.format("WeaveCPUWorker") if on_cpu else _GPU.format("WeaveGPUWorker")
    found: dict[str, Any] = {
        "worker_cls": _WORKERS[arguments["worker_cls"]] if "worker_cls" in arguments else own,
        "additional_config": {
            "quire_weave": {
                "mode": mode,
                "fuse_min_tokens": fuse_min_tokens,
                "min_tokens": min_tokens,
                "sms": settings.weave_sms,
                "multicast": settings.weave_multicast,
                "state_dir": settings.state_dir,
                "starts_anew": gives_up_compiling,
            }
        },
    }
    if gives_up_compiling:
        found["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    return found
