"""Prompts longer than the engine's memory: the oldest blocks of running requests are read where their copies are.

Over PageSchedulerMixin. Behind the engine's own blocks vLLM knows `far_places` more, one for each place at which the
ranks can map a page from elsewhere (shared/wire/mempool_far.py). When the stock runs low, sealed blocks of running
requests are copied out, and their entries in the block table change to the copies' places between two steps: vLLM's
tables in the ranks hear of it by `quire_far` of the next step's output (far_tables.py). The own pages go back when no
step that knows them is under way. A request that finds no page meanwhile stays out of the step, and is not preempted.

A mempool that dies takes the pins of far blocks with it: an engine that has some then begins anew.

Settings: `additional_config["quire"]`: `far_places`, of which `far_blocks` are used at once; the others are for moves.
"""

import logging
import os
from collections import Counter, deque
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from shared.engine.far_tables import runs
from shared.engine.page_pool import SEALED, WRITING
from shared.engine.page_scheduler import PageSchedulerMixin
from shared.engine.page_swaps import FAR
from shared.engine.pool_watch import EXIT_MEMORY_LOST
from shared.fair.far import MAX_ASKED, PATIENCE_S, Candidate, FarBook, Moved, choose
from shared.ids import BlockHash
from shared.kv.words import u32_list
from shared.wire.mempool_far import NO_PLACE, FarMoved, FarPlaced

MOST_VAIN = 4  # preemptions one after the other that came no further: a lease is in the way
WAIT_S = 0.002  # of a step in which nothing can run for lack of pages, for the mempool's answer

logger = logging.getLogger(__name__)


class FarSchedulerMixin(PageSchedulerMixin):
    """See the module."""

    far: FarBook | None = None

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        extra = vllm_config.additional_config["quire"]
        self._num_own = kv_cache_config.num_blocks - 1 - int(extra["far_places"])
        self.far_counts: Counter[str] = Counter()
        self._fenced: deque[tuple[int, list[KVCacheBlock]]] = deque()  # out of their table since this step
        self._dropping: deque[tuple[int, list[int]]] = deque()  # far places, likewise
        self._changed: dict[str, dict[int, int]] = {}  # entries that the ranks' tables do not have yet
        self._most_owned = 0  # pages at once
        self._left_at_s = -PATIENCE_S  # when own pages were last given for far ones
        self._came_to: dict[str, int] = {}  # computed tokens of preempted requests, at most
        self._num_vain = 0  # preemptions of requests that had come no further than before
        # more than half of the memory in one step would leave too little that is sealed, and may leave
        most_tokens = max(1, self._num_own // 2) * self.block_size
        self.max_num_scheduled_tokens = min(self.max_num_scheduled_tokens, most_tokens)
        self.far = FarBook(int(extra["far_blocks"]))

    # -- steps ------------------------------------------------------------------------------------------

    def _schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        assert self.far is not None
        self._end_if_lost()
        self._hear()
        self.pages.absorb()
        self._let_go()
        self._send()
        self.pages.far_room = self.far.spare
        held = self._starved()
        everyone, self.running = self.running, [r for r in self.running if r not in held]
        self.max_num_running_reqs -= len(held)
        try:
            output = super()._schedule(*args, **kwargs)
        finally:
            self.max_num_running_reqs += len(held)
            old = [r for r in everyone if r in held or r in self.running]
            self.running = old + [r for r in self.running if r not in everyone]
        self.far_counts["steps_without_pages"] += bool(held)
        self._end_a_lease_in_the_way()
        if not output.total_num_scheduled_tokens:  # what changed goes with the next step that computes
            if held and self.sched_step_seq <= self.processed_step_seq:  # else that step's end comes first
                self.quota.wait_far(WAIT_S)
            return output
        changed, self._changed = self._changed, {}
        output.quire_far = [change for name, entries in changed.items() for change in runs(name, entries)]
        return output

    def _update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        self._end_if_lost()  # before any token counts that was computed with what the next mempool may overwrite
        outputs = super()._update_from_output(scheduler_output, model_runner_output)
        self._let_go()
        return outputs

    def _answer_pool(self) -> None:
        with self._turn:
            if self.far is not None:  # the thread that watches the mempool was there first
                self._hear()
                self._let_go()
            super()._answer_pool()

    def finish_requests(self, *args: Any, **kwargs: Any) -> list[Request]:
        """vLLM's."""
        with self._turn:
            finished = super().finish_requests(*args, **kwargs)
            self._let_go()
            return finished

    def _end_if_lost(self) -> None:
        """The successor's places have the same numbers: none of this mempool's may be dropped there."""
        if not self.quota.lost or self.far is None:
            return
        # a step under way may be the last that knows them
        if self.far.in_use or self._dropping or FAR in self.pages.kinds:
            logger.critical("the mempool is gone that kept this engine's far blocks: the engine begins anew")
            os._exit(EXIT_MEMORY_LOST)

    def _starved(self) -> list[Request]:
        """Running requests that would find no page in this step, while some may come free yet."""
        assert self.far is not None
        now_s = self.pages.clock()
        self._most_owned = max(self._most_owned, self.pages.num_owned)
        is_owed = self.pages.num_owned < self._most_owned and now_s - self._left_at_s < PATIENCE_S
        may_come = is_owed or self._fenced or self.pages.num_expected or self.far.is_worth_waiting(now_s)
        if not (may_come or self.sched_step_seq > self.processed_step_seq):
            return []
        free, tokens, wanted = len(self.pages.stock), self.max_num_scheduled_tokens, 0
        held: list[Request] = []
        for request in self.running:
            missing, new = self._missing(request, tokens)
            wanted += max(0, missing)
            if missing > free:
                held.append(request)
            else:
                free -= max(0, missing)
                tokens -= new
        if not held or not (may_come or self._is_filling()):
            return []
        self.pages.refill(wanted)  # nobody asks for pages in its name meanwhile
        return held

    def _is_filling(self) -> bool:
        """Whether blocks may leave when a step under way is over that fills them: until then nothing may, if leases pin
        the others. Not for any step: who finds no page would wait as long as another request runs.
        """
        assert self.far is not None
        return self.far.spare > 0 and any(map(self._fills, self._givers()))

    def _fills(self, request: Request) -> bool:
        if request.quire_private or request.last_sched_seq <= self.processed_step_seq:
            return False
        whole, kinds = request.num_computed_tokens // self.block_size, self.pages.kinds
        return any(kinds[block.block_id] == WRITING for block in self._table(request.request_id)[:whole])

    def _missing(self, request: Request, tokens: int) -> tuple[int, int]:
        """Blocks that its next step adds to its table, and that step's tokens."""
        new = max(1, min(request.num_tokens - request.num_computed_tokens, tokens))
        end = request.num_computed_tokens + new + self.kv_cache_manager.ahead_tokens
        have = len(self.kv_cache_manager.get_blocks(request.request_id).blocks[0])
        return -(-min(end, self.max_model_len) // self.block_size) - have, new

    # -- out --------------------------------------------------------------------------------------------

    def _send(self) -> None:
        """Ask so many blocks to leave that the next steps of those that run find pages."""
        assert self.far is not None
        tokens, wanted = self.max_num_scheduled_tokens, 0
        for request in self._next():
            missing, new = self._missing(request, tokens)
            wanted += max(0, missing)
            tokens = max(1, tokens - new)
        wanted += min(self._low_stock, self._left(tokens))
        fenced = sum(len(blocks) for _, blocks in self._fenced)
        coming = self.pages.num_expected + self.far.num_asked + fenced
        unused = len(self.pages.stock) + self.pages.free_block_queue.num_free_blocks
        count = min(wanted - unused - coming, self.far.room(self.pages.clock()))
        if count <= 0 or self.quota.lost:
            return
        candidates = [Candidate(r.request_id, self._movable(r)) for r in self._givers()]
        for request_id, positions in choose(candidates, count):
            hashes = self.requests[request_id].block_hashes
            for first in range(0, len(positions), MAX_ASKED):
                blocks = {p: BlockHash(hashes[p]) for p in positions[first : first + MAX_ASKED]}
                number = self.far.ask(request_id, blocks, self.pages.clock())
                self.quota.far_out(number, list(blocks.values()))

    def _next(self) -> list[Request]:
        """Those that are to find pages in this step."""
        return self.running

    def _givers(self) -> list[Request]:
        """Those whose blocks may leave."""
        return self.running

    def _left(self, tokens: int) -> int:
        """Blocks that the running requests' prompts still take after their next step."""
        left = sum(max(0, r.num_tokens - r.num_computed_tokens - tokens) for r in self.running)
        return -(-left // self.block_size) + 1

    def _movable(self, request: Request) -> list[int]:
        """Whole sealed blocks that nobody else here uses, and that are not leaving."""
        assert self.far is not None
        table, leaving = self._table(request.request_id), self.far.leaving(request.request_id)
        kinds, leases = self.pages.kinds, self.pages.lease_counts
        whole = min(request.num_computed_tokens // self.block_size, len(request.block_hashes), len(table))
        return [
            position
            for position, block in enumerate(table[:whole])
            if kinds[block.block_id] == SEALED and block.ref_cnt == 1 and block.block_id not in leases
            if position not in leaving
        ]

    # -- what the mempool says --------------------------------------------------------------------------

    def _hear(self) -> None:
        """At a step boundary."""
        assert self.far is not None
        for message in self.quota.take_far():
            if isinstance(message, FarPlaced):
                self._on_placed(message)
            else:
                self._on_moved(message)

    def _on_placed(self, message: FarPlaced) -> None:
        assert self.far is not None
        places = u32_list(message.places)
        found = self.far.placed(message.number, places, self.pages.clock())
        if found is None:
            self._drop_places([place for place in places if place != NO_PLACE])
            return
        self.far_counts["blocks_refused"] += places.count(NO_PLACE)
        strays, gone = found.strays, []
        table = self._table(found.request_id)
        for position, place in found.entries:
            block = table[position] if position < len(table) else None
            if block is None or self.pages.kinds[block.block_id] != SEALED or block.ref_cnt != 1:
                strays.append(place)  # another request came with the same prefix
                continue
            self.pages._maybe_evict_cached_block(block)
            gone.append(block)
            self._replace(found.request_id, position, place)
        if gone:
            self._fenced.append((self.sched_step_seq, gone))
        self.far_counts["blocks_out"] += len(gone)
        self.far_counts["blocks_out_peer"] += min(message.blocks_peer, len(gone))
        self._drop_places(strays)

    def _on_moved(self, message: FarMoved) -> None:
        assert self.far is not None
        pairs = list(zip(u32_list(message.places), u32_list(message.to), strict=True))
        moved, strays = self.far.moved(pairs)
        lost: dict[str, list[Moved]] = {}
        for one in moved:
            if one.new == NO_PLACE:
                lost.setdefault(one.request_id, []).append(one)
                continue
            self._leave_place(one.old)
            self._replace(one.request_id, one.position, one.new, is_new=False)
        self.far_counts["blocks_moved"] += len(moved) - sum(map(len, lost.values()))
        self.far_counts["blocks_lost"] += sum(map(len, lost.values()))
        for request_id in lost:
            self._lose(self.requests[request_id])
        self._drop_places(strays)

    def _lose(self, request: Request) -> None:
        """Bytes of it are nowhere: it is computed again."""
        if request in self.running:
            self.running.remove(request)
            self._preempt_request(request, self.pages.clock())

    def _table(self, request_id: str) -> list[KVCacheBlock]:
        tables = self.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        return tables.get(request_id, [])

    def _replace(self, request_id: str, position: int, place: int, *, is_new: bool = True) -> None:
        """The table has the copy from the next step on."""
        assert self.far is not None
        block = self.pages.place_far(1 + self._num_own + place)
        self._table(request_id)[position] = block
        self._changed.setdefault(request_id, {})[position] = block.block_id
        if is_new:
            self.far.take(request_id, position, place)

    def _leave_place(self, place: int) -> None:
        """No table has it from the next step on."""
        block = self.pages.blocks[1 + self._num_own + place]
        self.pages.free_blocks([block])

    # -- behind the steps ---------------------------------------------------------------------------------

    def _let_go(self) -> None:
        """Own pages and far places that only steps knew which are over."""
        while self._fenced and self._fenced[0][0] <= self.processed_step_seq:
            self.pages.leave(self._fenced.popleft()[1])
            self._left_at_s = self.pages.clock()
        if self.pages.far_freed:
            freed, self.pages.far_freed = self.pages.far_freed, []
            places = [block_id - 1 - self._num_own for block_id in freed]
            self._dropping.append((self.sched_step_seq, places))
        while self._dropping and self._dropping[0][0] <= self.processed_step_seq:
            self._drop_places(self._dropping.popleft()[1])

    def _drop_places(self, places: list[int]) -> None:
        if places:
            self.quota.far_drop(places)

    # -- ends ---------------------------------------------------------------------------------------------

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self._forget(request)
        self._came_to.pop(request.request_id, None)
        return super()._free_request(request, delay_free_blocks)

    def _preempt_request(self, request: Request, timestamp: float) -> None:
        self._forget(request)
        self._note_preempted(request)
        self.far_counts["recomputed_tokens"] += request.num_computed_tokens
        super()._preempt_request(request, timestamp)

    def _note_preempted(self, request: Request) -> None:
        """A request that is computed again and again and comes no further shows that pages are missing for good."""
        before = self._came_to.get(request.request_id, -1)
        self._came_to[request.request_id] = max(before, request.num_computed_tokens)
        self._num_vain = self._num_vain + 1 if request.num_computed_tokens <= before else 0

    def _end_a_lease_in_the_way(self) -> None:
        """Blocks that leases pin do not leave. With a request running, if only for a step each time, nobody else ends
        any (lease_stalls.py): so it is with too few pages beside them for a long prompt's steps.
        """
        if self._num_vain < MOST_VAIN:
            return
        self._num_vain = 0
        waiting = [r.request_id for queue in (self.waiting, self.skipped_waiting) for r in queue]
        held = [name for name in waiting if name in self.leases]
        if held:  # the last in the queue first
            request = self.requests[held[-1]]
            self.quota.counters["leases_dropped"] += 1
            self.kv_cache_manager.tails.pop(request.request_id, None)
            is_read = request.last_sched_seq > self.processed_step_seq
            self._end_lease(self.leases.pop(request.request_id), self.sched_step_seq if is_read else 0)

    def _forget(self, request: Request) -> None:
        assert self.far is not None
        self.far.forget(request.request_id)
        self._changed.pop(request.request_id, None)


class FarPageScheduler(FarSchedulerMixin, Scheduler):
    """One step at a time."""


class AsyncFarPageScheduler(FarSchedulerMixin, AsyncScheduler):
    """The next step is scheduled while one runs."""


def _far_counts(core: EngineCore) -> dict[str, int]:
    return dict(getattr(core.scheduler, "far_counts", {}))


def install() -> None:
    """Before an engine core is made in this process, or in one that is forked from it: the question
    `quire_far_counts` that a test or a measurement may ask.
    """
    EngineCore.quire_far_counts = _far_counts
