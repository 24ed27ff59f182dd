"""The figures of one run, with confidence intervals: by bootstrap over its requests, of the good share Wilson's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from loadtest.open_loop import lag_p99_ms
from loadtest.outcomes import SOURCES, Outcome, Run

RESAMPLES = 400
LEVEL, LEVEL_Z = 0.95, 1.959964  # of intervals; the normal quantile of it
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
METRICS = ("ttft_ms", "tpot_ms", "jct_ms")
CHUNK_VALUES = 4_000_000  # resampled at once: bounds memory


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits of a request that counts as good."""

    ttft_ms: float = 2_000.0
    tpot_ms: float = 100.0

    def met(self, outcome: Outcome) -> bool:
        """Whole, and seen to be within both: an answer of which nothing was seen has no TTFT to be within."""
        return outcome.ok and 0 < outcome.ttft_ms <= self.ttft_ms and outcome.tpot_ms <= self.tpot_ms

    def is_open(self, outcome: Outcome) -> bool:
        """Cut off by the run's end before it was late: nobody knows what would have become of it."""
        return outcome.cut_off and (outcome.ttft_ms or outcome.jct_ms) <= self.ttft_ms


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and the interval in which 95% of resampled runs have it."""

    value: float
    low: float
    high: float


@dataclass(slots=True)
class Summary:
    """times: by metric, then mean, p50, p90, p99. sources: share of prompt tokens, by where their KV came from.

    seconds: from the first that was sent to the last answer's end. goodput: share in the SLO times the offered rate (of
    the gaps between the times at which requests were due), so that the end of a run, when nothing new comes, costs
    nothing. Locust's users wait for answers and offer no rate of their own: those in the SLO, over the run's seconds.
    """

    name: str
    num_requests: int
    num_failed: int
    num_skipped: int
    num_cut_off: int
    seconds: float
    requests_per_s: float
    output_tokens_per_s: float
    goodput: Interval
    slo: Slo
    slo_share: Interval
    times: dict[str, dict[str, Interval]] = field(default_factory=dict)
    sources: dict[str, float] = field(default_factory=dict)
    hit: Interval = field(default_factory=lambda: Interval(0, 0, 0))
    hit_bound: float | None = None  # of an infinite cache; None: not known, as of a part of a run
    predicted: dict[str, Interval] = field(default_factory=dict)  # error of the scheduler's TTFT, p50 and p90
    lag_p99_ms: float = 0.0
    client_verdict: str = ""
    is_cut_short: bool = False  # somebody stopped it


def nearest_rank(values: np.ndarray, share: float) -> np.ndarray:
    """The smallest value that at least `share` of all do not exceed, along the last axis (as results.quantile)."""
    rank = max(0, int(np.ceil(share * values.shape[-1])) - 1)
    return np.partition(values, rank, axis=-1)[..., rank]


def bootstrap(
    rows: np.ndarray,
    statistic: Callable[[np.ndarray], np.ndarray],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """Percentile bootstrap. Args: rows: [n] or [n, k], a row a request; statistic: of [..., n(, k)] over the n.

    Raises: ValueError on no rows. Cost: resamples * n draws.
    """
    if not len(rows):
        raise ValueError("no values")
    rng = np.random.default_rng(seed)
    step = max(1, CHUNK_VALUES // rows.size)
    drawn: list[np.ndarray] = []
    for begin in range(0, resamples, step):
        picks = rng.integers(0, len(rows), size=(min(step, resamples - begin), len(rows)))
        drawn.append(np.atleast_1d(statistic(rows[picks])))
    every = np.concatenate(drawn)
    low, high = np.quantile(every, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(statistic(rows[None])[0]), float(low), float(high))


def wilson(num_good: int, num: int) -> Interval:
    """A share and its interval by Wilson's score: 5 of 5 are not all there may ever be, as a bootstrap has it."""
    if not num:
        return Interval(0, 0, 0)
    share, z2 = num_good / num, LEVEL_Z * LEVEL_Z
    middle = (share + z2 / (2 * num)) / (1 + z2 / num)
    reach = LEVEL_Z * (share * (1 - share) / num + z2 / (4 * num * num)) ** 0.5 / (1 + z2 / num)
    return Interval(share, max(0.0, min(share, middle - reach)), min(1.0, max(share, middle + reach)))


def _ratio(rows: np.ndarray) -> np.ndarray:
    """Sum over sum, of [..., n, 2]."""
    sums = rows.sum(axis=-2)
    return sums[..., 0] / np.maximum(sums[..., 1], 1e-12)


def between(run: Run, from_s: float, to_s: float) -> Run:
    """The requests that were due in that time: without a warm-up, say. The bound of hits is of the whole run."""
    kept = [one for one in run.outcomes if from_s * 1000 <= one.due_ms < to_s * 1000]
    return Run(run.head if len(kept) == len(run.outcomes) else run.head | {"hit_bound": None}, kept)


def summarise(run: Run, slo: Slo) -> Summary:
    """Every figure of a run. Failed requests count against the SLO; those that the client did not send do too.

    Those that the run's end cut off count against it where they were late by then, and else neither way.
    """
    good = [one for one in run.outcomes if one.ok]
    sent = [one for one in run.outcomes if not one.skipped]
    begin_ms = min((one.sent_ms for one in sent), default=0.0)
    ended_ms = max((one.sent_ms if one.error else one.ended_ms for one in sent), default=0.0)
    seconds = max(1e-3, (ended_ms - begin_ms) / 1000)
    num_decided = sum(not slo.is_open(one) for one in run.outcomes)
    share = wilson(sum(slo.met(one) for one in run.outcomes), num_decided)
    due = [one.due_ms for one in run.outcomes]
    offered_s = (max(due) - min(due)) / 1000 if due else 0.0
    per_s = (len(due) - 1) / offered_s if offered_s else len(due) / seconds
    if run.head.get("client") == "locust":
        per_s = num_decided / seconds
    return Summary(
        name=run.name,
        num_requests=len(run.outcomes),
        num_failed=sum(not (one.ok or one.skipped or one.cut_off) for one in run.outcomes),
        num_skipped=sum(one.skipped for one in run.outcomes),
        num_cut_off=sum(one.cut_off for one in run.outcomes),
        seconds=seconds,
        requests_per_s=len(good) / seconds,
        output_tokens_per_s=sum(one.output_tokens for one in good) / seconds,
        goodput=Interval(share.value * per_s, share.low * per_s, share.high * per_s),
        slo=slo,
        slo_share=share,
        times=_times(good),
        sources=_sources(good),
        hit=_hit(good),
        hit_bound=run.head.get("hit_bound"),
        predicted=_predicted(good),
        lag_p99_ms=lag_p99_ms(run.outcomes),
        client_verdict=str(run.head.get("client_verdict") or ""),
        is_cut_short=bool(run.head.get("cut_short")),
    )


def _times(good: Sequence[Outcome]) -> dict[str, dict[str, Interval]]:
    found = {}
    for metric in METRICS:
        values = np.array([v for one in good if (v := getattr(one, metric)) > 0])
        if not len(values):
            continue
        found[metric] = {"mean": bootstrap(values, lambda v: v.mean(axis=-1))}
        for name, level in PERCENTILES.items():
            found[metric][name] = bootstrap(values, lambda v, level=level: nearest_rank(v, level))
    return found


def _sources(good: Sequence[Outcome]) -> dict[str, float]:
    total = sum(sum(one.sources.values()) for one in good)
    if not total:
        return {}
    return {name: sum(one.sources.get(name, 0) for one in good) / total for name in SOURCES}


def _predicted(good: Sequence[Outcome]) -> dict[str, Interval]:
    """|predicted - measured| / measured of TTFT, where both are there; the client is part of what is measured."""
    rows = [
        abs(one.predicted_ttft_ms / one.ttft_ms - 1)
        for one in good
        if one.predicted_ttft_ms > 0 and one.ttft_ms > 0
    ]
    if not rows:
        return {}
    values = np.array(rows)
    return {
        name: bootstrap(values, lambda v, level=level: nearest_rank(v, level))
        for name, level in (("p50", 0.5), ("p90", 0.9))
    }


def _hit(good: Sequence[Outcome]) -> Interval:
    """Prompt tokens whose KV existed: by the receipts where there are any, else by usage's cached tokens."""
    rows = []
    for one in good:
        if total := sum(one.sources.values()):
            rows.append([total - one.sources.get("computed", 0), total])
        else:
            rows.append([one.cached_tokens, max(1, one.prompt_tokens)])
    return bootstrap(np.array(rows, dtype=float), _ratio) if rows else Interval(0, 0, 0)


def one_line(found: Summary) -> str:
    """For a terminal."""
    parts = [
        f"{found.name}: {found.num_requests} requests in {found.seconds:.1f} s, {found.num_failed} failed, "
        f"{found.num_skipped} not sent" + (f", {found.num_cut_off} cut off" if found.num_cut_off else "")
    ]
    for metric, label in zip(METRICS, ("TTFT", "TPOT", "JCT"), strict=True):
        if times := found.times.get(metric):
            parts.append(f"{label} " + "/".join(f"{times[p].value:.1f}" for p in PERCENTILES) + " ms")
    parts.append(f"goodput {found.goodput.value:.2f}/s ({found.slo_share.value:.0%} in the SLO)")
    parts.append(f"hits {found.hit.value:.1%}")
    return "; ".join(parts)
