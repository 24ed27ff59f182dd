"""What bench_long_prompt_reclaim.py's samples mean: the consumer's rate by where its blocks lie, reclaims, the lender.

Pure: verify_results.py and the figure call it with what a result file has. Times in samples are one clock's seconds.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from loadtest.results import Metrics, Samples, quantile

Row = Sequence[float]
AT, PEER, DRAM, ASIDE, RECLAIMS, MOVED, BACK, LOST = range(8)  # of a row of the course
MOSTLY = 0.98  # of the bytes that are far, in one place
PHASES = ("quiet", "loaded", "quiet_again")
STEP_WINDOW_S = 2.0  # before a reclaim, in which the consumer's step is measured


def of_kind(samples: Samples, kind: str) -> list[Mapping[str, Any]]:
    """In order."""
    return [sample for sample in samples if sample["kind"] == kind]


def rows_of(samples: Samples, kind: str) -> list[Row]:
    """Of all samples of this kind."""
    return [row for sample in of_kind(samples, kind) for row in sample["rows"]]


def state_at(course: Sequence[Row], at_s: float) -> str:
    """Where the long prompt's far blocks lie: peer, dram, both (some move, or there is no room), or none."""
    index = bisect_right(course, at_s, key=lambda row: row[AT]) - 1
    if index < 0 or course[index][PEER] + course[index][DRAM] <= 0:
        return "none"
    share = course[index][PEER] / (course[index][PEER] + course[index][DRAM])
    return "peer" if share >= MOSTLY else "dram" if share <= 1 - MOSTLY else "both"


def gaps(samples: Samples) -> list[tuple[float, float, float, str]]:
    """Between two outputs: (when it began, seconds, tokens of the later, where blocks lay meanwhile)."""
    course, tokens = rows_of(samples, "course"), rows_of(samples, "tokens")
    out: list[tuple[float, float, float, str]] = []
    for (before_s, _), (at_s, count) in pairwise(tokens):
        states = {state_at(course, before_s), state_at(course, at_s)}
        out.append((before_s, at_s - before_s, count, states.pop() if len(states) == 1 else "both"))
    return out


def reclaims(samples: Samples) -> list[dict[str, float]]:
    """Each as the course has it: asked_s, ended_s, bytes that were read in lent pages when it was asked, and lost.

    Asked: the first row with one reclaim more. Ended: the first one behind it in which the producer has every page.
    """
    course = rows_of(samples, "course")
    out: list[dict[str, float]] = []
    for before, row in pairwise(course):
        if row[RECLAIMS] <= before[RECLAIMS]:
            continue
        end = next((each for each in course if each[AT] >= row[AT] and not each[ASIDE]), None)
        if end is not None:
            out.append(
                {
                    "asked_s": row[AT],
                    "ended_s": end[AT],
                    "bytes": before[PEER],
                    "lost": end[LOST] - before[LOST],
                }
            )
    return out


def step_s(samples: Samples, asked_s: float) -> float:
    """The consumer's, before a reclaim: its entries change between two steps."""
    near = [took_s for at_s, took_s, _, _ in gaps(samples) if asked_s - STEP_WINDOW_S <= at_s < asked_s]
    return quantile(near, 0.5) if near else 0.0


def copy_bytes_per_s(samples: Samples) -> float:
    """Of plain copies between a GPU and page-locked host memory, which is the way of a reclaim; 0: not measured."""
    copies = [s["bytes"] / s["seconds"] for s in of_kind(samples, "ceiling") if s["tier"] == "dram"]
    return quantile(copies, 0.5) if copies else 0.0


def bound_s(samples: Samples, reclaim: Mapping[str, float]) -> float:
    """Its bytes over that rate, and one step."""
    rate = copy_bytes_per_s(samples)
    return (reclaim["bytes"] / rate if rate else 0.0) + step_s(samples, reclaim["asked_s"])


def returns(samples: Samples) -> list[tuple[float, float]]:
    """When the first block went back after a reclaim, and when nearly all were in lent pages."""
    course = rows_of(samples, "course")
    out: list[tuple[float, float]] = []
    for before, row in pairwise(course):
        if row[BACK] > before[BACK] and (not out or row[AT] > out[-1][1]):
            end = next(
                (r[AT] for r in course if r[AT] >= row[AT] and state_at(course, r[AT]) == "peer"), None
            )
            if end is not None:
                out.append((row[AT], end))
    return out


def metrics_from_samples(samples: Samples) -> Metrics:
    """`throughput_gain_ratio`: the consumer's tokens/s with its far blocks on the peer over that in host memory."""
    out: Metrics = {}
    all_gaps = gaps(samples)
    for state in ("peer", "dram", "both"):
        mine = [(took_s, count) for _, took_s, count, where in all_gaps if where == state]
        if mine:
            out[f"{state}_tokens_per_s"] = sum(n for _, n in mine) / sum(took_s for took_s, _ in mine)
            out[f"{state}_s"] = sum(took_s for took_s, _ in mine)
    if "peer_tokens_per_s" in out and "dram_tokens_per_s" in out:
        out["throughput_gain_ratio"] = out["peer_tokens_per_s"] / out["dram_tokens_per_s"]
    if back := returns(samples):
        out["back_ms"] = 1e3 * quantile([end_s - begin_s for begin_s, end_s in back], 0.5)
        out["returns_count"] = len(back)
        later = [(took_s, n) for at_s, took_s, n, where in all_gaps if where == "peer" and at_s >= back[0][1]]
        if later:
            out["again_tokens_per_s"] = sum(n for _, n in later) / sum(took_s for took_s, _ in later)
    return out | _of_reclaims(samples) | _of_producer(samples)


def _of_reclaims(samples: Samples) -> Metrics:
    found = reclaims(samples)
    if not found:
        return {}
    took_s = [one["ended_s"] - one["asked_s"] for one in found]
    bounds_s = [bound_s(samples, one) for one in found]
    out: Metrics = {
        "reclaim_ms": 1e3 * quantile(took_s, 0.5),
        "reclaim_worst_ms": 1e3 * max(took_s),
        "reclaim_gb": quantile([one["bytes"] / 1e9 for one in found], 0.5),
        "reclaims_count": len(found),
        "reclaim_lost_count": sum(one["lost"] for one in found),
    }
    if all(bounds_s):
        out["reclaim_bound_ms"] = 1e3 * quantile(bounds_s, 0.5)
        out["reclaim_over_bound_ratio"] = quantile(
            [took / bound for took, bound in zip(took_s, bounds_s, strict=True)], 0.5
        )
    return out


def _of_producer(samples: Samples) -> Metrics:
    """Each phase beside the same load before anything was lent."""
    out: Metrics = {}
    alone = {s["phase"]: s for s in of_kind(samples, "alone")}
    for sample in of_kind(samples, "phase"):
        phase = sample["phase"]
        out[f"producer_{phase}_tokens_per_s"] = sample["items"] / sample["seconds"]
        base = alone.get(phase.removesuffix("_again"))
        if base is not None and base["items"]:
            rate = base["items"] / base["seconds"]
            out[f"producer_{phase}_throughput_ratio"] = out[f"producer_{phase}_tokens_per_s"] / rate
            out[f"producer_{phase}_tpot_ratio"] = sample["tpot_mean_ms"] / base["tpot_mean_ms"]
    for phase, sample in alone.items():
        out[f"producer_{phase}_alone_tokens_per_s"] = sample["items"] / sample["seconds"]
        out[f"producer_{phase}_alone_offered_gb"] = sample["offered_bytes"] / 1e9
    return out
