"""One record a request, as the load driver writes them, and what they come to."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from loadtest.results import quantile

SOURCES = ("local", "dram", "peer", "computed")
SHARES = (0.5, 0.9, 0.99)


@dataclass(slots=True)
class Record:
    """Times in ms from the beginning of the run. error: "" or the code with which it ended."""

    request_id: str
    arrival_ms: float
    prompt_tokens: int
    output_tokens: int
    session: str = ""
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0  # 0 where the answer has one token
    jct_ms: float = 0.0
    error: str = ""
    attempts: int = 0
    kind: str = ""
    prefill: str = ""
    decode: str = ""
    tokens_local: int = 0
    tokens_dram: int = 0
    tokens_peer: int = 0
    tokens_computed: int = 0
    queue_ms: float = 0.0
    predicted_ttft_ms: float = 0.0
    has_ended: bool = False

    @property
    def ok(self) -> bool:
        """Answered in full."""
        return self.has_ended and not self.error

    def as_line(self) -> dict[str, Any]:
        """For a JSON line; floats to the microsecond."""
        found = asdict(self)
        return {key: round(v, 3) if isinstance(v, float) else v for key, v in found.items()}


@dataclass(frozen=True, slots=True)
class Slo:
    """A request is good when both hold; 0 asks for nothing."""

    ttft_ms: float = 0.0
    tpot_ms: float = 0.0

    def holds(self, record: Record) -> bool:
        """Failed requests are never good."""
        return (
            record.ok
            and (not self.ttft_ms or record.ttft_ms <= self.ttft_ms)
            and (not self.tpot_ms or record.tpot_ms <= self.tpot_ms)
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """Of one run. Ratios are of the prompt tokens of answered requests."""

    num_requests: int
    num_failed: int
    span_ms: float  # first arrival to last end
    hit_ratio: float
    tokens_ratio: dict[str, float] = field(default_factory=dict)  # by source
    times_ms: dict[str, float] = field(default_factory=dict)  # "ttft_p99", ...
    good_ratio: float = 0.0
    goodput_per_s: float = 0.0


def summarize(records: Sequence[Record], slo: Slo | None = None) -> Summary:
    """Percentiles of what was answered; goodput over all that was asked."""
    slo = slo or Slo()
    good = [record for record in records if record.ok]
    begin_ms = min((record.arrival_ms for record in records), default=0.0)
    end_ms = max((record.arrival_ms + record.jct_ms for record in records), default=0.0)
    prompt_tokens = sum(record.prompt_tokens for record in good)
    ratio = {
        source: sum(getattr(record, f"tokens_{source}") for record in good) / max(1, prompt_tokens)
        for source in SOURCES
    }
    num_good = sum(slo.holds(record) for record in records)
    return Summary(
        num_requests=len(records),
        num_failed=len(records) - len(good),
        span_ms=end_ms - begin_ms,
        hit_ratio=1.0 - ratio["computed"] if good else 0.0,
        tokens_ratio=ratio,
        times_ms=_times(good),
        good_ratio=num_good / max(1, len(records)),
        goodput_per_s=1000 * num_good / max(1e-9, end_ms - begin_ms),
    )


def _times(good: Iterable[Record]) -> dict[str, float]:
    good = list(good)
    out: dict[str, float] = {}
    for name in ("ttft", "tpot", "jct"):
        values = [getattr(record, f"{name}_ms") for record in good]
        if name == "tpot":
            values = [value for value in values if value]
        if values:
            out[f"{name}_mean"] = sum(values) / len(values)
            for share in SHARES:
                out[f"{name}_p{round(share * 100)}"] = quantile(values, share)
    return out
