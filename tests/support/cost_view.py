"""Instances with a cost model whose numbers can be worked out by hand.

A prompt token costs 0.1 ms, a decode step 1 ms a request in it; a token's KV is 10 kB, so a link of 1 GB/s moves
100 tokens in a millisecond.
"""

from services.scheduler.core.instances import Instances
from services.scheduler.core.limits import PlacementLimits
from services.scheduler.core.placement import Placer
from services.scheduler.core.predict import CostSettings
from shared.wire.cost import CostCoefficients, LinkRate, ModelShape
from shared.wire.reports import PoolPlace
from tests.support.control_plane import description, hello, report

SHAPE = ModelShape(
    num_layers=1, hidden_size=1, intermediate_size=1, num_heads=1, num_kv_heads=1, head_dim=1, vocab_size=1
)
PREFILL_MS, DECODE_MS = 0.1, 1.0
TOKEN_BYTES = 10_000


def coefficients(prefill_ms=PREFILL_MS, decode_ms=DECODE_MS):
    return CostCoefficients(
        shape=SHAPE, token_ms=prefill_ms, decode_request_ms=decode_ms, max_batched_tokens=1024
    )


def links(gb_per_s=1.0, latency_ms=2.0):
    rate = LinkRate(gb_per_s=gb_per_s, latency_ms=latency_ms)
    return {"peer": rate, "dram": rate, "remote": rate}


class View:
    """A placer and its instances; say() changes what an instance reports."""

    def __init__(self, policy="cost", limits=None, max_instances=1_024, **cost):
        self.placer = Placer(
            Instances(),
            policy,
            "boot",
            limits or PlacementLimits(),
            CostSettings(**{"handoff_ms": 0.0, **cost}),
        )
        self.reports = {}
        self.now_ms = 0

    def add(
        self, name, role="prefill", *,
        space=1, host=1, cost=True, address="", crosses=True, ahead=False, tp=1, **load,
    ):  # fmt: skip
        """An instance of so many ranks, 1 or 2. Equal `space` and `host`: the same memory; `host` 0: no mempool.

        `crosses`: see PoolPlace; `ahead`: see Hello.
        """
        made = description(
            block_bytes=32 * TOKEN_BYTES // tp,
            tp_size=tp,
            num_kv_heads=2 // tp,
            total_kv_heads=2,
            order="HND",
        )
        more = {"cost": coefficients()} if cost is True else {"cost": cost} if cost else {}
        self.placer.instances.hello(
            hello(name, role=role, description=made, sends_ahead=ahead, **more), now_ms=self.now_ms
        )
        memory_id = host * 1_000 + space if space else 0
        pool = PoolPlace(host, memory_id, address, crosses) if host else None
        self.say(name, pool=pool, links=links(), **load)
        return self

    def say(self, name, **load):
        """Its next report: what was said before, with this."""
        before = self.reports.get(name, {"seq": -1})
        self.reports[name] = {**before, **load, "seq": before["seq"] + 1}
        self.placer.instances.report(report(name, **self.reports[name]), now_ms=self.now_ms)
        return self
