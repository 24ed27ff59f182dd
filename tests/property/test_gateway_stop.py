"""Stop strings over any cut of a text end it where vLLM's check_stop_strings() does, and never leak."""

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.gateway.core.stop import StopSearch, StopStrings, overlap

DELTAS = st.lists(st.text("ab\n", max_size=4), max_size=12)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3)
TWO_LETTERS = st.lists(st.text("ab", max_size=9), max_size=12)
NESTED = st.lists(st.text("ab", min_size=1, max_size=8), min_size=1, max_size=6)
MANY_A = "a" * 1_023


def reference(deltas, stops, include, num_unarmed):
    """vLLM's way: append, then search what a new character can have completed. Returns text, stop found."""
    text = ""
    for number, delta in enumerate(deltas):
        text += delta
        if number < num_unarmed or not delta:
            continue
        for stop in stops:
            at = text.find(stop, max(0, len(text) - len(delta) - len(stop) + 1))
            if at >= 0:
                return text[: at + len(stop)] if include else text[:at], stop
    return text, None


@given(DELTAS, STOPS, st.booleans(), st.integers(0, 3))
@example(deltas=["a", "b"], stops=["a", "aa"], include=False, num_unarmed=1)
def test_output_ends_where_vllm_ends_it(deltas, stops, include, num_unarmed):
    search = StopSearch(StopStrings(stops), include=include)
    out = "".join(search.feed(d, armed=number >= num_unarmed) for number, d in enumerate(deltas))
    assert (out + search.flush(), search.found) == reference(deltas, stops, include, num_unarmed)


@given(DELTAS, STOPS)
def test_nothing_of_a_stop_string_is_ever_emitted(deltas, stops):
    search, emitted = StopSearch(StopStrings(stops)), ""
    final, _ = reference(deltas, stops, False, 0)
    for delta in deltas:
        emitted += search.feed(delta)
        assert final.startswith(emitted)


@given(DELTAS, STOPS)
def test_only_what_may_begin_a_stop_string_is_held_back(deltas, stops):
    search, emitted = StopSearch(StopStrings(stops)), ""
    for number, delta in enumerate(deltas):
        emitted += search.feed(delta)
        if search.found is None:
            held = "".join(deltas[: number + 1])[len(emitted) :]
            assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_may_cross_the_first_token():
    search = StopSearch(StopStrings(["lo wor"]))
    assert [search.feed(d) for d in ("hel", "lo", " wor", "ld")] == ["he", "l", "", ""]
    assert search.found == "lo wor"
    assert search.flush() == ""


@given(st.text("ab", max_size=6), st.text("ab", min_size=1, max_size=6))
def test_overlap_is_the_longest_end_that_begins_the_mark(text, mark):
    lengths = [n for n in range(len(mark)) if text.endswith(mark[:n])]
    assert overlap(text, mark) == max(lengths)


@given(TWO_LETTERS, NESTED, st.booleans(), st.sets(st.integers(0, 11)))
@example(["a", "b", "a", "b", "a"], ["babb", "ab", "abab", "b"], False, {0, 1, 2, 3})
def test_every_delta_shows_as_much_as_a_search_that_forgets(deltas, stops, include, unarmed):
    """One without a state: what it holds is the longest overlap with any string, looked for anew each time."""
    search, held, found = StopSearch(StopStrings(stops), include=include), "", None
    for number, delta in enumerate(deltas):
        armed, pending = number not in unarmed, held + delta
        begins = {stop: pending.find(stop, max(0, len(held) - len(stop) + 1)) for stop in stops}
        found = next((stop for stop in stops if armed and delta and begins[stop] >= 0), None)
        if found is not None:
            expected, held = pending[: begins[found] + (len(found) if include else 0)], ""
        else:
            keep = max(overlap(pending, stop) for stop in stops)
            expected, held = pending[: len(pending) - keep], pending[len(pending) - keep :]
        assert (search.feed(delta, armed=armed), search.held, search.found) == (expected, held, found)
        if found is not None:
            break
    assert search.flush() == held


@given(st.lists(TWO_LETTERS, min_size=2, max_size=4), NESTED)
def test_choices_that_share_their_strings_end_as_each_alone(outputs, stops):
    shared = StopStrings(stops)
    together = [StopSearch(shared) for _ in outputs]
    shown = ["" for _ in outputs]
    for turn in range(12):
        for number, deltas in enumerate(outputs):
            shown[number] += together[number].feed(deltas[turn]) if turn < len(deltas) else ""
    for number, deltas in enumerate(outputs):
        assert (shown[number] + together[number].flush(), together[number].found) == reference(
            deltas, stops, False, 0
        )


def seconds_a_token(stops, before, tokens) -> float:
    """Of this thread alone; of five the quickest."""
    took = []
    for _ in range(5):
        search = StopSearch(StopStrings(stops))
        for token in before:
            search.feed(token)
        began = time.thread_time()
        for token in tokens:
            search.feed(token)
        took.append((time.thread_time() - began) / len(tokens))
        assert search.found is None
    return min(took)


@pytest.mark.parametrize(
    "stops",
    [
        [MANY_A + "b", *("a" + chr(0x4E00 + each) * 1_023 for each in range(15))],
        [MANY_A + chr(0x4E00 + each) for each in range(16)],
    ],
)
@pytest.mark.parametrize("tokens", [["a"] * 100, ([*"a" * 200, "c"]) * 3], ids=["same", "falls"])
def test_a_token_costs_no_more_with_long_stop_strings_that_it_nearly_completes(stops, tokens):
    """Once 5 ms a token, on the loop that all requests share."""
    usual_s = seconds_a_token(["ab", "cd"], [], ["a"] * 300)
    took_s = seconds_a_token(stops, [MANY_A], tokens)
    assert took_s < 40 * usual_s
