"""The placer against all placements there are: the same optimum, a bound that holds, pairs that nobody would leave."""

from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.placer import assign
from shared.placer.configuration import SMALL, Configuration, lower_limit
from shared.placer.highs import solve_linear
from shared.placer.patterns import choose_buckets, exact
from shared.placer.place import place
from shared.placer.problem import Kind, Problem, Shape
from shared.wire.placer import Placement, PlacementQuestion, Unplaceable
from tests.support.examples import examples
from tests.support.placements import best_of_all, check_placement, question, small_question


def still():
    """A clock that stands: only counted limits end a search."""
    return 0.0


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_small_questions_are_answered_with_the_least_eq6_of_all_placements(first):
    for seed in range(first, first + 20):
        asked = small_question(seed)
        best, answer = best_of_all(asked), place(asked, still)
        if best is None:
            assert isinstance(answer, Unplaceable), seed
            assert answer.reasons, seed
            assert answer.left_out, seed
        else:
            assert isinstance(answer, Placement), seed
            assert (answer.objective_bytes, answer.bound_bytes, answer.gap_ratio) == (best, best, 0.0), seed
            check_placement(asked, answer)


@pytest.mark.parametrize("first", range(1000, 1060, 20))
def test_without_the_exchange_programs_alone_find_and_prove_the_same(first, monkeypatch):
    monkeypatch.setattr(assign, "ROUNDS", 0)
    for seed in range(first, first + 20):
        asked = small_question(seed)
        best, answer = best_of_all(asked), place(asked, still)
        if best is not None:
            assert (answer.objective_bytes, answer.bound_bytes) == (best, best), seed


def random_problem(rng):
    kinds = {(rng.choice([1, 1, 2, 4]), rng.randint(-60, 60)): rng.randint(1, 3) for _ in range(9)}
    return Problem([Kind(*kind, count) for kind, count in kinds.items()], [Shape(8, 80, 3), Shape(4, 80, 2)])


@pytest.mark.parametrize("seed", range(5))
def test_columns_found_as_needed_say_the_same_as_all_of_them(seed):
    rng = Random(seed)
    problem = random_problem(rng)
    buckets = choose_buckets(problem, rng.choice([600, 2000]))
    assert buckets
    tried, every = Configuration(problem, buckets), Configuration(problem, buckets)
    for level in problem.levels():
        for limit in every.limits(level, 0, 1 << 40)[:: rng.randint(10, 30)]:
            columns = [np.flatnonzero((p.imbalance <= level) & (p.memory <= limit)) for p in every.sets]
            enough = solve_linear(every._program(columns)).cost < SMALL
            assert tried.possible(level, int(limit), lambda: False) == enough, (level, limit)


@pytest.mark.parametrize("seed", range(5))
def test_kinds_that_share_buckets_never_forbid_what_kinds_apart_allow(seed):
    problem = random_problem(Random(seed))
    apart = Configuration(problem, choose_buckets(problem, 100_000))
    coarsest = next(found for most in range(50, 5000, 50) if (found := choose_buckets(problem, most)))
    finer = choose_buckets(problem, 1500) or coarsest
    assert apart.exact
    assert not exact(coarsest)
    shared = [Configuration(problem, coarsest), Configuration(problem, finer)]
    for level in problem.levels():
        least = lower_limit(apart, level, 0, 1 << 40, lambda: False)
        for coarse in shared:
            found = lower_limit(coarse, level, 0, 1 << 40, lambda: False)
            assert least is None or (found is not None and found <= least), (level, found, least)


mixes = st.lists(
    st.tuples(st.sampled_from([1, 1, 2, 4]), st.integers(-60, 60), st.integers(1, 5)), min_size=1, max_size=9
)


@given(mixes, st.integers(2, 5), st.integers(0, 2**16))
@settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_mix_keeps_every_constraint_and_does_not_depend_on_the_order_of_its_entries(models, count, seed):
    asked = question([(8, 80, count)], models)
    answer = place(asked, still)
    if sum(tp * number for tp, _, number in models) > 8 * count:
        assert isinstance(answer, Unplaceable)
        return
    check_placement(asked, answer)
    rng = Random(seed)
    shuffled = PlacementQuestion(
        servers=rng.sample(asked.servers, len(asked.servers)),
        models=rng.sample(asked.models, len(asked.models)),
        time_limit_ms=asked.time_limit_ms,
    )
    assert place(shuffled, still) == answer
