"""What an engine core tells of a request's KV: with its first output what was loaded, with its last the rest.

vLLM tells at the end only, and then nothing of a request that was stopped from outside: by a stop string, which is the
gateway's, or by a client that left. All of it travels in `kv_transfer_params`, and the front joins what came.
"""

from collections.abc import Callable, Mapping
from typing import Any

from vllm.outputs import RequestOutput

from shared.engine.interface import KvUse, Swapped

Told = dict[str, Any]


def tell_first(outputs: Mapping[int, Any], use_of: Callable[[str], Told]) -> None:
    """Core: put what `use_of(request id)` says on the first output of each request that goes on.

    Args: outputs: what vLLM's update_from_output() returns. Cost: a look at each output of the step.
    """
    for of_client in outputs.values():
        for output in of_client.outputs:
            if output.prefill_stats is not None and output.finish_reason is None:
                output.kv_transfer_params = use_of(output.request_id)


def keep_told() -> None:
    """Front, once: outputs that vLLM merges before they are read keep what each was told, not only the last."""
    add = RequestOutput.add
    if getattr(add, "keeps_told", False):
        return

    def joined(self: RequestOutput, next_output: RequestOutput, aggregate: bool) -> None:
        told = {**(self.kv_transfer_params or {}), **(next_output.kv_transfer_params or {})}
        add(self, next_output, aggregate)
        self.kv_transfer_params = told or None

    joined.keeps_told = True  # type: ignore[attr-defined]
    RequestOutput.add = joined  # type: ignore[method-assign]


def kv_use(output: RequestOutput, told: Told, num_prompt_tokens: int) -> KvUse:
    """Front: of an output, with all that was told by then."""
    cached = int(output.num_cached_tokens or 0)
    pool_tokens = min(int(told.get("tokens_loaded", 0)), cached)
    stats = output.metrics  # engine core's own clock, in seconds
    queued_s = stats.scheduled_ts - stats.queued_ts if stats is not None and stats.queued_ts else 0.0
    return KvUse(
        queue_ms=max(0.0, queued_s) * 1e3,
        tokens_engine=cached - pool_tokens,
        tokens_pool=pool_tokens,
        tokens_computed=max(0, num_prompt_tokens - cached),
        blocks_moved=int(told.get("blocks_loaded", 0)),
        blocks_reused=int(told.get("blocks_local", 0)),
        bytes_moved=int(told.get("bytes_loaded", 0)),
        fetch_ms=float(told.get("fetch_ms", 0.0)),
        failed_blocks=int(told.get("failed_blocks", 0)),
        times_parked=int(told.get("times_parked", 0)),
        swaps=[Swapped(*each) for each in told.get("swaps", ())],
        preempted_ns=told.get("preempted_ns", ()),
    )
