"""The search for a rate finds the knee of every monotone system, in few runs, and noise at the knee moves it little."""

from math import floor, log2
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from loadtest.profiler.core.search import RateSearch, SearchLimits

STEPS = st.sampled_from([0.1, 0.25, 0.5, 1.0, 3.0])
REPEATS = st.sampled_from([1, 3, 5])
MOST = 256.0


def limits_of(step, repeats, places, max_runs=10_000):
    low, high = sorted(places)
    return SearchLimits(step, low * step, high * step, MOST, repeats, max_runs)


def run(search, kept):
    """What it found; `kept` says what becomes of a run at a rate."""
    while (rate := search.next_rate()) is not None:
        search.record(rate, kept=kept(rate))
    return search.found()


def few(limits):
    """Up and down by factors of two, the bracket halved, and both sides of the knee decided."""
    places = limits.most / limits.step
    return 3 + 2 * log2(places) + 2 * limits.repeats


PLACES = st.tuples(st.integers(1, 80), st.integers(1, 80))


@given(st.floats(0, 300), STEPS, REPEATS, PLACES)
def test_the_knee_of_a_monotone_system_is_found_to_the_step_in_few_runs(knee, step, repeats, places):
    limits = limits_of(step, repeats, places)
    found = run(RateSearch(limits), lambda rate: rate <= knee + 1e-9)
    expected = min(floor(knee / step + 1e-6), floor(MOST / step + 1e-6)) * step
    assert found.settled
    assert abs(found.rate_per_s - expected) <= 1e-6
    assert found.num_runs <= few(limits)
    assert bool(found.reason) == (expected > MOST - step)


@given(st.integers(0, 200), STEPS, PLACES, st.integers(0, 40))
def test_one_run_that_says_the_opposite_changes_nothing(knee, step, places, lie):
    limits = limits_of(step, 3, places)
    search, count = RateSearch(limits), [0]
    most = floor(MOST / step + 1e-6)

    def kept(rate):
        count[0] += 1
        return (round(rate / step) <= knee) != (count[0] == lie)

    found = run(search, kept)
    assert found.settled
    assert round(found.rate_per_s / step) == min(knee, most)


@given(st.integers(5, 100), st.integers(0, 4), STEPS, REPEATS, PLACES, st.integers(0, 1 << 30))
def test_where_runs_near_the_knee_are_a_matter_of_luck_it_is_found_near_it(
    knee, width, step, repeats, places, seed
):
    rng = Random(seed)

    def kept(rate):
        place = round(rate / step)
        return rng.random() < 0.5 if abs(place - knee) <= width else place < knee

    found = run(RateSearch(limits_of(step, repeats, places)), kept)
    assert found.settled
    most = floor(MOST / step + 1e-6)
    assert min(knee - width - 1, most) <= round(found.rate_per_s / step) <= min(knee + width, most)


@given(STEPS, REPEATS, PLACES, st.integers(1, 30), st.integers(0, 1 << 30))
def test_whatever_runs_say_it_ends_within_its_bound(step, repeats, places, max_runs, seed):
    rng = Random(seed)
    search = RateSearch(limits_of(step, repeats, places, max_runs))
    found = run(search, lambda rate: rng.random() < 0.5)
    assert found.num_runs <= max_runs
    assert found.settled or "ended after" in found.reason
    assert 0 <= found.rate_per_s <= MOST
