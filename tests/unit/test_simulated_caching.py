"""Simulated instances keep what pd_caching has them keep: a conversation of two turns over one pair."""

import pytest

from loadtest.simulator.caching import lends
from loadtest.simulator.cluster import Simulation
from loadtest.simulator.request import from_workload
from loadtest.simulator.spec import ClusterSpec, roles_of
from loadtest.workloads.request import Answer, Request, Segment, content_id
from services.mempool.core.pd_caching import PdCaching
from services.scheduler.core.predict import CostSettings
from tests.support.simulated import BLOCK_TOKENS, PRICES

FIRST, OUTPUT, MORE = 5 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 1, BLOCK_TOKENS
SECOND = FIRST + OUTPUT + MORE


def two_turns():
    document = Segment(content_id("document"), FIRST)
    first = Request(0, 0.0, "s", 0, (document,), OUTPUT)
    later = (document, Answer(0, OUTPUT), Segment(content_id("more"), MORE))
    return from_workload(
        [first, Request(1, 1.0, "s", 1, later, 3, depends_on=0, think_ms=500.0)], BLOCK_TOKENS
    )


def run(mode, roles, **more):
    cost = CostSettings(disaggregation="always")
    spec = ClusterSpec(roles, block_tokens=BLOCK_TOKENS, pd_caching=mode, cost=cost, **more)
    simulation = Simulation(spec, PRICES, two_turns())
    found = simulation.run()
    simulation.settle()
    return found, simulation._links.num_bytes / PRICES.kv_bytes_per_token


@pytest.mark.parametrize(
    ("mode", "computed", "moved"),
    [
        # both prompts are computed and handed over whole
        (PdCaching.BASIC, SECOND, FIRST + SECOND),
        # prefill finds the first prompt's blocks
        (PdCaching.PREFILL, SECOND - FIRST, FIRST + SECOND),
        # and decode has them, and the two that it completed
        (PdCaching.BOTH, SECOND - FIRST, FIRST + SECOND - FIRST - 2 * BLOCK_TOKENS),
        # which go back
        (PdCaching.FULL, SECOND - FIRST - 2 * BLOCK_TOKENS, FIRST + SECOND - FIRST),
    ],
)
def test_a_pair_keeps_what_its_mode_says(mode, computed, moved):
    found, num_moved = run(mode, roles_of(1, 1))
    assert found.outcomes[1].sources["computed"] == computed
    assert num_moved == moved


@pytest.mark.parametrize("mode", list(PdCaching))
def test_colocated_instances_keep_all_but_in_basic(mode):
    found, _ = run(mode, roles_of(0, 0, 1), dram_tokens=1 << 20)
    computed = found.outcomes[1].sources["computed"]
    assert computed == (SECOND if mode is PdCaching.BASIC else SECOND - FIRST - 2 * BLOCK_TOKENS)


def test_what_decode_keeps_in_mode_2_is_read_by_no_prefill_instance_beside_it():
    found, _ = run(PdCaching.BOTH, roles_of(1, 1), instances_per_host=2)
    assert found.outcomes[1].sources["computed"] == SECOND - FIRST
    found, _ = run(PdCaching.FULL, roles_of(1, 1), instances_per_host=2)
    assert found.outcomes[1].sources["computed"] == SECOND - FIRST - 2 * BLOCK_TOKENS


def test_nobody_reads_what_nobody_keeps():
    roles = ("prefill", "decode", "colocated")
    assert [[lends(mode, role) for role in roles] for mode in PdCaching] == [
        [False, False, False],
        [True, False, True],
        [True, False, True],
        [True, True, True],
    ]
