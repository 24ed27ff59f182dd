"""Swap space in an engine's turns: who leaves, who comes back, whose slot is kept meanwhile (AQUA 7).

Between PageSchedulerMixin and FairSchedulerMixin, which decides who runs. Who is chosen for a slot and is away
*reserves* it: the slot stays vacant until all of its blocks are back, and nobody else is admitted to it. Blocks of
parked requests leave, the furthest from their turn first, as far as those with a slot lack pages for their slice.

Settings: `additional_config["quire"]["swap"]`: `is_on`, `bytes_per_s` (0: as measured).
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from vllm.v1.request import Request

from shared.engine.fair_swap import Swapper
from shared.engine.page_pool import LEASED
from shared.engine.page_scheduler import PageSchedulerMixin
from shared.fair.away import PROBE_INTERVAL_S, SwapRate, SwapState
from shared.fair.carrying import RESERVE_S, Grower, grow, is_slow, nearest_first, pages_to_begin, short_pages
from shared.fair.slices import FairSlices

# with nothing running for so long, a newcomer's pages are worth somebody's computing again: when this engine has all
# pages that it ever had, and when some may still be on their way
STUCK_S, STUCK_WITHOUT_ITS_PAGES_S = 0.3, 5.0
# such a part of its pages an engine has beyond its share for moments, while others that it gave are filled for it
BEYOND_SHARE = 64
STEP_WEIGHT = 0.2  # of the newest step, in the mean of their times


def has_prompt_rows(request: Request) -> bool:
    """Whether vLLM's runner keeps log probabilities of its prompt's first tokens, until it has those of all: the second
    one forgets them with a request that is parked, so it keeps its slot as long.
    """
    params = request.sampling_params
    wants = params is not None and params.prompt_logprobs is not None
    return wants and 0 < request.num_computed_tokens < request.num_prompt_tokens


class SwapSchedulerMixin(PageSchedulerMixin):
    """Uses FairSchedulerMixin's `slices`, `_parked`, `fair_counts`, `_park()`, `_drop()`, `_in_flight()`."""

    slices: FairSlices
    fair_counts: Counter[str]
    _parked: dict[str, Request]

    swapper: Swapper | None = None

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        swap = vllm_config.additional_config["quire"].get("swap", {})
        self._swaps = bool(swap.get("is_on", False))
        self._reserved: dict[str, float] = {}  # slots of requests that come back, since when
        self._left_with: dict[str, int] = {}  # computed tokens of requests, when their blocks left last
        self._is_short = False  # of pages, when the last plan was made
        self._most_pages = 0  # at once
        self._busy_step = 0  # the last one that computes anything
        self._growth = 0  # pages that those who run need in the step that comes
        self._step_ms = self._last_step_s = self._idle_since_s = 0.0
        self._tables = self.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        self.swapper = Swapper(
            self.quota, self.pages, self._tables, self.block_size, self._block_bytes, self.fair_counts,
            SwapRate(float(swap.get("bytes_per_s", 0.0))),
            lost=self._drop, end_lease=self._end_lease_of,
        )  # fmt: skip

    def _is_here(self, request: Request) -> bool:
        return self.swapper.absences.is_here(request.request_id)

    def _swap(self, start: list[str]) -> list[str]:
        """Carry a plan out for those whose blocks are not all here. Returns: who may start in this step."""
        now_s = self.pages.clock()
        room = self.max_num_running_reqs - len(self.running) - len(self._reserved)
        ready = [r for r in self._reserved if self._is_here(self.requests[r])]
        for request_id in [r for r in start if r not in self._reserved][: max(0, room)]:
            if self.swapper.absences.state(request_id) is SwapState.LEAVING:
                self.swapper.forget(request_id)
            if self._is_here(self.requests[request_id]):
                ready.append(request_id)
            else:
                self._reserved[request_id] = now_s
                self.slices.started(request_id)
        ready = self._bring(ready)
        self._send_out(ready, self._parked.values())
        may_probe = self._is_short and not self.swapper.absences.is_waiting
        if may_probe and self.swapper.rate.wants_probe(now_s, PROBE_INTERVAL_S):
            for request in [*self.running, *self._parked.values()][:1]:
                self.swapper.probe(request)
        if not self.running:  # vLLM stops at the first that finds no page: who needs none would wait with it
            free = self.pages.get_num_free_blocks()
            ready += (meanwhile := self._out_of_turn(ready))
            if meanwhile and len(self._reserved) >= self.max_num_running_reqs:
                self._unreserve(next(reversed(self._reserved)))
            ready.sort(key=lambda request_id: self._lacks(request_id) > free)
        return ready

    def _out_of_turn(self, ready: list[str]) -> list[str]:
        """Nobody runs, no page is asked for, and none of `ready` finds its own: who is parked, here, and needs no more
        than is free goes on meanwhile, the nearest to its turn. At its end its pages are free.
        """
        free = self.pages.get_num_free_blocks()
        if self.swapper.absences.is_waiting or any(self._lacks(request_id) <= free for request_id in ready):
            return []
        here = [r for r in self._parked.values() if self._is_here(r) and not self._in_flight(r)]
        fit = [r.request_id for r in here if self._lacks(r.request_id) <= free]
        return nearest_first(self.slices, fit)[:1]

    def _lacks(self, request_id: str) -> int:
        """Blocks beyond those in its table without which it does not begin."""
        whole = min(self.requests[request_id].num_tokens, self.max_model_len)
        return -(-whole // self.block_size) - len(self._tables.get(request_id, ()))

    def _bring(self, ready: list[str]) -> list[str]:
        """Have those with a reserved slot come back, as far as there are pages. Returns: of `ready`, who may start."""
        taken, now_s = self._growth + len(self.running), self.pages.clock()
        lacks = (self._lacks(request_id) for request_id in ready if self._held(request_id))
        spare = taken + pages_to_begin(lacks, len(self.pages.stock) - taken)
        starved = []
        for request_id in self._reserved:
            if is_slow(self.swapper.absences.num_coming, self._most_pages) and not self._is_asked(request_id):
                break
            if not self.swapper.bring(self.requests[request_id], spare):
                starved.append(request_id)
        if not starved:
            return ready
        ready = [r for r in ready if self._held(r)]  # a newcomer would take the pages
        for request_id in [r for r in starved if now_s - self._reserved[r] > RESERVE_S]:
            self._unreserve(request_id)
        is_stuck = not ready and not self.running and self._is_stuck(None)
        if is_stuck and not self._out_of_turn(ready):  # each waits for another's pages
            self._drop(
                max((r for r in self._parked.values() if not self._in_flight(r)), key=self._drop_order)
            )
            self.fair_counts["dropped_stuck"] += 1
            self._idle_since_s = now_s
        return ready

    def _drop_order(self, request: Request) -> tuple:
        """The last in it is computed again where nobody else can go on: of those whose pages free most, the furthest
        from its turn. The last block of who is away is a page, too: enough of them keep everybody from coming back.
        """
        account = self.slices.accounts.requests[request.request_id]
        return min(self._held(request.request_id), 2), self.slices.order_key(account)

    def _comes(self, request: Request) -> bool:
        """Whether its blocks are on their way, or here with what it lacks: it runs before its turn may end."""
        state = self.swapper.absences.state(request.request_id)
        if state is None:
            return self._lacks(request.request_id) <= self.pages.get_num_free_blocks()
        return state is SwapState.COMING

    def _is_asked(self, request_id: str) -> bool:
        return self.swapper.absences.state(request_id) in (None, SwapState.COMING)

    def _who_can(self, start: list[str]) -> list[str]:
        """Nothing runs: who was parked goes on before newcomers, if there are no pages for any of these.

        As many of the parked leave as the first newcomer needs, or it would wait for an answer's end. Who was away and
        has computed nothing since does not: it would leave again and again, and nobody ever run.
        """
        accounts, free = self.slices.accounts.requests, self.pages.get_num_free_blocks()
        newcomers = [r for r in start if r not in self._parked]
        if not newcomers or any(accounts[r].pages <= free for r in newcomers):
            return start
        left_with = self._left_with
        ran = [r for r in self._parked.values() if r.num_computed_tokens > left_with.get(r.request_id, -1)]
        self._send_out(newcomers[:1], ran)
        parked = [r for r in self._parked.values() if not self._in_flight(r) and not self._is_leaving(r)]
        parked.sort(key=lambda r: (not self._is_here(r), self.slices.order_key(accounts[r.request_id])))
        return [r.request_id for r in parked] + newcomers

    def _is_leaving(self, request: Request) -> bool:
        """Whether its pages will be free soon; not if the mempool takes long to say so."""
        swap = self.swapper.absences.of(request.request_id)
        is_leaving = swap is not None and swap.state is SwapState.LEAVING
        return is_leaving and self.pages.clock() - swap.asked_s < STUCK_S

    def _frees(self, request: Request) -> bool:
        """Whether its pages are worth computing it again. Who is away has one here, its last, partial block."""
        return self._held(request.request_id) > 1

    def _park_for_growth_alone(self) -> None:
        """Nobody waits, and those who run need more than there is: vLLM would compute some of them again."""
        most = len(self.running) + self.max_num_scheduled_tokens // self.block_size
        if self._swaps and len(self.pages.stock) < most and self.swapper.rate.value(self.pages.clock()):
            self._park_for_growth(may_park=True)

    def _park_for_growth(self, *, may_park: bool = False) -> None:
        """Who would find no page in this step gives its slot up, while pages are on their way or can leave. What the
        others need is theirs: `_growth`.
        """
        self.pages.absorb()  # what the mempool asks back is no part of the stock
        self._has_counted = True
        may_park = may_park or self.slices.pays or self.swapper.absences.is_waiting
        if self.slices.is_calm and self.swapper.rate.value(self.pages.clock()):
            may_park = True  # all fit, says the plan: with pages that are not here yet, or will not come
        # who is parked may begin in this step and decode: the token that _pace() adds for it a running prompt may take
        tokens = min(self.max_num_scheduled_tokens, self._chunk_tokens() + len(self._parked))
        park, self._growth = grow(
            map(self._grower, self.running), len(self.pages.stock), tokens, self.block_size,
            most_tokens=self.max_model_len, may_park=may_park,
        )  # fmt: skip
        for request_id in park:
            self._park(self.requests[request_id])
            self.fair_counts["times_parked_for_pages"] += 1

    def _grower(self, request: Request) -> Grower:
        return Grower(
            request.request_id,
            request.num_tokens - request.num_computed_tokens,
            request.num_computed_tokens + self.kv_cache_manager.ahead_tokens,
            len(self._tables.get(request.request_id, ())),
            stays=has_prompt_rows(request),
        )

    def _chunk_tokens(self) -> int:
        """Of the next step, that prompts may take."""
        return self.slices.prompt_tokens(self.max_num_scheduled_tokens, self._step_ms)

    def _unreserve(self, request_id: str) -> None:
        """It keeps its place in the order and gives the slot up; what is on its way comes nonetheless."""
        if self._reserved.pop(request_id, None) is not None:
            self.slices.parked(request_id)
            self.fair_counts["waits_given_up"] += 1

    def _send_out(self, ready: list[str], parked: Iterable[Request]) -> None:
        """Blocks of these parked requests, the furthest from their turn first, make room for who has a slot, for a
        slice.
        """
        accounts = self.slices.accounts.requests
        if not self.slices.pays or not self._parked or not self.swapper.rate.value(self.pages.clock()):
            return
        absent = self.swapper.absences.of
        others = [r for r in parked if absent(r.request_id) is None and not self._in_flight(r)]
        others = [r for r in others if r.request_id not in self._reserved and r.request_id not in ready]
        if not others:
            return
        needs = [accounts[r.request_id] for r in self.running]
        needs += [accounts[r] for r in (*self._reserved, *ready) if r in accounts]
        slotted = [(a.pages, self._held(a.request_id)) for a in {id(a): a for a in needs}.values()]
        on_the_way = self._num_on_the_way() + self.swapper.absences.num_leaving
        short = short_pages(slotted, self.pages.get_num_free_blocks(), on_the_way)
        if short <= 0:
            return
        last_first = nearest_first(self.slices, (r.request_id for r in others))[::-1]
        for shared in (False, True):  # who shares all pages of its own frees none, until the others leave too
            for request in map(self.requests.__getitem__, last_first):
                if short <= 0:
                    return
                short -= self.swapper.begin_out(request, self.leases.get(request.request_id), shared=shared)
                if absent(request.request_id) is not None:
                    self._left_with[request.request_id] = request.num_computed_tokens

    def _held(self, request_id: str) -> int:
        """Blocks of it that are here. Asked of every request in every plan: the table itself, not vLLM's copy of it."""
        return len(self._tables.get(request_id, ())) - self.swapper.absences.num_away(request_id)

    def _end_lease_of(self, request_id: str) -> None:
        self.kv_cache_manager.tails.pop(request_id, None)
        if (lease := self.leases.pop(request_id, None)) is not None:
            self._end_lease(lease, fence=0)

    def _num_on_the_way(self) -> int:
        """Pages that are neither free nor in a table now, and will be this engine's."""
        return self.pages.num_expected + self.swapper.absences.num_coming

    def _num_pages(self) -> int:
        """Pages that are this engine's, or leased for its requests."""
        return self.pages.num_owned + self.pages.kinds.count(LEASED)

    def _note_step(self) -> None:
        """Mean time of a step, from one to the next while there is work."""
        now_s = self.pages.clock()
        if self.running and self._last_step_s:
            took_ms = (now_s - self._last_step_s) * 1e3
            self._step_ms += (took_ms - self._step_ms) * (STEP_WEIGHT if self._step_ms else 1.0)
        self._last_step_s = now_s if self.running else 0.0
        self._most_pages = max(self._most_pages, self._num_pages())
        is_idle = not self.running and self._busy_step <= self.processed_step_seq
        self._idle_since_s = (self._idle_since_s or now_s) if is_idle else 0.0

    def _answer_pool(self) -> None:
        with self._turn:
            if self.swapper is not None:  # the thread that watches the mempool was there first
                self.swapper.hear(self.requests)
            times = self.quota.counters["reattached"]  # `lost` may change at any moment
            super()._answer_pool()
            if self.swapper is not None and self.quota.counters["reattached"] > times:
                self.swapper.lost_pool()

    def _is_stuck(self, request: Request | None) -> bool:
        """Whether nobody runs, and pages for a newcomer, or for who is away, will not come of themselves.

        Leases of others that wait end first, each in its time: what it pins may be on its way to them.
        """
        held = [r.request_id for r in self.waiting if r.request_id in self.leases and r is not request]
        held = [request_id for request_id in held if request_id not in self._parked]
        if (ends := self._stalls.to_end(held, self.pages.clock())) is not None:
            self.quota.counters["leases_dropped"] += 1
            self._end_lease_of(ends)
        if held or self.swapper.absences.is_waiting or not self._idle_since_s:
            return False
        most = self._most_pages - self._most_pages // BEYOND_SHARE
        patience_s = STUCK_S if self._num_pages() >= most else STUCK_WITHOUT_ITS_PAGES_S
        if self._swaps and self.pages.clock() - self._idle_since_s <= patience_s:
            return False
        self._most_pages = self._num_pages()  # no more come: perhaps another engine shares the memory since
        return True
