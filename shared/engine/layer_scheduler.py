"""vLLM's schedulers over the mempool's pages, for `transfer_mode = "by-layer"`: each step of a prompt that is handed
over is announced to the mempool, which copies its blocks to the decode side layer by layer while they are computed.

Announced are the blocks that a step completes, because nobody writes to them after it; the step's end says which of
them it sealed. All of it is a help: without a word of it the decode side gets the blocks when the prompt is done.
"""

from collections import deque
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from shared.engine.destinations import DestinationsMixin
from shared.ids import BlockHash
from shared.mempool.page_quota import PAGES_PER_MESSAGE, SealedPage


class LayerSchedulerMixin(DestinationsMixin):
    """Announcements around PageSchedulerMixin's steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._told_cached: set[str] = set()  # of those with a destination, whose cached blocks were named
        self._announced: deque[tuple[int, list[SealedPage]]] = deque()  # of steps under way
        self.pages.on_steps_done = self._say_sealed

    def _forget(self, request_id: str) -> None:
        super()._forget(request_id)
        self._told_cached.discard(request_id)

    def _schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = super()._schedule(*args, **kwargs)
        output.quire_step = self.sched_step_seq  # type: ignore[attr-defined]  # for the ranks' layer words
        for request_id in [r for r in self._destinations if r in output.num_scheduled_tokens]:
            self._announce(self.requests[request_id], output.num_scheduled_tokens[request_id])
        return output

    def _announce(self, request: Request, num_scheduled: int) -> None:
        """What this step completes of the prompt. Cost: a look-up a block of the step."""
        request_id, step = request.request_id, self.sched_step_seq
        destination = self._destinations[request_id]
        begin = request.num_computed_tokens - num_scheduled  # this step's tokens are computed, for vLLM
        if begin >= request.num_prompt_tokens:
            return
        end = min(request.num_computed_tokens, request.num_prompt_tokens)
        first = begin // self.block_size
        sealing = self.pages.sealing
        seals = sealing[-1][1].blocks if sealing and sealing[-1][0] == step else {}
        found: list[SealedPage] = []
        for block in self.kv_cache_manager.get_blocks(request_id).blocks[0][
            first : -(-end // self.block_size)
        ]:
            tail_step, tail = self.pages.tails.get(block.block_id, (0, None))
            page = seals.get(block.block_id) or (tail if tail_step == step else None)
            if page is not None:
                found.append(page)
        cached: list[BlockHash] = []
        if request_id not in self._told_cached:
            cached = [BlockHash(h) for h in request.block_hashes[:first]]
        if (found or cached) and max(len(found), len(cached)) <= PAGES_PER_MESSAGE:
            self._told_cached.add(request_id)
            self._announced.append((step, found))
            self.quota.step_layers(
                destination.handoff_id, destination.target, step, found, cached, destination.traceparent
            )

    def _say_sealed(self, done: int) -> None:
        """Steps up to this one are over, and what they sealed was said."""
        sealed = self.pages.sealed_pages
        over: dict[int, list[SealedPage]] = {}
        while self._announced and self._announced[0][0] <= done:
            step, pages = self._announced.popleft()
            over.setdefault(step, []).extend(page for page in pages if sealed.get(page.page + 1) == page)
        for step, pages in over.items():
            self.quota.layers_sealed(step, [(page.page, page.epoch) for page in pages[:PAGES_PER_MESSAGE]])


class LayerScheduler(LayerSchedulerMixin, Scheduler):
    """One step at a time."""


class AsyncLayerScheduler(LayerSchedulerMixin, AsyncScheduler):
    """The next step is scheduled while one runs."""
