"""A model of two engines in fair slices behind one placer, asked for more than they can do: steps, reports, retries.

Time is in engine steps of STEP_MS. Engines are tests/support/fair_engine.py's, the placer is the scheduler's own.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from services.scheduler.core.instances import Instances
from services.scheduler.core.limits import PlacementLimits
from services.scheduler.core.placement import Placer
from shared.fair.elsewhere import Elsewhere
from shared.fair.rules import FairRules, Room
from shared.wire.placement import Ended, Placed
from tests.support.control_plane import hello, place, report
from tests.support.fair_engine import FairEngine, Job

STEP_MS = 10
RETRY_MS, SHED_MS = 250, 1_000  # a gateway's
REPORT_MS, EXCHANGE_MS = 250, 1_000
SLOTS = 8


@dataclass
class Asking:
    """A request that its gateway holds."""

    name: str
    tenant: str
    due_ms: int
    until_ms: int


class FairCluster:
    """`served`: tokens by second and tenant. `pauses`: times from and to which clients and gateways stand still."""

    def __init__(
        self,
        weights: dict[str, float],
        rates: dict[str, float],
        tokens: tuple[int, int],
        seed: int,
        *,
        limits: PlacementLimits | None = None,
        pauses: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.weights, self.rates, self.tokens = weights, rates, tokens
        self.chance = random.Random(seed)
        self.placer = Placer(Instances(), "least_load", "boot", limits or PlacementLimits())
        self.pauses = pauses
        self.engines = {name: FairEngine(FairRules(), Room(SLOTS, 512)) for name in ("a", "b")}
        self.elsewhere = {name: Elsewhere() for name in self.engines}
        self.served: Counter[tuple[int, str]] = Counter()
        self.shed: Counter[str] = Counter()
        self.now_ms = self.seq = self.count = 0
        self.asking: list[Asking] = []
        self.next_ms = dict.fromkeys(rates, 0.0)
        for name in self.engines:
            self.placer.instances.hello(hello(name, role="colocated", max_running=SLOTS), now_ms=0)
        self.report()

    def run(self, seconds: int) -> None:
        while self.now_ms < seconds * 1_000:
            self.now_ms += STEP_MS
            if not any(begin <= self.now_ms < end for begin, end in self.pauses):
                self.arrive()
                self.ask()
            for name, engine in self.engines.items():
                self.step(name, engine)
            if not self.now_ms % REPORT_MS:
                self.report()
            if not self.now_ms % EXCHANGE_MS:
                self.exchange()

    def arrive(self) -> None:
        for tenant, rate in self.rates.items():
            while self.next_ms[tenant] <= self.now_ms:
                self.count += 1
                self.asking.append(Asking(f"{self.count}", tenant, self.now_ms, self.now_ms + SHED_MS))
                self.next_ms[tenant] += 1_000 / rate * self.chance.uniform(0.5, 1.5)

    def ask(self) -> None:
        """In random order, as gateways do."""
        due = [one for one in self.asking if one.due_ms <= self.now_ms]
        self.chance.shuffle(due)
        for one in due:
            weight = self.weights[one.tenant]
            message = place(one.name, tokens=self.tokens[0], tenant=one.tenant, weight=weight)
            answer = self.placer.place(message, now_ms=self.now_ms)
            if isinstance(answer, Placed):
                engine = self.engines[answer.decode.instance]
                engine.add(Job(one.name, one.tenant, self.tokens[0], self.tokens[1], weight))
            elif self.now_ms >= one.until_ms:
                self.shed[one.tenant] += 1
            else:
                one.due_ms = self.now_ms + RETRY_MS
                continue
            self.asking.remove(one)

    def step(self, name: str, engine: FairEngine) -> None:
        before, jobs = engine.tokens.copy(), set(engine.jobs)
        engine.run_step()
        for tenant, tokens in (engine.tokens - before).items():
            self.served[self.now_ms // 1_000, tenant] += tokens
        for request in jobs - set(engine.jobs):
            self.placer.ended(Ended(request_id=request, attempt=1))

    def report(self) -> None:
        self.seq += 1
        for name, engine in self.engines.items():
            running, all_jobs = len(engine.running), len(engine.jobs)
            self.placer.instances.report(
                report(name, seq=self.seq, num_running=running, num_waiting=all_jobs - running),
                now_ms=self.now_ms,
            )

    def exchange(self) -> None:
        said = {name: dict(engine.tokens) for name, engine in self.engines.items()}
        for name, engine in self.engines.items():
            others = {other: totals for other, totals in said.items() if other != name}
            for tenant, tokens in self.elsewhere[name].news(others).items():
                engine.slices.accounts.served_elsewhere(tenant, tokens)

    def worst_error(self, first_s: int, end_s: int, window_s: int) -> float:
        """Of any tenant's share in any window, relative to what its weight says."""
        worst = 0.0
        for begin in range(first_s, end_s - window_s + 1):
            tokens = {
                tenant: sum(self.served[at, tenant] for at in range(begin, begin + window_s))
                for tenant in self.weights
            }
            for tenant, weight in self.weights.items():
                fair = weight / sum(self.weights.values())
                worst = max(worst, abs(tokens[tenant] / sum(tokens.values()) / fair - 1))
        return worst
