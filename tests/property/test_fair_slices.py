"""Fair slices: shares like weights, bounded waits, arrival order without contention, no idle slot, same plan again."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.fair.elsewhere import Elsewhere
from shared.fair.rules import FairRules, Room
from tests.support.examples import examples
from tests.support.fair_engine import FairEngine, Job

ROOM = Room(slots=4, step_tokens=64, step_ms=10.0)
# as bench_burst has them: order of arrival behind the first slice, prompts beside decodes
BURST = FairRules(
    slice_steps=8, quantum_tokens=1 << 20, patience_slices=128, spread_ms=500.0, chunk_tokens=16
)
jobs = st.tuples(
    st.integers(0, 40), st.sampled_from("abc"), st.integers(1, 200), st.integers(1, 60)
)  # arrival step, tenant, prompt, answer


def run(
    rules: FairRules, room: Room, found, weights=None, *, max_steps: int = 100_000
) -> tuple[FairEngine, list[Job]]:
    engine = FairEngine(rules, room)
    due = sorted(enumerate(found), key=lambda item: (item[1][0], item[0]))
    all_jobs = []
    while due or engine.jobs:
        while due and due[0][1][0] <= engine.step:
            number, (_, tenant, prompt, answer) = due.pop(0)
            job = Job(f"r{number}", tenant, prompt, answer, (weights or {}).get(tenant, 1.0))
            all_jobs.append(job)
            engine.add(job)
        engine.run_step()
        assert engine.step < max_steps, "requests starve"
    return engine, all_jobs


@pytest.mark.parametrize("rules", [FairRules(slice_steps=8), BURST], ids=["to_the_token", "burst"])
@pytest.mark.parametrize("seed", range(6))
def test_three_tenants_that_always_want_more_get_shares_like_their_weights(seed, rules):
    weights = {"a": 4.0, "b": 2.0, "c": 1.0}
    rng = random.Random(seed)
    engine = FairEngine(rules, Room(slots=rng.choice((3, 4, 7, 16)), step_tokens=128, step_ms=10.0))
    count = 0

    def top_up() -> None:
        nonlocal count
        for tenant, weight in weights.items():
            while sum(job.tenant == tenant for job in engine.jobs.values()) < 2 * engine.room.slots:
                count += 1
                lengths = rng.randint(1, 300), rng.randint(1, 120)
                engine.add(Job(f"r{count}", tenant, *lengths, weight))

    for _ in range(200):
        top_up()
        engine.run_step()
    before = Counter(engine.tokens)
    for _ in range(2_500):
        top_up()
        engine.run_step()
    served = {tenant: engine.tokens[tenant] - before[tenant] for tenant in weights}
    total = sum(served.values())
    for tenant, weight in weights.items():
        assert served[tenant] / total == pytest.approx(weight / 7, rel=0.05), (seed, served)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(jobs, min_size=1, max_size=30), st.integers(1, 12))
def test_everybody_ends_and_no_slot_is_idle_while_somebody_waits(found, slice_steps):
    engine, all_jobs = run(FairRules(slice_steps=slice_steps), ROOM, found)
    assert all(job.last_step and not job.prompt_left and not job.answer_left for job in all_jobs)
    assert engine.idle_slots_with_work == 0
    assert not engine.slices.accounts.requests
    assert not engine.slices.accounts.tenants


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(jobs, min_size=1, max_size=4), st.integers(1, 12))
def test_without_contention_nobody_is_parked_and_the_order_is_that_of_arrival(found, slice_steps):
    engine, all_jobs = run(FairRules(slice_steps=slice_steps), ROOM, found)
    assert engine.num_parked == 0
    assert all(
        job.ran[0] == min(job.ran) and len(job.ran) == job.ran[-1] - job.ran[0] + 1 for job in all_jobs
    )
    assert not any(plan.is_fair for plan in engine.plans)


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(jobs, min_size=5, max_size=30))
def test_where_switching_does_not_pay_the_order_is_that_of_arrival(found):
    slow = Room(slots=4, step_tokens=64, pages=8, page_bytes=1 << 20, swap_bytes_per_s=1e6, step_ms=10)
    engine = FairEngine(FairRules(), slow)
    started = []
    for number, (_, tenant, prompt, answer) in enumerate(found):
        job = Job(f"r{number}", tenant, prompt, answer, pages=2, away=2)
        engine.add(job)
    names = list(engine.jobs)
    while engine.jobs:
        before = set(engine.running)
        engine.run_step()
        started += [name for name in engine.plans[-1].start if name not in before and name not in started]
    assert engine.num_parked == 0
    assert started == names


@pytest.mark.parametrize(
    "rules",
    [
        FairRules(slice_steps=4, patience_slices=8),
        FairRules(slice_steps=4, patience_slices=8, quantum_tokens=1 << 20, spread_ms=100.0, chunk_tokens=16),
    ],
    ids=["to_the_token", "burst"],
)
@pytest.mark.parametrize("seed", range(6))
def test_no_request_waits_longer_than_its_patience_and_one_turn_of_the_others(seed, rules):
    """Newcomers never stop coming; one old request of the same tenant gets its turn again and again."""
    rng = random.Random(seed)
    engine = FairEngine(rules, ROOM)
    old = Job("old", "a", 10, 150)
    engine.add(old)
    count, most = 0, 0
    while "old" in engine.jobs:
        for _ in range(rng.randint(0, 6) if len(engine.jobs) < 60 else 0):
            count += 1
            engine.add(Job(f"r{count}", "a", rng.randint(1, 64), rng.randint(1, 4)))
        most = max(most, len(engine.jobs))
        engine.run_step()
        assert engine.step < 50_000
    gaps = [b - a for a, b in zip(old.ran, old.ran[1:], strict=False)]
    bound = (rules.patience_slices + 2 + -(-most // ROOM.slots)) * rules.slice_steps
    assert max(gaps) <= bound, (seed, max(gaps), bound)


def test_who_was_idle_or_got_all_that_it_wanted_has_saved_nothing():
    engine = FairEngine(FairRules(slice_steps=4), ROOM)
    for i in range(8):
        engine.add(Job(f"busy{i}", "busy", 8, 2_000))
    engine.add(Job("small", "lazy", 8, 10_000))  # one slot is all that it can use
    for _ in range(2_000):
        engine.run_step()
    before = Counter(engine.tokens)
    for i in range(8):
        engine.add(Job(f"lazy{i}", "lazy", 8, 2_000))
        engine.add(Job(f"new{i}", "new", 8, 2_000))
    for _ in range(600):
        engine.run_step()
    served = {tenant: engine.tokens[tenant] - before[tenant] for tenant in ("busy", "lazy", "new")}
    assert max(served.values()) <= 1.1 * min(served.values()), served


def test_what_was_served_while_nobody_waited_is_held_against_nobody():
    engine = FairEngine(FairRules(slice_steps=4), ROOM)
    for i in range(3):
        engine.add(Job(f"early{i}", "early", 8, 5_000))
    engine.add(Job("other", "other", 8, 5_000))
    for _ in range(1_000):
        engine.run_step()
    before = Counter(engine.tokens)
    for i in range(8):
        engine.add(Job(f"late{i}", "other", 8, 2_000))
    for _ in range(400):
        engine.run_step()
    served = {tenant: engine.tokens[tenant] - before[tenant] for tenant in ("early", "other")}
    assert max(served.values()) <= 1.1 * min(served.values()), served


@pytest.mark.parametrize("rules", [FairRules(slice_steps=8), BURST], ids=["to_the_token", "burst"])
def test_who_leaves_after_calm_service_and_comes_back_owes_nothing(rules):
    """It kept all of it as a debt, and starved until the others had been served as much."""
    engine = FairEngine(rules, ROOM)
    engine.add(Job("other", "other", 8, 2_100))
    for i in range(3):
        engine.add(Job(f"guest{i}", "guest", 8, 2_000))
    for _ in range(2_200):
        engine.run_step()
    assert not engine.jobs
    for i in range(8):
        engine.add(Job(f"busy{i}", "ab"[i % 2], 8, 4_000))
    for _ in range(100):
        engine.run_step()
    before = Counter(engine.tokens)
    for i in range(4):
        engine.add(Job(f"back{i}", "guest", 8, 4_000))
    for _ in range(600):
        engine.run_step()
    served = engine.tokens - before
    assert served["guest"] / served.total() == pytest.approx(1 / 3, rel=0.1), served


def test_a_flood_of_prompts_takes_no_share_of_another_tenants_decodes():
    engine = FairEngine(FairRules(slice_steps=4), Room(slots=4, step_tokens=512))
    for i in range(8):
        engine.add(Job(f"chat{i}", "chat", 4, 5_000, weight=2.0))
    count = 0
    for _ in range(3_000):
        while sum(job.tenant == "flood" for job in engine.jobs.values()) < 16:
            count += 1
            engine.add(Job(f"f{count}", "flood", 6, 1))
        engine.run_step()
    share = engine.tokens["chat"] / engine.tokens.total()
    assert share == pytest.approx(2 / 3, rel=0.05), share


@settings(max_examples=examples(25), deadline=None)
@given(st.lists(jobs, min_size=5, max_size=25), st.integers(1, 12))
def test_the_same_arrivals_make_the_same_plans(found, slice_steps):
    rules = FairRules(slice_steps=slice_steps)
    first, second = (run(rules, ROOM, found)[0] for _ in range(2))
    assert first.plans == second.plans


def test_twelve_requests_in_four_slots_take_turns_and_all_hear_soon():
    engine = FairEngine(FairRules(slice_steps=8), ROOM)
    all_jobs = [Job(f"r{i}", "t", 16, 60) for i in range(12)]
    for job in all_jobs:
        engine.add(job)
    while engine.jobs:
        engine.run_step()
    assert [job.first_step for job in all_jobs] == [1] * 4 + [9] * 4 + [17] * 4
    assert 76 <= engine.num_parked <= 92, engine.num_parked


@pytest.mark.parametrize("seed", range(6))
def test_a_share_of_four_to_one_stays_that_over_two_engines_of_which_one_serves_the_smaller(seed):
    rng = random.Random(seed)
    weights = {"large": 4.0, "small": 1.0}
    engines = {name: FairEngine(FairRules(slice_steps=4), ROOM) for name in ("one", "two")}
    heard = {name: Elsewhere() for name in engines}
    wanted = {"one": ("large", "small"), "two": ("large",)}
    count = 0
    for step in range(2_000):
        for name, engine in engines.items():
            for tenant in wanted[name]:
                while sum(job.tenant == tenant for job in engine.jobs.values()) < 2 * ROOM.slots:
                    count += 1
                    lengths = rng.randint(1, 30), rng.randint(20, 120)
                    engine.add(Job(f"r{count}", tenant, *lengths, weights[tenant]))
            engine.run_step()
        if step % 10 == 0:
            for name, other in (("one", "two"), ("two", "one")):
                for tenant, tokens in heard[name].news({other: engines[other].tokens}).items():
                    engines[name].slices.accounts.served_elsewhere(tenant, tokens)
        if step == 200:
            before = engines["one"].tokens + engines["two"].tokens
    after = engines["one"].tokens + engines["two"].tokens
    share = (after["large"] - before["large"]) / (after - before).total()
    assert share == pytest.approx(0.8, rel=0.05), (seed, share)
