"""Verdicts of `quire advise` that take many simulations: seconds each."""

from random import Random

from loadtest.reports.summary import Slo
from loadtest.simulator.advise import Advisor, Question
from tests.support.simulated import plain
from tests.unit.test_simulator_advise import MACHINE, ask


def test_a_slow_link_or_gaps_that_nobody_counts_want_it_colocated():
    assert not ask(0.05).disaggregate
    loose = ask(100.0, slo=Slo(4000, 10_000))
    assert not loose.disaggregate
    assert "Keep them colocated" in loose.sentence


def jittered(count, seed=5):
    """Of one trace: long prompts of differing lengths, short answers."""
    rng, at_ms, out = Random(seed), 0.0, []
    for number in range(count):
        at_ms += rng.uniform(125, 375)
        out.append(plain(number, at_ms, rng.randrange(6_000, 10_000), rng.randrange(40, 80)))
    return out


def test_the_verdict_is_the_same_for_a_short_stretch_of_a_trace_as_for_a_long_one():
    trace = jittered(1_500)
    found = []
    for most in (150, 600, 1_500):
        question = Question(trace, MACHINE, 3, Slo(8_000, 15), link_gb_per_s=100.0, most_requests=most)
        found.append(Advisor(question, lambda: 0.0, 1.0).advise())
    assert {(one.disaggregate, one.prefill, one.decode) for one in found} == {(True, 2, 1)}
    gains = [one.gain_ratio for one in found]
    assert max(gains) < 1.1 * min(gains)  # rates are tried in steps of 4%
    links = [one.break_even_gb_per_s for one in found]
    assert max(links) < 1.5 * min(links)
