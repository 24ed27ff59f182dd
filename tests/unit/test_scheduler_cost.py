"""The `cost` policy: eq 1 and eq 2 of MemServe with numbers worked out by hand, its brakes, and what it says."""

import time

import pytest

from shared.costmodel.model import CostModel
from shared.wire.placement import PrefixHit
from tests.support.control_plane import place
from tests.support.cost_view import View, coefficients, links
from tests.support.quickest import slowness


def prefills(**cost):
    """Three prefill instances on hosts of their own that reach nobody, and one decode instance."""
    view = View(disaggregation="always", **cost)
    for number in range(3):
        view.add(f"p{number}", host=number + 1)
    return view.add("d0", "decode", host=9)


def ask(view, tokens=1_000, hits=None, name="r1", **more):
    return view.placer.place(place(name, tokens=tokens, hits=hits, **more), now_ms=view.now_ms)


# ---- eq 1 ----


def test_eq_1_adds_the_queue_to_what_the_prefix_leaves_to_compute():
    view = prefills(hysteresis_ms=0.0, hysteresis_share=0.0)
    view.say("p0", queued_prefill_ms=30.0).say("p1", queued_prefill_ms=45.0).say("p2", queued_prefill_ms=90.0)
    # of 1000 tokens at 0.1 ms: 30 + 100, 45 + (1000 - 320) / 10, 90 + (1000 - 640) / 10
    placed = ask(view, hits={"p1": 320, "p2": 640})
    assert placed.prefill.instance == "p1"
    assert (placed.predicted.queue_ms, placed.predicted.compute_ms) == (45.0, 68.0)
    assert [(a.instance, a.hit_tokens) for a in placed.alternatives] == [("p2", 640), ("p0", 0)]
    totals = [a.predicted_ms - placed.predicted.total_ms for a in placed.alternatives]
    assert totals == pytest.approx([126.0 - 113.0, 130.0 - 113.0])
    assert "p1 and d0: queue 45.0 + compute 68.0" in placed.reason


def test_what_was_placed_since_the_report_is_queued_too():
    view = prefills()
    first = [ask(view, name=f"r{i}").prefill.instance for i in range(3)]
    assert sorted(first) == ["p0", "p1", "p2"]
    assert ask(view, name="r3").predicted.queue_ms == pytest.approx(100.0)


def test_a_queue_drains_while_no_report_comes():
    view = prefills()
    for name in ("p0", "p1", "p2"):
        view.say(name, queued_prefill_ms=200.0)
    view.now_ms = 150
    assert ask(view).predicted.queue_ms == pytest.approx(50.0)


def test_instances_that_measured_themselves_slower_are_predicted_slower():
    view = prefills()
    view.say("p0", prefill_correction=2.0).say("p1", prefill_correction=1.5)
    placed = ask(view)
    assert placed.prefill.instance == "p2"
    assert {
        a.instance: a.predicted_ms - placed.predicted.total_ms for a in placed.alternatives
    } == pytest.approx({"p1": 50.0, "p0": 100.0})


def test_a_correction_that_nothing_confirms_fades():
    view = prefills()
    view.say("p0", prefill_correction=3.0)
    for _ in range(40):  # 10 s of reports that repeat it
        view.now_ms += 250
        for name in ("p0", "p1", "p2", "d0"):
            view.say(name)
    assert view.placer.instances.get("p0").prefill_correction == pytest.approx(2.0)
    view.say("p0", prefill_correction=2.9)  # measured again
    assert view.placer.instances.get("p0").prefill_correction == pytest.approx(2.9)


def test_a_correction_that_is_measured_again_and_is_the_same_does_not_fade():
    view = prefills()
    view.say("p0", prefill_correction=3.0, decode_correction=3.0, num_prefills_measured=1)
    for count in range(40):
        view.now_ms += 250
        for name in ("p1", "p2", "d0"):
            view.say(name)
        view.say("p0", num_prefills_measured=2 + count)
    known = view.placer.instances.get("p0")
    assert known.prefill_correction == pytest.approx(3.0)
    assert known.decode_correction == pytest.approx(2.0), "of decodes it has measured nothing"


@pytest.mark.parametrize("said", [float("nan"), float("inf"), -1.0, 0.0, 1e9])
def test_nonsense_corrections_do_no_harm(said):
    view = prefills()
    placed = ask(view.say("p0", prefill_correction=said, queued_prefill_ms=said))
    assert placed.predicted.compute_ms > 0


# ---- eq 2 ----


def spaces(gb_per_s, **cost):
    """p0 and p1 have spaces of their own in one mempool; p0, which is busy, holds 800 of 1000 tokens."""
    view = (
        View(disaggregation="always", **cost)
        .add("p0", space=1)
        .add("p1", space=2)
        .add("d0", "decode", space=3)
    )
    view.say("p0", queued_prefill_ms=500.0)
    return view.say("p1", links=links(gb_per_s))


@pytest.mark.parametrize(
    ("gb_per_s", "fetch_ms", "compute_ms"),
    # 800 tokens are 8 MB: 2 + 8 ms at 1 GB/s; computing them takes 80 ms. Equal at 8 / 78 GB/s.
    [(1.0, 10.0, 20.0), (8 / 77.9, 79.9, 20.0), (8 / 78.1, 0.0, 100.0)],
)
def test_eq_2_fetches_what_costs_less_to_move_than_to_compute(gb_per_s, fetch_ms, compute_ms):
    placed = ask(spaces(gb_per_s), hits={"p0": 800})
    assert placed.prefill.instance == "p1"
    assert (placed.predicted.fetch_ms, placed.predicted.compute_ms) == pytest.approx((fetch_ms, compute_ms))
    assert (placed.kv.source, placed.kv.tokens, placed.kv.path) == ("p0", 800, "peer")
    assert (placed.kv.reach, placed.kv.recompute) == (("host", False) if fetch_ms else ("own", True))


def test_eq_2_moves_only_what_the_reader_lacks():
    placed = ask(spaces(1.0), hits={"p0": 800, "p1": 480})
    assert placed.predicted.fetch_ms == pytest.approx(2.0 + 3.2)  # 320 tokens
    assert placed.predicted.compute_ms == pytest.approx(20.0)


def test_a_fetch_may_come_from_another_host_by_its_address():
    view = View(disaggregation="always")
    view.add("p0", host=1, address="tcp://one").add("p1", host=2, address="tcp://two").add(
        "d0", "decode", host=2
    )
    view.say("p0", queued_prefill_ms=500.0)
    placed = ask(view, hits={"p0": 800})
    assert placed.prefill.instance == "p1"
    kv = placed.kv
    assert (kv.reach, kv.path, kv.source, kv.source_mempool) == ("remote", "remote", "p0", "tcp://one")


def test_a_slow_network_is_not_used_and_the_own_host_still_is():
    view = View(disaggregation="always")
    view.add("p0", host=1, address="tcp://one").add("p1", host=2, address="tcp://two").add(
        "d0", "decode", host=2
    )
    view.say("p0", queued_prefill_ms=500.0).say("p1", links=links(0.01))
    kv = ask(view, hits={"p0": 800}).kv
    assert (kv.recompute, kv.reach, kv.path, kv.source_mempool) == (True, "host", "remote", "")


def test_hosts_without_an_address_are_not_reached():
    view = View(disaggregation="always").add("p0", host=1).add("p1", host=2).add("d0", "decode", host=2)
    view.say("p0", queued_prefill_ms=500.0)
    assert ask(view, hits={"p0": 800}).kv is None


def test_what_lies_in_host_memory_behind_an_instance_is_fetched_or_computed_by_the_same_rule():
    request = place(tokens=1_000)
    hits = [PrefixHit("p0", 160), PrefixHit("p0", 800, "dram")]
    for gb_per_s, path, reach in ((1.0, "dram", "host"), (0.01, "dram", "own")):
        view = View(disaggregation="always").add("p0").add("d0", "decode")
        view.say("p0", links=links(gb_per_s))
        answer = view.placer.place(type(request)(**{**fields(request), "hits": hits}), now_ms=0)
        assert (answer.kv.path, answer.kv.reach, answer.kv.source) == (path, reach, "p0")


def fields(message):
    return {name: getattr(message, name) for name in message.__struct_fields__}


def test_instances_of_one_memory_share_what_any_of_them_holds_without_a_byte():
    view = View(disaggregation="always").add("p0").add("p1").add("d0", "decode")
    view.say("p0", queued_prefill_ms=50.0)
    placed = ask(view, hits={"p0": 800})
    assert placed.prefill.instance == "p1"
    assert (placed.predicted.fetch_ms, placed.predicted.compute_ms) == (0.0, pytest.approx(20.0))
    assert placed.predicted.transfer_ms == 0.0


@pytest.mark.parametrize(("fetch", "reach"), [("never", "own"), ("always", "host")])
def test_fetching_can_be_forced_or_forbidden(fetch, reach):
    view = spaces(0.01 if fetch == "always" else 1.0, fetch=fetch).say("p0", queued_prefill_ms=5_000.0)
    placed = ask(view, hits={"p0": 800})
    assert placed.kv.reach == reach


# ---- brakes ----


def test_the_holder_is_not_left_for_a_small_gain():
    view = prefills(hysteresis_ms=5.0, hysteresis_share=0.0)
    view.say("p0", queued_prefill_ms=36.0)  # 36 + 68 against 100
    placed = ask(view, hits={"p0": 320})
    assert placed.prefill.instance == "p0"
    assert "it holds 320 tokens, leaving it would gain only 4.0 ms" in placed.reason
    view = prefills(hysteresis_ms=5.0, hysteresis_share=0.0)
    assert ask(view.say("p0", queued_prefill_ms=37.5), hits={"p0": 320}).prefill.instance != "p0"


def test_an_instance_in_panic_is_avoided_whatever_it_holds_unless_all_are():
    view = prefills(panic_queue_ms=200.0)
    view.say("p0", queued_prefill_ms=201.0).say("p1", queued_prefill_ms=199.0).say(
        "p2", queued_prefill_ms=199.0
    )
    placed = ask(view, tokens=4_000, hits={"p0": 3_200})  # 281 ms there, 599 elsewhere
    assert placed.prefill.instance in ("p1", "p2")
    assert [a.why for a in placed.alternatives if a.instance == "p0"] == [
        "its queue of 201 ms is too long whatever it holds"
    ]
    view.say("p1", queued_prefill_ms=300.0).say("p2", queued_prefill_ms=300.0)
    assert ask(view, tokens=4_000, hits={"p0": 3_200}, name="r2").prefill.instance == "p0"


# ---- disaggregate or not ----


def two(space=2, **cost):
    return View(**cost).add("p0", space=1).add("d0", "decode", space=space)


def test_a_pair_that_shares_memory_stays_a_pair():
    placed = ask(two(space=1), continues=True)  # as dear as one instance: roles are kept
    assert (placed.kind, placed.predicted.transfer_ms) == ("disaggregated", 0.0)
    placed = ask(two(space=1, role_margin_ms=5.0))  # 1 ms dearer: the first token is drawn again
    assert (placed.kind, placed.predicted.transfer_ms) == ("disaggregated", 0.0)


def test_by_default_a_pair_is_taken_only_where_no_instance_alone_is_predicted_to_be_cheaper():
    placed = ask(two(space=1))
    assert placed.kind == "colocated"
    assert "one instance saves 1.0 ms" in placed.reason


def test_a_first_token_that_is_final_waits_for_no_hand_off():
    drawn_again, final = (ask(two(disaggregation="always"), continues=each) for each in (False, True))
    assert drawn_again.kind == final.kind == "disaggregated"
    assert final.predicted_ttft_ms == pytest.approx(100.0)
    assert drawn_again.predicted_ttft_ms == pytest.approx(100.0 + final.predicted.transfer_ms + 1.0)


def test_one_instance_runs_all_where_the_transfer_costs_more_than_the_margin():
    view = two(role_margin_ms=5.0, role_margin_share=0.0)
    slow = view.say("d0", links=links(0.5))  # 1000 tokens: 2 + 20 ms
    placed = ask(slow)
    assert placed.kind == "colocated"
    assert (
        "one instance saves 23.5 ms" in placed.reason
    )  # of whole blocks, and the first token is drawn again
    assert [(a.instance, a.stage, a.why) for a in placed.alternatives][-1] == (
        "p0",
        "prefill",
        "hand-off 23.5 ms more",
    )
    fast = two(role_margin_ms=5.0, role_margin_share=0.0).say("d0", links=links(10.0, 0.5))
    assert ask(fast).kind == "disaggregated"


def test_a_busy_decode_instance_keeps_prompts_away():
    view = two().say("d0", links=links(0.5), num_running=6, running_context_tokens=600)
    view.say("p0", num_running=0, queued_prefill_ms=0.0)
    placed = ask(view)
    # on d0 six requests would wait 100 ms each; p0 alone decodes by itself
    assert (placed.kind, placed.decode.instance) == ("colocated", "p0")


def test_roles_are_kept_for_less_than_their_margin():
    view = two(role_margin_ms=25.0, role_margin_share=0.0).say("d0", links=links(0.5))
    placed = ask(view)
    assert placed.kind == "disaggregated"
    assert "one instance would gain only 23.5 ms" in placed.reason
    assert placed.alternatives[0].why == "cheaper by less than the margin"


def test_no_path_for_pages_means_computing_the_prompt_again():
    view = View(role_margin_share=0.0).add("p0", host=0).add("d0", "decode", host=0)
    placed = ask(view)
    assert placed.kind == "colocated"
    pair = next(a for a in placed.alternatives if a.stage == "prefill")
    assert pair.predicted_ms == pytest.approx(placed.predicted.total_ms + 101.0)


@pytest.mark.parametrize(("disaggregation", "kind"), [("always", "disaggregated"), ("never", "colocated")])
def test_disaggregation_can_be_forced_or_forbidden(disaggregation, kind):
    view = two(disaggregation=disaggregation).say("d0", links=links(0.1))
    assert ask(view).kind == kind


def test_decode_goes_where_the_prompt_is_unless_its_batch_is_much_larger():
    def view(running):
        made = View(disaggregation="always").add("p0", space=1, address="a")
        made.add("d0", "decode", space=2, address="a").add("d1", "decode", space=3, address="a")
        return made.say("d1", num_running=running, running_context_tokens=100 * running)

    assert ask(view(0), hits={"d1": 992}).decode.instance == "d1"
    assert ask(view(6), hits={"d1": 992}).decode.instance == "d0"


def test_one_output_token_needs_no_decode_instance():
    placed = ask(two().say("d0", links=links(0.1)), max_tokens=1)
    assert (placed.kind, placed.predicted.transfer_ms) == ("disaggregated", 0.0)


# ---- without coefficients ----


def test_without_coefficients_it_behaves_as_prompt_tree_and_says_so():
    view = View()
    for name in ("p0", "p1"):
        view.add(name, cost=None)
    view.add("d0", "decode", cost=None)
    placed = ask(view, hits={"p1": 320})
    assert (placed.prefill.instance, placed.predicted, placed.predicted_ttft_ms) == ("p1", None, None)
    assert placed.reason.startswith("By cost, as prompt_tree because d0 sent no coefficients: ")


def test_one_that_sent_none_borrows_its_familys():
    view = View(disaggregation="always").add("p0").add("p1", cost=None).add("d0", "decode", cost=None)
    placed = ask(view.say("p0", queued_prefill_ms=50.0))
    assert placed.prefill.instance == "p1"
    assert placed.predicted.compute_ms == pytest.approx(100.0)


@pytest.mark.parametrize("policy", ["least_load", "session", "prompt_tree"])
def test_other_policies_are_predicted_too(policy):
    view = View(policy).add("p0", space=1).add("d0", "decode", space=1)
    placed = ask(view, hits={"p0": 320}, session="s")
    assert placed.predicted.compute_ms == pytest.approx(68.0)
    assert placed.predicted_ttft_ms == pytest.approx(68.0 + 1.0)


# ---- its own cost ----


def cluster_of(num_instances, monkeypatch):
    """A third each of prefill, decode and colocated, all with coefficients of their own; calls are counted."""
    calls = []
    real = CostModel.prefill_ms

    def counted(self, *args):
        calls.append(args)
        return real(self, *args)

    monkeypatch.setattr(CostModel, "prefill_ms", counted)
    view = View()
    for number in range(num_instances):
        role = ("prefill", "decode", "colocated")[number % 3]
        cost = coefficients(prefill_ms=0.1 + number * 1e-6)
        view.add(f"i{number}", role, space=number + 1, host=1 + number // 8, address=f"a{number // 8}", cost=cost,
                 queued_prefill_ms=float(number % 5), num_running=number % 4)  # fmt: skip
    return view, calls


@pytest.mark.parametrize("num_instances", [30, 100, 300])
def test_a_placement_predicts_few_instances_however_many_there_are(num_instances, monkeypatch):
    view, calls = cluster_of(num_instances, monkeypatch)
    hits = {f"i{number}": 32 * (number % 25) for number in range(0, num_instances, 2)}
    ask(view, hits=hits)
    assert len(calls) <= 100


def test_a_placement_over_100_instances_takes_far_below_2_ms_of_cpu(monkeypatch):
    view, _ = cluster_of(100, monkeypatch)
    hits = {f"i{number}": 32 * (number % 25) for number in range(0, 100, 5)}
    taken_ms = []
    for number in range(100):
        begin_s = time.thread_time()
        ask(view, hits=hits, name=f"r{number}")
        taken_ms.append((time.thread_time() - begin_s) * 1e3)
    assert min(taken_ms) < 3.0 * slowness()  # a third of that on a machine of its own


def test_among_many_the_best_is_still_found(monkeypatch):
    view, _ = cluster_of(100, monkeypatch)
    placed = ask(view, hits={"i42": 960, "i43": 640, **{f"i{n}": 32 for n in range(50, 80)}})
    assert placed.predicted.compute_ms == pytest.approx(4.0, rel=0.05)
    assert placed.alternatives
    assert len(placed.alternatives) <= 8


@pytest.mark.parametrize("policy", ["cost", "prompt_tree"])
def test_ways_not_taken_are_named_only_for_whoever_reads_them(policy):
    def answer(**more):
        view = View(policy).add("p0").add("p1", host=2).add("d0", "decode")
        return view.placer.place(place(tokens=1_000, hits={"p1": 640}, **more), now_ms=0)

    told, brief = answer(), answer(explain=False)
    assert told.alternatives
    assert not brief.alternatives
    assert (brief.decode, brief.prefill, brief.reason) == (told.decode, told.prefill, told.reason)
