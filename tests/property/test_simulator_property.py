"""The simulator against random clusters and workloads: nothing is lost, invented or left to chance."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.simulator.cluster import Simulation, simulate
from loadtest.simulator.fair_engine import FairEngine
from loadtest.simulator.links import gb_per_s
from loadtest.simulator.local import Local, rules_for
from loadtest.simulator.records import summarize
from loadtest.simulator.request import infinite_cache
from loadtest.simulator.spec import ClusterSpec, Death, roles_of
from loadtest.simulator.task import EngineLimits
from services.gateway.core.request_flow import Limits
from services.mempool.core.pd_caching import PdCaching
from tests.support.examples import examples
from tests.support.simulated import BLOCK_TOKENS, PRICES, conversations

splits = st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)).filter(
    lambda n: n[2] or (n[0] and n[1])
)


locals_ = st.one_of(
    st.just(Local()),
    st.builds(
        lambda fair_for, steps, size, rate, counted: Local(
            "cfs", rules_for(fair_for, ["chunk_tokens=32"], steps), gb_per_s(rate, 1.0), gb_per_s(0.05, 1.0),
            size, size // 2, counted,
        ),
        st.sampled_from(["shares", "bursts"]),
        st.integers(1, 9),
        st.sampled_from([0, 400_000, 1 << 30]),
        st.sampled_from([0.01, 10.0]),
        st.sampled_from([0.0, 1e6]),
    ),
)  # fmt: skip


@st.composite
def specs(draw):
    roles = roles_of(*draw(splits))
    deaths = ()
    if len(roles) > 1 and draw(st.booleans()):
        deaths = (Death(draw(st.floats(0, 4000)), draw(st.integers(0, len(roles) - 1))),)
    return ClusterSpec(
        roles,
        block_tokens=BLOCK_TOKENS,
        memory_tokens=draw(st.sampled_from([1500, 4000, 1 << 20])),
        dram_tokens=draw(st.sampled_from([0, 1000, 1 << 20])),
        policy=draw(st.sampled_from(["least_load", "session", "prompt_tree"])),
        limits=EngineLimits(draw(st.integers(1, 8)), draw(st.sampled_from([64, 512]))),
        local=draw(locals_),
        pd_caching=draw(st.sampled_from([PdCaching.BASIC, PdCaching.FULL])),
        instances_per_host=draw(st.integers(1, 3)),
        peer=gb_per_s(draw(st.sampled_from([0, 0.001, 1.0]))),
        remote=gb_per_s(draw(st.sampled_from([0, 0.001, 1.0]))),
        deaths=deaths,
        flow=Limits(request_deadline_ms=draw(st.sampled_from([600_000, 600, 150]))),
        noise=draw(st.sampled_from([0.0, 0.1])),
        seed=draw(st.integers(0, 9)),
    )


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(specs(), st.integers(0, 50))
def test_every_request_ends_once_and_its_tokens_add_up(spec, seed):
    requests = conversations(seed)
    run = simulate(spec, PRICES, requests)
    assert [outcome.request_id for outcome in run.outcomes] == [request.request_id for request in requests]
    for outcome, request in zip(run.outcomes, requests, strict=True):
        assert bool(outcome.error) != outcome.ok
        assert outcome.jct_ms >= outcome.ttft_ms >= 0
        if request.depends_on is not None:
            before = run.outcomes[request.depends_on]
            assert outcome.sent_ms >= before.ended_ms + request.think_ms - 1e-6
        if outcome.ok:
            assert outcome.ttft_ms > 0
            assert outcome.sources["computed"] > 0
            assert min(outcome.sources.values()) >= 0
            assert sum(outcome.sources.values()) == outcome.prompt_tokens


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(specs(), st.integers(0, 50), st.sampled_from([300.0, 5.0]))
def test_all_memory_returns_and_none_is_used_twice(spec, seed, gap_ms):
    simulation = Simulation(spec, PRICES, conversations(seed, gap_ms=gap_ms))
    simulation.run()
    simulation.settle(120_000)  # links of 1 MB/s have queues of many seconds
    for engine in simulation.engines:
        if not engine.dead:
            assert (engine.store.private_tokens, engine.store.pinned_tokens) == (0, 0)
            assert engine.store.promised_tokens == 0
            assert (engine.num_running, engine.num_waiting) == (0, 0)
            assert engine.told()["queued_prefill_ms"] == engine.told()["unfinished_prefill_tokens"] == 0
            assert engine.context_tokens == 0
            assert engine.store.indexed_tokens <= spec.memory_tokens
        if isinstance(engine, FairEngine) and not engine.dead:
            assert (engine.swapper.space.used_bytes, engine.swapper.absences.is_waiting) == (0, False)
            assert not engine.slices.accounts.requests


@pytest.mark.slow
@settings(max_examples=examples(15), deadline=None)
@given(specs(), st.integers(0, 50))
def test_the_same_arguments_give_the_same_run(spec, seed):
    requests = conversations(seed)
    assert simulate(spec, PRICES, requests) == simulate(spec, PRICES, requests)


@pytest.mark.slow
@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 500), st.sampled_from(["least_load", "prompt_tree"]))
def test_one_instance_with_memory_for_all_hits_what_an_infinite_cache_would(seed, policy):
    """Requests far apart: then a prompt is cached before the next one comes, as the bound supposes."""
    requests = conversations(seed, gap_ms=8e3)
    spec = ClusterSpec(
        ("colocated",), block_tokens=BLOCK_TOKENS, policy=policy, limits=EngineLimits(unit_tokens=1)
    )
    run = simulate(spec, PRICES, requests)
    bound = infinite_cache(requests, BLOCK_TOKENS)
    found = summarize(run.outcomes)
    answers = sum(len(request.output_blocks) for request in requests) * BLOCK_TOKENS
    hits = round(found.hit_ratio * bound.prompt_tokens)
    seen, whole = set(), 0
    for request in requests:  # of a prompt that is cached to its end the last token is computed all the same
        whole += request.blocks[-1] in seen
        seen.update(request.blocks)
    assert bound.hit_tokens - whole <= hits <= bound.hit_tokens + answers


@settings(max_examples=examples(15), deadline=None)
@given(specs(), st.integers(0, 50), st.sampled_from(["shares", "bursts"]))
def test_where_all_fit_turns_change_nothing(spec, seed, fair_for):
    many = replace(
        spec, memory_tokens=1 << 20, limits=replace(spec.limits, max_running=256), handoff_ahead=False
    )
    requests = conversations(seed)
    arrival = simulate(replace(many, local=Local()), PRICES, requests)
    turns = simulate(replace(many, local=Local("cfs", rules_for(fair_for))), PRICES, requests)
    assert turns.outcomes == arrival.outcomes
    assert (turns.num_steps, turns.turns) == (arrival.num_steps, arrival.turns)
