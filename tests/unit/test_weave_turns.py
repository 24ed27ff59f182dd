"""Ways that are compared take turns so that a drift of the machine favours none."""

import pytest

from shared.weave.turns import turns


@pytest.mark.parametrize("ways", [[], ["a"], ["a", "b"], ["a", "b", "c"], ["a", "b", "c", "d"]])
def test_each_round_has_every_way_once_and_two_rounds_have_each_at_the_same_mean_place(ways):
    for number in range(0, 12, 2):
        one, other = turns(ways, number), turns(ways, number + 1)
        assert sorted(one) == sorted(other) == ways
        assert {one.index(way) + other.index(way) for way in ways} <= {len(ways) - 1}


def test_each_way_comes_first_in_as_many_rounds_as_any_other():
    ways = ["a", "b", "c"]
    first = [turns(ways, number)[0] for number in range(2 * len(ways))]
    assert {way: first.count(way) for way in ways} == dict.fromkeys(ways, 2)
