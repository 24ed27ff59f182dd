"""A model of an engine's steps around shared.fair: slots, chunked prefill, one token per decode and step."""

from collections import Counter
from dataclasses import dataclass, field

from shared.fair.rules import FairRules, Room
from shared.fair.slices import FairSlices, Plan


@dataclass(slots=True)
class Job:
    """A request: what is left of it."""

    name: str
    tenant: str
    prompt_left: int
    answer_left: int
    weight: float = 1.0
    pages: int = 0
    away: int = 0
    first_step: int = 0  # in which its first token came
    last_step: int = 0
    ran: list[int] = field(default_factory=list)  # steps in which it had a slot


class FairEngine:
    """Runs jobs to their end; every plan is checked against the room."""

    def __init__(self, rules: FairRules, room: Room) -> None:
        self.slices = FairSlices(rules)
        self.room = room
        self.jobs: dict[str, Job] = {}
        self.running: list[str] = []
        self.step = 0
        self.tokens: Counter[str] = Counter()  # served, by tenant
        self.num_parked = 0
        self.plans: list[Plan] = []
        self.idle_slots_with_work = 0
        self.prompt_tokens: list[int] = []  # that the slices gave prompts, by step

    def add(self, job: Job) -> None:
        self.jobs[job.name] = job
        self.slices.add(job.name, job.tenant, job.weight, job.prompt_left)
        self.slices.holds(job.name, job.pages, 0, job.away)

    def run_step(self) -> None:
        self.step += 1
        plan = self._plan()
        self.plans.append(plan)
        assert not set(plan.park) & set(plan.start)
        for name in plan.park:
            self.running.remove(name)
            self.slices.parked(name)
            self.num_parked += 1
        for name in plan.start:
            if len(self.running) == self.room.slots:
                break
            assert name not in self.running
            self.running.append(name)
            self.slices.started(name)
        assert len(self.running) <= self.room.slots
        waiting = len(self.jobs) - len(self.running)
        self.idle_slots_with_work += min(waiting, self.room.slots - len(self.running))
        left = self._pace()
        for name in list(self.running):
            job = self.jobs[name]
            job.ran.append(self.step)
            count = min(job.prompt_left, left) if job.prompt_left else min(1, left)
            left -= count
            self._serve(job, count)

    def _pace(self) -> int:
        """Tokens of the step. As in an engine: decodes first, prompts share what the slices give them."""
        chunk = self.slices.prompt_tokens(self.room.step_tokens, self.room.step_ms)
        self.prompt_tokens.append(chunk)
        if chunk >= self.room.step_tokens:
            return chunk
        self.running.sort(key=lambda name: self.jobs[name].prompt_left > 0)
        decodes = sum(not self.jobs[name].prompt_left for name in self.running)
        return min(self.room.step_tokens, chunk + decodes)

    def _plan(self) -> Plan:
        """As an engine asks: only where somebody waits, and something can change."""
        if len(self.running) == len(self.jobs):
            self.slices.calm_step()
            return Plan()
        if not self.slices.next_step(vacant=len(self.running) < self.room.slots):
            return Plan(is_fair=True)
        return self.slices.plan(self.room)

    def _serve(self, job: Job, count: int) -> None:
        self.tokens[job.tenant] += count
        was_prefill = job.prompt_left > 0
        job.prompt_left -= count if was_prefill else 0
        self.slices.served(job.name, count, job.prompt_left)
        if job.prompt_left or not count:
            return
        job.first_step = job.first_step or self.step
        job.answer_left -= 1  # a prompt's last step makes the first token
        if job.answer_left <= 0:
            job.last_step = self.step
            self.leave(job.name)

    def leave(self, name: str) -> None:
        del self.jobs[name]
        self.slices.remove(name)
        if name in self.running:
            self.running.remove(name)
