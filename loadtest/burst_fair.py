"""Fair slices in the model of one engine: who runs is `shared.fair`'s FairSlices, the core that production has.

What the engine's schedulers do around it (shared/engine/fair_scheduler.py, swap_scheduler.py) is written out here in
short; asynchronous steps, shared blocks and lost ones are not. Blocks leave and come back over one link, each way one
swap after the other.
"""

from loadtest.burst_model import ArrivalEngine, Job, Machine
from shared.fair.carrying import (
    RESERVE_S,
    Begun,
    Grower,
    Seen,
    free_mark,
    grow,
    may_begin,
    may_fill,
    nearest_first,
    pages_for_turns,
    short_pages,
)
from shared.fair.rules import Room
from shared.fair.slices import FairSlices

ALWAYS_PAYS = 1e15  # bytes per second that slices count on, as the bench says it


class FairEngine(ArrivalEngine):
    """Slices of FairSlices; parked requests keep their pages, or these leave over the link and come back."""

    def __init__(self, machine: Machine, slices: FairSlices) -> None:
        super().__init__(machine)
        self.slices = slices
        self.jobs: dict[str, Job] = {}
        self.parked: dict[str, Job] = {}
        self.reserved: dict[str, float] = {}
        self._page_bytes = machine.block_tokens * machine.prices.kv_bytes_per_token
        assert machine.link is not None
        self._link = machine.link
        self._out_free_ms = self._in_free_ms = 0.0
        self._seen = Seen(0, 0, 0)
        self._is_short = False

    def add(self, job: Job) -> None:
        self.jobs[job.name] = job
        self.waiting.append(job)
        self.slices.add(job.name, job.tenant, job.weight, job.prompt_tokens)

    def ended(self, job: Job) -> None:
        del self.jobs[job.name]
        self.slices.remove(job.name)

    def served(self, job: Job, new: int) -> None:
        self.slices.served(job.name, new, job.prompt_tokens - job.computed)

    def next_event_ms(self) -> float:
        times = [job.back_ms for job in self.jobs.values() if job.back_ms >= 0]
        times += [job.leaving_ms for job in self.jobs.values() if job.leaving_ms >= 0]
        times += [self.now_ms + 1.0] if self.jobs else []
        return min(times, default=-1.0)

    # -- as shared/engine does it ---------------------------------------------------------------------

    def _hear(self) -> None:
        for job in self.jobs.values():
            if 0 <= job.leaving_ms <= self.now_ms:
                job.pages -= job.leaving
                self.free += job.leaving
                job.away, job.leaving, job.leaving_ms = job.leaving, 0, -1.0
            if 0 <= job.back_ms <= self.now_ms:
                job.away, job.back_ms = 0, -1.0

    def _room(self) -> Room:
        ahead, size = self.slices.rules.slice_steps, self.machine.block_tokens
        resident = wanted = coming = 0
        begun = Begun(len(self.running), len(self.parked))
        may_come = may_begin(
            begun, self.machine.pages, limits_parked=self.slices.rules.has_units, can_be_short=False
        )
        for job in self.jobs.values():
            have = job.pages - (job.away if job.back_ms >= 0 else 0)
            need = max(-(-(job.tokens + ahead) // size), have + job.away)
            ready = may_come or have + job.away > 0
            self.slices.holds(job.name, need, have, job.away, ready=ready)
            resident += have
            wanted += need
            coming += job.away if job.back_ms >= 0 else 0
        pages = self.free + coming + resident
        self._is_short = wanted > pages
        if self._is_short:
            pages = pages_for_turns(self.slices.rules, pages, begun, has_room_for_all=True)
        return Room(
            self.machine.slots, self.machine.step_tokens, pages, self._page_bytes,
            ALWAYS_PAYS, self._step_ms,
        )  # fmt: skip

    def _may_fill(self) -> bool:
        taken = len(self.running) + len(self.reserved)
        was, self._seen = self._seen, Seen(taken, len(self.jobs), free_mark(self.free, self.machine.pages))
        return may_fill(self.slices.rules, self._seen, was, self.machine.slots, is_short=self._is_short)

    def _park(self, job: Job) -> None:
        if job.name in self.reserved:
            self._unreserve(job.name)
            return
        self.running.remove(job)
        self.waiting.append(job)
        self.parked[job.name] = job
        self.slices.parked(job.name)
        self.counts.parked += 1

    def _unreserve(self, name: str) -> None:
        del self.reserved[name]
        self.slices.parked(name)

    def _is_here(self, job: Job) -> bool:
        return not job.away

    def _start(self) -> list[str]:
        """Park and reorder. Returns: who may start in this step."""
        if not self.waiting:
            self.slices.calm_step()
            return []
        start: list[str] = []
        if self.slices.next_step(vacant=self._may_fill()):
            plan = self.slices.plan(self._room())
            for name in plan.park:
                self._park(self.jobs[name])
            start = plan.start
        self._park_for_growth()
        return self._swap(start)

    def _park_for_growth(self) -> None:
        if not self.slices.pays and not any(
            job.back_ms >= 0 or job.leaving_ms >= 0 for job in self.jobs.values()
        ):
            return
        running = [
            Grower(job.name, job.tokens - job.computed, job.computed, job.pages) for job in self.running
        ]
        tokens, size = self._chunk_tokens(), self.machine.block_tokens
        for name in grow(running, self.free, tokens, size, most_tokens=1 << 40, may_park=True)[0]:
            self._park(self.jobs[name])

    def _swap(self, start: list[str]) -> list[str]:
        room = self.machine.slots - len(self.running) - len(self.reserved)
        ready = [name for name in self.reserved if self._is_here(self.jobs[name])]
        for name in [name for name in start if name not in self.reserved][: max(0, room)]:
            job = self.jobs[name]
            if job.leaving_ms >= 0:
                job.leaving_ms, job.leaving = -1.0, 0
            if self._is_here(job):
                ready.append(name)
            else:
                self.reserved[name] = self.now_ms
                self.slices.started(name)
        starved = [name for name in self.reserved if not self._bring(self.jobs[name])]
        if starved:
            ready = [name for name in ready if self.jobs[name].pages]
            for name in [name for name in starved if self.now_ms - self.reserved[name] > RESERVE_S * 1e3]:
                self._unreserve(name)
        self._send_out(ready)
        return ready

    def _bring(self, job: Job) -> bool:
        if self._is_here(job) or job.back_ms >= 0:
            return True
        if job.away + len(self.running) > self.free:
            return False
        self.free -= job.away
        self.given += job.away
        job.pages += job.away
        self._in_free_ms = max(self._in_free_ms, self.now_ms) + self._link_ms(job.away)
        job.back_ms = self._in_free_ms + self._link.wait_ms
        return True

    def _link_ms(self, pages: int) -> float:
        return pages * self._page_bytes / self._link.bytes_per_s * 1e3

    def _send_out(self, ready: list[str]) -> None:
        if not self.slices.pays or not self.parked:
            return
        accounts = self.slices.accounts.requests
        names = dict.fromkeys([*(job.name for job in self.running), *self.reserved, *ready])
        here = {
            name: self.jobs[name].pages - (self.jobs[name].away if self.jobs[name].back_ms >= 0 else 0)
            for name in names
        }
        coming = sum(job.away for job in self.jobs.values() if job.back_ms >= 0)
        leaving = sum(job.leaving for job in self.jobs.values())
        short = short_pages(
            ((accounts[name].pages, here[name]) for name in names), self.free, leaving + coming
        )
        if short <= 0:
            return
        others = nearest_first(
            self.slices, (n for n in self.parked if n not in self.reserved and n not in ready)
        )
        while others and short > 0:
            job = self.jobs[others.pop()]
            whole = job.computed // self.machine.block_tokens
            if job.away or job.leaving or not min(whole, job.pages):
                continue
            job.leaving = min(whole, job.pages)
            self._out_free_ms = max(self._out_free_ms, self.now_ms) + self._link_ms(job.leaving)
            job.leaving_ms = self._out_free_ms + self._link.wait_ms
            self.counts.out_bytes += job.leaving * self._page_bytes
            short -= job.leaving

    def schedule(self) -> list[tuple[Job, int]]:
        self._hear()
        start = self._start()
        budget, chunks = self._pace(start), []
        for job in self.running:
            new = min(job.tokens - job.computed, budget)
            if new <= 0 or not self.take(job, job.computed + new):
                continue
            chunks.append((job, new))
            budget -= new
        chosen = dict.fromkeys(start)
        rest = [] if self.reserved else [job.name for job in self.waiting if job.name not in chosen]
        for name in [*chosen, *rest]:
            job = self.jobs[name]
            if not self._is_here(job):
                continue
            slots = self.machine.slots - len(self.reserved) + (name in self.reserved)
            if budget <= 0 or len(self.running) >= slots:
                break
            new = min(job.tokens - job.computed, budget)
            if not self.take(job, job.tokens):
                break
            self.waiting.remove(job)
            self.running.append(job)
            self.reserved.pop(name, None)
            self.parked.pop(name, None)
            job.leaving_ms, job.leaving = -1.0, 0
            account = self.slices.accounts.requests[name]
            if not account.running:
                self.slices.started(name)
            chunks.append((job, new))
            budget -= new
        return chunks

    def _chunk_tokens(self) -> int:
        return self.slices.prompt_tokens(self.machine.step_tokens, self._step_ms)

    def _pace(self, start: list[str]) -> int:
        chunk = self._chunk_tokens()
        if chunk >= self.machine.step_tokens:
            return self.machine.step_tokens
        self.running.sort(key=_in_prefill)
        start.sort(key=lambda name: _in_prefill(self.jobs[name]))
        both = [*self.running, *(self.jobs[name] for name in start)]
        return min(self.machine.step_tokens, chunk + sum(not _in_prefill(job) for job in both))


def _in_prefill(job: Job) -> bool:
    return job.computed < job.prompt_tokens
