"""What a look-up's reply becomes, and what a gateway remembers of it."""

import pytest

from shared.prompttree.hits import Depths, as_hits, pack_audience, parse_reply, short_hashes
from shared.prompttree.lookup_cache import LookupCache
from shared.wire.placement import PrefixHit


def block(i):
    return i.to_bytes(4, "big") * 8


def chain(*numbers):
    """Like hashes of a prompt: each tells all before it."""
    out, sofar = [], ()
    for number in numbers:
        sofar = (*sofar, number)
        out.append(hash(sofar).to_bytes(8, "big", signed=True) * 4)
    return out


def reply(engines=(), spaces=(), version=0, everybody=b""):
    return [list(engines), list(spaces), version, everybody]


def test_an_engines_own_blocks_are_hbm_and_what_lies_behind_its_space_dram():
    audience = pack_audience({"p0": "hbm", "d0": "dram"}).encode()
    found, version = parse_reply(reply([b"p0", 3], [5, 9, audience], 7))
    assert version == 7
    assert found == {"p0": Depths(5, 9), "d0": Depths(0, 9)}
    assert as_hits(found.items(), 16) == [
        PrefixHit("p0", 80),
        PrefixHit("p0", 144, "dram"),
        PrefixHit("d0", 144, "dram"),
    ]


def test_the_deepest_of_several_sources_counts():
    one, two = (pack_audience({"p0": medium}).encode() for medium in ("hbm", "dram"))
    found, _ = parse_reply(reply([b"p0", 6], [4, 4, one, 0, 5, two]))
    assert found == {"p0": Depths(6, 6)}
    assert as_hits(found.items(), 1) == [PrefixHit("p0", 6)]


def test_a_remembered_instance_counts_unless_it_lives_elsewhere():
    audience = pack_audience({"p0": "hbm", "d0": "dram", "y": "hbm"}, {"p0", "d0"}).encode()
    for everybody, wanted in (
        ([audience], {"p0": Depths(5, 9), "d0": Depths(0, 9), "y": Depths(5, 9)}),
        ([audience, b"hp0"], {"d0": Depths(0, 9), "y": Depths(5, 9)}),
        ([audience, pack_audience({"d0": "dram"}).encode()], {"p0": Depths(5, 9), "y": Depths(5, 9)}),
        ([audience, audience, b""], {"p0": Depths(5, 9), "d0": Depths(0, 9), "y": Depths(5, 9)}),
    ):
        assert parse_reply(reply([], [5, 9, audience], 0, b"\x1f".join(everybody)))[0] == wanted


def test_rows_of_and_for_earlier_versions_have_their_letters():
    """They take `h` for an instance's own pages, and any other letter for memory a copy away."""
    assert pack_audience({"x": "hbm", "y": "dram"}) == "dy\x1fhx"
    assert pack_audience({"x": "hbm", "y": "dram"}, {"x", "y"}) == "Dy\x1fHx"
    assert parse_reply(reply([], [5, 9, b"hx\x1fdy"], 0, b"hx"))[0] == {
        "x": Depths(5, 9),
        "y": Depths(0, 9),
    }


def test_a_space_without_instances_and_one_with_odd_names_are_no_hits():
    assert pack_audience({"a\x1fb": "hbm"}) == ""
    assert parse_reply(reply([], [3, 3, b""])) == ({}, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        *(None, [], [1, 2, 3, b""], [[], [], 0]),
        *([*parts, b""] for parts in ([[b"p0"], [], 0], [[], [1, 2], 0], [[], [1, 2, 3], 0], [[], [], b""])),
        *([[], [], 0, 1], [[], [], 0, [b"hx"]]),
    ],
)
def test_a_reply_that_no_script_makes_is_refused(wrong):
    with pytest.raises((TypeError, ValueError)):
        parse_reply(wrong)


def test_a_remembered_answer_serves_prompts_that_part_from_it_near_the_end():
    cache = LookupCache(max_answers=4, max_age_ms=100)
    first = chain(*range(64))
    cache.put(first, {"p0": Depths(60, 64), "p1": Depths(10, 10)}, 1, now_ms=0)
    assert cache.get(first, now_ms=99) == {"p0": Depths(60, 64), "p1": Depths(10, 10)}
    other = chain(*range(58), *range(100, 106))
    assert cache.get(other, now_ms=99) == {"p0": Depths(58, 58), "p1": Depths(10, 10)}
    early = chain(*range(40), *range(100, 124))
    assert cache.get(early, now_ms=99) is None
    assert cache.get(chain(*range(200, 264)), now_ms=99) is None


def test_age_and_a_retraction_end_an_answer():
    cache = LookupCache(max_answers=4, max_age_ms=100)
    one, two = chain(1), chain(2)
    cache.put(one, {"p0": Depths(1, 1)}, 1, now_ms=0)
    cache.put(two, {}, 1, now_ms=50)
    assert cache.get(one, now_ms=100) is None
    assert cache.get(two, now_ms=100) == {}
    cache.put(one, {"p0": Depths(1, 1)}, 2, now_ms=100)  # something was retracted
    assert cache.get(two, now_ms=100) is None
    assert cache.get(one, now_ms=100) == {"p0": Depths(1, 1)}


def test_what_is_remembered_is_bounded_and_the_oldest_goes_first():
    cache = LookupCache(max_answers=3, max_age_ms=1_000)
    prompts = [chain(*range(n, n + 80)) for n in range(0, 1_000, 100)]
    for prompt in prompts:
        cache.put(prompt, {}, 0, now_ms=0)
    assert len(cache) == 3
    assert len(cache._by_hash) == 3 * 11
    assert [cache.get(prompt, now_ms=0) is not None for prompt in prompts] == [False] * 7 + [True] * 3
    for prompt in prompts[-3:]:
        cache.put(prompt, {}, 0, now_ms=0)
    assert len(cache) == 3
    cache.put(prompts[0], {}, 1, now_ms=0)
    assert len(cache) == 1
    assert len(cache._by_hash) == 11


def test_short_hashes_are_the_heads_of_the_hashes():
    assert short_hashes([]) == b""
    for count in (1, 2, 255):
        hashes = [bytes([n]) * 16 + bytes([n ^ 255]) * 16 for n in range(count)]
        assert short_hashes(hashes) == b"".join(h[:16] for h in hashes)
