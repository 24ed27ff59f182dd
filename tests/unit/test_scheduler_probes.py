"""Probes: a path that nobody measured is tried although eq 2 says no, seldom and where it costs little."""

import pytest

from services.scheduler.core.probes import PROBE_EVERY_MS
from shared.wire.cost import LinkRate
from tests.support.control_plane import place
from tests.support.cost_view import View, coefficients

QUICK = coefficients(
    prefill_ms=0.001
)  # 800 tokens in 0.8 ms: the careful rates bring them in 2.6 (peer), 10 (remote)


def unmeasured(*, second_host=1, **more):
    """p0, which is busy, holds what is asked for; p1 is idle and computes it sooner than a careful link brings it."""
    view = View(disaggregation="always", **more)
    view.add("p0", space=1, host=1, address="tcp://one", cost=QUICK)
    there = "tcp://one" if second_host == 1 else "tcp://two"
    view.add("p1", space=2, host=second_host, address=there, cost=QUICK)
    view.add("d0", "decode", space=3, host=second_host, address=there)
    view.say("p0", queued_prefill_ms=5_000.0)
    for name in ("p0", "p1", "d0"):
        view.say(name, links={})
    return view


def kv_of(view, name="r1", *, tokens=1_000, held=800):
    placed = view.placer.place(place(name, tokens=tokens, hits={"p0": held}), now_ms=view.now_ms)
    assert placed.prefill.instance == "p1"
    return placed.kv


@pytest.mark.parametrize(
    ("second_host", "reach", "path", "address"),
    [(1, "host", "peer", ""), (2, "remote", "remote", "tcp://one")],
)
def test_a_path_that_nobody_measured_is_tried_although_computing_seems_quicker(
    second_host, reach, path, address
):
    kv = kv_of(unmeasured(second_host=second_host))
    assert (kv.recompute, kv.reach, kv.path, kv.source) == (False, reach, path, "p0")
    assert (kv.source_mempool, kv.tokens) == (address, 800)


def test_what_was_measured_is_eq_2s_alone():
    view = unmeasured()
    view.say("p1", links={"peer": LinkRate(gb_per_s=5.0, latency_ms=1.0)})
    assert kv_of(view).recompute
    view.say("p1", links={"peer": LinkRate(gb_per_s=200.0, latency_ms=0.1)})
    kv = kv_of(view, "r2")
    assert (kv.recompute, kv.reach) == (False, "host"), "as quick as the probe had shown"


def test_probes_of_an_instance_are_a_second_apart():
    """Reports come in between: many requests at once do not all wait for a link that may be slow."""
    view = unmeasured()
    assert not kv_of(view, "r1").recompute
    assert kv_of(view, "r2").recompute
    view.now_ms += PROBE_EVERY_MS - 1
    assert kv_of(view, "r3").recompute
    view.now_ms += 1
    assert not kv_of(view, "r4").recompute


def test_a_long_prefix_is_no_probe():
    """At 1 GB/s it might take its request a third of a second."""
    view = unmeasured(second_host=2)
    assert kv_of(view, "r1", tokens=40_000, held=32_000).recompute
    assert not kv_of(view, "r2").recompute, "a short one is"


def test_nothing_is_tried_where_fetching_is_off_or_the_holder_has_no_address():
    view = unmeasured(fetch="never")
    assert (kv_of(view).reach, kv_of(view, "r2").recompute) == ("own", False)
    hidden = View(disaggregation="always").add("p0", host=1, cost=QUICK).add("p1", host=2, cost=QUICK)
    hidden.add("d0", "decode", host=2).say("p0", queued_prefill_ms=500.0)
    assert kv_of(hidden) is None
    gone = unmeasured(second_host=2)
    gone.say("p0", pool=None)
    kv = kv_of(gone)
    assert kv is None or kv.recompute


def test_other_paths_are_tried_though_one_is_known():
    view = unmeasured(second_host=2)
    view.say("p1", links={"peer": LinkRate(gb_per_s=200.0, latency_ms=0.1)})
    assert not kv_of(view).recompute


def test_the_reason_says_that_it_fetches_to_measure():
    view = unmeasured()
    placed = view.placer.place(place("r1", tokens=1_000, hits={"p0": 800}), now_ms=0)
    assert "it fetches 800 tokens of p0 to learn how fast they come" in placed.reason
    placed = view.placer.place(place("r2", tokens=1_000, hits={"p0": 800}), now_ms=0)
    assert "to learn" not in placed.reason
