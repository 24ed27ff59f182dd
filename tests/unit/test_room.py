"""Room in an engine's pages: what answers may take, what requests together may still need, who begins when."""

from itertools import pairwise

import pytest

from shared.room.answers import EDGES, FIRST_TOKENS, LEAST_SEEN, SHARE, AnswerLengths
from shared.room.growth import Need, growth_pages
from shared.room.queue import Figures, RoomQueue


def seen(lengths, *, ended=True):
    answers = AnswerLengths()
    for length in lengths:
        answers.note(length, ended=ended)
    return answers


def test_before_enough_answers_were_seen_max_tokens_is_believed_up_to_a_bound():
    answers = seen([10] * (LEAST_SEEN - 1))
    assert answers.expected(300) == 300
    assert answers.expected(100_000) == FIRST_TOKENS
    assert answers.expected(100_000, made=4 * FIRST_TOKENS) == 8 * FIRST_TOKENS


def test_answers_that_end_by_themselves_bound_what_max_tokens_allows():
    answers = seen(range(1, 201))
    expected = answers.expected(4_096)
    assert SHARE * 200 <= expected <= SHARE * 200 * 9 / 8 + 1
    assert answers.expected(50) == 50


def test_answers_that_max_tokens_cut_say_nothing_against_longer_ones():
    """Half of the clients ask for 20 tokens: counted as ends they would hide that answers get 400 long."""
    answers = AnswerLengths()
    for _ in range(100):
        answers.note(20, ended=False)
        answers.note(400, ended=True)
    assert 400 <= answers.expected(4_096) <= 400 * 9 / 8 + 1
    assert seen([20] * 100, ended=False).expected(700) == 700


def test_who_has_made_much_is_compared_with_long_answers_only():
    answers = seen([20] * 90 + [1_000] * 10)
    assert answers.expected(4_096) < 30
    assert 1_000 <= answers.expected(4_096, made=50) <= 1_000 * 9 / 8 + 1
    assert answers.expected(4_096, made=3_000) >= 3_000, "never less than it has"


def test_old_answers_fade():
    answers = seen([1_000] * 500)
    for _ in range(3_000):
        answers.note(50, ended=True)
    assert answers.expected(4_096) < 60


def test_edges_grow_and_are_fine_enough():
    assert all(a < b <= a * 9 / 8 + 1 for a, b in pairwise(EDGES))


def by_steps(needs):
    """The same by stepping a page at a time; without sharing."""
    peak, start = 0, sum(need.held for need in needs)
    for step in range(max((need.more for need in needs), default=0) + 1):
        alive = [need.held + step for need in needs if need.more >= step]
        peak = max(peak, sum(alive) - start)
    return peak


@pytest.mark.parametrize(
    "needs",
    [
        [], [Need(5, 0)], [Need(5, 3)], [Need(5, 3), Need(2, 10)], [Need(1, 7)] * 4,
        [Need(40, 1), Need(3, 30), Need(3, 29)],
    ],
)  # fmt: skip
def test_growth_is_the_worst_moment_ahead(needs):
    assert growth_pages(needs, in_use=sum(need.held for need in needs)) == by_steps(needs)


def test_pages_that_several_hold_are_not_free_at_the_end_of_one():
    needs = [Need(10, 1), Need(10, 20)]
    assert growth_pages(needs, in_use=20) == 10
    assert growth_pages(needs, in_use=10) == 15


def figures(free, needs=(), num_pages=100, in_use=None):
    in_use = sum(n.held for n in needs) if in_use is None else in_use
    return Figures(num_pages=num_pages, free=free, in_use=in_use, needs=needs, answer_tokens=64)


def test_prompts_begin_in_order_and_the_first_that_has_no_room_keeps_those_behind_it_waiting():
    queue = RoomQueue()
    for key, held in (("a", 10), ("b", 30), ("c", 5)):
        queue.ask(key, Need(held, 5), until_ms=1_000)
    assert queue.admit(figures(30, [Need(40, 2)]), now_ms=0) == ["a"]
    assert queue.pages == 15 + 35 + 10
    assert queue.admit(figures(30, [Need(40, 2)]), now_ms=0) == []
    queue.leave("a")
    assert queue.admit(figures(60, [Need(40, 2)]), now_ms=0) == ["b", "c"]


def test_whose_time_is_over_begins_wherever_it_stands():
    """Another host holds its pages, and nobody here can make that last longer."""
    queue = RoomQueue()
    queue.ask("held here", Need(50, 5), until_ms=60_000)
    queue.ask("held elsewhere", Need(10, 5), until_ms=5_000)
    queue.ask("held here, too", Need(1, 1), until_ms=60_000)
    full = figures(5, [Need(95, 5)])
    assert queue.admit(full, now_ms=4_999) == []
    assert queue.admit(full, now_ms=5_000) == ["held elsewhere"]
    assert queue.admit(full, now_ms=60_000) == ["held here", "held here, too"]


def test_what_began_counts_until_figures_know_of_it():
    queue = RoomQueue()
    queue.ask("a", Need(10, 0), until_ms=1_000)
    queue.ask("b", Need(10, 0), until_ms=1_000)
    busy = [Need(1, 1)]
    assert queue.admit(figures(15, busy), now_ms=0) == ["a"]
    question = queue.question()
    queue.entered("a")
    for _ in range(2):  # asked before, and perhaps on its way then
        queue.figures_came(question)
        assert queue.admit(figures(15, busy), now_ms=0) == []
        question = queue.question()
    queue.figures_came(question)
    assert queue.admit(figures(15, busy), now_ms=0) == ["b"], "the figures that came have a's pages in them"


def test_an_engine_with_nothing_to_do_takes_whoever_is_first_however_much_it_needs():
    queue = RoomQueue()
    queue.ask("a", Need(500, 500), until_ms=1_000)
    queue.ask("b", Need(1, 0), until_ms=1_000)
    assert queue.admit(figures(3), now_ms=0) == ["a"]


def test_nobody_waits_where_nothing_is_known_or_beyond_its_time():
    queue = RoomQueue(most=2)
    queue.ask("a", Need(50, 50), until_ms=100)
    assert queue.admit(figures(3, [Need(90, 5)]), now_ms=99) == []
    assert queue.admit(figures(3, [Need(90, 5)]), now_ms=100) == ["a"]
    queue.ask("b", Need(50, 50), until_ms=1_000)
    assert queue.admit(None, now_ms=101) == ["b"]
    for key in "cde":
        queue.ask(key, Need(50, 50), until_ms=1_000)
    assert queue.admit(figures(3, [Need(90, 5)]), now_ms=101) == ["c"], "more than `most` do not wait"
