"""Whether to disaggregate a workload, in which ratio, and what link that needs: by simulating every layout.

Layouts are compared by the highest rate at which a share of the requests keeps the SLO, on equal numbers of instances,
as DistServe and Splitwise compare them. That rate is one that they sustain (sustained.py), however short the trace is.
No I/O; time is asked for through a callable, so that a budget can end the search: what is left then is coarser, and
says so.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from loadtest.outcomes import Outcome
from loadtest.reports.summary import Slo
from loadtest.results import quantile
from loadtest.simulator.advice import (
    GAIN,
    LINKS_GB_PER_S,
    Advice,
    BreakEven,
    Engine,
    Layout,
    LinkNow,
    rounded,
    sentence,
    undecided,
    untold,
)
from loadtest.simulator.cluster import Simulation
from loadtest.simulator.hardware import Machine
from loadtest.simulator.known import Setting
from loadtest.simulator.links import gb_per_s
from loadtest.simulator.records import Summary, summarize
from loadtest.simulator.request import SimRequest, densest, mean_rate_per_s
from loadtest.simulator.spec import ClusterSpec, roles_of
from loadtest.simulator.sustained import (
    MOST_DOUBLINGS,
    MOST_MS,
    STEPS_PER_DOUBLING,
    Bracket,
    EndlessTrace,
    rate_at,
    step_of,
)
from loadtest.simulator.task import EngineLimits
from loadtest.workloads.stats import BLOCK_TOKENS
from services.scheduler.core.predict import CostSettings
from shared.errors import InvalidRequest

MAX_SPLITS = 7
MOST_SIMULATED = 8_000  # requests of one run: some 4 s
MOST_GAIN = 1000.0  # also where colocated instances sustain nothing: JSON has no infinity
SEARCH_SHARE = 0.75  # of the budget; the rest is for the link
LINK_STEPS = 7
BURST = 1.5  # times the whole trace's rate: so dense a stretch has its pauses left out
REACH = MOST_DOUBLINGS * STEPS_PER_DOUBLING  # steps from the trace's own rate, either way
LEAST_TTFT_MS, LEAST_TPOT_MS = 2_000.0, 50.0


@dataclass(frozen=True, slots=True)
class Question:
    """Args: instances: engines in all; setting: what is around their prices and KV, the link between them above all;
    good_share: of the requests must keep the SLO. most_simulated: requests of one run: rates that would need more are
    not tried, unless twice most_requests do."""

    requests: Sequence[SimRequest]
    machine: Machine
    instances: int
    slo: Slo
    setting: Setting = field(default_factory=Setting)
    good_share: float = 0.9
    most_requests: int = 600
    most_simulated: int = MOST_SIMULATED


def default_slo(requests: Sequence[SimRequest], machine: Machine) -> Slo:
    """Three times a long prompt's prefill alone, twice a lonely decode step; never tighter than 2 s and 50 ms, and no
    TTFT beyond MOST_MS."""
    prices = machine.prices
    long_prompt = quantile([request.prompt_tokens for request in requests], 0.9)
    ttft_ms = 3 * (prices.prefill_ms(int(long_prompt)) + prices.outside_ms(int(long_prompt)))
    return Slo(
        min(MOST_MS, max(LEAST_TTFT_MS, round(ttft_ms, -2))),
        max(LEAST_TPOT_MS, round(2 * prices.decode_ms(1, int(long_prompt)))),
    )


class Advisor:
    """Args: elapsed_s: since the beginning; budget_s: when the search ends.

    Raises: InvalidRequest on a question without an answer; of the trace only the stretch that is simulated must fit.
    """

    def __init__(self, question: Question, elapsed_s: Callable[[], float], budget_s: float) -> None:
        if question.instances < 2:
            raise InvalidRequest(
                f"{question.instances} instance cannot be divided into prefill and decode: give at least 2 instances"
            )
        self._question = question
        self._requests = densest(question.requests, question.most_requests)
        longest = max(one.prompt_tokens + one.output_tokens for one in self._requests)
        room = question.machine.memory_tokens
        if longest > room:
            raise InvalidRequest(
                f"a request of {longest} tokens has no room in the {room} of an engine: see --tp, --gpu"
            )
        if question.slo.ttft_ms > MOST_MS:
            raise InvalidRequest(
                f"a TTFT limit of {question.slo.ttft_ms:g} ms is longer than a rate is simulated for: give "
                f"--slo-ttft-ms of at most {MOST_MS:g}"
            )
        own, whole = mean_rate_per_s(self._requests), mean_rate_per_s(question.requests)
        if not own and not whole:
            raise InvalidRequest(
                "the trace has no rate: all of its requests come at one time; give a longer part of it, or lengths "
                "without times and --rate"
            )
        self._whole_rate_per_s, self._is_burst = whole, not own or own > BURST * whole > 0
        self._trace = EndlessTrace(self._requests, question.slo, own or whole)
        self._elapsed_s, self._budget_s = elapsed_s, budget_s
        self._deadline_s = budget_s * SEARCH_SHARE
        self._most_requests = max(question.most_simulated, 2 * len(self._requests))  # of one run
        self._num_simulations = 0
        self._within_budget = True

    def advise(self) -> Advice:
        """The verdict. Cost: some 30 simulations, or the budget."""
        layouts = self._layouts()
        for layout in layouts:
            self._at_own_rate(layout)
        decided = self._find_rates(layouts)
        colocated = layouts[0]
        splits = sorted(
            layouts[1:], key=lambda one: (one.max_rate_per_s, one.good_ratio, -one.jct_mean_ms), reverse=True
        )
        self._deadline_s = self._budget_s
        link = self._break_even(splits, colocated.max_rate_per_s)
        return self._verdict(layouts, splits[0], link, decided=decided)

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
        question, setting = self._question, self._question.setting
        coefficients = question.machine.prices.coefficients
        return ClusterSpec(
            roles_of(layout.num_prefill, layout.num_decode, layout.num_colocated),
            block_tokens=BLOCK_TOKENS,
            memory_tokens=question.machine.memory_tokens,
            dram_tokens=setting.dram_tokens,
            cost=CostSettings(disaggregation="always" if layout.is_split else "auto"),
            limits=EngineLimits(setting.max_running, coefficients.max_batched_tokens),
            pd_caching=setting.pd_caching,
            remote=gb_per_s(link_gb_per_s, setting.link_latency_ms),
            dram=setting.dram,
        )

    def _simulation(
        self,
        layout: Layout,
        link_gb_per_s: float,
        requests: Sequence[SimRequest],
        enough: Callable[[Outcome], bool] | None = None,
    ) -> Simulation:
        self._num_simulations += 1
        spec = self._spec(layout, link_gb_per_s)
        prices = self._question.machine.prices
        return Simulation(spec, prices, requests, enough=enough, is_late=lambda: not self._has_time())

    def _at_own_rate(self, layout: Layout) -> None:
        """What it does then, where there is time for all of it: half a run says nothing of the other half."""
        link = self._question.setting.link_gb_per_s
        if not self._has_time():
            return
        done = self._simulation(layout, link, self._requests).run()
        if len(done.outcomes) < len(self._requests):
            return
        layout.is_simulated = True
        found: Summary = summarize(done.outcomes, self._question.slo)
        layout.good_ratio, layout.hit_ratio = round(found.good_ratio, 4), round(found.hit_ratio, 4)
        for name in ("ttft_p50", "ttft_p99", "tpot_p99", "jct_mean"):
            setattr(layout, f"{name}_ms", round(found.times_ms.get(name, 0.0), 3))

    def _holds(self, layout: Layout, rate_per_s: float, link_gb_per_s: float) -> bool | None:
        """Whether the share keeps the SLO, warm-up aside; None: time ended first. It ends as soon as that is sure."""
        slo, load = self._question.slo, self._trace.at(rate_per_s)
        may_miss = int((1 - self._question.good_share) * load.num_judged + 1e-9)
        must_meet, num_met, num_missed = load.num_judged - may_miss, 0, 0
        judged = load.judged_ids()

        def is_sure(outcome: Outcome) -> bool:
            nonlocal num_met, num_missed
            if outcome.request_id in judged:
                is_met = slo.met(outcome)
                num_met, num_missed = num_met + is_met, num_missed + (not is_met)
            return num_met >= must_meet or num_missed > may_miss

        self._simulation(layout, link_gb_per_s, load.requests, is_sure).run()
        if num_met >= must_meet or num_missed > may_miss:
            return num_met >= must_meet
        return None

    def _has_time(self) -> bool:
        """Until the deadline of what is done now."""
        has = self._elapsed_s() < self._deadline_s
        self._within_budget = self._within_budget and has
        return has

    # -- the search -------------------------------------------------------------------------------

    def _find_rates(self, layouts: Sequence[Layout]) -> bool:
        """Whether it came to an end. To a step of the colocated layout and the best split; of the other splits until
        they are known to be no better."""
        own, top = step_of(self._trace.rate_per_s), self._top_step()
        brackets = [Bracket(min(own - REACH, top), min(own + REACH, top)) for _ in layouts]
        first, splits = brackets[0], range(1, len(layouts))
        first.stride *= 2  # nothing is known yet
        while not first.is_done and self._narrow(layouts[0], first, own):
            pass
        start = own if first.low is None else first.low
        for at in splits:
            self._narrow(layouts[at], brackets[at], start)
        while True:
            at = max(splits, key=lambda n: (brackets[n].most, brackets[n].is_done))
            if brackets[at].is_done or not self._narrow(layouts[at], brackets[at], start):
                break
        for layout, bracket in zip(layouts, brackets, strict=True):
            layout.max_rate_per_s = 0.0 if bracket.low is None else rounded(rate_at(bracket.low))
            layout.failed_rate_per_s = 0.0 if bracket.high is None else rounded(rate_at(bracket.high))
        return first.is_done and brackets[at].is_done

    def _narrow(self, layout: Layout, bracket: Bracket, start: int) -> bool:
        """One more simulation. False: there is no time for it."""
        if not self._has_time():
            return False
        step = bracket.next_step(start)
        holds = self._holds(layout, rate_at(step), self._question.setting.link_gb_per_s)
        if holds is None:
            return False
        bracket.note(step, holds=holds)
        return True

    def _top_step(self) -> int:
        """The highest rate whose run is not too long."""
        step = step_of(self._trace.rate_per_s) + REACH
        while self._trace.num_at(rate_at(step)) > self._most_requests and rate_at(step) > 1e-3:
            step -= 1
        return step

    def _cap(self) -> int | None:
        """Requests of one run, where they end the rates that are tried; None: REACH does."""
        is_sparse = self._top_step() == step_of(self._trace.rate_per_s) + REACH
        return None if is_sparse else self._most_requests

    def _break_even(self, splits: Sequence[Layout], rate_per_s: float) -> BreakEven:
        """Of the first split that sustains the rate over the fastest link: which is best there, nobody knows before."""
        if not rate_per_s:
            return BreakEven()
        fastest, now = LINKS_GB_PER_S[1], self._question.setting.link_gb_per_s
        for split in splits:
            if split.max_rate_per_s >= rate_per_s and now <= fastest:
                return self._slowest_link(split, rate_per_s, now)  # the search has seen that
            holds = self._holds_in_time(split, rate_per_s, fastest)
            if holds is None:
                return BreakEven()
            if holds:
                return self._slowest_link(split, rate_per_s, fastest)
        return BreakEven(is_known=True)

    def _slowest_link(self, split: Layout, rate_per_s: float, enough_gb_per_s: float) -> BreakEven:
        """At which it sustains the rate, as it does over the one that is known to be enough."""
        low, high = LINKS_GB_PER_S[0], enough_gb_per_s
        holds = high <= low or self._holds_in_time(split, rate_per_s, low)
        if holds:
            return BreakEven(low, split, is_known=True)
        for _ in range(LINK_STEPS):
            if holds is None:
                break
            middle = (low * high) ** 0.5
            holds = self._holds_in_time(split, rate_per_s, middle)
            if holds is not None:
                low, high = (low, middle) if holds else (middle, high)
        return BreakEven(round(high, 3), split, is_known=holds is not None)

    def _holds_in_time(self, layout: Layout, rate_per_s: float, link_gb_per_s: float) -> bool | None:
        """See _holds; not begun where time has ended."""
        return self._holds(layout, rate_per_s, link_gb_per_s) if self._has_time() else None

    # -- the verdict ------------------------------------------------------------------------------

    def _verdict(self, layouts: list[Layout], best: Layout, link: BreakEven, *, decided: bool) -> Advice:
        question, colocated = self._question, layouts[0]
        machine, setting = question.machine, question.setting
        gain = best.max_rate_per_s / colocated.max_rate_per_s if colocated.max_rate_per_s else math.inf
        if not best.max_rate_per_s:
            gain = 0.0
        pays = decided and gain >= GAIN and not colocated.is_at_least
        link_now = LinkNow(setting.link_gb_per_s, setting.source("link_gb_per_s"))
        if not decided:
            words = undecided(layouts)
        elif best.is_at_least and not pays:
            words, decided = untold(colocated, best, self._cap()), False
        else:
            words = sentence(colocated, best, pays, gain, link, link_now)
        return Advice(
            disaggregate=pays,
            prefill=best.num_prefill,
            decode=best.num_decode,
            gain_ratio=round(min(gain, MOST_GAIN), 3),
            break_even_gb_per_s=link.gb_per_s,
            break_even_known=link.is_known,
            break_even_layout=link.layout.name if link.layout is not None else "",
            decided=decided,
            sentence=words,
            trace_rate_per_s=rounded(self._trace.rate_per_s),
            whole_rate_per_s=rounded(self._whole_rate_per_s),
            is_burst=self._is_burst,
            simulated_requests=len(self._requests),
            slo_ttft_ms=question.slo.ttft_ms,
            slo_tpot_ms=question.slo.tpot_ms,
            good_share=question.good_share,
            link_gb_per_s=link_now.gb_per_s,
            link_source=link_now.source,
            engine=Engine(
                machine.memory_tokens, setting.max_running, setting.dram_tokens, str(setting.pd_caching)
            ),
            engine_sources={
                "memory_tokens": machine.memory_source,
                **{name: setting.source(name) for name in ("max_running", "dram_tokens", "pd_caching")},
            },
            costs=machine.words,
            calibrated=machine.calibrated,
            within_budget=self._within_budget,
            num_simulations=self._num_simulations,
            layouts=layouts,
        )
