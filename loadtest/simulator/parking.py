"""Parked requests of a simulated engine: who keeps its KV without a slot, who leaves for swap space and comes back.

Between Engine and FairEngine, which decides who runs, as shared/engine/swap_scheduler.py is in production; the rules
are shared/fair/carrying.py's. Memory is counted in tokens: what one page of production is to another is a token here.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from loadtest.simulator.engine import Engine, EngineParts
from loadtest.simulator.held import held_tokens, keep_here, lacking_tokens
from loadtest.simulator.spec import Turns
from loadtest.simulator.swaps import Swapper
from loadtest.simulator.task import Task
from shared.fair.away import SwapState
from shared.fair.carrying import RESERVE_S, Grower, grow, is_slow, nearest_first, pages_to_begin, short_pages
from shared.fair.slices import FairSlices


class ParkingEngine(Engine):
    """`local` is of the slices and of swap space. Pages are of limits.unit_tokens."""

    def __init__(self, parts: EngineParts) -> None:
        super().__init__(parts)
        self.slices = FairSlices(parts.local.rules)
        self._unit, self._token_bytes = parts.limits.unit_tokens, parts.prices.kv_bytes_per_token
        self.swapper = Swapper(
            parts.events, parts.store, parts.local, self._unit, self._unit * self._token_bytes, self.wake
        )
        self.num_parked = 0
        self._most_pages = parts.store.capacity_tokens // self._unit
        self._queue: dict[str, Task] = {}  # everybody who is in no step
        self._parked: dict[str, Task] = {}
        self._reserved: dict[str, float] = {}  # slots of those that come back, since when
        self._held: set[Task] = set()  # prefilled prompts whose memory somebody will release
        self._unsettled: set[str] = set()  # that are in no step, and of which the slices are to hear anew
        self._left_with: dict[str, int] = {}  # KV tokens of requests, when their blocks left last
        self._left_idle: set[str] = set()  # who left since the last step
        self._growth = 0  # tokens for those who run, in the step that comes
        self._is_short = False  # of memory, when the last plan was made

    @property
    def num_waiting(self) -> int:
        """Requests in no step: parked ones too."""
        return super().num_waiting + len(self._parked)

    def _running(self) -> list[Task]:
        return [*self._decoding.values(), *self._prefilling]

    def _kv_tokens(self, task: Task) -> int:
        """That it needs to make its next token."""
        if task.state == "decoding":
            return task.done_tokens + self.num_steps - task.joined_step
        return max(task.goal_tokens, task.done_tokens)

    def _tokens_here(self, task: Task) -> int:
        if task.state == "waiting":
            return 0
        if task.state == "parked":
            return task.done_tokens - self._unit * self.swapper.absences.num_away(task.name)
        if task.state == "prefilling":
            return held_tokens(task)
        return self._kv_tokens(task)

    def _chunk_tokens(self) -> int:
        return self.slices.prompt_tokens(self.limits.max_batched_tokens, self.step_ms)

    # -- parking ----------------------------------------------------------------------------------

    def _park(self, name: str) -> None:
        """It leaves its slot and keeps its KV."""
        if name in self._reserved:
            self._unreserve(name)
            return
        task = next(one for one in self._running() if one.name == name)
        if task.state == "decoding":
            self._leave_decodes(task)
        else:
            self._prefilling.remove(task)
            keep_here(self.store, task, task.done_tokens, 0)
        task.state = "parked"
        self._queue[name] = self._parked[name] = task
        self._unsettled.add(name)
        self.slices.parked(name)
        self.num_parked += 1

    def _park_for_growth(self, *, may_park: bool = False) -> None:
        """Who would find no memory in this step gives its slot up, while blocks are on their way or can leave."""
        may_park = may_park or self.slices.pays or self.swapper.absences.is_waiting
        may_park = may_park or (self.slices.is_calm and bool(self.swapper.bytes_per_s))
        kv_tokens = self._kv_tokens
        running = [Grower(t.name, 1, kv_tokens(t), kv_tokens(t)) for t in self._decoding.values()]
        for task in self._prefilling:
            left = task.goal_tokens - task.done_tokens
            running.append(Grower(task.name, left, task.done_tokens, held_tokens(task)))
        tokens = min(self.limits.max_batched_tokens, self._chunk_tokens() + len(self._parked))
        most = self.store.capacity_tokens
        park, self._growth = grow(
            running, self.store.room_tokens, tokens, 1, most_tokens=most, may_park=may_park
        )
        for name in park:
            self._park(name)

    def _preempt(self, task: Task) -> None:
        super()._preempt(task)
        self.swapper.forget(task)
        self._parked.pop(task.name, None)
        self._queue[task.name] = task
        self._unsettled.add(task.name)
        if self.slices.accounts.requests[task.name].running:
            self.slices.parked(task.name)

    def _room_for_decodes(self) -> None:
        """Parked requests give their memory up before one that runs is computed again."""
        while self.store.room_tokens < len(self._decoding) and self._drop_one():
            pass
        super()._room_for_decodes()

    def _drop_one(self) -> bool:
        """The parked request that is furthest from its turn is computed again. False: nobody has memory to give."""
        here = {n: self._tokens_here(task) for n, task in self._parked.items() if n not in self._reserved}
        names = nearest_first(self.slices, [name for name, tokens in here.items() if tokens > 0])
        if not names:
            return False
        # who is away has no more than its last, partial block
        names.sort(key=lambda name: here[name] > self._unit)
        self._preempt(self._parked[names[-1]])
        return True

    # -- swap space -------------------------------------------------------------------------------

    def _swap(self, start: list[str]) -> list[str]:
        """Carry a plan out for those whose blocks are not all here. Returns: who may start in this step."""
        room = self.limits.max_running - self.num_running - len(self._reserved)
        absences = self.swapper.absences
        ready = [name for name in self._reserved if absences.is_here(name)]
        for name in [name for name in start if name not in self._reserved][: max(0, room)]:
            if absences.state(name) is SwapState.LEAVING:
                self.swapper.forget(self._queue[name])
            if absences.is_here(name):
                ready.append(name)
            else:
                self._reserved[name] = self.swapper.now_s
                self.slices.started(name)
        ready = self._bring(ready)
        self._send_out(ready, self._parked)
        if self._is_short and not absences.is_waiting:
            for task in [*self._running(), *self._parked.values()][:1]:
                self.swapper.probe(task, self._kv_tokens(task))
        return ready

    def _bring(self, ready: list[str]) -> list[str]:
        """Have those with a reserved slot come back, as far as there is memory. Returns: of `ready`, who may start."""
        absences = self.swapper.absences
        begun = [name for name in ready if self._tokens_here(self._queue[name])]
        taken, starved = self._growth + self.num_running * self._unit, []
        lacks = (self._lacks(self._queue[name]) for name in begun)
        spare = taken + pages_to_begin(lacks, self.store.room_tokens - taken)
        for name in self._reserved:
            is_asked = absences.state(name) in (None, SwapState.COMING)
            if is_slow(absences.num_coming, self._most_pages) and not is_asked:
                break
            if not self.swapper.bring(self._queue[name], spare):
                starved.append(name)
        if not starved:
            return ready
        late_s = self.swapper.now_s - RESERVE_S
        for name in [name for name in starved if self._reserved[name] < late_s]:
            self._unreserve(name)
        return begun  # a newcomer would take the memory

    def _lacks(self, task: Task) -> int:
        """Tokens of memory that it may need to begin, a page at least."""
        new = min(task.goal_tokens - task.done_tokens, self.limits.max_batched_tokens)
        return max(self._unit, lacking_tokens(task, new))

    def _who_can(self, start: list[str]) -> list[str]:
        """Nobody runs: who was parked goes on before newcomers, if there is no memory for any of these. As many of the
        parked leave as the first newcomer needs.
        """
        accounts, free = self.slices.accounts.requests, self.store.room_tokens
        newcomers = [name for name in start if name not in self._parked]
        if not newcomers or any(accounts[name].pages <= free for name in newcomers):
            return start
        self._send_out(newcomers[:1], [name for name in self._parked if self._has_run(name)])
        absences = self.swapper.absences
        parked = [n for n in self._parked if absences.state(n) is not SwapState.LEAVING]
        parked = nearest_first(self.slices, parked)
        return [*sorted(parked, key=lambda name: not absences.is_here(name)), *newcomers]

    def _has_run(self, name: str) -> bool:
        """Since it was away; else it would leave again and again, and nobody ever run."""
        return self._parked[name].done_tokens > self._left_with.get(name, -1)

    def _send_out(self, ready: list[str], parked: Iterable[str]) -> None:
        """Blocks of parked requests, the furthest from their turn first, make room for who has a slot, for a slice."""
        absences, accounts = self.swapper.absences, self.slices.accounts.requests
        if not self.slices.pays or not self._parked or not self.swapper.bytes_per_s:
            return
        slotted = {task.name: task for task in self._running()}
        slotted |= {name: self._queue[name] for name in (*self._reserved, *ready)}
        others = [n for n in parked if n not in slotted and absences.of(n) is None]
        if not others:
            return
        needs = [(accounts[name].pages, self._tokens_here(task)) for name, task in slotted.items()]
        on_the_way = self._unit * (absences.num_coming + absences.num_leaving)
        short = short_pages(needs, self.store.room_tokens, on_the_way)
        names = nearest_first(self.slices, others) if short > 0 else []
        while names and short > 0:
            short -= self._unit * self._leave(names.pop())

    def _leave(self, name: str) -> int:
        task = self._parked[name]
        num_pages = self.swapper.begin_out(task)
        if num_pages:
            self._left_with[name] = task.done_tokens
        return num_pages

    def _make_way(self) -> bool:
        """Nobody runs, and each waits for another's memory: somebody leaves, or else is computed again.

        Between two steps each leaves once: who comes back and finds no room to run would leave again and again.
        """
        self._unreserve_all()
        if self.swapper.bytes_per_s and (self.slices.pays or self.slices.is_calm):
            absences = self.swapper.absences
            here = [n for n in self._parked if absences.is_here(n) and n not in self._left_idle]
            for name in reversed(nearest_first(self.slices, here)):
                self._left_idle.add(name)
                if self._leave(name):
                    return True
        return self._drop_one()

    def _unreserve_all(self) -> bool:
        for name in list(self._reserved):
            self._unreserve(name)
        return True

    def _unreserve(self, name: str) -> None:
        del self._reserved[name]
        self.slices.parked(name)

    # -- the end ----------------------------------------------------------------------------------

    def _advance(self, task: Task, new: int) -> None:
        super()._advance(task, new)
        if task.state == "held":
            self.slices.remove(task.name)
            self._held.add(task)

    def _drop(self, task: Task) -> None:
        self.swapper.forget(task)
        self.slices.remove(task.name)
        for there in (self._queue, self._parked, self._reserved):
            there.pop(task.name, None)
        self._unsettled.discard(task.name)
        self._held.discard(task)
        self._left_with.pop(task.name, None)
        super()._drop(task)


def in_prefill(task: Task) -> bool:
    """Whether it has tokens to compute before its next one."""
    return task.done_tokens < task.goal_tokens


def turns_of(engines: Sequence[Engine]) -> Turns:
    """Of all of them together."""
    found = [engine for engine in engines if isinstance(engine, ParkingEngine)]
    counts: Counter[str] = Counter()
    for engine in found:
        counts.update(engine.swapper.counts)
    return Turns(
        num_parked=sum(engine.num_parked for engine in found),
        num_recomputed_tokens=sum(engine.num_recomputed_tokens for engine in engines),
        swapped_out_bytes=counts["swapped_out_bytes"],
        swapped_in_bytes=counts["swapped_in_bytes"],
        peak_swap_bytes=max((engine.swapper.space.peak_bytes for engine in found), default=0),
    )
