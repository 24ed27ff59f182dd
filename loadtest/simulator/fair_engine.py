"""An engine with fair slices: who runs is `shared.fair`'s FairSlices, as in production (`local_policy = cfs`).

What surrounds a plan in shared/engine/fair_scheduler.py and swap_scheduler.py surrounds it here: who loses its slot is
parked and keeps its KV; where memory is short, blocks of parked requests leave for swap space and are back before
their turn (swaps.py). Where all fit nobody is parked, and the order is the other engine's. Who runs, waits and is
parked is one tenant's: workloads name none.
"""

from itertools import chain, repeat

from loadtest.simulator.engine import EngineParts
from loadtest.simulator.held import lacking_tokens
from loadtest.simulator.parking import ParkingEngine, in_prefill
from loadtest.simulator.task import Task
from shared.fair.carrying import Begun, Seen, free_mark, may_begin, may_fill, pages_for_turns
from shared.fair.rules import Room


class FairEngine(ParkingEngine):
    """Turns around the steps of Engine."""

    def __init__(self, parts: EngineParts) -> None:
        super().__init__(parts)
        self._fresh: list[Task] = []  # came, and the slices have not heard of them
        self._start: list[str] = []
        self._step_tokens = parts.limits.max_batched_tokens
        self._seen: Seen | None = None
        self._is_stuck = False  # nobody runs, and nothing will come of itself
        self._may_begin = True

    # -- from outside -----------------------------------------------------------------------------

    def submit(self, task: Task) -> bool:
        """See Engine."""
        self._fresh.append(task)
        if super().submit(task):
            return True
        self._fresh.remove(task)
        return False

    def loaded(self, task: Task) -> None:
        """See Engine."""
        self._unsettled.add(task.name)
        super().loaded(task)

    # -- steps ------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._take_turns()
        super()._begin()
        # where nobody runs and nothing is on its way, each waits for another's memory, until somebody has enough of it
        for measure in chain((self._unreserve_all,), repeat(self._make_way)):
            if self._run is not None:
                self._left_idle.clear()
                return
            if not (self._queue or self._prefilling) or self._will_change() or not measure():
                return
            if self._will_change():  # who leaves is not called back
                return
            self._is_stuck, self._seen = True, None
            self._take_turns()
            super()._begin()
            self._is_stuck = False

    def _will_change(self) -> bool:
        """Whether something is on its way that may let somebody run."""
        return bool(self.swapper.absences.is_waiting or self._loading or self._held)

    def _row_length(self) -> int:
        """Rows where nobody waits for a turn: only for what is loaded, which ends a row."""
        nobody_waits = len(self._queue) == len(self._loading) and (self.slices.is_calm or not self._queue)
        return super()._row_length() if nobody_waits and not self.swapper.absences.is_waiting else 1

    def _end(self, generation: int) -> None:
        if generation == self._generation and self._run is not None:
            self._charge(self._run[1], self._run[4])
        super()._end(generation)

    def _charge(self, num_steps: int, chunks: list[tuple[Task, int]]) -> None:
        """What the steps that end now computed."""
        for task in self._decoding.values():
            self.slices.served(task.name, num_steps, 0)
        for task, new in chunks:
            if task.state == "prefilling":
                left = task.request.prompt_tokens - task.done_tokens - new
                self.slices.served(task.name, new, max(0, left))
        for _ in range(min(num_steps - 1, self.slices.rules.slice_steps)):
            self.slices.calm_step()  # rows of several steps are of those for whom nobody waits

    def _take_turns(self) -> None:
        """Park, and say who may start in this step."""
        self._meet()
        self._start, self._step_tokens = [], self.limits.max_batched_tokens
        if not self._queue:
            self.slices.calm_step()
            self._park_for_growth(may_park=self._is_stuck or bool(self.swapper.bytes_per_s))
            if not self._queue:
                return
        start: list[str] = []
        if self.slices.next_step(vacant=self._may_fill()):
            plan = self.slices.plan(self._room())
            for name in plan.park:
                self._park(name)
            start = plan.start
        self._park_for_growth(may_park=self._is_stuck)
        self._start = self._swap(start if self.num_running or self._reserved else self._who_can(start))
        self._pace()

    def _meet(self) -> None:
        for task in self._fresh:
            if task.state != "gone":
                self.slices.add(task.name, "", 1.0, task.request.prompt_tokens)
                self._queue[task.name] = task
                self._unsettled.add(task.name)
        self._fresh.clear()

    def _pace(self) -> None:
        """Decodes go first, a token each; prompts have p of the step."""
        chunk, most = self._chunk_tokens(), self.limits.max_batched_tokens
        if chunk < most:
            self._start.sort(key=lambda name: in_prefill(self._queue[name]))
            decodes = sum(not in_prefill(self._queue[name]) for name in self._start)
            self._step_tokens = min(most, chunk + len(self._decoding) + decodes)

    # -- what the slices hear ---------------------------------------------------------------------

    def _may_fill(self) -> bool:
        taken, requests = self.num_running + len(self._reserved), len(self.slices.accounts.requests)
        mark = free_mark(self.store.room_tokens // self._unit, self._most_pages)
        was, self._seen = self._seen, Seen(taken, requests, mark)
        slots = self.limits.max_running
        return may_fill(self.slices.rules, self._seen, was, slots, is_short=self._is_short)

    def _room(self) -> Room:
        may_come = self._may_come()
        self._tell_slices(may_come)
        accounts, unit = self.slices.accounts, self._unit
        tokens = self.store.room_tokens + unit * self.swapper.absences.num_coming + accounts.resident
        self._is_short = accounts.pages > tokens
        if self._is_short:
            begun = Begun(self.num_running, len(self._parked))
            tokens = unit * pages_for_turns(
                self.slices.rules, tokens // unit, begun, has_room_for_all=may_come
            )
        return Room(
            slots=self.limits.max_running,
            step_tokens=self.limits.max_batched_tokens,
            pages=tokens,
            page_bytes=self._token_bytes,
            swap_bytes_per_s=self.swapper.bytes_per_s,
            step_ms=self.step_ms,
        )

    def _may_come(self) -> bool:
        both = chain(self._running(), self._parked.values())
        longest = max((t.request.prompt_tokens + t.request.output_tokens for t in both), default=0)
        begun = Begun(self.num_running, len(self._parked), -(-longest // self._unit))
        limits = self.slices.rules.has_units
        return may_begin(begun, self._most_pages, limits_parked=limits, can_be_short=self._is_short)

    def _tell_slices(self, may_come: bool) -> None:
        changed = self.swapper.absences.take_changed() | self._unsettled
        changed.update(task.name for task in self._running())
        if may_come is not self._may_begin:
            changed.update(self._queue)
        self._may_begin, self._unsettled = may_come, set()
        tasks = {**{task.name: task for task in self._running()}, **self._queue}
        ahead = self.slices.rules.slice_steps
        for name in changed & tasks.keys():
            task = tasks[name]
            have, away = self._tokens_here(task), self._unit * self.swapper.absences.num_away(name)
            most = min(self._kv_tokens(task) + 1 + ahead, self.store.capacity_tokens)
            ready = task not in self._loading and (may_come or have + away > 0)
            self.slices.holds(name, max(most, have + away), have, away, ready=ready)

    # -- who enters the step ----------------------------------------------------------------------

    def _compose(self) -> list[tuple[Task, int]]:
        budget = self._step_tokens - len(self._decoding)
        chunks: list[tuple[Task, int]] = []
        for task in self._prefilling:
            new = min(task.goal_tokens - task.done_tokens, budget)
            if new > 0 and self._has_room(task, new):
                chunks.append((task, new))
                budget -= new
        for task in self._candidates():
            slots = self.limits.max_running - len(self._reserved) + (task.name in self._reserved)
            if budget <= 0 or self.num_running >= slots or not self._enter(task, budget):
                break
            if task.state == "decoding":
                budget -= 1
            elif task.state == "prefilling":
                chunks.append((task, min(task.goal_tokens - task.done_tokens, budget)))
                budget -= chunks[-1][1]
        return chunks

    def _has_room(self, task: Task, new: int) -> bool:
        """Memory for so many tokens more. At its admission it had all; who was parked has it chunk by chunk."""
        missing = lacking_tokens(task, new)
        if not self.store.reserve(missing):
            return False
        task.private_tokens += missing
        return True

    def _candidates(self) -> list[Task]:
        """Who was chosen, then, where no slot is kept for anybody, the others. Where nobody runs and nobody can come,
        who was parked goes on before newcomers.
        """
        chosen = dict.fromkeys(self._start)
        rest = () if self._reserved and not self._is_stuck else self._queue
        names = dict.fromkeys((*chosen, *rest))
        found = [self._queue[name] for name in names if self.swapper.absences.is_here(name)]
        if self._is_stuck:
            found.sort(key=lambda task: task.state != "parked")
        return [task for task in found if task not in self._loading]

    def _enter(self, task: Task, budget: int) -> bool:
        """It begins, or goes on, in this step; or what it needs from elsewhere begins to come. False: no memory."""
        if task.state == "parked":
            if not self._go_on(task, budget):
                return False
        elif task.state == "waiting":
            if not self._admit(task):
                return False
            self._waiting.remove(task)
            if task in self._loading:
                self._unsettled.add(task.name)
                return True
            self._prefill(task)
        else:
            self._ready.remove(task)
            self._prefill(task)
        if not self.slices.accounts.requests[task.name].running:
            self.slices.started(task.name)
        self.swapper.forget(task)  # its blocks may have been leaving
        for there in (self._queue, self._parked, self._reserved):
            there.pop(task.name, None)
        return True

    def _go_on(self, task: Task, budget: int) -> bool:
        if in_prefill(task):
            if not self._has_room(task, min(task.goal_tokens - task.done_tokens, budget)):
                return False
            self._prefill(task)
            return True
        if not self.store.reserve(1):
            return False
        self._num_admitted += 1  # who came back last is who came last
        task.seq = self._num_admitted
        self._join_decodes(task)
        return True

    def _prefill(self, task: Task) -> None:
        task.state = "prefilling"
        self._prefilling.append(task)
