"""What a worker says of its links: measured, without the opening of a path, and fading."""

import pytest
from prometheus_client import REGISTRY

from shared.costmodel.transfer import LinkRates
from shared.engine.worker_links import MAX_SOURCES, MeasuredLinks

MB = 1_000_000


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def test_the_first_call_to_a_mempool_opens_a_path_and_is_no_measurement(clock):
    """It takes 60 ms where the next take 10, and eq 2 would not fetch again."""
    links = MeasuredLinks(clock)
    links.called("tcp://a", 3 * MB, 62.0)
    assert links.rates() == {}
    links.called("tcp://a", 6 * MB, 14.0)
    assert links.rates()["remote"].gb_per_s == pytest.approx(0.5)
    links.called("tcp://b", 3 * MB, 3_000.0)
    assert links.rates()["remote"].gb_per_s == pytest.approx(0.5)


def test_sources_that_are_remembered_are_bounded(clock):
    links = MeasuredLinks(clock)
    for number in range(MAX_SOURCES + 1):
        links.called(f"tcp://{number}", 3 * MB, 62.0)
    links.called("tcp://0", 3 * MB, 62.0)
    assert links.rates() == {}, "the oldest was forgotten"
    links.called(f"tcp://{MAX_SOURCES}", 6 * MB, 14.0)
    assert "remote" in links.rates()


def test_paths_are_measured_apart_and_copies_have_no_latency_in_them(clock):
    links = MeasuredLinks(clock)
    links.copied("peer", 100 * MB, 0.5)
    links.copied("dram", 100 * MB, 2.0)
    found = links.rates()
    assert {path: round(rate.gb_per_s) for path, rate in found.items()} == {"peer": 200, "dram": 50}
    assert found["peer"].latency_ms == 1.0


def test_what_prompts_wait_beside_their_copies_is_the_paths_latency_but_not_what_every_call_takes(clock):
    """On H200s a call took 6 ms for a copy of 1.4, one that brings nothing 0.8."""
    links = MeasuredLinks(clock)
    for call_ms in (0.7, 0.8, 9.0):
        links.found(call_ms)
    for call_ms in (4.2, 5.2, 6.2, 30.0):
        links.copied("peer", 126 * MB, 1.4, call_ms=call_ms)
    assert links.rates()["peer"].latency_ms == 1.0, "four are too few"
    links.copied("peer", 126 * MB, 1.4, call_ms=5.2)
    assert links.rates()["peer"].latency_ms == pytest.approx(3.0)
    assert links.rates()["peer"].gb_per_s == pytest.approx(90.0)
    for _ in range(40):
        links.copied("peer", 126 * MB, 1.4)  # hand-offs
        links.copied("peer", 126 * MB, 1.4, call_ms=0.3)  # the copy was under way
    assert links.rates()["peer"].latency_ms == pytest.approx(3.0)
    for _ in range(3):
        links.copied("peer", 126 * MB, 1.4, call_ms=2.6)
    assert links.rates()["peer"].latency_ms == pytest.approx(0.4), "three say that it has changed"


def test_a_latency_of_a_bad_time_fades_while_hand_offs_go_on_and_eq_2_fetches_nothing(clock):
    links = MeasuredLinks(clock)
    for _ in range(5):
        links.copied("peer", 126 * MB, 1.4, call_ms=301.4)
    assert links.rates()["peer"].latency_ms == pytest.approx(300.0)
    for _ in range(60):
        clock.now_s += 1.0
        links.copied("peer", 126 * MB, 1.4)
    assert links.rates()["peer"].latency_ms == pytest.approx(300.0**0.5)
    assert links.rates()["peer"].gb_per_s == pytest.approx(90.0), "as it is seen"


def test_a_link_slower_than_careful_fades_and_a_new_transfer_says_it_again(clock):
    links = MeasuredLinks(clock)
    for _ in range(2):
        links.called("tcp://a", 6 * MB, 602.0)  # 10 MB/s
    assert links.rates()["remote"].gb_per_s == pytest.approx(0.01)
    clock.now_s += 60.0
    assert links.rates()["remote"].gb_per_s == pytest.approx(0.1)
    links.called("tcp://a", 1000, 1.0)
    assert links.rates()["remote"].gb_per_s == pytest.approx(0.1), "it said nothing"
    links.called("tcp://a", 6 * MB, 602.0)
    assert links.rates()["remote"].gb_per_s == pytest.approx(0.01)


def test_what_was_given_up_opened_a_path_or_fades_like_what_came(clock):
    links = MeasuredLinks(clock)
    links.gave_up("tcp://a", 10 * MB, 1_000.0)
    assert links.rates() == {}, "a path was opened in it"
    links.gave_up("tcp://a", 10 * MB, 1_002.0)
    assert links.rates()["remote"].gb_per_s == pytest.approx(0.01)
    clock.now_s += 60.0
    assert links.rates()["remote"].gb_per_s == pytest.approx(0.1)
    links.gave_up("tcp://a", 10 * MB, 1_002.0)
    assert links.rates()["remote"].gb_per_s < 0.01, "seen again, and slower than was thought"


def test_a_latency_of_a_while_ago_does_not_refuse_every_fetch_for_good(clock):
    """Transfers were held up by 300 ms while the machine was starved; a prefix saves 100 ms."""
    links = MeasuredLinks(clock)
    links.called("tcp://a", 3 * MB, 60.0)
    for megabytes in (3, 12, 6, 18) * 4:
        links.called("tcp://a", megabytes * MB, 300.0 + megabytes / 2.0)  # 2 GB/s, faster than careful
    assert LinkRates(links.rates()).transfer_ms("remote", 3 * MB) > 300.0
    for _ in range(3):
        clock.now_s += 120.0
        assert LinkRates(links.rates()).transfer_ms("remote", 3 * MB) < 100.0, "it is tried again"
        links.called("tcp://a", 3 * MB, 5.0)
    assert LinkRates(links.rates()).transfer_ms("remote", 3 * MB) < 10.0


def test_status_says_what_eq_2_counts_with_and_how_many_transfers_said_so(clock):
    """A user asks: why did it not fetch?"""
    links = MeasuredLinks(clock)
    links.called("tcp://a", 6 * MB, 70.0)  # opens the path
    for _ in range(2):
        links.called("tcp://a", 6 * MB, 14.0)
    links.called("tcp://a", 1_000, 1.0)  # too short to say anything
    links.gave_up("tcp://a", 6 * MB, 100.0)
    links.copied("peer", 100 * MB, 0.5)
    found = links.status()
    assert found["remote"] == {"gb_per_s": 0.5, "latency_ms": 2.0, "num_measured": 2, "num_given_up": 1}
    assert found["peer"] == {"gb_per_s": 200.0, "latency_ms": 1.0, "num_measured": 1, "num_given_up": 0}
    assert found["dram"] == {"gb_per_s": 5.0, "latency_ms": 1.0, "num_measured": 0, "num_given_up": 0}
    for path, rate in links.rates().items():
        assert found[path]["gb_per_s"] == pytest.approx(rate.gb_per_s)
        assert found[path]["latency_ms"] == pytest.approx(rate.latency_ms)


def test_gauges_by_path_fade_with_the_rates(clock):
    links = MeasuredLinks(clock)

    def shown():
        links.update_gauges()
        return REGISTRY.get_sample_value("quire_worker_link_gb_per_s", {"path": "remote"})

    for _ in range(2):
        links.called("tcp://a", 6 * MB, 602.0)
    assert shown() == pytest.approx(0.01)
    assert REGISTRY.get_sample_value("quire_worker_link_latency_ms", {"path": "remote"}) == 2.0
    clock.now_s += 60.0
    assert shown() == pytest.approx(0.1)
