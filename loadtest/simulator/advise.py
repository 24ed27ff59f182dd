"""Whether to disaggregate a workload, in which ratio, and what link that needs: by simulating every layout.

Layouts are compared by the highest rate at which a share of the requests keeps the SLO, on equal numbers of instances,
as DistServe and Splitwise compare them. No I/O; time is asked for through a callable, so that a budget can end the
search: what is left then is coarser, and says so.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from loadtest.outcomes import Outcome
from loadtest.reports.summary import Slo
from loadtest.results import quantile
from loadtest.simulator.cluster import Simulation
from loadtest.simulator.hardware import Machine
from loadtest.simulator.links import gb_per_s
from loadtest.simulator.records import Summary, summarize
from loadtest.simulator.request import SimRequest, densest, faster, mean_rate_per_s
from loadtest.simulator.spec import ClusterSpec, roles_of
from loadtest.simulator.task import EngineLimits
from loadtest.workloads.stats import BLOCK_TOKENS
from services.scheduler.core.predict import CostSettings
from shared.errors import InvalidRequest

MAX_SPLITS = 7
GAIN = 1.05  # below this a layout is no better: the search itself is no finer
REFINE_STEPS = 4  # of the rate: to 2 ** (1 / 16), 4%
MAX_DOUBLINGS = 10
LINKS_GB_PER_S = (0.05, 1000.0)
LINK_STEPS = 7
LEAST_TTFT_MS, LEAST_TPOT_MS = 2_000.0, 50.0


@dataclass(frozen=True, slots=True)
class Question:
    """Args: instances: engines in all; link_gb_per_s: between them; good_share: of the requests must keep the SLO."""

    requests: Sequence[SimRequest]
    machine: Machine
    instances: int
    slo: Slo
    link_gb_per_s: float = 20.0
    good_share: float = 0.9
    most_requests: int = 600
    max_running: int = 256


@dataclass(slots=True)
class Layout:
    """One way to use the instances. Times at the trace's own rate."""

    name: str
    num_prefill: int
    num_decode: int
    num_colocated: int
    max_rate_per_s: float = 0.0
    good_ratio: float = 0.0
    hit_ratio: float = 0.0
    ttft_p50_ms: float = 0.0
    ttft_p99_ms: float = 0.0
    tpot_p99_ms: float = 0.0
    jct_mean_ms: float = 0.0

    @property
    def is_split(self) -> bool:
        """Disaggregated."""
        return self.num_prefill > 0


@dataclass(slots=True)
class Advice:
    """break_even_gb_per_s: the slowest link at which the best split still sustains what colocated instances do; None:
    none does. within_budget: False where time ended the search early."""

    disaggregate: bool
    prefill: int
    decode: int
    gain_ratio: float
    break_even_gb_per_s: float | None
    sentence: str
    trace_rate_per_s: float
    simulated_requests: int
    slo_ttft_ms: float
    slo_tpot_ms: float
    good_share: float
    link_gb_per_s: float
    costs: str
    calibrated: bool
    within_budget: bool = True
    num_simulations: int = 0
    layouts: list[Layout] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        return asdict(self)


def default_slo(requests: Sequence[SimRequest], machine: Machine) -> Slo:
    """Three times a long prompt's prefill alone, twice a lonely decode step, and never tighter than 2 s and 50 ms."""
    prices = machine.prices
    long_prompt = quantile([request.prompt_tokens for request in requests], 0.9)
    ttft_ms = 3 * (prices.prefill_ms(int(long_prompt)) + prices.outside_ms(int(long_prompt)))
    return Slo(
        max(LEAST_TTFT_MS, round(ttft_ms, -2)),
        max(LEAST_TPOT_MS, round(2 * prices.decode_ms(1, int(long_prompt)))),
    )


class Advisor:
    """Args: elapsed_s: since the beginning; budget_s: when the search ends."""

    def __init__(self, question: Question, elapsed_s: Callable[[], float], budget_s: float) -> None:
        if question.instances < 2:
            raise InvalidRequest(
                f"{question.instances} instance cannot be divided into prefill and decode: give at least 2 instances"
            )
        self._question = question
        self._requests = densest(question.requests, question.most_requests)
        self._rate = mean_rate_per_s(self._requests) or 1.0
        self._elapsed_s, self._budget_s = elapsed_s, budget_s
        self._num_simulations = 0
        self._within_budget = True

    def advise(self) -> Advice:
        """The verdict. Cost: some 50 simulations, or the budget."""
        layouts = self._layouts()
        guess = 1.0
        for layout in layouts:
            self._at_own_rate(layout)
            speed = guess = self._max_speed(layout, guess)
            layout.max_rate_per_s = round(speed * self._rate, 4)
        colocated = layouts[0]
        best = max(layouts[1:], key=lambda one: (one.max_rate_per_s, one.good_ratio, -one.jct_mean_ms))
        gain = best.max_rate_per_s / max(1e-9, colocated.max_rate_per_s)
        link = self._break_even(best, colocated.max_rate_per_s / self._rate)
        return self._verdict(layouts, colocated, best, gain, link)

    # -- simulations ------------------------------------------------------------------------------

    def _layouts(self) -> list[Layout]:
        n = self._question.instances
        counts = sorted(
            {max(1, min(n - 1, round(n * k / (MAX_SPLITS + 1)))) for k in range(1, MAX_SPLITS + 1)}
        )
        if n <= MAX_SPLITS + 1:
            counts = list(range(1, n))
        return [Layout(f"{n} colocated", 0, 0, n), *(Layout(f"{p}P:{n - p}D", p, n - p, 0) for p in counts)]

    def _spec(self, layout: Layout, link_gb_per_s: float) -> ClusterSpec:
        question = self._question
        coefficients = question.machine.prices.coefficients
        return ClusterSpec(
            roles_of(layout.num_prefill, layout.num_decode, layout.num_colocated),
            block_tokens=BLOCK_TOKENS,
            memory_tokens=question.machine.memory_tokens,
            cost=CostSettings(disaggregation="always" if layout.is_split else "auto"),
            limits=EngineLimits(question.max_running, coefficients.max_batched_tokens),
            remote=gb_per_s(link_gb_per_s),
        )

    def _run(self, layout: Layout, speed: float, link_gb_per_s: float, *, whole: bool) -> Summary:
        """Unless `whole`, it ends as soon as too many requests missed the SLO."""
        question = self._question
        left = int((1 - question.good_share) * len(self._requests))

        def too_many(outcome: Outcome) -> bool:
            nonlocal left
            left -= not question.slo.met(outcome)
            return left < 0

        self._num_simulations += 1
        spec = self._spec(layout, link_gb_per_s)
        requests = faster(self._requests, speed)
        done = Simulation(spec, question.machine.prices, requests, enough=None if whole else too_many).run()
        found = summarize(done.outcomes, question.slo)
        return found if left >= 0 or whole else replace(found, good_ratio=0.0)

    def _holds(self, layout: Layout, speed: float, link_gb_per_s: float) -> bool:
        return self._run(layout, speed, link_gb_per_s, whole=False).good_ratio >= self._question.good_share

    def _has_time(self) -> bool:
        self._within_budget = self._within_budget and self._elapsed_s() < self._budget_s
        return self._within_budget

    def _at_own_rate(self, layout: Layout) -> None:
        found = self._run(layout, 1.0, self._question.link_gb_per_s, whole=True)
        layout.good_ratio, layout.hit_ratio = round(found.good_ratio, 4), round(found.hit_ratio, 4)
        for name in ("ttft_p50", "ttft_p99", "tpot_p99", "jct_mean"):
            setattr(layout, f"{name}_ms", round(found.times_ms.get(name, 0.0), 3))

    def _max_speed(self, layout: Layout, guess: float) -> float:
        """The highest multiple of the trace's rate at which enough requests keep the SLO; 0: none that was tried."""
        link = self._question.link_gb_per_s
        low, high = 0.0, 0.0
        speed = guess or 1.0
        for _ in range(MAX_DOUBLINGS):
            if not self._has_time():
                break
            if self._holds(layout, speed, link):
                low = speed
                speed *= 2
                if high:
                    break
            else:
                high = speed
                speed /= 2
                if low:
                    break
        for _ in range(REFINE_STEPS):
            if not low or not high or not self._has_time():
                break
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self._holds(layout, middle, link) else (low, middle)
        return low

    def _break_even(self, best: Layout, speed: float) -> float | None:
        """The slowest link at which the split sustains the speed."""
        low, high = LINKS_GB_PER_S
        if not speed or not self._holds(best, speed, high):
            return None
        if self._holds(best, speed, low):
            return low
        for _ in range(LINK_STEPS):
            if not self._has_time():
                break
            middle = (low * high) ** 0.5
            low, high = (low, middle) if self._holds(best, speed, middle) else (middle, high)
        return round(high, 3)

    # -- the verdict ------------------------------------------------------------------------------

    def _verdict(
        self, layouts: list[Layout], colocated: Layout, best: Layout, gain: float, link: float | None
    ) -> Advice:
        question = self._question
        pays = gain >= GAIN
        return Advice(
            disaggregate=pays,
            prefill=best.num_prefill,
            decode=best.num_decode,
            gain_ratio=round(gain, 3),
            break_even_gb_per_s=link,
            sentence=_sentence(colocated, best, pays, gain, link, question.link_gb_per_s),
            trace_rate_per_s=round(self._rate, 3),
            simulated_requests=len(self._requests),
            slo_ttft_ms=question.slo.ttft_ms,
            slo_tpot_ms=question.slo.tpot_ms,
            good_share=question.good_share,
            link_gb_per_s=question.link_gb_per_s,
            costs=question.machine.words,
            calibrated=question.machine.calibrated,
            within_budget=self._within_budget,
            num_simulations=self._num_simulations,
            layouts=layouts,
        )


def _sentence(
    colocated: Layout, best: Layout, pays: bool, gain: float, link: float | None, link_now: float
) -> str:
    if not colocated.max_rate_per_s and not best.max_rate_per_s:
        return "No layout keeps the SLO at any rate that was tried: loosen it, or take faster instances."
    ratio = f"{best.num_prefill} prefill to {best.num_decode} decode"
    if pays:
        return (
            f"Disaggregate, {ratio}: it sustains {best.max_rate_per_s:.2f} requests/s within the SLO, "
            f"{colocated.name} sustain {colocated.max_rate_per_s:.2f} ({gain:.2f}x). {_link_words(link, link_now)}"
        )
    return (
        f"Keep them colocated: {colocated.name} sustain {colocated.max_rate_per_s:.2f} requests/s within the SLO, "
        f"the best division ({ratio}) {best.max_rate_per_s:.2f} ({gain:.2f}x; it takes {GAIN:g}x to be "
        f"worth it). {_keeps_up_words(link)}"
    )


def _keeps_up_words(link: float | None) -> str:
    if link is None:
        return f"No link up to {LINKS_GB_PER_S[1]:g} GB/s would change that."
    if link <= LINKS_GB_PER_S[0]:
        return f"It keeps up with them over any link from {link:g} GB/s on."
    return f"It keeps up with them from {link:.3g} GB/s between instances on."


def _link_words(link: float | None, link_now: float) -> str:
    if link is None:
        return f"No link up to {LINKS_GB_PER_S[1]:g} GB/s would change that."
    if link <= LINKS_GB_PER_S[0]:
        return f"Any link from {link:g} GB/s on is enough to break even."
    return f"Below {link:.3g} GB/s between instances disaggregation stops paying (assumed now: {link_now:g} GB/s)."
