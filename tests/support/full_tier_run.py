"""Bursts in virtual time whose swap space is nearly full: who is computed again, when and how much of it.

    python -m tests.support.full_tier_run [SWAP_PAGES ...]

As burst_run.py, a sixteenth of the burst, over host memory of so many pages; a line of JSON for each. Every request
that is dropped for another's pages is held against the rule of FairSchedulerMixin._make_way() as it happens.
"""

import json
import sys
from collections import Counter
from dataclasses import asdict
from typing import Any

from tests.support import page_engine  # first: it prepares for vLLM  # noqa: F401  # isort: skip

from vllm.v1.request import Request, RequestStatus

from loadtest.burst_expected import rules_of
from tests.support.burst_costs import EAGER_H200
from tests.support.burst_engine import BurstEngine, BurstScheduler
from tests.support.burst_run import PAGES, jobs
from tests.support.burst_world import BurstWorld

SHARE = 16
SWAP_PAGES = (8, 32, 64, 100, 500)


class Watched(BurstScheduler):
    """Notes what each request computes, and what is dropped of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.dropped: Counter[str] = Counter()  # tokens, by request
        self.scheduled: Counter[str] = Counter()
        self.preempted: Counter[str] = Counter()
        self.num_for_pages = 0
        self._wants: tuple[Request, int] | None = None
        super().__init__(*args, **kwargs)

    def _make_way(self, request: Request, missing: int) -> None:
        self._wants = request, missing
        super()._make_way(request, missing)
        self._wants = None

    def _drop(self, request: Request) -> None:
        if self._wants is not None:
            self._hold_against_rule(request, *self._wants)
            self.num_for_pages += 1
        else:
            assert not self.running, "each waits for another's pages"
        self.dropped[request.request_id] += request.num_computed_tokens
        super()._drop(request)

    def _hold_against_rule(self, request: Request, wanting: Request, missing: int) -> None:
        """Parked, with pages to give; of those that are here whole the one furthest from its turn; and only while
        pages are missing."""
        assert missing > self.pages.get_num_free_blocks(), "enough is free"
        assert request.request_id in self._parked, "who runs is not dropped"
        assert request is not wanting
        assert wanting.status == RequestStatus.RUNNING or not self.running, "a newcomer waits"
        others = [r for r in self._parked.values() if r is not wanting and not self._in_flight(r)]
        if wanting.status == RequestStatus.RUNNING:
            assert self._held(request.request_id) > 1, "one page is not worth it"
            others = [r for r in others if self._held(r.request_id) > 1]
        accounts, num_away = self.slices.accounts.requests, self.swapper.absences.num_away
        here = [r for r in others if not num_away(r.request_id)]
        if here:
            assert not num_away(request.request_id), "who has a place elsewhere stays"
            others = here
        key = self.slices.order_key
        assert all(key(accounts[r.request_id]) <= key(accounts[request.request_id]) for r in others)

    def _preempt_request(self, request: Request, timestamp: float) -> None:
        self.preempted[request.request_id] += request.num_computed_tokens
        super()._preempt_request(request, timestamp)

    def _note_served(self, output: Any) -> None:
        self.scheduled.update(output.num_scheduled_tokens)
        super()._note_served(output)


def run(swap_pages: int) -> dict[str, Any]:
    """One burst."""
    name = f"full-{swap_pages}"
    world = BurstWorld(name, PAGES // SHARE, lent_pages=0, dram_pages=swap_pages, in_flight_pages=32)
    engine = BurstEngine(world, name, EAGER_H200, asdict(rules_of({})), kind=Watched)
    world.advance_to(0.1)
    asked = jobs(SHARE)
    engine.run(asked)
    found: Any = engine.scheduler
    again = {job.name: found.scheduled[job.name] - (job.prompt_tokens + job.made - 1) for job in asked}
    for request_id, tokens in again.items():
        most = found.dropped[request_id] + found.preempted[request_id]
        assert tokens <= most, (request_id, tokens, most)
    return {
        "swap_pages": swap_pages, "fair": dict(engine.counts), "num_for_pages": found.num_for_pages,
        "again": {request_id: tokens for request_id, tokens in again.items() if tokens > 0},
        "dropped": dict(found.dropped), "preempted": dict(found.preempted),
        "tokens": sum(job.made for job in asked), "asked_tokens": sum(job.output_tokens for job in asked),
        "left": {"pinned": world.space("engine").index.num_pinned, "kept": world.core.swaps.num_kept},
    }  # fmt: skip


def main() -> None:
    """See the module's docstring."""
    for swap_pages in map(int, sys.argv[1:] or SWAP_PAGES):
        print(json.dumps(run(swap_pages)), flush=True)


if __name__ == "__main__":
    main()
