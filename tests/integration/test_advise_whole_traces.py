"""Verdicts of `quire advise` that take many simulations: seconds each."""

import json
from random import Random

from deploy.local import cmd_advise
from loadtest.reports.summary import Slo
from loadtest.simulator.advise import Advisor, Question
from loadtest.simulator.known import Setting
from tests.support.simulated import mooncake_lines, plain
from tests.unit.test_simulator_advise import MACHINE, STEADY, ask, quire


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
        question = Question(trace, MACHINE, 3, Slo(8_000, 15), Setting(100.0), most_requests=most)
        found.append(Advisor(question, lambda: 0.0, 1.0).advise())
    assert {(one.disaggregate, one.prefill, one.decode) for one in found} == {(True, 2, 1)}
    gains = [one.gain_ratio for one in found]
    assert max(gains) < 1.1 * min(gains)  # rates are tried in steps of 4%
    links = [one.break_even_gb_per_s for one in found]
    assert max(links) < 1.5 * min(links)


def test_a_rate_counts_only_where_it_could_go_on():
    # these 30 are over before the last one waits 4 s, at up to twice the rate that three instances can keep
    machine_rate_per_s = 3 * 1000 / MACHINE.prices.prefill_ms(8_000)
    colocated = ask(100.0, slo=Slo(4000, 10_000), requests=STEADY[:30]).layouts[0]
    assert 0.5 * machine_rate_per_s < colocated.max_rate_per_s < 1.15 * machine_rate_per_s


def test_the_command_prints_a_table_or_json_and_the_same_verdict(tmp_path, monkeypatch):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(mooncake_lines(2, count=40)))
    monkeypatch.setattr(cmd_advise, "BUDGET_S", 600.0)  # on a busy machine two runs must say the same
    words = (path, "--gpus", 2, "--requests", 30, "--slo-tpot-ms", 40, "--gpu", "l40s")
    told, read = quire(*words), json.loads(quire(*words, "--json").stdout)
    assert told.exit_code == 0
    assert "1P:1D" in told.stdout
    assert read["sentence"] in " ".join(told.stdout.split())
    assert (read["simulated_requests"], read["slo_tpot_ms"], read["calibrated"]) == (30, 40.0, False)
