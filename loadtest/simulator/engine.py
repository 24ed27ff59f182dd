"""One engine as a step machine: vLLM's order of things (running first, then waiting, first come first served).

A step takes one token of every decode and up to max_batched_tokens in all, prompts cut into chunks. Steps of decodes
alone are taken together until one of them ends; whoever needs the engine earlier cuts the row at the next whole step.
"""

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loadtest.simulator.blocks import BlockStore, tokens_of
from loadtest.simulator.events import EventQueue
from loadtest.simulator.held import free, keep_output, promise, seal_prompt
from loadtest.simulator.local import Local
from loadtest.simulator.prices import Chunk, StepPrices
from loadtest.simulator.room import EnginePages, Queues
from loadtest.simulator.task import EngineHooks, EngineLimits, OnSteps, Task
from services.mempool.core.entry import Entry

MAX_ROW_STEPS = 512


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine is made of. noise: factor of each step's time, called once a step or row of steps. keeps: what it
    computed is found by later requests. room_wait_ms: see EnginePages."""

    number: int
    events: EventQueue
    prices: StepPrices
    store: BlockStore
    limits: EngineLimits
    hooks: EngineHooks
    noise: Callable[[], float]
    local: Local
    keeps: bool = True
    room_wait_ms: float = 0.0


class Engine:
    """Order of arrival, whatever else `local` says."""

    def __init__(self, parts: EngineParts) -> None:
        self.number, self.store, self.limits = parts.number, parts.store, parts.limits
        self.num_steps = self.num_preempted = self.num_recomputed_tokens = 0
        self.busy_ms = self.step_ms = 0.0
        self._unfinished: dict[str, tuple[int, int]] = {}  # prompts: tokens, said to be cached
        self._told_of: list[tuple[int, int]] = []  # those of the last report, and their time
        self._told_ms = 0.0
        self._arrived: list[tuple[str, int]] = []  # since the last report
        self.on_steps: OnSteps | None = None  # who watches: called at the end of a step or row of steps
        self.dead = False
        self._events, self._prices = parts.events, parts.prices
        self._hooks, self._noise, self._keeps = parts.hooks, parts.noise, parts.keeps
        self._waiting: deque[Task] = deque()
        self._ready: deque[Task] = deque()  # loaded, before all that waits
        self._loading: set[Task] = set()
        self._prefilling: list[Task] = []
        self._ends: list[tuple[int, int, Task]] = []  # decodes by the step in which they end
        self._decoding: dict[tuple[str, int], Task] = {}
        self._context_tokens = 0  # of all decodes
        self._num_admitted = self._generation = 0
        queues = Queues(self._decoding, self._prefilling, self._ready, self._loading, self._waiting)
        self._pages = EnginePages(parts.store, parts.limits.unit_tokens, parts.room_wait_ms, queues)
        self._run: tuple[float, int, int, float, list[tuple[Task, int]]] | None = None

    # -- from outside -----------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Requests in steps."""
        return len(self._decoding) + len(self._prefilling)

    @property
    def num_waiting(self) -> int:
        """Requests that no step has seen."""
        return len(self._waiting) + len(self._ready) + len(self._loading)

    @property
    def context_tokens(self) -> int:
        """KV tokens of running requests."""
        return self._context_tokens + sum(task.done_tokens for task in self._prefilling)

    def told(self) -> dict[str, Any]:
        """What a report says of it; what has come is told once."""
        arrived, self._arrived = self._arrived, []
        unfinished = list(self._unfinished.values())
        if unfinished != self._told_of:
            self._told_of, self._told_ms = unfinished, self._prices.waiting_ms(unfinished)
        return {
            "num_running": self.num_running,
            "num_waiting": self.num_waiting,
            "unfinished_prefill_tokens": sum(tokens for tokens, _ in unfinished),
            "running_context_tokens": self.context_tokens,
            "kv_used_share": self.store.used_share,
            "step_ms": self.step_ms,
            "queued_prefill_ms": self._told_ms,
            "arrived": arrived,
            "room": self._pages.now(self.num_steps),
        }

    def submit(self, task: Task) -> bool:
        """A stage arrives. False: it could never fit."""
        request = task.request
        if self.dead or request.prompt_tokens + request.output_tokens > self.store.capacity_tokens:
            return False
        task.queued_at_ms = self._events.now_ms
        task.goal_tokens = request.prompt_tokens
        if task.stage != "decode":
            self._unfinished[task.name] = request.prompt_tokens, task.hinted_tokens
        self._arrived.append(task.key)
        self._waiting.append(task)
        self.wake()
        return True

    def loaded(self, task: Task) -> None:
        """What it needed from elsewhere is here, in the private memory that was reserved for it."""
        if task.state != "loading" or self.dead:
            return
        self._loading.discard(task)
        request = task.request
        have = request.prompt_tokens if task.stage == "decode" else task.done_tokens
        seal_prompt(self.store, task, have)
        task.done_tokens = min(have, request.prompt_tokens - 1)
        self._ready.append(task)
        self.wake()

    def release(self, task: Task) -> None:
        """Nobody needs the pages of a prefilled prompt any more."""
        if task.state == "held":
            self._drop(task)
            self.wake()

    def abort(self, task: Task) -> None:
        """The stage is over for whoever asked for it. Harmless when it has ended."""
        if task.state == "gone" or self.dead:
            return
        if task.state == "decoding":
            self._leave_decodes(task)
        for queue in (self._waiting, self._ready, self._prefilling):
            if task in queue:
                queue.remove(task)
        self._loading.discard(task)
        self._unfinished.pop(task.name, None)
        self._drop(task)
        self.wake()

    def die(self) -> None:
        """Nothing comes from it any more."""
        self.dead = True
        self._generation += 1
        self._run = None

    def wake(self) -> None:
        """Something changed: begin a step, or end a row of steps at the next whole one."""
        if self.dead:
            return
        if self._run is None:
            self._begin()
        elif self._run[1] > 1 and (self._waiting or self._ready):
            self._cut()

    # -- steps ------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._room_for_decodes()
        chunks, num_decodes = self._compose(), len(self._decoding)
        if not chunks and not num_decodes:
            return
        now_ms = self._events.now_ms
        factor = self._noise()
        if chunks:
            shapes: list[Chunk] = [(new, task.done_tokens) for task, new in chunks]
            took_ms = factor * self._prices.step_ms(shapes, num_decodes, self._context_tokens)
            self._run = (now_ms, 1, num_decodes, factor, chunks)
        else:
            num_steps = self._row_length()
            self._run = (now_ms, num_steps, num_decodes, factor, chunks)
            took_ms = self._row_ms(num_steps)
            self._reserve_steps(num_decodes * (num_steps - 1))
        self._generation += 1
        self._events.at(now_ms + took_ms, self._end, self._generation)

    def _row_length(self) -> int:
        """Steps until a decode ends, as far as memory reaches without preempting; one has its memory already."""
        room = self.store.room_tokens // len(self._decoding)
        return max(1, min(self._next_end() - self.num_steps, room + 1, MAX_ROW_STEPS))

    def _reserve_steps(self, num_tokens: int) -> None:
        has_room = self.store.reserve(num_tokens)
        assert has_room, "counted before"
        self._pages.row_tokens += num_tokens

    def _next_end(self) -> int:
        while (task := self._ends[0][2]).state != "decoding" or task.end_step != self._ends[0][0]:
            heapq.heappop(self._ends)
        return self._ends[0][0]

    def _row_ms(self, num_steps: int) -> float:
        """Of the row that runs; exact where a step's time grows linearly with its context."""
        assert self._run is not None
        _, _, num_decodes, factor, _ = self._run
        context = self._context_tokens + num_decodes * (num_steps - 1) // 2
        return factor * num_steps * self._prices.decode_ms(num_decodes, context)

    def _cut(self) -> None:
        """End the row with the step that runs now."""
        assert self._run is not None
        began_ms, num_steps, num_decodes, factor, chunks = self._run
        elapsed_ms = self._events.now_ms - began_ms
        low = 1 + bisect_left(range(1, num_steps), elapsed_ms - 1e-9, key=self._row_ms)
        if low < num_steps:
            self.store.release(num_decodes * (num_steps - low))
            self._pages.row_tokens -= num_decodes * (num_steps - low)
            end_ms = began_ms + self._row_ms(low)
            self._run = (began_ms, low, num_decodes, factor, chunks)
            self._generation += 1
            self._events.at(end_ms, self._end, self._generation)

    def _end(self, generation: int) -> None:
        if generation != self._generation or self._run is None:
            return
        began_ms, num_steps, num_decodes, _, chunks = self._run
        self._run = None
        self._pages.row_tokens = 0
        took_ms = self._events.now_ms - began_ms
        if self.on_steps is not None:
            self.on_steps(began_ms, took_ms, num_steps, num_decodes)
        self.busy_ms += took_ms
        self.step_ms = 0.8 * self.step_ms + 0.2 * took_ms / num_steps
        self.num_steps += num_steps
        grown = len(self._decoding) * num_steps
        self._context_tokens += grown
        self.store.release((num_decodes - len(self._decoding)) * num_steps)  # of those that left meanwhile
        while self._ends and self._decoding and self._next_end() <= self.num_steps:
            task = heapq.heappop(self._ends)[2]
            self._leave_decodes(task)
            self._finish(task)
        if not self._decoding:
            self._ends.clear()
        for task, new in (chunk for chunk in chunks if chunk[0].state == "prefilling"):
            self._advance(task, new)
        self._begin()

    # -- prompts ----------------------------------------------------------------------------------

    def _compose(self) -> list[tuple[Task, int]]:
        """The chunks of the next step."""
        budget = self.limits.max_batched_tokens - len(self._decoding)
        chunks: list[tuple[Task, int]] = []
        for task in self._prefilling:
            if budget <= 0:
                return chunks
            new = min(task.goal_tokens - task.done_tokens, budget)
            chunks.append((task, new))
            budget -= new
        while budget > 0 and self.num_running < self.limits.max_running:
            task = self._next_task()
            if task is None:
                break
            task.state = "prefilling"
            self._prefilling.append(task)
            self._hooks.computed(self.number, task)
            new = min(task.goal_tokens - task.done_tokens, budget)
            chunks.append((task, new))
            budget -= new
        return chunks

    def _next_task(self) -> Task | None:
        if self._ready:
            return self._ready.popleft()
        while self._waiting:
            task = self._waiting[0]
            waits = self._pages.keeps_waiting(task, self.num_steps, self._events.now_ms)
            if waits or not self._admit(task):
                return None
            self._waiting.popleft()
            if task.state != "loading":
                return task
        return None

    def _admit(self, task: Task) -> bool:
        """Memory for all of its context, what is cached pinned. False: it waits on."""
        request, store = task.request, self.store
        unit = self.limits.unit_tokens
        most = request.prompt_tokens if task.stage == "decode" else (request.prompt_tokens - 1) // unit * unit
        found = store.match(request.blocks) if self._keeps else []
        store.pin(found)
        local = min(tokens_of(found), most)
        need = task.goal_tokens - tokens_of(found)
        if need > 0 and not store.reserve(need):
            store.unpin(found)
            return False
        promise(store, task)
        self._num_admitted += 1
        task.seq, task.state, task.entries = self._num_admitted, "waiting", found
        task.private_tokens = max(0, need)
        task.done_tokens = local
        self.num_recomputed_tokens += max(0, task.lost_tokens - local)
        task.lost_tokens = moved = dram = 0
        if task.stage == "decode" and not task.made:
            moved = request.prompt_tokens - local
        elif not task.made:
            dram, moved = self._elsewhere(task, found, local, most)
        if task.admitted_at_ms < 0:  # a preempted request comes again; its receipt is of the first time
            task.admitted_at_ms = self._events.now_ms
            task.tokens_local, task.tokens_dram, task.tokens_moved = local, dram, moved
            task.tokens_computed = request.prompt_tokens - local - dram - moved
        if moved or dram:
            task.state = "loading"
            task.done_tokens = local + dram + moved
            self._loading.add(task)
            self._hooks.load(self.number, task, moved, dram)
        elif task.stage == "decode":
            task.done_tokens = min(task.done_tokens, task.goal_tokens - 1)
        return True

    def _elsewhere(self, task: Task, found: list[Entry], local: int, most: int) -> tuple[int, int]:
        """(tokens from host memory, tokens from other instances) that follow what is here."""
        if task.kv is not None and task.kv.reach == "own":
            return 0, 0
        here = tokens_of(found)
        behind = self.store.match_dram(task.request.blocks[len(found) :]) if self._keeps else 0
        dram = max(0, min(here + behind, most) - local)
        num_blocks = (here + behind) // self.store.block_tokens
        if not (more := self._hooks.find(self.number, task, num_blocks)):
            return dram, 0
        return dram, max(0, min(num_blocks * self.store.block_tokens + more, most) - local - dram)

    def _advance(self, task: Task, new: int) -> None:
        """A chunk of it was computed."""
        task.done_tokens += new
        seal_prompt(self.store, task, min(task.done_tokens, task.request.prompt_tokens))
        if task.done_tokens < task.goal_tokens:
            self._hooks.computed(self.number, task)
            return
        self._prefilling.remove(task)
        self._unfinished.pop(task.name, None)
        task.made += 1
        if task.stage == "prefill":
            task.state = "held"
            self._hooks.first_token(self.number, task)
            return
        if task.made == 1:
            self._hooks.first_token(self.number, task)
        if task.made >= task.wanted_tokens:
            self._finish(task)
            return
        self._join_decodes(task)

    # -- decodes ----------------------------------------------------------------------------------

    def _join_decodes(self, task: Task) -> None:
        task.state = "decoding"
        task.joined_step = self.num_steps
        self._decoding[task.key] = task
        self._context_tokens += task.done_tokens
        heapq.heappush(self._ends, (task.end_step, task.seq, task))

    def _leave_decodes(self, task: Task) -> None:
        """Its steps so far become its own."""
        del self._decoding[task.key]
        steps = self.num_steps - task.joined_step
        task.made += steps
        task.done_tokens += steps
        task.private_tokens += steps
        self._context_tokens -= task.done_tokens

    def _room_for_decodes(self) -> None:
        """A token of memory for each; who came last gives its memory up and computes everything anew later."""
        while self._decoding and self.store.room_tokens < len(self._decoding):
            task = max(self._decoding.values(), key=lambda t: t.seq)
            self._leave_decodes(task)
            self._preempt(task)
        self._reserve_steps(len(self._decoding))

    def _preempt(self, task: Task) -> None:
        """It is in no step any more, loses what it has, and comes first."""
        self.num_preempted += 1
        free(self.store, task)
        task.state = "waiting"
        task.lost_tokens = task.done_tokens
        task.goal_tokens = task.request.prompt_tokens + task.made
        self._waiting.appendleft(task)

    def _finish(self, task: Task) -> None:
        keep_output(self.store, task)
        self._drop(task)
        self._hooks.finished(self.number, task)

    # -- the end ----------------------------------------------------------------------------------

    def _drop(self, task: Task) -> None:
        free(self.store, task)
        task.state = "gone"
