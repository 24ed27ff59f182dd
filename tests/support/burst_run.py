"""Bursts in virtual time, printed as a line of JSON each: `python -m tests.support.burst_run [SHARE] [CASE...]`.

The shape of bench_burst.py's, SHARE of its requests and memory (an eighth): 25 prompts at the stable rate, then twice
the rate for 20 s; 8B shape on an H200 (burst_costs.py); lent pages and host memory full of what requests that
ended left there. Cases: `peer`: over lent pages; `late`: copies of the engine's GPU go through a thread that something
holds up, a twentieth of a second each, until 38 s (so the first measured burst looked; 80 GB were being page-locked);
`later`: 0.08 s each; `dram`: without a loan.
"""

import json
import random
import sys
from dataclasses import asdict
from statistics import fmean
from typing import Any

from tests.support import page_engine  # first: it prepares for vLLM  # noqa: F401  # isort: skip

from loadtest import burst_plan
from loadtest.burst_expected import rules_of
from loadtest.burst_model import Job, jobs_of
from loadtest.burst_plan import BURST, PEER, Point
from loadtest.results import quantile
from tests.support.burst_costs import EAGER_H200, RATE_PER_S
from tests.support.burst_engine import BurstEngine
from tests.support.burst_world import BurstWorld

SHARE = 8
PAGES, SWAP_PAGES, SWAP_FREE = 6_081, 19_073, 13_000
BURST_S, LATE_UNTIL_S = 20.0, 38.0
LATE_S = {"late": 0.05, "later": 0.08}
CASES = ("peer", "late", "later", "dram")


def jobs(share: int, seed: int = 1) -> list[Job]:
    """Every SHAREth request of the burst."""
    plan = burst_plan.DEFAULTS["cuda"]
    pairs = burst_plan.lengths("sharegpt", plan["scale"], plan["context_tokens"])
    point = Point("sharegpt", BURST, PEER, seed)
    asked = burst_plan.requests(point, pairs, RATE_PER_S, factor=2.0, burst_s=BURST_S, stable_s=0.0)
    return jobs_of(asked)[::share]


class OneThread:
    """Every copy of the engine's GPU but those that a peer's copy engines make waits for the one before it."""

    def __init__(self, each_s: float) -> None:
        self._each_s, self._free_s, self._chance = each_s, 0.0, random.Random(1)

    def __call__(self, route: tuple[str, str], now_s: float) -> float:
        if now_s > LATE_UNTIL_S or route == ("engine", "peer"):
            return 0.0
        self._free_s = max(self._free_s, now_s) + self._each_s * self._chance.uniform(0.5, 1.5)
        return self._free_s - now_s


def run(case: str, share: int) -> dict[str, Any]:
    """One burst. Times in ms and seconds."""
    pages, swap = PAGES // share, SWAP_PAGES // share
    world = BurstWorld(case, pages, lent_pages=0 if case == "dram" else swap, dram_pages=swap,
                       in_flight_pages=max(32, 256 // share))  # fmt: skip
    engine = BurstEngine(world, case, EAGER_H200, asdict(rules_of({})))
    world.advance_to(0.1)
    world.fill("dram", swap)
    if case != "dram":
        world.fill("loan", swap - SWAP_FREE // share)
    if case in LATE_S:
        world.late_s = OneThread(LATE_S[case])
    asked = jobs(share)
    engine.run(asked)
    counters = world.counters()
    ttft = [job.ttft_ms for job in asked[burst_plan.WARM // share :]]
    return {
        "case": case, "requests": len(asked), "ttft_p90_ms": quantile(ttft, 0.9),
        "rct_ms": fmean(job.rct_ms for job in asked), "end_s": world.now_s, "stood_s": engine.idle_s,
        "tokens": sum(job.made for job in asked), "asked_tokens": sum(job.output_tokens for job in asked),
        "fair": dict(engine.counts),
        "pool": {name: count for name, count in counters.items() if name.startswith(("swap_", "dram_", "peer_"))},
        "pages": {" to ".join(route): count for route, count in world.moved.items()},
        "copies": {" to ".join(route): count for route, count in world.copies.items()},
        "left": {"pinned": world.space("engine").index.num_pinned, "kept": world.core.swaps.num_kept},
    }  # fmt: skip


def main() -> None:
    """See the module's docstring."""
    words = sys.argv[1:]
    share = int(words.pop(0)) if words and words[0].isdecimal() else SHARE
    for case in words or CASES:
        print(json.dumps(run(case, share)), flush=True)


if __name__ == "__main__":
    main()
