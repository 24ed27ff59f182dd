"""Fair slices in the simulator, on random workloads: seconds each, so not among the quick ones."""

from random import Random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from loadtest.simulator.cluster import simulate
from loadtest.simulator.local import Local, rules_for
from loadtest.simulator.spec import ClusterSpec
from loadtest.simulator.task import EngineLimits
from services.scheduler.core.limits import PlacementLimits
from tests.support.simulated import BLOCK_TOKENS, PRICES, plain


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 500),
    st.sampled_from(["shares", "bursts"]),
    st.integers(1, 9),
    st.integers(2, 9),
    st.sampled_from([1, 7, 16]),
    st.sampled_from([1_500, 2_001]),
)
# two prompts, each sent away to make room, took it from each other again:
@example(295, "shares", 7, 6, 16, 1_500)
def test_with_room_in_swap_space_and_turns_that_pay_nothing_is_computed_twice(
    seed, fair_for, slice_steps, slots, unit_tokens, memory_tokens
):
    rules = rules_for(fair_for, ["chunk_tokens=32", "spread_ms=50"], slice_steps)
    spec = ClusterSpec(
        ("colocated",), block_tokens=BLOCK_TOKENS, memory_tokens=memory_tokens,
        limits=EngineLimits(slots, 64, unit_tokens),
        placement=PlacementLimits(overload_factor=100.0), local=Local("cfs", rules, counted_gb_per_s=1e6),
    )  # fmt: skip
    rng = Random(seed)  # what several share does not leave, so these share nothing
    requests = [
        plain(n, 5.0 * n, rng.randint(10, 900), rng.randint(1, 300), blocks=n % 2 == 0) for n in range(24)
    ]
    run = simulate(spec, PRICES, requests)
    assert all(outcome.ok for outcome in run.outcomes)
    assert (run.turns.num_recomputed_tokens, run.num_preempted) == (0, 0)
