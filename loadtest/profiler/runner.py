"""From runs to a profile: search, bursts, label. What serves is behind `Runner`: a simulation or a cluster."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from loadtest.outcomes import Outcome
from loadtest.profiler.core.demand import Served, Span, fair_demand, peak_tokens, swap_bytes
from loadtest.profiler.core.profile import (
    Burst,
    Measured,
    Profile,
    Settings,
    factor_name,
    judge,
    label,
    nearest_rank,
    size_text,
)
from loadtest.profiler.core.search import RateSearch, SearchLimits
from loadtest.profiler.requests import Lengths
from loadtest.workloads.request import Request
from shared.errors import ClusterError

MAX_SERIES = 400  # requests of a run that are kept for its plot
FOR_EVER_MS = float("inf")
NO_RATE = "no rate that was tried keeps the SLO: try a smaller step, looser limits or shorter requests"
ALL_FAILED = "every request of every run failed: see what the server says of one"
FAILED_SHARE = 0.5  # of a burst's requests; of one of which more fail the rest does not say what it needs
Told = Callable[[str], None]


class NeedUnknown(ClusterError):
    """The burst that the role is decided by was not served: lower its factor, or see why its requests fail."""

    code = "profile.need_unknown"


class Spans:
    """Times in which something held, as pieces that follow each other are told."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def note(self, begin_ms: float, end_ms: float, *, holds: bool) -> None:
        """One more piece; none begins before the last one's end."""
        if holds and self.spans and self.spans[-1][1] == begin_ms:
            self.spans[-1] = (self.spans[-1][0], end_ms)
        elif holds:
            self.spans.append((begin_ms, end_ms))


@dataclass(slots=True)
class Observed:
    """What one run showed.

    gaps: (ms between two tokens, how many). peak_kv_bytes: of one GPU, the fullest. full: when requests waited for
    memory, in ms from the run's beginning.
    """

    outcomes: list[Outcome]
    gaps: list[tuple[float, float]] = field(default_factory=list)
    peak_kv_bytes: int = 0
    full: list[Span] = field(default_factory=list)
    peak_swap_bytes: int = 0  # of one GPU


class Runner(Protocol):
    """Serves requests at their times. All bytes are of one GPU."""

    @property
    def model(self) -> str:
        """What is profiled."""
        ...

    @property
    def tp(self) -> int:
        """GPUs that one instance is spread over."""
        ...

    @property
    def num_instances(self) -> int:
        """Among which requests are divided."""
        ...

    @property
    def chunk_tokens(self) -> int:
        """Of a step with prompts in it, at most; 0: not known."""
        ...

    @property
    def words(self) -> str:
        """Where the figures come from, for people."""
        ...

    @property
    def is_calibrated(self) -> bool:
        """Measured, or computed from what was; False: from a data sheet."""
        ...

    @property
    def pool_bytes(self) -> int:
        """KV memory."""
        ...

    @property
    def bytes_per_token(self) -> float:
        """KV of one token, shared out over all instances that hold contexts."""
        ...

    def run(self, requests: Sequence[Request]) -> Observed:
        """Serve them, nothing else meanwhile, and wait for all. Raises: ClusterError when it says nothing."""
        ...


class Profiler:
    """Args: tell: a line of progress for people. machine: goes into the file. turns: runs bursts in fair slices too."""

    def __init__(
        self,
        runner: Runner,
        lengths: Lengths,
        settings: Settings,
        limits: SearchLimits,
        *,
        tell: Told = lambda text: None,
        machine: dict[str, Any] | None = None,
        turns: Runner | None = None,
    ) -> None:
        self._runner, self._lengths, self._settings, self._limits = runner, lengths, settings, limits
        self._tell, self._machine, self._turns = tell, machine or {}, turns
        self._runs: list[Measured] = []
        self._series: dict[float, list[list[float]]] = {}

    def profile(self) -> Profile:
        """Everything. A stable rate of 0 says that no rate keeps the SLO; then nothing is lent or needed.

        Raises: what the runner raises; NeedUnknown. Cost: some 12 runs, then one a burst.
        """
        search = RateSearch(self._limits)
        while (rate := search.next_rate()) is not None:
            measured = self._measure(rate)
            search.record(rate, kept=measured.kept)
        found = search.found()
        asked = self._settings.bursts if found.rate_per_s else ()
        bursts = [one for factor in asked if (one := self._burst(found.rate_per_s, factor)) is not None]
        return self._sum_up(found.rate_per_s, found.settled, found.reason, bursts)

    def _measure(self, rate_per_s: float) -> Measured:
        settings = self._settings
        seed = settings.seed + sum(one.rate_per_s == rate_per_s for one in self._runs)
        requests = self._lengths.at_rate(rate_per_s, settings.seconds, settings.least_requests, seed)
        observed = self._runner.run(requests)
        measured = _measured(observed, rate_per_s, seed, settings)
        self._runs.append(measured)
        self._series.setdefault(rate_per_s, _series(observed.outcomes))
        verdict = "kept" if measured.kept else "missed"
        self._tell(
            f"{rate_per_s:g}/s: {verdict}; TTFT {_ms_text(measured.ttft_ms)}, TBT {measured.tbt_ms:.1f} ms, "
            f"{size_text(measured.peak_kv_bytes)} of KV, {measured.num_failed} failed"
        )
        return measured

    def _burst(self, rate_per_s: float, factor: float) -> Burst | None:
        """None: most of its requests failed, so that what it needs is not known."""
        settings, runner = self._settings, self._runner
        requests = self._lengths.burst(rate_per_s, factor, settings.burst_s, settings.seed)
        observed = runner.run(requests)
        num_failed = sum(not one.ok for one in observed.outcomes)
        if num_failed > FAILED_SHARE * len(requests):
            self._tell(f"{factor:g}x: {num_failed} of {len(requests)} requests failed, its need is not known")
            return None
        demand = peak_tokens(fair_demand(served(observed.outcomes), observed.full))
        measured = _measured(observed, rate_per_s * factor, settings.seed, settings)
        burst = Burst(
            factor=factor,
            demand_bytes=round(demand * runner.bytes_per_token),
            swap_bytes=swap_bytes(demand, runner.bytes_per_token, runner.pool_bytes),
            ttft_ms=measured.ttft_ms,
            num_requests=measured.num_requests,
            num_failed=measured.num_failed,
        )
        self._tell(
            f"{factor:g}x for {settings.burst_s:g} s: TTFT {_ms_text(burst.ttft_ms)}, {size_text(burst.demand_bytes)} "
            f"if nobody waited, {size_text(burst.swap_bytes)} more than there is"
        )
        return self._in_turns(burst, requests) if self._turns is not None else burst

    def _in_turns(self, burst: Burst, requests: Sequence[Request]) -> Burst:
        assert self._turns is not None
        observed = self._turns.run(requests)
        ttft_ms = _measured(observed, 0.0, self._settings.seed, self._settings).ttft_ms
        self._tell(
            f"{burst.factor:g}x in fair slices: TTFT {_ms_text(ttft_ms)}, {size_text(observed.peak_swap_bytes)} in "
            "swap space at most"
        )
        return msgspec.structs.replace(
            burst, turns_ttft_ms=ttft_ms, turns_swap_bytes=observed.peak_swap_bytes
        )

    def _sum_up(self, rate_per_s: float, settled: bool, reason: str, bursts: Sequence[Burst]) -> Profile:
        runner, settings = self._runner, self._settings
        at_rate = [one for one in self._runs if one.rate_per_s == rate_per_s and one.kept]
        peak = max((one.peak_kv_bytes for one in at_rate), default=0)
        free = max(0, runner.pool_bytes - peak) if at_rate else 0
        swap = {factor_name(one.factor): one.swap_bytes for one in bursts}
        decides = factor_name(settings.need_factor)
        if rate_per_s and settings.bursts and decides not in swap and free <= settings.threshold_bytes:
            raise NeedUnknown(f"most requests of the {decides}x burst failed: what it needs is not known")
        need = swap.get(decides, 0)
        role, bytes_per_gpu = label(free, need, settings.threshold_bytes)
        shown = (rate_per_s, round(rate_per_s + self._limits.step, 9))
        return Profile(
            model=runner.model,
            tp=runner.tp,
            role=role,
            bytes_per_gpu=bytes_per_gpu,
            stable_rate_per_s=rate_per_s,
            num_instances=runner.num_instances,
            pool_bytes=runner.pool_bytes,
            peak_kv_bytes=peak,
            free_bytes=free,
            swap_bytes=swap,
            settled=settled,
            reason=reason or ("" if rate_per_s else self._why_none()),
            source=runner.words,
            calibrated=runner.is_calibrated,
            settings=msgspec.to_builtins(settings),
            machine=self._machine,
            runs=msgspec.to_builtins(self._runs),
            bursts=msgspec.to_builtins(list(bursts)),
            series={f"{rate:g}": self._series[rate] for rate in shown if rate in self._series},
        )

    def _why_none(self) -> str:
        all_failed = all(one.num_failed == one.num_requests for one in self._runs)
        return ALL_FAILED if all_failed else NO_RATE


def served(outcomes: Sequence[Outcome]) -> list[Served]:
    """What fair_demand() reads. Failed requests are left out: with them it would be more."""
    return [
        Served(one.sent_ms, one.sent_ms + one.ttft_ms, one.ended_ms, one.prompt_tokens, one.output_tokens)
        for one in outcomes
        if one.ok
    ]


def _measured(observed: Observed, rate_per_s: float, seed: int, settings: Settings) -> Measured:
    slo = settings.slo
    times = [(one.ttft_ms if one.ok else FOR_EVER_MS, 1.0) for one in observed.outcomes]
    ttft_ms, middle_ms = nearest_rank(times, slo.ttft_share), nearest_rank(times, 0.5)
    measured = Measured(
        rate_per_s=rate_per_s,
        seed=seed,
        num_requests=len(observed.outcomes),
        num_failed=sum(not one.ok for one in observed.outcomes),
        ttft_ms=_finite(ttft_ms),
        ttft_p50_ms=_finite(middle_ms),
        tbt_ms=round(nearest_rank(observed.gaps, slo.tbt_share), 3),
        peak_kv_bytes=observed.peak_kv_bytes,
    )
    return msgspec.structs.replace(measured, kept=judge(measured, slo))


def _finite(ms: float) -> float:
    return -1.0 if ms == FOR_EVER_MS else round(ms, 3)


def _ms_text(ms: float) -> str:
    return f"{ms:.0f} ms" if ms >= 0 else "of requests that failed"


def _series(outcomes: Sequence[Outcome]) -> list[list[float]]:
    good = [one for one in outcomes if one.ok]
    every = max(1, -(-len(good) // MAX_SERIES))
    return [
        [round(one.sent_ms / 1000, 2), round(one.ttft_ms, 1), round(one.tpot_ms, 2)] for one in good[::every]
    ]
