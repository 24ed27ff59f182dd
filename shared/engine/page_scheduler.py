"""vLLM's schedulers over the mempool's pages: a block pool of granted pages instead of vLLM's own.

`scheduler_cls` names PageScheduler, or AsyncPageScheduler with asynchronous scheduling. Settings come through
`additional_config["quire"]`: `description` (JSON of EngineDescription), `mempool_socket`, `instance`,
`events_address`, `handoff_ttl_ms`. The worker has attached its ranks before a scheduler is made, so the pool's
memory exists.
"""

import functools
import logging
import threading
import time
from collections import OrderedDict, deque
from typing import Any, NamedTuple

import msgspec
import vllm.v1.core.kv_cache_coordinator as coordinator_module
import vllm.v1.core.sched.scheduler as scheduler_module
import vllm.v1.engine.core as engine_core_module
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request, RequestStatus

from shared.engine.block_hasher import agreed_hashes, given, quire_block_hasher, seed_of
from shared.engine.cache_events import CacheEventSender
from shared.engine.choice_totals import ChoiceTotals
from shared.engine.early_requests import EarlyRequests
from shared.engine.kv_told import Told, tell_first
from shared.engine.lease_stalls import LeaseStalls
from shared.engine.page_manager import LeasedTail, PageKVCacheManager
from shared.engine.page_pool import LEASED, PageBlockPool
from shared.engine.page_room import note_answer
from shared.engine.pool_watch import PoolWatch
from shared.engine.preempt_times import note_preempted, preempted_ns
from shared.engine.vllm_setup import die_with_parent
from shared.errors import SettingsError
from shared.ids import BlockHash, HandoffId, InstanceId, LeaseId
from shared.kv.block_hash import hash_tail, pack_tokens
from shared.kv.layout import EngineDescription, num_blocks
from shared.kv.page import STOCK_PART
from shared.kv.words import u32_list, u64_list
from shared.mempool.page_quota import PageQuota, SealedPage
from shared.room.answers import AnswerLengths

logger = logging.getLogger(__name__)

STOCK_STEPS = 2  # the stock is kept at what so many of the largest steps can take
MAX_SEEN_LEASES = 65_536


class LeaseUse(NamedTuple):
    """What a request found in leased pages: whole blocks are aliased, the last, partial one is copied."""

    num_tokens: int
    num_aliased: int
    num_copied: int


NO_USE = LeaseUse(0, 0, 0)


class PageSchedulerMixin(EarlyRequests, PoolWatch):
    """Leases, seals, hand-offs and receipts around vLLM's scheduling."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1 or type(groups[0].kv_cache_spec) is not FullAttentionSpec:
            raise SettingsError(
                "only models with one group of full-attention layers work in the pool's pages"
            )
        die_with_parent()
        extra: dict[str, Any] = vllm_config.additional_config["quire"]
        description = msgspec.json.decode(extra["description"], type=EngineDescription)
        num_pages = kv_cache_config.num_blocks - 1 - int(extra.get("far_places", 0))
        quota = PageQuota(
            extra["mempool_socket"], InstanceId(extra["instance"]), description, quota_pages=num_pages
        )
        header = quota.attach()
        assert header.num_pages == num_pages, (header, kv_cache_config.num_blocks)
        events = CacheEventSender(extra["events_address"]) if extra.get("events_address") else None
        self._events = events
        make_pool = functools.partial(PageBlockPool, quota, self._on_cache_event)
        stock_pool, coordinator_module.BlockPool = coordinator_module.BlockPool, make_pool
        stock_manager, scheduler_module.KVCacheManager = scheduler_module.KVCacheManager, PageKVCacheManager
        try:
            super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        finally:
            coordinator_module.BlockPool = stock_pool
            scheduler_module.KVCacheManager = stock_manager
        # A freed block may be granted to somebody else: it waits until no step that knows it is under way.
        self.defer_block_free = True
        self.quota = quota
        self.pages: PageBlockPool = self.kv_cache_manager.block_pool
        self.pages.keeps = bool(extra.get("keeps_cache", True))
        self.kv_cache_manager.tails = {}
        self.kv_cache_manager.ahead_tokens = int(extra.get("ahead_tokens", 0))
        self._handoff_ttl_ms = int(extra["handoff_ttl_ms"])
        config = self.scheduler_config
        largest_step = config.max_num_batched_tokens // description.block_tokens + config.max_num_seqs
        self._stepped_s = 0.0
        self._early, self._early_keys = {}, {}
        self._stalls = LeaseStalls()
        self._low_stock = min(STOCK_STEPS * largest_step, max(1, header.num_pages // STOCK_PART))
        self.leases: dict[str, tuple[LeaseId, list[KVCacheBlock]]] = {}
        self._seen_leases: OrderedDict[str, None] = OrderedDict()
        self._ended_leases: deque[tuple[int, LeaseId, list[KVCacheBlock]]] = deque()
        self._handoffs: dict[str, HandoffId] = {}  # prompts that are not computed yet
        self._is_settling = False
        self._has_counted = False  # somebody decided by the stock of now who runs in the step that comes
        self._ready: deque[tuple[int, HandoffId, list[BlockHash]]] = deque()
        self._use: dict[str, LeaseUse | None] = {}  # None: it was told
        self._turn = threading.RLock()  # where pages change hands: a report to a new mempool waits for it
        self._totals = ChoiceTotals()
        self.answers = AnswerLengths()
        self._block_bytes = description.block_bytes
        self._watch_pool()

    def _on_cache_event(self, kind: str, hashes: list[BlockHash]) -> None:
        if self._events is not None:
            self._events.send(kind, hashes)

    # -- requests -----------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Take over the lease that the front made for it; keep one aside whose lease is to come."""
        with self._turn:
            if not self.keep_early(request):
                self._add_request(request)

    def lease_came(self, key: str, params: dict[str, Any]) -> None:
        """Of a request that is kept aside; `params` without a lease if there is none."""
        with self._turn:
            if (request := self.take_early(key, params)) is not None:
                self._add_request(request)

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Request]:
        """vLLM's."""
        with self._turn:
            if request_ids is not None and not isinstance(request_ids, str):
                request_ids = list(request_ids)
            early = self.finish_early(request_ids, finished_status)
            return super().finish_requests(request_ids, finished_status) + early

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """vLLM's."""
        with self._turn:
            return super().reset_prefix_cache(*args, **kwargs)

    def _add_request(self, request: Request) -> None:
        params = given(request)
        request.quire_seed = seed_of(request)
        request.quire_private = bool(params.get("private"))
        lease_id = params.get("lease_id")
        if lease_id and lease_id not in self._seen_leases:  # of n choices the first takes it, others share
            self._take_lease(request, params)
        if params.get("handoff_id"):
            self._handoffs[request.request_id] = HandoffId(params["handoff_id"])
        super().add_request(request)

    def _take_lease(self, request: Request, params: dict[str, Any]) -> None:
        """Rule 10: what counts are the hashes of the tokens that are here.

        A lease of an earlier mempool ended with it, unless this engine reported it; one of a successor that this
        engine has not attached to yet may not be in what it is about to report. Neither is worked in.
        """
        lease_id = LeaseId(params["lease_id"])
        self._seen_leases[lease_id] = None
        if len(self._seen_leases) > MAX_SEEN_LEASES:
            self._seen_leases.popitem(last=False)
        if not self.quota.made(lease_id):
            self.quota.release(lease_id)
            return
        num_tokens = params.get("handed_tokens") or request.num_prompt_tokens
        expected: list[BlockHash] = list(request.block_hashes[: num_tokens // self.block_size])
        if num_tokens % self.block_size:
            expected.append(self._tail_hash(request, num_tokens))
        agreed = agreed_hashes(params["hashes"], expected)
        count = len(agreed)
        pages, epochs = u32_list(params["pages"])[:count], u64_list(params["epochs"])[:count]
        blocks = self.pages.lease(pages, epochs, agreed[: len(pages)])
        self.leases[request.request_id] = (lease_id, blocks)
        if len(blocks) == num_blocks(num_tokens, self.block_size):
            self.kv_cache_manager.tails[request.request_id] = LeasedTail(blocks[-1], num_tokens)

    def _tail_hash(self, request: Request, num_tokens: int) -> BlockHash:
        """Of the block in which the first num_tokens tokens end."""
        full = num_tokens // self.block_size
        parent = BlockHash(request.block_hashes[full - 1]) if full else request.quire_seed
        return hash_tail(parent, pack_tokens(request.all_token_ids[full * self.block_size : num_tokens]))

    def holds_lease(self, lease_id: str) -> bool:
        """Whether this engine will release it, or has. A lease that is held may be too old to be among those seen."""
        if lease_id in self._seen_leases:
            return True
        live = any(held == lease_id for held, _ in self.leases.values())
        return live or any(held == lease_id for _, held, _ in self._ended_leases)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        params, ec_params = super()._free_request(request, delay_free_blocks)
        note_answer(self.answers, request)
        request_id = request.request_id
        self._handoffs.pop(request_id, None)
        self.kv_cache_manager.tails.pop(request_id, None)
        lease = self.leases.pop(request_id, None)
        if lease is not None:
            # as vLLM fences the blocks themselves: not before a step under way that reads them is over
            in_flight = request.last_sched_seq > self.processed_step_seq
            self._end_lease(lease, self.sched_step_seq if in_flight else 0)
        said = self._untold_use(request_id) | {"preempted_ns": preempted_ns(request)}
        del self._use[request_id]
        return {**(params or {}), **self._totals.add(request_id, said)}, ec_params

    def _told_first(self, request_id: str) -> Told:
        return self._totals.add(request_id, self._untold_use(request_id))

    def _untold_use(self, request_id: str) -> Told:
        """What it found in leased pages; {} when that was told already."""
        use, self._use[request_id] = self._use.get(request_id, NO_USE), None
        if use is None:
            return {}
        return {
            "tokens_loaded": use.num_tokens,
            "blocks_local": use.num_aliased,
            "blocks_loaded": use.num_copied,
            "bytes_loaded": use.num_copied * self._block_bytes,
        }

    def _preempt_request(self, request: Request, timestamp: float) -> None:
        note_preempted(request)
        super()._preempt_request(request, timestamp)

    def _end_lease(self, lease: tuple[LeaseId, list[KVCacheBlock]], fence: int) -> None:
        self._ended_leases.append((fence, *lease))
        if not self._is_settling:
            self._end_leases()

    def _end_leases(self) -> None:
        for _ in range(len(self._ended_leases)):
            fence, lease_id, blocks = self._ended_leases.popleft()
            if fence > self.processed_step_seq or not self.pages.may_unlease(blocks):
                self._ended_leases.append((fence, lease_id, blocks))
                continue
            self.pages.unlease(blocks)
            self.quota.release(lease_id)

    # -- steps --------------------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """vLLM's, with the stock of pages looked after."""
        with self._turn:
            return self._schedule(*args, **kwargs)

    def _schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._stepped_s = time.monotonic()
        self.pages.absorb(answers=not self._has_counted)
        manager: PageKVCacheManager = self.kv_cache_manager
        output = super().schedule(*args, **kwargs)
        unmet, manager.unmet_blocks = manager.unmet_blocks, 0
        self.pages.refill(max(self._low_stock, unmet))
        self.pages.step_scheduled(self.sched_step_seq)
        for new in output.scheduled_new_reqs:
            self._note_use(new.req_id, new.block_ids[0], new.num_computed_tokens)
        if self._handoffs:
            self._find_ready(output)
        self._look_for_stall(output)
        return output

    def _look_for_stall(self, output: SchedulerOutput) -> None:
        """With nothing running, leases of waiting requests end one after the other (lease_stalls.py)."""
        under_way = output.total_num_scheduled_tokens or self.sched_step_seq > self.processed_step_seq
        if under_way or self.running or not self.leases:
            self._stalls.runs()
            return
        waiting = [r.request_id for queue in (self.waiting, self.skipped_waiting) for r in queue]
        held = [request_id for request_id in waiting if request_id in self.leases]
        request_id = self._stalls.to_end(held, self.pages.clock())
        if request_id is not None:
            self.quota.counters["leases_dropped"] += 1
            self.kv_cache_manager.tails.pop(request_id, None)
            self._end_lease(self.leases.pop(request_id), fence=0)

    def _note_use(self, request_id: str, block_ids: list[int], num_computed: int) -> None:
        """For the receipt: what the request's first step found in leased pages."""
        lease = self.leases.get(request_id)
        if lease is None or not lease[1] or request_id in self._use:
            return
        kinds = self.pages.kinds
        whole, rest = divmod(num_computed, self.block_size)
        aliased = sum(kinds[block_id] == LEASED for block_id in block_ids[:whole])
        self._use[request_id] = LeaseUse(aliased * self.block_size + rest, aliased, num_copied=int(rest > 0))

    def _find_ready(self, output: SchedulerOutput) -> None:
        for request_id in [r for r in self._handoffs if r in output.num_scheduled_tokens]:
            request = self.requests[request_id]
            if request.num_computed_tokens < request.num_prompt_tokens:
                continue
            full = request.num_prompt_tokens // self.block_size
            hashes = [BlockHash(h) for h in request.block_hashes[:full]]
            valid = request.num_prompt_tokens % self.block_size
            if valid and request.max_tokens == 1:  # the request ends with this step: nobody writes on
                block = self.kv_cache_manager.get_blocks(request_id).blocks[0][full]
                page, epoch = self.pages.own(block)
                tail = self._tail_hash(request, request.num_prompt_tokens)
                parent = hashes[-1] if hashes else request.quire_seed
                self.pages.keep_tail(self.sched_step_seq, block, SealedPage(page, epoch, tail, parent, valid))
                hashes.append(tail)
            self._ready.append((self.sched_step_seq, self._handoffs.pop(request_id), hashes))

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        """vLLM's, then what the finished step makes final: seals, hand-offs, ended leases."""
        with self._turn:
            return self._update_from_output(scheduler_output, model_runner_output)

    def _update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        self._is_settling = True  # a hand-off is told before the lease of its prompt's beginning ends
        try:
            outputs = super().update_from_output(scheduler_output, model_runner_output)
        finally:
            self._is_settling = False
        tell_first(outputs, self._told_first)
        done = self.processed_step_seq
        self.pages.step_over(done)
        while self._ready and self._ready[0][0] <= done:
            _, handoff_id, hashes = self._ready.popleft()
            self.quota.handoff_ready(handoff_id, hashes, self._handoff_ttl_ms)
        self.pages.drop_tails(done)
        self._end_leases()
        return outputs

    def shutdown(self) -> None:
        """End the attachment too."""
        super().shutdown()
        self.quota.close()


class PageScheduler(PageSchedulerMixin, Scheduler):
    """One step at a time."""


class AsyncPageScheduler(PageSchedulerMixin, AsyncScheduler):
    """The next step is scheduled while one runs."""


def _holds_lease(core: EngineCore, lease_id: str) -> bool:
    return core.scheduler.holds_lease(lease_id)


def install() -> None:
    """Before an engine core is made in this process, or in one that is forked from it: Quire's block hashes,
    and the question `quire_holds_lease` that a worker's front may ask.
    """
    engine_core_module.get_request_block_hasher = quire_block_hasher
    EngineCore.quire_holds_lease = _holds_lease
