"""Which of vLLM's steps say what a prompt costs, told from vLLM's own statistics."""

import types

import pytest

pytestmark = pytest.mark.engine
BUDGET = 2048


@pytest.fixture
def view_and_rig(monkeypatch):
    """A view, and what tells it of a step and gives the prompts that it has told of; the clock moves 10 ms a step."""
    module = pytest.importorskip("shared.engine.load_view")
    from vllm.v1.metrics.stats import IterationStats, PrefillStats, SchedulerStats

    clock = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=lambda: clock.now))
    unfinished: dict[str, int] = {}
    view = module.LoadView(unfinished, {"a": 500, "b": 700, "new": 900}, BUDGET)
    told = []
    view.listener.hear = told.append

    def step(decodes, *prompts, after_ms=10.0, still_open=()):
        """`prompts`: (tokens, found) of those that came to their first token."""
        clock.now += after_ms / 1e3
        unfinished.clear()
        unfinished.update(dict.fromkeys(still_open, 1))
        stats = IterationStats()
        stats.num_generation_tokens = decodes + len(prompts)
        for tokens, found in prompts:
            one = PrefillStats()
            one.set(tokens, found, 0)
            stats.prompt_token_stats.update_from_output(one)
            stats.time_to_first_tokens_iter.append(0.1)
        view.record(SchedulerStats(num_running_reqs=decodes + len(prompts)), stats)
        return [each for each in told if isinstance(each, module.PromptStep)]

    return view, step


@pytest.fixture
def rig(view_and_rig):
    return view_and_rig[1]


def test_a_prompt_beside_decodes_is_told_with_its_steps_time_and_the_one_befores(rig):
    rig(3)
    rig(3)
    (told,) = rig(2, (900, 400), after_ms=35.0)
    assert told.ms == pytest.approx(45.0)
    assert (told.new_tokens, told.past_tokens, told.num_decodes, told.context_tokens) == (500, 400, 2, 1200)
    assert told.decodes_before == 3


def test_a_result_that_comes_late_as_the_prompt_is_launched_takes_nothing_from_the_prompt(rig):
    """vLLM launches a step before it takes the result of the one before: 12 ms late on an H200, of 20."""
    rig(2)
    rig(2, after_ms=17.0, still_open=("a",))
    (told,) = rig(2, (900, 0), after_ms=13.0)
    assert told.ms == pytest.approx(30.0)


@pytest.mark.parametrize(
    ("why", "steps"),
    [
        ("nothing decoded: the time from an arrival is another one's to measure", [(0, (900, 0))]),
        ("two prompts share it", [(2, (900, 0), (100, 0))]),
        ("it took several steps", [(2, (BUDGET, 0))]),
        ("the step before computed a prompt too", [(2, (BUDGET, 0)), (2, (900, 0))]),
    ],
)
def test_other_steps_say_nothing(rig, why, steps):
    for step in [(2,), (2,), *steps]:
        found = rig(*step)
    assert found == [], why
    rig(2)
    assert len(rig(2, (900, 0))) == 1


def test_another_prompt_that_is_open_may_have_had_a_part_of_the_step(rig):
    rig(2)
    rig(2)
    assert rig(2, (900, 0), still_open=("x", "y")) == []
    rig(2, still_open=("x", "y"))
    assert rig(2, (900, 0)) == []
    rig(2, still_open=("x", "y"))
    rig(2)  # may have had a part of this one
    assert rig(2, (900, 0)) == []


def test_steps_behind_a_pause_began_nobody_knows_when(rig):
    assert rig(2, (900, 0)) == []
    rig(2)
    rig(2)
    assert rig(2, (900, 0), after_ms=2000.0) == []
    rig(2, after_ms=2000.0)
    assert rig(2, (900, 0)) == []


def test_a_listener_that_fails_does_not_end_the_engine(view_and_rig):
    """vLLM takes an exception in a stat logger for the engine's death: every stream of the worker would end."""
    view, rig = view_and_rig
    heard = view.listener.hear

    def fail(step):
        raise ValueError("Counters can only be incremented by non-negative amounts.")

    view.listener.hear = fail
    rig(2)
    rig(2)
    assert rig(2, (900, 0)) == []
    rig(2)
    rig(2)  # decodes alone are told too
    view.listener.hear = heard
    rig(2)
    assert len(rig(2, (900, 0))) == 1
