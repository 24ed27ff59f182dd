"""Instances whose own profile failed: their family's coefficients tell how long what they have queued takes."""

import pytest

from shared.wire.cost import CostCoefficients, ModelShape
from tests.support.control_plane import description, hello, place
from tests.support.cost_view import TOKEN_BYTES, View, coefficients

SHAPE = ModelShape(
    num_layers=4,
    hidden_size=512,
    intermediate_size=2_048,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    vocab_size=512,
)


def ask(view, hits=None):
    return view.placer.place(place("r1", tokens=1_000, hits=hits), now_ms=view.now_ms)


def borrows(**cost):
    """p1 has no model of its own, and so reports no queue in ms."""
    view = View(disaggregation="always", **cost).add("p0", host=1).add("p1", host=2, cost=None)
    return view.add("d0", "decode", host=8).add("d1", "decode", host=9, cost=None)


def test_the_queue_of_one_that_borrows_is_predicted_from_its_tokens_and_drains():
    view = borrows().say("p0", queued_prefill_ms=200.0).say("p1", unfinished_prefill_tokens=2_500)
    assert ask(view).prefill.instance == "p0", "200 ms against two full steps of 1024 tokens and one of 452"
    view = borrows().say("p0", queued_prefill_ms=300.0).say("p1", unfinished_prefill_tokens=2_500)
    view.now_ms = 150
    placed = ask(view)
    assert (placed.prefill.instance, placed.predicted.queue_ms) == ("p1", pytest.approx(100.0))


def test_one_that_borrows_panics_like_any_other():
    view = borrows(panic_queue_ms=100.0).say("p1", unfinished_prefill_tokens=1_100)
    assert ask(view, hits={"p1": 992}).prefill.instance == "p0"


def test_handed_over_prompts_are_no_queue_of_a_decode_instance_that_borrows():
    view = borrows(panic_queue_ms=100.0).say("d0", num_running=4).say("d1", unfinished_prefill_tokens=50_000)
    assert ask(view).decode.instance == "d1"


def test_a_queue_is_predicted_from_when_there_is_a_model_until_the_instance_has_its_own():
    view = View().add("p1", cost=None, unfinished_prefill_tokens=1_000)
    known = view.placer.instances.get
    assert known("p1").view(now_ms=0).queue_ms == 0.0
    view.add("p0")
    assert known("p1").view(now_ms=0).queue_ms == pytest.approx(100.0)
    view.add(
        "p1", unfinished_prefill_tokens=1_000
    )  # it was profiled after all: the same epoch says Hello again
    assert known("p1").view(now_ms=0).queue_ms == 0.0


@pytest.mark.parametrize(("own", "borrower", "factor"), [(1, 2, 0.5), (2, 1, 2.0), (2, 2, 1.0)])
def test_one_that_borrows_from_other_ranks_computes_on_its_own(own, borrower, factor):
    cost = CostCoefficients(shape=SHAPE, tp=own, matmul_ms_per_gflop=1.0, attention_ms_per_gflop=1.0)
    view = View().add("p0", tp=own, cost=cost).add("p1", tp=borrower, cost=None)
    models = [view.placer.instances.get(name).model for name in ("p0", "p1")]
    lent_ms, borrowed_ms = (model.prefill_ms(1_000) for model in models)
    assert borrowed_ms == pytest.approx(factor * lent_ms, rel=0.01)


@pytest.mark.parametrize("order", [("p0", "p1"), ("p1", "p0")])
def test_one_of_another_family_borrows_of_its_model_and_no_other_goes_without_predictions(order):
    view = View()
    for name in order:
        made = description(block_bytes=16 * TOKEN_BYTES, block_tokens=16 if name == "p1" else 32)
        cost = coefficients() if name == "p0" else None
        view.placer.instances.hello(hello(name, description=made, cost=cost), now_ms=0)
        view.say(name)
    known = {name: view.placer.instances.get(name) for name in order}
    assert known["p0"].family_key != known["p1"].family_key
    assert ask(view, hits={"p0": 992}).reason.startswith("By cost: p0 alone")


def test_one_of_another_model_lends_nothing():
    view = View().add("p0")
    view.placer.instances.hello(hello("p1", description=description("other", "f2")), now_ms=0)
    assert view.placer.instances.get("p1").model is None
