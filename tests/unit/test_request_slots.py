"""One test per rule of slots that follow a scheduler's block tables."""

import pytest

from shared.vmm.errors import BadMapping
from shared.vmm.request_slots import HOLE, RequestSlots
from shared.vmm.slot_commands import Map, Unmap


def test_a_request_is_mapped_in_one_run_for_reading_only():
    table = RequestSlots(2, 8)
    change = table.begin("a", [5, 9, 7])
    assert change.commands == [Map(change.slot * 8, (5, 9, 7), False)]
    assert table.slot_of("a") == change.slot


def test_growth_is_mapped_behind_what_is_there():
    table = RequestSlots(2, 8)
    slot = table.begin("a", [5]).slot
    assert table.grow("a", [6, 7]).commands == [Map(slot * 8 + 1, (6, 7), False)]
    assert table.length("a") == 3


def test_one_page_lies_in_several_slots():
    table = RequestSlots(2, 8)
    first, second = table.begin("a", [5, 6]).slot, table.begin("b", [5, 8]).slot
    assert first != second
    assert table.pages_at(first)[0] == table.pages_at(second)[0] == 5


def test_the_same_beginning_finds_the_slot_that_still_has_it_and_maps_only_the_rest():
    table = RequestSlots(3, 8)
    slot = table.begin("a", [1, 2, 3, 4]).slot
    table.end("a", 1)
    table.begin("x", [9]), table.passed(1)
    change = table.begin("b", [1, 2, 7])
    assert change == (slot, [Unmap(slot * 8 + 2, 1), Map(slot * 8 + 2, (7,), False)])
    assert table.pages_at(slot) == [1, 2, 7, 4]  # what is left over behind the end stays


def test_leftovers_behind_the_end_are_replaced_when_the_request_grows_into_them():
    table = RequestSlots(1, 8)
    table.begin("a", [1, 2, 3])
    table.end("a", 1)
    table.passed(1)
    table.begin("b", [1])
    assert table.grow("b", [2]).commands == []  # the page that lies there already
    assert table.grow("b", [8]).commands == [Unmap(2, 1), Map(2, (8,), False)]


def test_a_slot_is_not_changed_before_the_last_step_that_reads_it_is_over():
    table = RequestSlots(1, 8)
    table.begin("a", [1, 2])
    table.end("a", 7)
    assert table.begin("b", [3]) is None
    assert table.fence() == 7
    table.passed(6)
    assert table.begin("b", [3]) is None
    table.passed(7)
    assert table.begin("b", [3]).commands == [Unmap(0, 1), Map(0, (3,), False)]


def test_without_anything_to_unmap_a_slot_is_used_at_once():
    table = RequestSlots(1, 8)
    table.begin("a", [1, 2])
    table.end("a", 7)
    assert table.begin("b", [1, 2, 3]).commands == [Map(2, (3,), False)]


def test_a_slot_with_leftovers_behind_a_short_beginning_waits_too_because_growth_will_not():
    table = RequestSlots(1, 8)
    table.begin("a", [1, 2])
    table.end("a", 7)
    assert table.begin("b", [1]) is None
    table.passed(7)
    table.begin("b", [1])
    assert table.grow("b", [3]).commands == [Unmap(1, 1), Map(1, (3,), False)]


def test_an_empty_slot_is_preferred_to_one_with_leftovers_of_no_use():
    table = RequestSlots(2, 8)
    used = table.begin("a", [1, 2]).slot
    table.end("a", 0)
    assert table.begin("b", [3]).slot != used


def test_ending_twice_or_an_unknown_request_changes_nothing():
    table = RequestSlots(1, 8)
    table.end("nobody", 3)
    table.begin("a", [1])
    table.end("a", 1), table.end("a", 9)
    assert table.fence() == 1


def test_forgotten_pages_are_unmapped_where_no_request_has_them_and_refused_where_one_has():
    table = RequestSlots(2, 8)
    table.begin("a", [1, 2, 3])
    table.end("a", 4)
    with pytest.raises(BadMapping, match="in use"):
        table.forget([2])
    table.passed(4)
    assert table.forget([2, 3]) == [Unmap(1, 2)]
    assert table.pages_at(0) == [1, HOLE, HOLE]
    table.begin("b", [5])
    with pytest.raises(BadMapping, match="in use"):
        table.forget([5])
    assert table.begin("c", [1, 2]).commands == [Map(1, (2,), False)]


def test_where_one_page_is_in_use_none_is_forgotten():
    table = RequestSlots(2, 8)
    table.begin("a", [1, 2, 3]), table.begin("b", [4])
    table.end("a", 0)
    with pytest.raises(BadMapping, match="page 4 is in use"):
        table.forget([2, 3, 4])
    assert table.pages_at(0) == [1, 2, 3]
    assert table.num_mapped == 4
    assert table.begin("c", [1, 2, 3]).commands == [], "all of it is still mapped"


def test_more_mappings_than_allowed_cost_the_longest_idle_slot_its_leftovers():
    table = RequestSlots(3, 8, max_mapped=4)
    table.begin("a", [1, 2]), table.begin("b", [3, 4]), table.begin("c", [5])
    table.end("b", 1), table.end("a", 2), table.passed(2)
    slot_b = next(n for n in range(3) if table.pages_at(n)[:1] == [3])
    assert table.trim() == [Unmap(slot_b * 8, 2)]
    assert table.num_mapped == 3
    assert table.trim() == []


def test_trimming_spares_what_a_step_under_way_reads():
    table = RequestSlots(1, 8, max_mapped=1)
    table.begin("a", [1, 2])
    table.end("a", 5)
    assert table.trim() == []
    table.passed(5)
    assert table.trim() == [Unmap(0, 2)]


def test_what_cannot_be_is_refused():
    table = RequestSlots(1, 2)
    with pytest.raises(BadMapping, match="3 pages"):
        table.begin("a", [1, 2, 3])
    table.begin("a", [1])
    with pytest.raises(BadMapping, match="all 1 slots"):
        table.begin("b", [1])
    with pytest.raises(BadMapping, match="has slot 0"):
        table.begin("a", [1])
    with pytest.raises(BadMapping, match="3 pages"):
        table.grow("a", [2, 3])
    with pytest.raises(BadMapping):
        RequestSlots(0, 1)
