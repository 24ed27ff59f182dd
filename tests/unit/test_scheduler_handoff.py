"""What a hand-off is predicted to take, where prefill sends a prompt's blocks while it computes the rest."""

import pytest

from shared.engine import worker_main
from shared.engine.worker_config import WorkerSettings, ahead_prevented_by, sends_ahead
from shared.errors import SettingsError
from tests.support.cost_view import View, links
from tests.unit.test_scheduler_cost import ask


@pytest.mark.parametrize(
    ("gb_per_s", "hit_tokens", "ahead", "left_ms"),
    # 4,096 tokens in steps of 1,024: 102.4 ms each; all of them are 41 MB, the last step's 10.2; 2 ms of latency
    [
        (1.0, 0, False, 2 + 40.96),
        (1.0, 0, True, 2 + 10.24),
        (0.05, 0, True, 2 + 819.2 - 3 * 102.4),  # the link is free from the end of the first step
        (1.0, 3_072, True, 2 + 10.24),  # what was cached leaves at once
        (0.2, 3_072, True, 2 + 204.8 - 102.4),
    ],
)
def test_of_a_prompt_that_leaves_while_it_is_computed_only_the_rest_is_waited_for(
    gb_per_s, hit_tokens, ahead, left_ms
):
    view = View(disaggregation="always").add("p0", space=1, ahead=ahead).add("d0", "decode", space=2)
    placed = ask(view.say("d0", links=links(gb_per_s)), tokens=4_096, hits={"p0": hit_tokens})
    assert placed.predicted.transfer_ms == pytest.approx(left_ms, abs=0.01)


def test_nothing_leaves_ahead_for_another_host():
    view = View(disaggregation="always").add("p0", space=1, address="a", ahead=True)
    view.add("d0", "decode", host=2, address="b").say("d0", links=links(0.05))
    assert ask(view, tokens=4_096).predicted.transfer_ms == pytest.approx(2 + 819.2, abs=0.01)


def test_each_prefill_instance_has_the_hand_off_of_its_own_even_where_they_share_memory():
    view = View(disaggregation="always", hysteresis_ms=0.0, hysteresis_share=0.0)
    view.add("p0", space=1).add("p1", space=1, ahead=True).add("d0", "decode", space=2)
    placed = ask(view, tokens=4_096)
    assert placed.prefill.instance == "p1"
    assert placed.predicted.transfer_ms == pytest.approx(2 + 10.24, abs=0.01)
    assert placed.alternatives[0].predicted_ms - placed.predicted.total_ms == pytest.approx(30.72, abs=0.01)


def test_a_prompt_of_one_step_leaves_when_it_is_done():
    view = View(disaggregation="always").add("p0", space=1, ahead=True).add("d0", "decode", space=2)
    assert ask(view, tokens=1_024).predicted.transfer_ms == pytest.approx(2 + 10.24, abs=0.01)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("host", [1, 2])
def test_pages_go_to_an_instance_of_other_ranks_as_to_one_of_as_many(host, tp):
    view = View(disaggregation="always").add("p0", space=1, host=1, address="a", tp=2)
    view.add("d0", "decode", space=2, host=host, address="ab"[host - 1], tp=tp)
    assert ask(view).predicted.transfer_ms == pytest.approx(2 + 10.24, abs=0.01)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_prefix_of_another_host_is_planned_to_be_fetched_however_it_is_cut(tp):
    view = View(disaggregation="always").add("p0", host=1, address="a", tp=2, queued_prefill_ms=9_000.0)
    view.add("p1", host=2, address="b", tp=tp).add("d0", "decode", host=2, address="b", tp=tp)
    placed = ask(view, hits={"p0": 960})
    assert placed.prefill.instance == "p1"
    assert placed.predicted.compute_ms == pytest.approx((1_000 - 960) / 10)
    assert placed.kv.source == "p0"


def test_prefill_engines_in_pages_send_ahead_and_say_so():
    settings = {"mempool_socket": "/x", "model_dir": "m", "model_name": "m", "role": "prefill"}
    assert sends_ahead(WorkerSettings(**settings))
    for other in (
        {"role": "decode"}, {"handoff_ahead": False}, {"mempool_socket": ""}, {"kv_cache": "copy"}, {"engine": "mock"},
        {"local_policy": "cfs"}, {"kv_layout": "token-major"},
    ):  # fmt: skip
        assert not sends_ahead(WorkerSettings(**(settings | other))), other
    by_layer = {"transfer_mode": "by-layer", "handoff_ahead": False, "kv_layout": "layer-major"}
    assert sends_ahead(WorkerSettings(**(settings | by_layer)))


PAGES = {"mempool_socket": "/x", "model_dir": "m", "model_name": "m", "role": "prefill"}
PREVENTS = [
    ({"local_policy": "cfs"}, "local_policy"), ({"far_bytes": 1 << 20}, "far_bytes"),
    ({"kv_layout": "layer-major"}, "kv_layout"),
]  # fmt: skip
NOT_ASKED_FOR = [
    {}, {"handoff_ahead": False}, {"role": "decode"}, {"kv_cache": "copy"}, {"mempool_socket": ""}, {"engine": "mock"},
]  # fmt: skip


@pytest.mark.parametrize(("settings", "name"), PREVENTS)
@pytest.mark.parametrize("more", NOT_ASKED_FOR)
def test_a_setting_that_takes_sending_ahead_away_is_named_where_it_does(settings, name, more):
    assert ahead_prevented_by(WorkerSettings(**(PAGES | settings | more))) == ("" if more else name)
    assert ahead_prevented_by(WorkerSettings(**(PAGES | more))) == ""


@pytest.mark.parametrize("settings", [{}, *(settings for settings, _ in PREVENTS)])
def test_a_worker_says_at_its_start_that_it_sends_nothing_ahead_although_it_should(monkeypatch, settings):
    said = {}

    class Logger:
        def note(self, event, **fields):
            said[event] = fields

        info = warning = error = note

    def refuse(_):
        raise SettingsError("no engine here")

    monkeypatch.setattr(worker_main.log, "setup", lambda *_: None)
    monkeypatch.setattr(worker_main, "get_logger", lambda _: Logger())
    monkeypatch.setattr(worker_main, "make_engine", refuse)
    assert worker_main.run("prefill", WorkerSettings(**(PAGES | settings))) == worker_main.EXIT_SETTINGS
    assert ("handoff_ahead_off" in said) == bool(settings)
    for name, value in settings.items():
        assert (said["handoff_ahead_off"]["because"], said["handoff_ahead_off"]["value"]) == (
            f"worker.{name}",
            value,
        )


@pytest.mark.parametrize("confined", ["p0", "p1"])
def test_no_fetch_is_planned_where_blocks_cannot_leave_the_one_host_or_come_to_the_other(confined):
    view = View(disaggregation="always").add("d0", "decode", host=2, address="tcp://two")
    for name, host, address in (("p0", 1, "tcp://one"), ("p1", 2, "tcp://two")):
        view.add(name, host=host, address=address, crosses=name != confined)
    placed = ask(view.say("p0", queued_prefill_ms=500.0), hits={"p0": 800})
    assert placed.prefill.instance == "p1"
    assert placed.kv is None
    assert placed.predicted.compute_ms == pytest.approx(100.0), "all of the prompt"


@pytest.mark.parametrize("confined", ["p0", "d0"])
def test_a_hand_off_to_another_host_that_would_be_a_miss_is_predicted_as_one(confined):
    view = View(disaggregation="always").add("p0", host=1, address="a", crosses=confined != "p0")
    view.add("d0", "decode", host=2, address="b", crosses=confined != "d0")
    assert ask(view).predicted.transfer_ms == pytest.approx(100.0), "the prompt is computed again"


@pytest.mark.parametrize(("crosses", "kind"), [(True, "disaggregated"), (False, "colocated")])
def test_a_prompt_is_kept_from_a_hand_off_that_would_be_a_miss(crosses, kind):
    view = View(role_margin_ms=100.0).add("p0", host=1, address="a", crosses=crosses)
    view.add("d0", "decode", host=2, address="b")
    assert ask(view, tokens=4_096).kind == kind
