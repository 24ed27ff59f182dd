"""The standing orders against a full scan: every placement is the one that looking at all instances would give."""

import random
from copy import deepcopy

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from services.scheduler.core.instances import Instances
from services.scheduler.core.limits import PlacementLimits
from services.scheduler.core.placement import Placer
from services.scheduler.core.predict import CostSettings
from shared.wire.placement import Ended, Place, PrefixHit
from shared.wire.reports import PoolPlace
from tests.support.control_plane import description, hello, report
from tests.support.cost_view import coefficients, links
from tests.support.examples import examples
from tests.support.full_scan import place_by_full_scan

ROLES = ("prefill", "decode", "colocated")
NUM_STEPS = 40


class History:
    """A cluster that placements, reports, ends and time happen to; all times and loads are small whole numbers.

    One seed in three has more instances of a role than a shortlist takes in.
    """

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.count, self.families, self.hosts = (
            rng.choice([2, 12, 36]),
            rng.choice([1, 1, 2]),
            rng.choice([0, 1, 3]),
        )
        self.roles = rng.choice(
            [ROLES, ROLES, ("prefill", "decode"), ("colocated",), ("prefill", "prefill", "decode")]
        )
        self.costs = [coefficients()] if rng.random() < 0.9 else [coefficients(), None]
        self.calm = rng.random() < 0.5  # whether most have nothing to do, so that turns and names decide
        self.now_ms, self.num_placed, self.seqs = 0, 0, {}
        cost = CostSettings(
            disaggregation=rng.choice(["auto", "auto", "always", "never"]),
            fetch=rng.choice(["auto", "always", "never"]),
            panic_queue_ms=rng.choice([60.0, 10_000.0, 10_000.0]),
            hysteresis_ms=rng.choice([0.0, 5.0, 50.0]),
            handoff_ms=rng.choice([0.0, 2.0]),
        )
        policy = rng.choice(["cost", "cost", "cost", "prompt_tree", "least_load", "session"])
        limits = PlacementLimits(overload_factor=rng.choice([1.0, 4.0]), max_prefill_tokens=4_096)
        self.placer = Placer(Instances(), policy, "boot", limits, cost)
        for index in range(self.count):
            self.hello(index)
            self.report(index)

    def hello(self, index):
        made = description(isa=f"f{index % self.families}")
        cost = self.costs[index % len(self.costs)]
        told = hello(f"i{index}", role=self.roles[index % len(self.roles)], description=made, cost=cost)
        self.placer.instances.hello(told, now_ms=self.now_ms)

    def report(self, index):
        rng, hosts = self.rng, self.hosts
        pool = PoolPlace(1 + index % hosts, 10 + index % 7, "a" if index % 2 else "") if hosts else None
        self.seqs[index] = self.seqs.get(index, -1) + 1
        busy = not self.calm or rng.random() < 0.3
        load = {
            "num_running": rng.randrange(9) * busy,
            "unfinished_prefill_tokens": rng.choice([0, 64, 512, 5_000 if rng.random() < 0.1 else 0]),
            "queued_prefill_ms": rng.choice([0.0, 8.0, 32.0, 250.0]) * busy,
            "running_context_tokens": rng.choice([0, 256, 4_096]) * busy,
            "kv_used_share": rng.choice([0.0, 0.25, 0.5, 1.0]) * busy,
            "decode_correction": rng.choice([1.0, 1.0, 2.0]),
        }
        draining = rng.random() < 0.03
        told = report(f"i{index}", seq=self.seqs[index], pool=pool, links=links(), draining=draining, **load)
        self.placer.instances.report(told, now_ms=self.now_ms)

    def other_than_placing(self):
        rng = self.rng
        what = rng.choice(["report", "report", "end", "end", "wait", "wait", "long wait", "hello"])
        if what == "report":
            self.report(rng.randrange(self.count))
        elif what == "end":
            self.placer.ended(Ended(request_id=f"r{rng.randrange(self.num_placed + 1)}", attempt=0))
        elif what == "hello" and rng.random() < 0.2:
            self.hello(rng.randrange(self.count))
        else:
            long = what == "long wait" and rng.random() < 0.3
            self.now_ms += 10_500 if long else rng.choice([1, 9, 20, 40])
            for index in range(self.count) if long else ():
                self.report(index)

    def place(self):
        """(answer, the full scan's)."""
        rng = self.rng
        self.num_placed += 1
        holders = rng.sample(range(self.count), min(self.count, rng.choice([0, 0, 1, 2, 5])))
        medium = rng.choice(["hbm", "hbm", "dram"])
        request = Place(
            request_id=f"r{self.num_placed}", attempt=0, num_prompt_tokens=rng.choice([1, 100, 1_000]),
            hits=[PrefixHit(f"i{i}", rng.choice([0, 32, 500, 1_200]), medium) for i in holders],
            exclude=[f"i{rng.randrange(self.count)}" for _ in range(rng.choice([0, 0, 0, 2]))],
            must_colocate=rng.random() < 0.1, explain=rng.random() < 0.5, continues=rng.random() < 0.5,
            tenant=rng.choice("ab"), weight=rng.choice([1.0, 4.0]), session=rng.choice(["", "s"]),
            max_tokens=rng.choice([0, 1, 8]),
        )  # fmt: skip
        expected = place_by_full_scan(deepcopy(self.placer), request, now_ms=self.now_ms)
        return self.placer.place(request, now_ms=self.now_ms), expected


@settings(max_examples=examples(25), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.integers(0, 1 << 30))
def test_a_placement_is_the_one_that_a_full_scan_gives(seed):
    history = History(seed)
    for _ in range(NUM_STEPS):
        if history.rng.random() < 0.4:
            answer, expected = history.place()
            assert answer == expected
        else:
            history.other_than_placing()
