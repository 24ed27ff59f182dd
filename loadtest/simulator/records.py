"""What many simulated requests come to: loadtest/outcomes.py's records, without confidence intervals, fast."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from loadtest.outcomes import SOURCES, Outcome
from loadtest.reports.summary import Slo
from loadtest.results import quantile

SHARES = (0.5, 0.9, 0.99)
ANY = Slo(ttft_ms=float("inf"), tpot_ms=float("inf"))


@dataclass(frozen=True, slots=True)
class Summary:
    """Of one run. Ratios of tokens are of the prompt tokens of answered requests."""

    num_requests: int
    num_failed: int
    span_ms: float  # first arrival to last end
    hit_ratio: float
    tokens_ratio: dict[str, float] = field(default_factory=dict)  # by source
    times_ms: dict[str, float] = field(default_factory=dict)  # "ttft_p99", ...
    good_ratio: float = 0.0
    goodput_per_s: float = 0.0


def summarize(outcomes: Sequence[Outcome], slo: Slo = ANY) -> Summary:
    """Percentiles of what was answered; goodput over all that was asked. Raises: ValueError on no requests."""
    if not outcomes:
        raise ValueError("no requests")
    good = [outcome for outcome in outcomes if outcome.ok]
    span_ms = max(outcome.ended_ms for outcome in outcomes) - min(outcome.sent_ms for outcome in outcomes)
    prompt_tokens = sum(outcome.prompt_tokens for outcome in good)
    ratio = {
        source: sum(outcome.sources.get(source, 0) for outcome in good) / max(1, prompt_tokens)
        for source in SOURCES
    }
    num_good = sum(slo.met(outcome) for outcome in outcomes)
    return Summary(
        num_requests=len(outcomes),
        num_failed=len(outcomes) - len(good),
        span_ms=span_ms,
        hit_ratio=1.0 - ratio["computed"] if good else 0.0,
        tokens_ratio=ratio,
        times_ms=_times(good),
        good_ratio=num_good / len(outcomes),
        goodput_per_s=1000 * num_good / max(1e-9, span_ms),
    )


def _times(good: Iterable[Outcome]) -> dict[str, float]:
    good = list(good)
    out: dict[str, float] = {}
    for name in ("ttft", "tpot", "jct"):
        values = [getattr(outcome, f"{name}_ms") for outcome in good]
        if name == "tpot":
            values = [value for value in values if value]
        if values:
            out[f"{name}_mean"] = sum(values) / len(values)
            for share in SHARES:
                out[f"{name}_p{round(share * 100)}"] = quantile(values, share)
    return out
