"""vLLM's schedulers over the mempool's pages, for prefill engines whose prompts go to another space as whole blocks.

A long prompt takes several steps (chunked prefill). What earlier steps sealed, and what was cached, need not wait for
the last one: the mempool is told as soon as it is sealed, and copies it to the decode side's space while the rest is
computed. The hand-off then waits for the last chunk's blocks only. All of it is a help: without a word of it the
decode side gets the blocks when the prompt is done. See docs/decisions/0024.
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from shared.engine.destinations import DestinationsMixin
from shared.engine.page_swaps import LEASED, SEALED
from shared.ids import BlockHash
from shared.mempool.page_quota import PAGES_PER_MESSAGE


class AheadSchedulerMixin(DestinationsMixin):
    """Says which blocks of a prompt under way may leave."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sent: dict[str, int] = {}  # of a prompt's first blocks, how many were named
        self.pages.on_steps_done = self._send_sealed

    def _forget(self, request_id: str) -> None:
        super()._forget(request_id)
        self._sent.pop(request_id, None)

    def _schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = super()._schedule(*args, **kwargs)
        for request_id in [r for r in self._destinations if r in output.num_scheduled_tokens]:
            if request_id not in self._sent:  # what was cached
                self._send(self.requests[request_id])
        return output

    def _send_sealed(self, _done: int) -> None:
        """Steps are over, and what they sealed was said."""
        for request_id in self._sent.keys() & self._destinations.keys():
            request = self.requests[request_id]
            if not request.num_output_tokens:  # else its prompt is done: the hand-off takes the rest
                self._send(request)

    def _send(self, request: Request) -> None:
        """Cost: a step a block that is new since the last time."""
        begin = self._sent.setdefault(request.request_id, 0)
        kinds, block_ids = self.pages.kinds, self.kv_cache_manager.get_block_ids(request.request_id)[0]
        most = min(request.num_prompt_tokens // self.block_size, begin + PAGES_PER_MESSAGE, len(block_ids))
        end = begin
        while end < most and kinds[block_ids[end]] in (SEALED, LEASED):
            end += 1
        if end == begin:
            return
        self._sent[request.request_id] = end
        handoff_id, target, traceparent = self._destinations[request.request_id]
        hashes = [BlockHash(block_hash) for block_hash in request.block_hashes[begin:end]]
        self.quota.step_layers(handoff_id, target, self.sched_step_seq, (), hashes, traceparent)


class AheadPageScheduler(AheadSchedulerMixin, Scheduler):
    """One step at a time."""


class AsyncAheadPageScheduler(AheadSchedulerMixin, AsyncScheduler):
    """The next step is scheduled while one runs."""
