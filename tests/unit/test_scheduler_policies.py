"""least_load, session, prompt_tree: which of several, and why."""

from services.scheduler.core.instances import Instances
from services.scheduler.core.placement import Placer
from tests.support.control_plane import hello, place, report


def prefills(policy, *names, **more):
    made = Placer(Instances(), policy, "boot")
    for name in names:
        made.instances.hello(hello(name), now_ms=0)
    made.instances.hello(hello("d0", role="decode", max_running=10_000), now_ms=0)
    return made


def busy(made, name, **load):
    known = made.instances.get(name)
    made.instances.report(report(name, seq=known.last_seq + 1, **load), now_ms=0)


def test_least_load_takes_the_shortest_queue():
    made = prefills("least_load", "p0", "p1", "p2")
    busy(made, "p0", unfinished_prefill_tokens=900)
    busy(made, "p1", unfinished_prefill_tokens=100)
    busy(made, "p2", unfinished_prefill_tokens=500)
    placed = made.place(place(tokens=10), now_ms=0)
    assert placed.prefill.instance == "p1"
    assert "least load" in placed.reason


def test_least_load_spreads_a_burst_before_any_report():
    made = prefills("least_load", "p0", "p1", "p2", "p3")
    chosen = [made.place(place(f"r{i}"), now_ms=0).prefill.instance for i in range(8)]
    assert sorted(chosen) == ["p0", "p0", "p1", "p1", "p2", "p2", "p3", "p3"]


def test_idle_equals_take_turns():
    made = prefills("least_load", "p0", "p1")
    chosen = []
    for i in range(4):
        placed = made.place(place(f"r{i}"), now_ms=0)
        chosen.append(placed.prefill.instance)
        made._forget((f"r{i}", 1))
    assert sorted(chosen[:2]) == ["p0", "p1"]
    assert chosen[:2] == chosen[2:]


def test_a_session_sticks_to_its_instance_whatever_the_load():
    made = prefills("session", "p0", "p1", "p2")
    first = made.place(place("r0", session="alice"), now_ms=0).prefill.instance
    busy(made, first, unfinished_prefill_tokens=5_000)
    again = [made.place(place(f"r{i}", session="alice"), now_ms=0).prefill.instance for i in range(1, 9)]
    assert set(again) == {first}


def test_sessions_spread_and_only_those_of_a_lost_instance_move():
    made = prefills("session", "p0", "p1", "p2", "p3")
    names = [f"user-{i}" for i in range(200)]

    def where():
        out = {}
        for i, name in enumerate(names):
            out[name] = made.place(place(f"r{i}", session=name, tokens=1), now_ms=0).prefill.instance
            made._forget((f"r{i}", 1))
        return out

    before = where()
    assert {"p0", "p1", "p2", "p3"} == set(before.values())
    made.instances.report(report("p2", draining=True), now_ms=0)
    after = where()
    assert all(after[n] != "p2" for n in names)
    assert all(after[n] == before[n] for n in names if before[n] != "p2")


def test_a_session_leaves_an_overloaded_instance():
    made = prefills("session", "p0", "p1")
    first = made.place(place("r0", session="alice"), now_ms=0).prefill.instance
    busy(made, first, num_waiting=10_000)
    other = made.place(place("r1", session="alice"), now_ms=0).prefill.instance
    assert other != first


def test_a_request_without_a_session_goes_by_load():
    made = prefills("session", "p0", "p1")
    busy(made, "p0", unfinished_prefill_tokens=900)
    assert made.place(place(), now_ms=0).prefill.instance == "p1"


def test_prompt_tree_takes_the_longest_prefix():
    made = prefills("prompt_tree", "p0", "p1", "p2")
    placed = made.place(place(tokens=100, hits={"p1": 32, "p2": 96}), now_ms=0)
    assert (placed.prefill.instance, placed.prefill_hit_tokens) == ("p2", 96)
    assert "p2 holds 96 prompt tokens" in placed.reason


def test_prompt_tree_breaks_ties_by_load():
    made = prefills("prompt_tree", "p0", "p1", "p2")
    busy(made, "p1", unfinished_prefill_tokens=200)
    assert made.place(place(tokens=100, hits={"p1": 64, "p2": 64}), now_ms=0).prefill.instance == "p2"


def test_prompt_tree_passes_over_a_holder_whose_queue_costs_more_than_the_prefix_saves():
    made = prefills("prompt_tree", "p0", "p1")
    busy(made, "p1", unfinished_prefill_tokens=20_000)
    placed = made.place(place(tokens=100, hits={"p1": 96}), now_ms=0)
    assert placed.prefill.instance == "p0"
    assert "too busy" in placed.reason
    busy(made, "p1", unfinished_prefill_tokens=500)
    assert made.place(place("r2", tokens=100, hits={"p1": 96}), now_ms=0).prefill.instance == "p1"


def test_prompt_tree_sends_decode_to_its_holder_unless_that_one_is_much_fuller():
    made = Placer(Instances(), "prompt_tree", "boot")
    for one in (hello("p0"), hello("d0", role="decode"), hello("d1", role="decode")):
        made.instances.hello(one, now_ms=0)
    assert made.place(place(hits={"d1": 32}), now_ms=0).decode.instance == "d1"
    busy(made, "d1", num_running=7)
    assert made.place(place("r2", hits={"d1": 32}), now_ms=0).decode.instance == "d0"


def test_prompt_tree_without_hits_goes_by_load():
    made = prefills("prompt_tree", "p0", "p1")
    busy(made, "p0", unfinished_prefill_tokens=900)
    placed = made.place(place(), now_ms=0)
    assert placed.prefill.instance == "p1"
    assert "no cached prefix" in placed.reason
