"""What became of each request of a run, and the file that keeps it: a head line, then a line per request."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from loadtest.sse import StreamTimes

SOURCES = ("engine", "pool", "peer", "dram", "remote", "computed")
FORMAT = "quire-run/1"


@dataclass(slots=True)
class Outcome:
    """One request. Times in ms from the run's beginning or from when it was sent; 0: did not happen.

    lag_ms: how late it was sent, which is the client's fault. ttft_ms: 0 of a whole answer: none of its tokens showed
    text. error: "" when the answer is whole; skipped: nothing was sent (the turn before failed, or the client had too
    many in flight). cut_off: the run ended before the answer did; jct_ms is until then, and until
    a request failed where it did.
    sources: prompt tokens by where their KV came from, by the receipt of the stage that computed the prompt.
    """

    request_id: int
    session: str
    turn: int
    due_ms: float = 0.0
    sent_ms: float = 0.0
    lag_ms: float = 0.0
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    jct_ms: float = 0.0
    planned_prompt_tokens: int = 0
    planned_output_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    sources: dict[str, int] = field(default_factory=dict)
    placement: str = ""
    policy: str = ""
    reason: str = ""
    instances: list[str] = field(default_factory=list)
    stages: dict[str, float] = field(
        default_factory=dict
    )  # queue_ms, fetch_ms, compute_ms of the first stage
    # by stage, ms: what the scheduler expected, what it took; None where one of them does not know
    times: dict[str, list[float | None]] = field(default_factory=dict)
    bytes_moved: int = 0
    predicted_ttft_ms: float = 0.0
    longest_gap_ms: float = 0.0
    skipped: bool = False
    cut_off: bool = False
    error: str = ""

    @property
    def ok(self) -> bool:
        """A whole answer with at least one token."""
        return not (self.error or self.skipped or self.cut_off) and self.output_tokens > 0

    @property
    def ended_ms(self) -> float:
        """From the run's beginning."""
        return self.sent_ms + self.jct_ms


@dataclass(slots=True)
class Run:
    """One run: what it was (workload, rate, seed, server, machine, ...) and what became of its requests."""

    head: dict[str, Any]
    outcomes: list[Outcome]

    @property
    def name(self) -> str:
        """For tables and legends."""
        return str(self.head.get("name") or self.head.get("workload") or "run")


def take_receipt(outcome: Outcome, receipt: Mapping[str, Any] | None) -> None:
    """Fill in what a receipt says. Other servers have none, and older ones say less."""
    if not receipt:
        return
    stages: Sequence[Mapping[str, Any]] = receipt.get("stages") or []
    outcome.placement = str(receipt.get("placement") or "")
    outcome.policy = str(receipt.get("policy") or "")
    outcome.reason = str(receipt.get("reason") or "")
    outcome.predicted_ttft_ms = float(receipt.get("predicted_ttft_ms") or 0.0)
    outcome.instances = [str(stage.get("instance", "")) for stage in stages]
    outcome.bytes_moved = sum(int(stage.get("bytes_moved") or 0) for stage in stages)
    times: Mapping[str, Mapping[str, float | None]] = receipt.get("times") or {}
    outcome.times = {name: [one.get("predicted_ms"), one.get("actual_ms")] for name, one in times.items()}
    if stages:
        first = stages[0]
        outcome.sources = sources_of(first)
        outcome.stages = {
            name: round(float(first.get(name) or 0.0), 3) for name in ("queue_ms", "fetch_ms", "compute_ms")
        }


def take_times(outcome: Outcome, times: StreamTimes) -> None:
    """Fill in what a whole answer's stream showed. One without a token is an error."""
    outcome.ttft_ms, outcome.jct_ms = round(times.ttft_ms, 3), round(times.ended_ms, 3)
    outcome.tpot_ms = round(times.tpot_ms, 4)
    outcome.longest_gap_ms = max(times.gaps_ms, default=0.0)
    outcome.prompt_tokens, outcome.cached_tokens = times.prompt_tokens, times.cached_tokens
    outcome.output_tokens = times.output_tokens or len(times.token_ids) or times.num_events
    if not outcome.output_tokens:
        outcome.error = "the answer holds no token"


def take_cut(outcome: Outcome, times: StreamTimes, took_ms: float) -> None:
    """Fill in what was seen of an answer until the run ended."""
    outcome.cut_off = True
    outcome.ttft_ms, outcome.jct_ms = round(times.ttft_ms, 3), round(took_ms, 3)
    outcome.output_tokens = times.output_tokens or len(times.token_ids) or times.num_events


def sources_of(stage: Mapping[str, Any]) -> dict[str, int]:
    """Tokens by source of one stage. What was brought to the pool for it is part of the receipt's tokens_pool."""
    found = {name: int(stage.get(f"tokens_{name}") or 0) for name in SOURCES}
    found["pool"] = max(0, found["pool"] - found["peer"] - found["dram"] - found["remote"])
    return {name: count for name, count in found.items() if count}


def write_run(path: Path, run: Run) -> None:
    """One JSON object a line; the first is the head."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as target:
        write_head(target, run.head)
        for outcome in run.outcomes:
            write_outcome(target, outcome)


def write_head(target: IO[str], head: Mapping[str, Any]) -> None:
    """A run's first line."""
    target.write(json.dumps({"format": FORMAT, **head}) + "\n")


def write_outcome(target: IO[str], outcome: Outcome) -> None:
    """One more line."""
    target.write(json.dumps(asdict(outcome)) + "\n")


class _Machine(msgspec.Struct):
    gpu: list[str] = []


class _Head(msgspec.Struct):
    """What reports calculate with; the rest of a head is shown as it is."""

    hit_bound: float | None = None
    machine: _Machine | None = None


def read_run(path: Path) -> Run:
    """Raises: ValueError naming the file and line when it is no such file, or a value has another type."""
    with path.open() as source:
        try:
            head = json.loads(source.readline() or "null")
        except ValueError:
            head = None
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            raise ValueError(f"{path}: the first line is not the head of a {FORMAT} file")
        try:
            msgspec.convert(head, _Head)
        except ValueError as error:
            raise ValueError(f"{path}:1: {error}") from None
        outcomes = []
        for number, line in enumerate(source, 2):
            try:
                outcomes.append(msgspec.convert(json.loads(line), Outcome, strict=False))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
    head.setdefault("name", path.stem)
    return Run(head, outcomes)
