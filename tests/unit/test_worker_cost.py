"""What a worker learns of its prompts while it decodes: from steps that it can tell apart."""

import pytest

from shared.costmodel.model import CostModel, StepShape
from shared.engine.interface import DecodeStep, PromptStep
from shared.engine.worker_cost import MAX_ARRIVED, WorkerCost
from tests.unit.test_costmodel import CPU

MODEL = CostModel(CPU)


def learnt(steps, cost=None) -> WorkerCost:
    cost = cost or WorkerCost()
    cost.use(CPU)
    for step in steps:
        cost.on_step(step)
    return cost


def mixed(slower, *, new=400, past=100, decodes=4, context=2000) -> PromptStep:
    """`slower` times as long as predicted, all of it the prompt's doing."""
    chunks = ((new, past),)
    prompt = MODEL.step_ms(StepShape(chunks))
    added = MODEL.step_ms(StepShape(chunks, decodes, context)) - prompt
    return PromptStep(prompt * slower + added, new, past, decodes, context)


def test_prompts_beside_decodes_teach_what_prompts_take():
    cost = learnt([mixed(2.0) for _ in range(15)])
    assert cost.corrections["prefill"].factor == pytest.approx(2.0)
    assert cost.corrections["decode"].num_observed == 0
    cost.begin("a", 800, 0)
    assert cost.queued_prefill_ms == pytest.approx(2.0 * MODEL.prefill_ms(800))


def test_what_decodes_add_is_taken_away_as_they_are_known_to_be():
    slow = [DecodeStep(3 * MODEL.decode_step_ms(4, 2000), 4, 2000)] * 15
    chunks = ((400, 100),)
    prompt = MODEL.step_ms(StepShape(chunks))
    added = MODEL.step_ms(StepShape(chunks, 4, 2000)) - prompt
    steps = [PromptStep(prompt + 3 * added, 400, 100, 4, 2000)] * 15
    cost = learnt([*slow, *steps])
    assert cost.corrections["decode"].factor == pytest.approx(3.0)
    assert cost.corrections["prefill"].factor == pytest.approx(1.0)


def test_the_step_of_decodes_before_it_is_taken_away_too():
    slow = [DecodeStep(3 * MODEL.decode_step_ms(4, 2000), 4, 2000)] * 15
    chunks = ((400, 100),)
    prompt = MODEL.step_ms(StepShape(chunks))
    added = MODEL.step_ms(StepShape(chunks, 4, 2000)) - prompt
    both_ms = 2 * prompt + 3 * (added + MODEL.decode_step_ms(5, 2000))
    cost = learnt([*slow, *[PromptStep(both_ms, 400, 100, 4, 2000, decodes_before=5)] * 15])
    assert cost.corrections["prefill"].factor == pytest.approx(2.0)


def test_a_token_that_a_step_computes_beside_many_says_nothing_of_prompts():
    """A decode worker computes the last token of each prompt that it is handed."""
    cost = learnt([mixed(9.0, new=1, past=400, decodes=8, context=8000) for _ in range(20)])
    assert cost.corrections["prefill"].num_observed == 0


def test_one_wild_step_changes_nothing():
    cost = learnt([mixed(1.0), mixed(1.0), mixed(4.0), mixed(1.0)])
    assert cost.corrections["prefill"].factor == pytest.approx(1.0)


def test_a_step_that_took_less_than_its_decodes_are_said_to_add_says_nothing():
    """As on a machine that did something else during the decodes before it."""
    slow = [DecodeStep(3 * MODEL.decode_step_ms(4, 2000), 4, 2000)] * 15
    chunks = ((400, 100),)
    added = MODEL.step_ms(StepShape(chunks, 4, 2000)) - MODEL.step_ms(StepShape(chunks))
    cost = learnt([*slow, PromptStep(2 * added, 400, 100, 4, 2000)])
    assert cost.corrections["decode"].factor == pytest.approx(3.0)
    assert cost.corrections["prefill"].num_observed == 0


def test_what_came_is_told_until_a_report_left_and_forgotten_while_there_is_nobody_to_tell():
    cost = WorkerCost()  # also without a model
    cost.begin("a", 800, 0, ("r", 1))
    cost.begin("handed over", 800, 799)
    assert list(cost.arrived) == [("r", 1)]
    for number in range(MAX_ARRIVED):
        cost.begin(f"b{number}", 8, 0, (f"s{number}", 1))
    assert len(cost.arrived) == MAX_ARRIVED
    assert cost.arrived[0] == ("s0", 1)
