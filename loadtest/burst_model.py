"""A burst in a model of one engine, step by step, in vLLM's order of arrival; fair slices are burst_fair.py's.

Slots, pages and the token budget are vLLM's, preemption by computing again too; steps take what the cost model of a
measured GPU says. Nothing here is drawn: the same requests have the same end.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.simulator.prices import StepPrices
from loadtest.workloads.request import Request

MOST_STEPS = 400_000
STEP_WEIGHT = 0.2  # of the newest step, in the mean of their times


@dataclass(frozen=True, slots=True)
class Link:
    """Of swap space. wait_ms: from asking to the first byte, and from the last to the answer."""

    bytes_per_s: float
    wait_ms: float = 3.0


@dataclass(frozen=True, slots=True)
class Machine:
    """Of one engine. pages: of its KV memory. link: none: nothing can leave."""

    prices: StepPrices
    pages: int
    block_tokens: int
    slots: int
    step_tokens: int
    link: Link | None = None


@dataclass(slots=True, eq=False)
class Job:
    """A request. computed: tokens whose KV exists; pages: here; away: blocks in swap space, or on their way back."""

    name: str
    arrival_ms: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    weight: float = 1.0
    computed: int = 0
    made: int = 0
    pages: int = 0
    away: int = 0
    first_ms: float = -1.0
    end_ms: float = -1.0
    ran_ms: float = -1.0  # end of the last step that it was in
    longest_gap_ms: float = 0.0  # from one step to the next, once it began
    preempted: int = 0
    freed_at: tuple[int, int, int] = (
        0,
        0,
        0,
    )  # pages given up, free before, given out before: what is left is cached
    back_ms: float = -1.0  # when what is away is here again
    leaving_ms: float = -1.0  # when what leaves is there
    leaving: int = 0

    @property
    def tokens(self) -> int:
        """Prompt and answer so far."""
        return self.prompt_tokens + self.made

    @property
    def ttft_ms(self) -> float:
        """From its arrival."""
        return self.first_ms - self.arrival_ms

    @property
    def rct_ms(self) -> float:
        """From its arrival to its end."""
        return self.end_ms - self.arrival_ms


@dataclass(slots=True)
class Counts:
    """Of a run."""

    steps: int = 0
    parked: int = 0
    preempted: int = 0
    recomputed_tokens: int = 0
    out_bytes: int = 0
    idle_ms: float = 0.0


class ArrivalEngine:
    """vLLM's order: who runs goes on, who came last gives way when pages are short and is computed again."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.now_ms = 0.0
        self.free = machine.pages
        self.given = 0  # pages, in all
        self.running: list[Job] = []
        self.waiting: deque[Job] = deque()
        self.counts = Counts()
        self._step_ms = 0.0  # mean

    def run(self, jobs: Sequence[Job]) -> Counts:
        """To the end of all, which are written into."""
        due = deque(sorted(jobs, key=lambda job: job.arrival_ms))
        left = len(due)
        while left:
            while due and due[0].arrival_ms <= self.now_ms:
                self.add(due.popleft())
            chunks = self.schedule()
            if not chunks:
                nexts = [at for at in (self.next_event_ms(), due[0].arrival_ms if due else -1.0) if at >= 0]
                assert nexts, f"nothing runs at {self.now_ms} ms, and nothing will"
                self.counts.idle_ms += max(0.0, min(nexts) - self.now_ms)
                self.now_ms = max(self.now_ms, min(nexts)) + 1e-6
                continue
            left -= self._carry_out(chunks)
            self.counts.steps += 1
            assert self.counts.steps < MOST_STEPS, "requests starve"
        return self.counts

    def _carry_out(self, chunks: list[tuple[Job, int]]) -> int:
        decodes = [job for job, new in chunks if new == 1 and job.computed >= job.prompt_tokens]
        names = set(map(id, decodes))
        prompts = [(new, job.computed) for job, new in chunks if id(job) not in names]
        took_ms = self.machine.prices.step_ms(prompts, len(decodes), sum(job.computed for job in decodes))
        self.now_ms += took_ms
        self._step_ms += (took_ms - self._step_ms) * (STEP_WEIGHT if self._step_ms else 1.0)
        ended = 0
        for job, new in chunks:
            job.computed += new
            if job.ran_ms >= 0:
                job.longest_gap_ms = max(job.longest_gap_ms, self.now_ms - job.ran_ms)
            job.ran_ms = self.now_ms
            if job.computed == job.tokens:
                if job.first_ms < 0:
                    job.first_ms = self.now_ms
                job.made += 1
            self.served(job, new)
            if job.made == job.output_tokens:
                job.end_ms = self.now_ms
                self.running.remove(job)
                self.free += job.pages
                job.pages = 0
                self.ended(job)
                ended += 1
        return ended

    # -- for a policy ---------------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        """It came."""
        self.waiting.append(job)

    def served(self, job: Job, new: int) -> None:
        """A step computed so many of its tokens."""

    def ended(self, job: Job) -> None:
        """It is over."""

    def next_event_ms(self) -> float:
        """When something happens by itself; -1: never."""
        return -1.0

    def take(self, job: Job, tokens: int) -> bool:
        """Pages for so many tokens. False: there are not enough."""
        need = -(-tokens // self.machine.block_tokens) - job.pages
        if need > self.free:
            return False
        if need > 0:
            self.free -= need
            self.given += need
            job.pages += need
        return True

    def schedule(self) -> list[tuple[Job, int]]:
        """Who computes how many tokens in the step that comes."""
        budget, chunks, is_short = self.machine.step_tokens, [], False
        index = 0
        while index < len(self.running) and budget > 0:
            job = self.running[index]
            new = min(job.tokens - job.computed, budget)
            is_in = True
            while not self.take(job, job.computed + new):
                is_short = True
                last = self.running[-1]
                self._preempt(last)
                if last is job:
                    is_in = False
                    break
            if not is_in:
                break
            chunks.append((job, new))
            budget -= new
            index += 1
        while not is_short and self.waiting and budget > 0 and len(self.running) < self.machine.slots:
            job = self.waiting[0]
            cached = self._cached_tokens(job)
            new = min(job.tokens - cached, budget)
            if not self.take(job, job.tokens):
                break
            self.waiting.popleft()
            self.counts.recomputed_tokens += max(0, job.computed - cached)
            job.computed = cached
            self.running.append(job)
            chunks.append((job, new))
            budget -= new
        return chunks

    def _preempt(self, job: Job) -> None:
        self.running.pop()
        job.freed_at = (job.pages, self.free, self.given)
        job.preempted += 1
        self.counts.preempted += 1
        self.free += job.pages
        job.pages = 0
        self.waiting.appendleft(job)

    def _cached_tokens(self, job: Job) -> int:
        """Of who was preempted: blocks that nobody was given since, whole ones."""
        pages, free, given = job.freed_at
        left = max(0, min(pages, pages + free - (self.given - given)))
        return (
            min(left * self.machine.block_tokens, max(0, job.computed - 1))
            // self.machine.block_tokens
            * (self.machine.block_tokens)
        )


def jobs_of(requests: Sequence[Request]) -> list[Job]:
    """Of a workload."""
    return [
        Job(f"r{n}", one.arrival_ms, one.prompt_tokens, one.output_tokens) for n, one in enumerate(requests)
    ]
