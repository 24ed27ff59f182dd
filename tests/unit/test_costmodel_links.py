"""What a link's transfers show of it: its rate, its latency, and what to say when none came for a while."""

import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.costmodel.transfer import (
    FULL_WINDOW,
    LEAST_BYTES,
    MAX_AGE,
    RECENT,
    LinkMeter,
    LinkRates,
    careful_rate,
    faded,
    should_fetch,
)
from shared.wire.cost import LinkRate


def meter(path="peer", **more):
    return LinkMeter(careful_rate(path), **more)


def test_a_link_meter_learns_from_transfers_that_say_something():
    seen = meter()
    assert seen.rate is None
    assert seen.observe(100_000_000, 11.0)
    assert seen.rate is not None
    assert seen.rate.gb_per_s == pytest.approx(10.0)
    for num_bytes, ms in ((1000, 50.0), (100_000_000, float("nan")), (100_000_000, 0.0), (100_000_000, -1.0)):
        assert not seen.observe(num_bytes, ms)
    assert seen.rate.gb_per_s == pytest.approx(10.0)
    seen.observe(100_000_000, 6.0)
    assert seen.rate.gb_per_s == pytest.approx(1 / 0.075), "the median of 0.1 and 0.05 ms/MB"


def test_the_time_of_a_copy_has_no_latency_in_it():
    seen = meter(times_copies=True)
    seen.observe(100_000_000, 0.5)
    assert seen.rate is not None
    assert seen.rate.gb_per_s == pytest.approx(200.0)
    for num_bytes in (10_000_000, 100_000_000) * 10:
        seen.observe(num_bytes, 0.4 + num_bytes / 200e6)
    assert seen.rate.latency_ms == careful_rate("peer").latency_ms, "whoever waits for it waits longer"


@pytest.mark.parametrize("latency_ms", [0.0, 0.4, 7.0, 60.0])
def test_a_link_meter_finds_the_constant_share_of_a_transfer(latency_ms):
    """What a pull costs before and behind its bytes is not 2 ms everywhere."""
    seen = meter("remote")
    for megabytes in (3, 12, 6, 24, 3, 18, 6, 12) * 3:
        seen.observe(megabytes * 1_000_000, latency_ms + megabytes / 0.1)
    assert seen.rate is not None
    assert seen.rate.latency_ms == pytest.approx(latency_ms, abs=1e-6)
    assert seen.rate.gb_per_s == pytest.approx(0.1)


def test_a_link_meter_says_a_latency_only_where_sizes_differ():
    seen = meter("remote")
    for _ in range(40):
        seen.observe(10_000_000, 50.0)
    assert seen.rate is not None
    assert seen.rate.latency_ms == careful_rate("remote").latency_ms
    assert seen.rate.gb_per_s == pytest.approx(10 / 48)


@pytest.mark.parametrize(("before", "after"), [(0.4, 0.02), (0.02, 0.4)])
def test_a_link_that_changes_is_known_after_three_transfers(before, after):
    """An average of rates held on to the faster one for twenty: prompts were fetched that computing had sooner."""
    seen, sizes = meter("remote"), (3, 12, 6, 18) * 5
    for megabytes in sizes:
        seen.observe(megabytes * 1_000_000, 5.0 + megabytes / before)
    for number, megabytes in enumerate(sizes):
        seen.observe(megabytes * 1_000_000, 5.0 + megabytes / after)
        assert seen.rate is not None
        assert seen.rate.latency_ms == pytest.approx(5.0, abs=1.0), "which has not changed"
        assert number < 2 or seen.rate.gb_per_s == pytest.approx(after, rel=0.1)


def test_one_transfer_that_was_held_up_makes_no_latency():
    """Each transfer behind a short one of 45 ms was compared with it: 44 ms, for good where all others are alike."""
    seen = meter("remote")

    def came(num_bytes, held_up_ms=0.0):
        seen.observe(num_bytes, 0.5 + num_bytes / 1e6 + held_up_ms)

    for _ in range(20):
        came(64_000_000)
    for _ in range(FULL_WINDOW - 1):
        came(2_000_000, held_up_ms=42.5)
        for _ in range(RECENT):
            came(64_000_000)
            assert seen.rate is not None
            assert seen.rate.latency_ms == careful_rate("remote").latency_ms
    for _ in range(MAX_AGE):
        came(64_000_000)
    for number in range(2 * FULL_WINDOW):
        came(2_000_000)
        came(64_000_000)
        assert seen.rate.latency_ms == pytest.approx(0.5 if number >= FULL_WINDOW - 1 else 2.0)


@pytest.mark.parametrize("ms", [1.5, 1.999, 2.001, 2.5, 3.999, 4.001, 20.0])
def test_a_transfer_about_as_long_as_the_latency_says_its_own_bytes_over_its_time_within_a_factor_of_two(ms):
    """A little more than the latency left a thousandth of a ms for all of its bytes."""
    seen = meter("remote")
    seen.observe(2_000_000, ms)
    assert seen.rate is not None
    assert 0.999 < seen.rate.gb_per_s * ms / 2 < 2.001


def test_a_longer_transfer_that_came_sooner_says_nothing_of_the_latency():
    """Two of three short ones were held up."""
    seen = meter("remote")
    for _ in range(10):
        for short_ms in (130.0, 130.0, 93.0):
            seen.observe(3_000_000, short_ms)
            seen.observe(12_000_000, 102.0)
    assert seen.rate is not None
    assert seen.rate.latency_ms == pytest.approx(90.0)


def test_two_transfers_that_were_held_up_say_nothing_of_a_link():
    seen = meter("remote")
    for megabytes in (3, 12, 6, 18) * 5:
        seen.observe(megabytes * 1_000_000, 5.0 + megabytes / 0.1)
    for _ in range(2):
        seen.observe(12_000_000, 2_000.0)
    assert seen.rate is not None
    assert seen.rate.gb_per_s == pytest.approx(0.1, rel=0.01)


def test_a_transfer_that_took_no_longer_than_the_latency_says_how_slow_a_link_is_at_most():
    """All of its time may have been bytes. Left out, it taught a rate nothing for as long as the latency was wrong."""
    seen = meter("remote")
    for _ in range(3):
        assert seen.observe(3_000_000, 1.5)
    assert seen.rate is not None
    assert seen.rate.gb_per_s == pytest.approx(2.0)


def starved():
    """A meter of 10 ms and 0.1 GB/s whose transfers were held up by some 300 ms, for a while."""
    seen = meter("remote")
    for megabytes in (3, 12, 6, 18) * 5:
        seen.observe(megabytes * 1_000_000, 10.0 + megabytes / 0.1)
    for megabytes in (3, 12, 6, 18) * 3:
        seen.observe(megabytes * 1_000_000, 310.0 + megabytes / 0.1)
    assert seen.rate is not None
    assert seen.rate.latency_ms == pytest.approx(310.0)
    return seen


@pytest.mark.parametrize("sizes", [(3, 3), (6, 12)])
def test_two_transfers_that_took_less_than_the_latency_end_it(sizes):
    """It is in the median of 9 lines, and through equal sizes there are none."""
    seen = starved()
    for megabytes in sizes:
        seen.observe(megabytes * 1_000_000, 10.0 + megabytes / 0.1)
    assert seen.rate is not None
    assert seen.rate.latency_ms <= 10.0
    for _ in range(3):
        seen.observe(3_000_000, 40.0)
    assert seen.rate.gb_per_s == pytest.approx(0.1, rel=0.3)


def test_transfers_that_are_held_up_at_random_do_not_make_a_latency_shorter_than_it_is():
    """What is forgotten lies on one side."""
    seen, rng, found = meter("remote"), random.Random(1), []
    for _ in range(400):
        megabytes = rng.choice((3, 6, 12, 18))
        seen.observe(megabytes * 1_000_000, 5.0 + megabytes / 0.1 + rng.expovariate(1 / 20.0))
        assert seen.rate is not None
        found.append(seen.rate.latency_ms)
    assert 5.0 <= median(found) <= 25.0, "20 ms of it are the delays' mean"


def test_one_transfer_that_came_by_an_earlier_call_does_not_end_a_latency():
    """Who joins a pull at its end sees many bytes in a moment."""
    seen = meter("remote")
    for megabytes in (3, 12, 6, 18) * 5:
        seen.observe(megabytes * 1_000_000, 60.0 + megabytes / 0.1)
    seen.observe(24_000_000, 3.0)
    assert seen.rate is not None
    assert seen.rate.latency_ms == pytest.approx(60.0)


def known():
    """A meter of 5 ms and 0.5 GB/s."""
    seen = meter("remote")
    for megabytes in (3, 12, 6, 18) * 5:
        seen.observe(megabytes * 1_000_000, 5.0 + megabytes / 0.5)
    return seen


def test_three_transfers_that_were_given_up_show_how_fast_a_link_is_at_most():
    seen = known()
    for _ in range(3):
        assert seen.gave_up(12_000_000, 1_000.0)
    assert seen.rate is not None
    assert seen.rate.gb_per_s == pytest.approx(0.012, rel=0.01)
    assert seen.rate.latency_ms == pytest.approx(5.0), "nothing that came says otherwise"
    for megabytes in (3, 12, 6):
        seen.observe(megabytes * 1_000_000, 5.0 + megabytes / 0.5)
    assert seen.rate.gb_per_s == pytest.approx(0.5)
    for _ in range(12):
        seen.gave_up(12_000_000, 1_000.0)
        seen.observe(3_000_000, 905.0)
    assert seen.rate.latency_ms == pytest.approx(5.0), "a bound is no end of a line"


def test_a_transfer_that_saves_more_than_anybody_waits_is_not_tried_for_good():
    """All that is known of it is that a second was not enough; computing would take five."""
    seen = known()
    for number in range(15):
        assert seen.rate is not None
        if not should_fetch(LinkRates({"remote": seen.rate}).transfer_ms("remote", 12_000_000), 5_000.0, 0.0):
            assert 3 < number <= 12
            return
        seen.gave_up(12_000_000, 1_000.0)
    pytest.fail("it is still fetched")


def test_a_link_of_which_nothing_is_known_is_given_up_once():
    seen = meter("remote")
    assert seen.gave_up(12_000_000, 1_000.0)
    assert seen.rate is not None
    assert seen.rate.gb_per_s == pytest.approx(0.012, rel=0.01)
    for num_bytes, ms in ((1000, 1_000.0), (0, 1_000.0), (12_000_000, 0.0), (12_000_000, float("inf"))):
        assert not seen.gave_up(num_bytes, ms)


transfers = st.tuples(st.integers(LEAST_BYTES, 1 << 34), st.floats(1e-3, 1e7))


@given(st.lists(transfers, max_size=20), st.lists(transfers, min_size=1, max_size=20), st.booleans())
def test_what_was_given_up_never_raises_a_rate_nor_moves_a_latency(came, given_up, times_copies):
    seen = meter("remote", times_copies=times_copies)
    for num_bytes, ms in came:
        seen.observe(num_bytes, ms)
    before = seen.rate or careful_rate("remote")
    for num_bytes, ms in given_up:
        seen.gave_up(num_bytes, ms)
        assert seen.rate is not None
        assert seen.rate.gb_per_s <= before.gb_per_s * (1 + 1e-6)
        assert seen.rate.latency_ms == before.latency_ms
        before = seen.rate


def test_a_slow_link_that_nothing_comes_by_any_more_is_tried_again():
    careful = LinkRate(gb_per_s=1.0, latency_ms=2.0)
    slow, quick = LinkRate(gb_per_s=0.01, latency_ms=5.0), LinkRate(gb_per_s=9.0, latency_ms=0.1)
    assert faded(slow, careful, 0.0) == slow
    assert faded(slow, careful, 60_000.0).gb_per_s == pytest.approx(0.1)
    assert faded(slow, careful, 120_000.0).gb_per_s == pytest.approx(10**-0.5)
    assert 0.9 < faded(slow, careful, 1e6).gb_per_s <= 1.0
    assert faded(quick, careful, 1e9) == quick


@pytest.mark.parametrize("gb_per_s", [9.0, 1.0, 0.01])
def test_a_latency_longer_than_careful_fades_at_whatever_rate_and_a_shorter_one_stays(gb_per_s):
    """By it eq 2 refuses every fetch that saves less, and nothing would show that the link waits no more."""
    careful = LinkRate(gb_per_s=1.0, latency_ms=2.0)
    late = LinkRate(gb_per_s=gb_per_s, latency_ms=200.0)
    assert faded(late, careful, 0.0) == late
    assert faded(late, careful, 60_000.0).latency_ms == pytest.approx(20.0)
    assert faded(late, careful, 120_000.0).latency_ms == pytest.approx(20.0 / 10**0.5)
    assert 2.0 <= faded(late, careful, 1e6).latency_ms < 2.1
    for latency_ms in (0.0, 0.5, 2.0):
        seen = LinkRate(gb_per_s=gb_per_s, latency_ms=latency_ms)
        assert faded(seen, careful, 60_000.0).latency_ms == latency_ms
