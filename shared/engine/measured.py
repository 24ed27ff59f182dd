"""For measurements only: stock vLLM behind the same stream as ours, and step times inside any engine core.

A client's view of steps also holds its own work for every token, which differs between the engines that are compared;
so the core itself notes when its scheduler takes in an output.
"""

import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch
import vllm.v1.core.sched.scheduler as scheduler_module
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from shared.engine.measured_driver_calls import count_driver_calls
from shared.engine.measured_late_steps import Clocks, LateSteps


def record_steps(path: Path) -> None:
    """From now on every engine core made here appends a line for every step: "end_s interval_ms num_requests num_tokens
    inline background", the last two as in DriverCalls, since counting began. PATH's neighbour .late: rows of
    LateSteps.
    """
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # noqa: TID251  vLLM's setting: a spawned core has no recorder
    stock = scheduler_module.Scheduler.update_from_output
    calls = count_driver_calls()
    lines: list[str] = []
    last = 0.0
    late = LateSteps(Clocks().now)

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        nonlocal last
        begin = time.perf_counter()
        out = stock(self, scheduler_output, model_runner_output)
        now = time.perf_counter()
        scheduled = scheduler_output.num_scheduled_tokens
        total = scheduler_output.total_num_scheduled_tokens
        lines.append(
            f"{now:.6f} {(now - last) * 1e3:.4f} {len(scheduled)} {total} {calls.inline} {calls.background}\n"
        )
        late.note(now, (now - last) * 1e3, len(scheduled), total, (now - begin) * 1e3)
        last = now
        if total == 0 or len(lines) >= 500:  # idle, or enough for one write
            with path.open("a") as file:
                file.writelines(lines)
            lines.clear()
            with path.with_suffix(".late").open("a") as file:
                file.writelines(late.take())
            _write_memory(path.with_suffix(".memory"))
        return out

    scheduler_module.Scheduler.update_from_output = update_from_output


def _write_memory(path: Path) -> None:
    """Of torch's allocator, where the engine core is the only rank: allocated, reserved, the most of each until now."""
    if torch.cuda.is_initialized():
        now = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
        most = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
        path.write_text(" ".join(map(str, now + most)))


class StockEngine:
    """vLLM as it comes: its own runner, asynchronous scheduling, prefix caching; random weights."""

    def __init__(self, model_dir: str, *, kv_cache_bytes: int = 0, **args: Any) -> None:
        if kv_cache_bytes:
            args["kv_cache_memory_bytes"] = kv_cache_bytes
        engine_args = AsyncEngineArgs(
            model=model_dir, load_format="dummy", enable_prefix_caching=True, seed=0, **args
        )
        self._llm = AsyncLLM.from_engine_args(engine_args)

    def facts(self) -> dict[str, Any]:
        """What it chose."""
        config = self._llm.vllm_config
        return {
            "block_tokens": config.cache_config.block_size,
            "num_blocks": config.cache_config.num_gpu_blocks,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "v2_runner": bool(config.use_v2_model_runner),
        }

    async def stream(self, name: str, prompt: list[int], max_tokens: int) -> AsyncIterator[int]:
        """Number of tokens of each output."""
        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        async for output in self._llm.generate(TokensPrompt(prompt_token_ids=prompt), params, name):
            yield len(output.outputs[0].token_ids)

    def close(self) -> None:
        """Stop its processes."""
        self._llm.shutdown()


def used_bytes() -> int:
    """Of the first GPU, by everybody; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free
