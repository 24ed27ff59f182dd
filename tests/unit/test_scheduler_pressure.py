"""Policy cost where memory is short: what new pages push out counts, as far as it is asked for again."""

from functools import partial

import pytest

from loadtest import bench_locality, disaggregation_metrics, locality_simulated
from services.scheduler.core.predict import CostSettings
from services.scheduler.core.pressure import HALF_LIFE, Pressure
from tests.support.control_plane import place
from tests.support.cost_view import View
from tests.unit.test_scheduler_cost import ask

pytestmark = pytest.mark.slow

FAST = {"hysteresis_ms": 0.0, "hysteresis_share": 0.0}


def three(**cost):
    """Of one host: pages move between them for little."""
    view = View(disaggregation="never", **FAST, **cost)
    for number in range(3):
        view.add(f"c{number}", "colocated", space=number + 1)
    return view


def lose(view, times, tokens=1_000, attempt=1):
    """Prompts come that were asked for before, and that nobody holds any more."""
    for number in range(times):
        request = place(f"lost-{number}", attempt=attempt, tokens=tokens, seen_tokens=tokens)
        view.placer.place(request, now_ms=view.now_ms)
        view.placer.ended(request)


def held(view, name="again"):
    """A prompt comes that c0 holds, whose queue is longer by more than fetching takes, by less than computing."""
    view.say("c0", queued_prefill_ms=70.0)
    return ask(view, hits={"c0": 992}, name=name, seen_tokens=992)


def test_a_copy_goes_to_an_idle_instance_while_nothing_is_missed():
    placed = held(three())
    assert placed.decode.instance != "c0"
    assert placed.kv.source == "c0"
    assert placed.predicted.evict_ms == 0.0


def test_where_prompts_come_again_and_are_gone_new_pages_cost_what_they_push_out():
    view = three()
    lose(view, 50)
    placed = held(view)
    # each of them was computed whole, 100 ms for 1000 tokens but the last one: 4 * 0.0999 ms a token, 8 tokens are new
    assert placed.decode.instance == "c0"
    assert placed.predicted.evict_ms == pytest.approx(4 * 0.0999 * 8, abs=0.001)
    assert f"what it pushes out costs {placed.predicted.evict_ms:.1f}" in placed.reason
    assert {a.why.split(" ")[0] for a in placed.alternatives} == {"pushes"}


def test_without_a_weight_only_its_own_time_counts():
    view = three(evict_weight=0.0)
    lose(view, 50)
    placed = held(view)
    assert placed.decode.instance != "c0"
    assert placed.predicted.evict_ms == 0.0


def test_prompts_that_somebody_still_holds_were_not_pushed_out():
    view = three()
    for number in range(50):
        request = place(f"found-{number}", tokens=1_000, seen_tokens=992, hits={"c1": 992})
        view.placer.place(request, now_ms=view.now_ms)
        view.placer.ended(request)
    assert view.placer.pressures.ms_per_token("") == 0.0


def test_another_attempt_at_the_same_request_tells_nothing_new():
    view = three()
    lose(view, 50, attempt=2)
    assert view.placer.pressures.ms_per_token("") == 0.0


def test_counts_from_a_socket_are_cut_to_what_can_be():
    view = three()
    for name, seen in (("less", -5), ("more", 1 << 40)):
        assert view.placer.place(place(name, tokens=1_000, seen_tokens=seen), now_ms=0)
    assert 0.0 <= view.placer.pressures.ms_per_token("") <= 0.1


def test_what_was_missed_long_ago_counts_less():
    pressure = Pressure()
    for _ in range(500):
        pressure.add(100.0, 1_000)
    assert pressure.ms_per_token == pytest.approx(0.1)
    for _ in range(HALF_LIFE):
        pressure.add(0.0, 1_000)
    assert pressure.ms_per_token == pytest.approx(0.05, rel=0.01)
    for _ in range(20 * HALF_LIFE):
        pressure.add(0.0, 0)
    assert pressure.ms_per_token < 0.1


def test_nothing_new_costs_nothing():
    pressure = Pressure()
    pressure.add(0.0, 0)
    assert pressure.ms_per_token == 0.0


@pytest.mark.parametrize(("memory_tokens", "least_gain"), [(16_384, 0.04), (393_216, -0.005)])
def test_simulated_documents_are_found_more_often_with_little_memory_and_as_often_with_enough(
    memory_tokens, least_gain, monkeypatch
):
    def found(evict_weight):
        monkeypatch.setattr(
            locality_simulated, "CostSettings", partial(CostSettings, evict_weight=evict_weight)
        )
        cluster = locality_simulated.SimulatedCluster("h200", "llama-8b", None, memory_tokens)
        cluster.use(bench_locality.ARMS["cost"])
        options = bench_locality.parse(["--simulate", "h200", "--ratios", "2"])
        rows = [
            {"sources": one.sources}
            for seed in (1, 2, 3)
            for one in cluster.run(bench_locality.workload(options, 2, seed, 120.0, "cost"))
        ]
        return disaggregation_metrics.hit_ratio(rows)

    assert found(4.0) - found(0.0) >= least_gain
