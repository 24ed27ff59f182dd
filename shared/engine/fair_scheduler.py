"""vLLM's schedulers over the mempool's pages with fair slices (`worker.local_policy = "cfs"`): AQUA section 7.

shared/fair decides who runs; this carries it out. A request that loses its slot is parked: vLLM's own path of
preempted requests, but its blocks stay in its block table and its computed tokens count on, so that it goes on where it
was and nothing is computed twice (decision 0016). It comes back through vLLM's waiting queue, with all of its blocks.
A request under way (asynchronous scheduling) may be parked, and comes back when its last step's output is in.

Where pages are short, blocks of parked requests leave for swap space and come back: swap_scheduler.py.

Settings: those of page_scheduler.py and swap_scheduler.py, `additional_config["quire"]["fair"]`: FairRules' fields.
"""

import time
from collections import Counter
from itertools import chain
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEventType
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request, RequestStatus

from shared.engine.block_hasher import given
from shared.engine.preempt_times import note_preempted
from shared.engine.swap_scheduler import SwapSchedulerMixin, has_prompt_rows
from shared.fair.carrying import Begun, Seen, free_mark, may_begin, may_fill, pages_for_turns
from shared.fair.elsewhere import Elsewhere, Here
from shared.fair.rules import FairRules, Room
from shared.fair.slices import FairSlices

MAX_SERVED = 4_096  # tenants whose totals are kept


class FairSchedulerMixin(SwapSchedulerMixin):
    """Turns around the steps of PageSchedulerMixin and SwapSchedulerMixin.

    `fair_counts`: since the start: times_parked, times_resumed; kept_tokens: of parked requests, each time;
    computed_tokens: all; recomputed_tokens: those of a request that were computed before, for whatever reason;
    times_dropped: parked requests that are computed again: dropped_for_pages, dropped_stuck (each waited for another's
    pages), and those that lost blocks; times_preempted: running ones. waits_for_blocks, waited_for_blocks_us: slices
    that began late because blocks had to come, waits_given_up: that did not begin. Of fair_swap.py:
    swapped_{out,in}_{blocks,bytes}, swap_blocks_lost, swaps_refused, swaps_given_up.
    """

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        self.slices = FairSlices(FairRules(**vllm_config.additional_config["quire"]["fair"]))
        self.fair_counts: Counter[str] = Counter()
        self.served: Counter[str] = Counter()  # tokens by tenant
        self._here, self._elsewhere = Here(), Elsewhere()
        self._parked: dict[str, Request] = {}  # they keep their blocks, here or in swap space
        self._times_parked: Counter[str] = Counter()
        self._seen = Seen(0, 0, 0)  # what the last look for vacant slots found
        self._step_tokens = 0  # of the step that comes
        self._newcomers_wait = False  # the last plan found no memory for more that begin
        self._may_begin = True  # what the slices were told of newcomers last
        self._unsettled: set[str] = set()  # that do not run, and of which the slices are to hear anew
        self._computed: dict[str, int] = {}  # by request: so many of its tokens were computed
        self._limits_parked = self.slices.rules.has_units
        super().__init__(vllm_config, *args, **kwargs)
        self.kv_cache_manager.make_way = self._make_way

    # -- requests -----------------------------------------------------------------------------------

    def _add_request(self, request: Request) -> None:
        super()._add_request(request)
        if request.request_id not in self.slices.accounts.requests:
            params = given(request)
            tenant, weight = params.get("tenant", ""), float(params.get("weight", 1.0))
            self.slices.add(request.request_id, tenant, weight, request.num_prompt_tokens)
            self._unsettled.add(request.request_id)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        request_id = request.request_id
        self.swapper.forget(request_id)
        self.slices.remove(request_id)
        self._reserved.pop(request_id, None)
        self._parked.pop(request_id, None)
        self._unsettled.discard(request_id)
        self._computed.pop(request_id, None)
        self._left_with.pop(request_id, None)
        params, ec_params = super()._free_request(request, delay_free_blocks)
        said = {"times_parked": self._times_parked.pop(request_id, 0)}
        if swaps := self.swapper.noted.pop(request_id, None):
            said["swaps"] = swaps
        return {**(params or {}), **said}, ec_params

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """vLLM's; parked requests count as running."""
        with self._turn:
            if reset_running_requests:
                for request in list(self._parked.values()):
                    request.async_tokens_to_discard = request.num_output_placeholders
                    request.num_output_placeholders = 0
                    self._drop(request)
            return super().reset_prefix_cache(reset_running_requests, reset_connector)

    # -- steps --------------------------------------------------------------------------------------

    def _schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        under_way = self._take_turns()
        most, self.max_num_scheduled_tokens = self.max_num_scheduled_tokens, self._step_tokens
        try:
            output = super()._schedule(*args, **kwargs)
        finally:
            self.max_num_scheduled_tokens = most
        self.waiting.extend(under_way)
        self._note_served(output)
        return output

    def _take_turns(self) -> list[Request]:
        """Park and reorder. Returns: requests that cannot start in this step, taken out of the queue."""
        self.swapper.hear(self.requests)
        self._has_counted = False
        self._step_tokens = self.max_num_scheduled_tokens
        if self._pause_state != PauseState.UNPAUSED:
            return []
        self._promote()
        self._note_step()
        if not self.waiting and not self.skipped_waiting:
            self._newcomers_wait = False
            self.slices.calm_step()
            self._park_for_growth_alone()
            if not self.waiting:
                return []
        start: list[str] = []
        if self.slices.next_step(vacant=self._may_fill()):
            plan = self.slices.plan(self._room())
            for request in map(self.requests.__getitem__, plan.park):
                if not has_prompt_rows(request):
                    self._park(request)
            start = plan.start
        if self._swaps:
            self._park_for_growth()
            start = self._swap(start if self.running or self._reserved else self._who_can(start))
        self._pace(start)
        if start:
            self._put_first(start)
        away = self.swapper.absences.away
        stay = [r for name, r in self._parked.items() if name in away or self._in_flight(r)]
        if self._reserved:
            known = {*start, *(r.request_id for r in stay)}
            stay += [r for r in self.waiting if r.request_id not in known]
        elif self._newcomers_wait and (self.running or start):
            stay += [
                r for r in self.waiting if r.request_id not in self._parked and r.request_id not in start
            ]
        if stay:
            self.waiting.remove_requests(stay)
        return stay

    def _pace(self, start: list[str]) -> None:
        """Decodes go first, a token each; prompts have p of the step (FairSlices.prompt_tokens). Cost: O(running)."""
        chunk = self._chunk_tokens()
        if chunk >= self.max_num_scheduled_tokens:
            return
        self.running.sort(key=_in_prefill)
        start.sort(key=lambda request_id: _in_prefill(self.requests[request_id]))
        both = [*self.running, *(self.requests[request_id] for request_id in start)]
        decodes = sum(1 + len(request.spec_token_ids) for request in both if not _in_prefill(request))
        self._step_tokens = min(self.max_num_scheduled_tokens, chunk + decodes)

    def _may_fill(self) -> bool:
        taken = len(self.running) + len(self._reserved)
        mark = free_mark(self.pages.get_num_free_blocks(), self._most_pages)
        was, self._seen = self._seen, Seen(taken, len(self.requests), mark)
        return may_fill(
            self.slices.rules, self._seen, was, self.max_num_running_reqs, is_short=self._is_short
        )

    def _promote(self) -> None:
        """Requests that waited for their grammar take their turn with the others."""
        for request in list(self.skipped_waiting):
            blocked = self._is_blocked_waiting_status(request.status)
            if not blocked or self._try_promote_blocked_waiting_request(request):
                self.skipped_waiting.remove_request(request)
                self.waiting.add_request(request)

    def _room(self) -> Room:
        """What this step has. Tells the slices what requests have and need, as far as that may have changed. Cost:
        O(running, and those that came, left or came back since the last time).
        """
        may_come = self._may_come()
        self._newcomers_wait = not (may_come or self._limits_parked)
        self._tell_slices(may_come)
        accounts = self.slices.accounts
        resident, wanted = accounts.resident, accounts.pages
        pages = self.pages.get_num_free_blocks() + self._num_on_the_way() + resident
        self._is_short = wanted > pages
        if self._is_short and self._swaps:
            begun = Begun(len(self.running), len(self._parked))
            pages = pages_for_turns(self.slices.rules, pages, begun, has_room_for_all=may_come)
        return Room(
            slots=self.max_num_running_reqs - self.num_waiting_for_streaming_input,
            step_tokens=self.max_num_scheduled_tokens,
            pages=pages,
            page_bytes=self._block_bytes,
            swap_bytes_per_s=self.swapper.rate.value(self.pages.clock()) if self._swaps else 0.0,
            step_ms=self._step_ms,
        )

    def _tell_slices(self, may_come: bool) -> None:
        ahead = self.slices.rules.slice_steps + self.kv_cache_manager.ahead_tokens
        most, block_size, tables = self.max_model_len, self.block_size, self._tables
        absences, holds, requests = self.swapper.absences, self.slices.holds, self.requests
        away_of, changed = absences.away, absences.take_changed() | self._unsettled
        if may_come is not self._may_begin:
            changed.update(requests)
        changed.update(r.request_id for r in chain(self.running, self.skipped_waiting))
        self._may_begin, self._unsettled = may_come, set()
        for request_id in changed & requests.keys():
            request = requests[request_id]
            away = away_of.get(request_id, 0)
            have = len(tables.get(request_id, ())) - away
            need = max(-(-min(request.num_tokens + ahead, most) // block_size), have + away)
            ready = not (self._is_blocked_waiting_status(request.status) or request.is_finished())
            if self._in_flight(request):
                ready = False
                self._unsettled.add(request_id)
            moves = absences.num_elsewhere(request_id) if away else 0
            holds(request_id, need, have, moves, ready=ready and (may_come or have + away > 0))

    def _may_come(self) -> bool:
        """Whether memory has room for newcomers. Cost: O(requests)."""
        can_be_short, longest = self._swaps and self._is_short, 0
        if self._parked and can_be_short and not self._limits_parked:
            both = chain(self._parked.values(), self.running)
            longest = max(min(r.num_prompt_tokens + r.max_tokens, self.max_model_len) for r in both)
        begun = Begun(len(self.running), len(self._parked), -(-longest // self.block_size))
        return may_begin(
            begun, self._most_pages, limits_parked=self._limits_parked, can_be_short=can_be_short
        )

    def _put_first(self, names: list[str]) -> None:
        chosen = set(names)
        rest = [request for request in self.waiting if request.request_id not in chosen]
        self.waiting.clear()
        self.waiting.extend(self.requests[request_id] for request_id in names)
        self.waiting.extend(rest)

    def _in_flight(self, request: Request) -> bool:
        """Whether a step under way computes tokens of it."""
        return request.last_sched_seq > self.processed_step_seq

    def _park(self, request: Request) -> None:
        """As vLLM's _preempt_request(), without freeing blocks and forgetting what is computed. Whose blocks are coming
        keeps the slot: slices go by while nobody runs, and slots would change hands for ever.
        """
        if request.request_id in self._reserved:
            if not self._comes(request):
                self._unreserve(request.request_id)
            return
        note_preempted(request)
        self.running.remove(request)
        self._inflight_prefills.discard(request)
        request.status = RequestStatus.PREEMPTED
        request.spec_token_ids = []
        request.num_preemptions += 1
        if self.log_stats:
            request.record_event(EngineCoreEventType.PREEMPTED, time.monotonic())
        self.waiting.add_request(request)
        self.reset_preempted_req_ids.add(request.request_id)
        self._parked[request.request_id] = request
        self._unsettled.add(request.request_id)
        self.slices.parked(request.request_id)
        self._times_parked[request.request_id] += 1
        self.fair_counts["times_parked"] += 1
        self.fair_counts["kept_tokens"] += request.num_computed_tokens

    def _note_served(self, output: SchedulerOutput) -> None:
        """Charge what the step computes."""
        if output.total_num_scheduled_tokens:
            self._busy_step = self.sched_step_seq
        accounts, away = self.slices.accounts.requests, self.swapper.absences.away
        assert away.keys().isdisjoint(output.num_scheduled_tokens), "a request runs without its blocks"
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            if not accounts[request_id].running or request_id in self._reserved:
                self.slices.started(request_id)
                self._end_wait(request_id)
                self.fair_counts["times_resumed"] += self._parked.pop(request_id, None) is not None
                self.swapper.forget(request_id)  # its blocks may have been leaving
                if request_id in self._left_with:
                    table = self._tables[request_id]
                    assert not any(block.is_null for block in table), "a request runs without its blocks"
            end = request.num_computed_tokens  # vLLM counts this step's already
            self.slices.served(request_id, count, request.num_prompt_tokens - end)
            self.served[accounts[request_id].tenant] += count
            before = self._computed.get(request_id, 0)
            self.fair_counts["recomputed_tokens"] += max(0, min(before, end) - (end - count))
            self.fair_counts["computed_tokens"] += count
            self._computed[request_id] = max(before, end)

    def _end_wait(self, request_id: str) -> None:
        """It runs. Counted: slices that began late because blocks had to come, and how much later."""
        since_s = self._reserved.pop(request_id, None)
        if since_s is not None:
            self.fair_counts["waits_for_blocks"] += 1
            self.fair_counts["waited_for_blocks_us"] += round((self.pages.clock() - since_s) * 1e6)

    def exchange(self, said: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
        """What other instances served, against what happened here."""
        with self._turn:
            for tenant, tokens in self._elsewhere.news(said).items():
                self.slices.accounts.served_elsewhere(tenant, tokens)
            if len(self.served) > MAX_SERVED:  # others take a total that fell for a beginning
                self.served = Counter(
                    {t: n for t, n in self.served.items() if t in self.slices.accounts.tenants}
                )
            return {"counts": dict(self.fair_counts), "served": self._here.word(self.served)}

    # -- pages are short ----------------------------------------------------------------------------

    def _preempt_request(self, request: Request, timestamp: float) -> None:
        """A running request gives its pages up: vLLM computes it again."""
        super()._preempt_request(request, timestamp)
        self._unsettled.add(request.request_id)
        self.slices.parked(request.request_id)
        self.fair_counts["times_preempted"] += 1

    def _make_way(self, request: Request, missing: int) -> None:
        """A running request needs pages, or nobody would run: those parked furthest from their turn drop theirs.

        A newcomer waits instead: its turn is worth no computing again. Nor are single pages: a request that is away has
        one here, and for some of these eleven requests were once computed again, 25,000 tokens.
        """
        if request.status != RequestStatus.RUNNING and (self.running or not self._is_stuck(request)):
            return
        others = [r for r in self._parked.values() if r is not request and not self._in_flight(r)]
        if request.status == RequestStatus.RUNNING:
            others = [r for r in others if self._frees(r)]
        accounts = self.slices.accounts.requests
        others.sort(key=lambda r: (self._is_here(r), self.slices.order_key(accounts[r.request_id])))
        while others and missing > self.pages.get_num_free_blocks():
            self._drop(others.pop())
            self.fair_counts["dropped_for_pages"] += 1

    def _drop(self, request: Request) -> None:
        """It is computed again; what of it is cached here is found."""
        self.swapper.forget(request.request_id)
        self._unsettled.add(request.request_id)
        self._unreserve(request.request_id)
        self._free_request_blocks(request)
        request.num_computed_tokens = 0
        del self._parked[request.request_id]
        self.fair_counts["times_dropped"] += 1


class FairPageScheduler(FairSchedulerMixin, Scheduler):
    """One step at a time."""


class AsyncFairPageScheduler(FairSchedulerMixin, AsyncScheduler):
    """The next step is scheduled while one runs."""


def _in_prefill(request: Request) -> bool:
    return request.num_computed_tokens < request.num_prompt_tokens


def _fair_counts(core: EngineCore) -> dict[str, int]:
    return dict(getattr(core.scheduler, "fair_counts", {}))


def _fair_exchange(core: EngineCore, said: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    return core.scheduler.exchange(said)


def install() -> None:
    """Before an engine core is made in this process, or in one that is forked from it: the questions
    `quire_fair_counts` and `quire_fair_exchange` that a worker's front may ask.
    """
    EngineCore.quire_fair_counts = _fair_counts
    EngineCore.quire_fair_exchange = _fair_exchange
