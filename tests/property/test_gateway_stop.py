"""Stop strings over any cut of a text end it where vLLM's check_stop_strings() does, and never leak."""

from hypothesis import example, given
from hypothesis import strategies as st

from services.gateway.core.stop import StopSearch, overlap

DELTAS = st.lists(st.text("ab\n", max_size=4), max_size=12)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3)


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
    search = StopSearch(stops, include=include)
    out = "".join(search.feed(d, armed=number >= num_unarmed) for number, d in enumerate(deltas))
    assert (out + search.flush(), search.found) == reference(deltas, stops, include, num_unarmed)


@given(DELTAS, STOPS)
def test_nothing_of_a_stop_string_is_ever_emitted(deltas, stops):
    search, emitted = StopSearch(stops), ""
    final, _ = reference(deltas, stops, False, 0)
    for delta in deltas:
        emitted += search.feed(delta)
        assert final.startswith(emitted)


@given(DELTAS, STOPS)
def test_only_what_may_begin_a_stop_string_is_held_back(deltas, stops):
    search, emitted = StopSearch(stops), ""
    for number, delta in enumerate(deltas):
        emitted += search.feed(delta)
        if search.found is None:
            held = "".join(deltas[: number + 1])[len(emitted) :]
            assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_may_cross_the_first_token():
    search = StopSearch(["lo wor"])
    assert [search.feed(d) for d in ("hel", "lo", " wor", "ld")] == ["he", "l", "", ""]
    assert search.found == "lo wor"
    assert search.flush() == ""


@given(st.text("ab", max_size=6), st.text("ab", min_size=1, max_size=6))
def test_overlap_is_the_longest_end_that_begins_the_mark(text, mark):
    lengths = [n for n in range(len(mark)) if text.endswith(mark[:n])]
    assert overlap(text, mark) == max(lengths)
