"""Around a plan of fair slices: who begins, who gives way for want of a page, whose blocks leave."""

import pytest

from shared.fair.carrying import (
    Begun,
    Grower,
    Seen,
    free_mark,
    grow,
    may_begin,
    may_fill,
    nearest_first,
    pages_for_turns,
    pages_to_begin,
    short_pages,
)
from shared.fair.rules import FairRules
from shared.fair.slices import FairSlices

TOKENS, UNITS = FairRules(), FairRules(quantum_tokens=1 << 20)


def test_in_units_newcomers_wait_where_those_parked_have_less_than_eight_pages_each():
    assert may_begin(Begun(running=90, parked=12), 100, limits_parked=True, can_be_short=True)
    assert not may_begin(Begun(running=0, parked=13), 100, limits_parked=True, can_be_short=False)


def test_to_the_token_newcomers_wait_where_the_longest_could_not_end_beside_a_page_of_each():
    begun = Begun(running=3, parked=2, longest_pages=20)
    assert may_begin(begun, 25, limits_parked=False, can_be_short=True)
    assert not may_begin(begun, 24, limits_parked=False, can_be_short=True)
    assert may_begin(
        begun, 24, limits_parked=False, can_be_short=False
    )  # memory is not short, or nothing can leave
    assert may_begin(Begun(3, 0, 30), 24, limits_parked=False, can_be_short=True)  # nobody is parked


def test_a_plan_counts_on_no_page_that_those_begun_keep():
    begun = Begun(running=3, parked=2)
    assert pages_for_turns(UNITS, 20, begun, has_room_for_all=True) == 15
    assert pages_for_turns(TOKENS, 20, begun, has_room_for_all=True) == 20
    assert pages_for_turns(TOKENS, 20, begun, has_room_for_all=False) == 15
    assert pages_for_turns(UNITS, 2, begun, has_room_for_all=True) == 1


def test_where_pages_are_short_a_vacant_slot_is_looked_at_again_when_something_changed():
    seen = Seen(3, 9, free_mark(40, 1_280))
    assert seen.free_mark == 4
    assert not may_fill(UNITS, seen, seen, 4, is_short=True)
    assert may_fill(UNITS, seen, Seen(3, 8, 4), 4, is_short=True)
    assert may_fill(UNITS, seen, seen, 4, is_short=False)
    assert may_fill(TOKENS, seen, seen, 4, is_short=True)
    assert not may_fill(TOKENS, seen, None, 3, is_short=False)


@pytest.mark.parametrize("may_park", [True, False])
def test_who_finds_no_page_gives_its_slot_up_if_pages_can_leave_and_the_rest_have_theirs(may_park):
    running = [Grower("a", 1, 16, 1), Grower("b", 1, 8, 1), Grower("c", 40, 16, 1), Grower("d", 1, 32, 2)]
    park, growth = grow(running, 2, 32, 16, most_tokens=1_000, may_park=may_park)
    # a takes one page, b none; c wants two of the one that is left
    assert park == (["c", "d"] if may_park else [])
    assert growth == (1 if may_park else 4)


def test_who_cannot_be_parked_has_its_page_before_the_others():
    running = [Grower("a", 1, 16, 1), Grower("b", 40, 16, 1, stays=True), Grower("c", 1, 32, 2)]
    assert grow(running, 1, 16, 16, most_tokens=1_000, may_park=True) == (["a", "c"], 1)
    assert grow(running, 0, 16, 16, most_tokens=1_000, may_park=True) == (
        ["a", "c"],
        1,
    )  # it is short all the same


def test_nobody_grows_beyond_the_longest_request():
    assert grow([Grower("a", 1, 16, 1)], 0, 1, 16, most_tokens=16, may_park=True) == ([], 0)


def test_pages_are_short_by_what_those_with_a_slot_lack_and_nobody_has_more_than_it_needs():
    assert short_pages([(5, 2), (3, 9)], free_pages=1, on_the_way=1) == 1


def test_the_furthest_from_its_turn_leaves_first():
    slices = FairSlices(TOKENS)
    for name in ("a", "b", "c"):
        slices.add(name, "", 1.0, 10)
    slices.served("a", 5, 5)
    slices.served("c", 2, 8)
    assert nearest_first(slices, ["a", "b", "c"]) == ["b", "c", "a"]


def test_who_comes_back_leaves_the_pages_that_those_who_begin_in_this_step_find():
    assert pages_to_begin([2, 5, 1], 8) == 8
    assert pages_to_begin([9, 3], 8) == 3  # the first finds too few and keeps none
    assert pages_to_begin([1], -2) == 0
