"""The placer against all placements there are: the same optimum, a bound that holds, pairs that nobody would leave."""

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.placer.place import place
from shared.wire.placer import Placement, PlacementQuestion, Unplaceable
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


mixes = st.lists(
    st.tuples(st.sampled_from([1, 1, 2, 4]), st.integers(-60, 60), st.integers(1, 5)), min_size=1, max_size=9
)


@given(mixes, st.integers(2, 5), st.integers(0, 2**16))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
