"""What bench_burst.py compares: systems, the loads of each, and in which order the points are measured.

A point is a run of its own: a system, a seed, a load. Nothing runs beside it: with another engine at work on the other
GPU a run takes some percent less or more, and 2% tell the systems apart.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.profiler.requests import WARM, Lengths, of_workload
from loadtest.results import load_result
from loadtest.workloads.distributions import Draws, Lognormal
from loadtest.workloads.request import Request, salted

FCFS, DRAM, PEER = "fcfs", "cfs_dram", "cfs_peer"
SYSTEMS = (FCFS, DRAM, PEER)
BESIDE = "fcfs_beside"  # an engine
BURST, STABLE = "burst", "stable"
HEADROOM = 1.3  # of the KV memory, over the most that the stable rate holds
FACTORS = {"sharegpt": 2.0, "arxiv": 3.0}  # AQUA 9.3, Figures 8 and 13
ARXIV_PROMPT = Lognormal.of_mean(7_900, 0.5)  # AQUA 9.1, 9.4: a median of some 7,000 tokens
ARXIV_OUTPUT = Lognormal.of_mean(348, 0.8)
DRAWN = 1_024
DEFAULTS: dict[str, dict[str, Any]] = {  # of the options, by device
    "cuda": {
        "burst_s": 60.0, "stable_s": 20.0, "scale": 1.0, "context_tokens": 8_192, "slots": 256, "chunk_tokens": 8_192,
        "slice_steps": 8, "quantum_tokens": 1 << 20, "patience_slices": 128, "spread_ms": 500.0,
        "swap_bytes": 90_000_000_000, "in_flight_bytes": 1 << 30, "seeds": "1,2,3",
        "max_lag_ms": 100.0,
    },
    "cpu": {
        "burst_s": 10.0, "stable_s": 5.0, "scale": 0.2, "context_tokens": 1_024, "slots": 32, "chunk_tokens": 512,
        "slice_steps": 8, "quantum_tokens": 1 << 20, "patience_slices": 128, "spread_ms": 500.0,
        "swap_bytes": 256 << 20, "in_flight_bytes": 64 << 20, "seeds": "1", "max_lag_ms": 500.0,
    },
}  # fmt: skip
# rate and bytes at most on two cores
CPU_STABLE = {"sharegpt": (5.0, 18 << 20), "arxiv": (2.0, 18 << 20)}
# file and case of the stable rate on a GPU
PROFILE = {
    "sharegpt": "simulated-profile.json:h200_chunk8192",
    "arxiv": "simulated-profile.json:h200_chunk8192_arxiv",
}


@dataclass(frozen=True, slots=True)
class Point:
    """One run. load: the burst of AQUA 9.3, or the stable rate alone."""

    workload: str
    load: str
    system: str
    seed: int

    @property
    def engine(self) -> str:
        """Which engine serves it: fair slices with and without a lender are one. At the stable rate the order of
        arrival has one on the same GPU: 2% is the bar, and two GPUs of one kind may differ by more.
        """
        if self.system != FCFS:
            return "cfs"
        return FCFS if self.load == BURST else BESIDE


@dataclass(frozen=True, slots=True)
class Stable:
    """A workload's stable rate, and the KV memory that it holds at most. source: who found both."""

    workload: str
    rate_per_s: float
    peak_kv_bytes: int
    source: str

    @property
    def pool_bytes(self) -> int:
        """KV memory of each engine."""
        return round(self.peak_kv_bytes * HEADROOM)


def points(workload: str, seeds: Sequence[int], systems: Sequence[str]) -> Iterator[Point]:
    """The most telling first: a seed's burst in all systems, then its stable rate, then the next seed."""
    for seed in seeds:
        for load, names in ((BURST, (FCFS, DRAM, PEER)), (STABLE, (PEER, FCFS))):
            yield from (Point(workload, load, name, seed) for name in names if name in systems)


def lengths(workload: str, scale: float, context_tokens: int) -> Lengths:
    """Pairs of lengths. Raises: SettingsError on an unknown workload."""
    if workload != "arxiv":
        return of_workload(workload, scale=scale, context_tokens=context_tokens)
    prompt, output = Draws("arxiv prompt"), Draws("arxiv output")
    pairs = []
    for _ in range(DRAWN):
        answer = min(max(1, round(output.of(ARXIV_OUTPUT) * scale)), context_tokens // 2)
        asked = min(max(1, round(prompt.of(ARXIV_PROMPT) * scale)), context_tokens - answer)
        pairs.append((asked, answer))
    return Lengths("arxiv" + (f" x {scale:g}" if scale != 1.0 else ""), pairs)


def requests(
    point: Point, pairs: Lengths, rate_per_s: float, *, factor: float, burst_s: float, stable_s: float
) -> list[Request]:
    """The same for every system, in tokens that only this point has."""
    if point.load == BURST:
        found = pairs.burst(rate_per_s, factor, burst_s, point.seed)
    else:
        found = pairs.at_rate(rate_per_s, stable_s, WARM, point.seed)
    return salted(found, point.workload, point.load, point.system, point.seed)


def expected_s(point: Point, rate_per_s: float, *, factor: float, burst_s: float, stable_s: float) -> float:
    """What a point takes, before one like it was measured: its arrivals, and what is left to serve behind them."""
    if point.load == STABLE:
        return max(stable_s, WARM / rate_per_s) + 15.0
    return WARM / rate_per_s + factor * burst_s + 15.0


def stable_from(path: Path, case: str, workload: str) -> Stable:
    """Of a profile's file (`quire profile`), or of a case of a result file with many.

    Raises: KeyError, OSError, ValueError; StopIteration without that case.
    """
    found = load_result(path)
    if case:
        found = next(row for row in found["samples"] if row["case"] == case)
    source = f"{path.stem}{':' * bool(case)}{case}"
    return Stable(workload, float(found["stable_rate_per_s"]), int(found["peak_kv_bytes"]), source)


def warm(stable: Stable, pairs: Lengths, engine: str) -> list[Request]:
    """Some requests that are not measured: kernels are made, connections opened."""
    found = pairs.at_rate(max(stable.rate_per_s, 2.0), 3.0, 4, seed=9_999)[:8]
    return salted(found, "warm", engine)
