"""AQUA's story of a producer (Figure 12) and of a consumer, reading by reading; profiles; rules that make no sense."""

import msgspec
import pytest

from loadtest.profiler.core.profile import Profile, encode
from shared.errors import SettingsError
from shared.ids import LeaseId
from shared.lending.consumer import Ask, Borrowed, Consumer, Need, Renew, Return
from shared.lending.load import Load
from shared.lending.producer import MakeOffer, OnOffer, Producer, TakeBack
from shared.lending.rules import GB, LendingRules, decode_profile

TOTAL = 40 * GB
PROFILE = encode(
    Profile(
        model="llama-8b", tp=1, role="producer", bytes_per_gpu=20 * GB, stable_rate_per_s=2.5, pool_bytes=TOTAL,
        peak_kv_bytes=20 * GB, free_bytes=20 * GB,
    )
)  # fmt: skip


class Story:
    """One producer, a reading every quarter of a second."""

    def __init__(self, *profiles, rules=None):
        self.producer = Producer(rules or LendingRules(), profiles)
        self.now_ms, self.arrived, self.offers, self.short = 0, 0.0, [], False
        self.refuses = False  # the coordinator

    def run(self, seconds, *, rate=2.0, waiting=0, needed=10 * GB):
        """What it decides within so long, with when."""
        out = []
        for _ in range(int(seconds * 4)):
            self.now_ms += 250
            self.arrived += rate / 4
            load = Load(TOTAL, needed, num_waiting=waiting, num_arrived=int(self.arrived))
            for one in self.producer.decide(load, self.offers, self.now_ms, is_short=self.short):
                out.append((self.now_ms, one))
                if isinstance(one, MakeOffer) and self.refuses:
                    self.producer.answered(self.now_ms, retry_after_ms=1_000)
                elif isinstance(one, MakeOffer):
                    self.producer.answered(self.now_ms)
                    self.offers = [
                        *self.offers,
                        OnOffer(f"o{self.now_ms}", one.length_bytes, one.length_bytes),
                    ]
                else:
                    self.offers = [
                        OnOffer(o.offer_id, one.keep_bytes, one.keep_bytes)
                        if o.offer_id == one.offer_id
                        else o
                        for o in self.offers
                    ]
                    self.offers = [o for o in self.offers if o.length_bytes]
        return out


def decide(consumer, need, loans, now_ms, **more):
    consumer.note(need, now_ms)
    return consumer.decide(loans, now_ms, **more)


def test_a_producer_offers_at_steady_load_takes_back_when_it_doubles_and_offers_again():
    story = Story(decode_profile(PROFILE, "test"))
    [(at_ms, made)] = story.run(60)
    assert made == MakeOffer(20 * GB), "the profile's surplus, though more is free"
    assert 10_000 <= at_ms <= 11_000
    began_ms = story.now_ms
    [(at_ms, taken)] = story.run(15, rate=5.0)
    assert isinstance(taken, TakeBack)
    assert taken.keep_bytes == 0
    assert "requests/s" in taken.reason
    assert at_ms - began_ms < 10_000, "within a window"
    assert not story.run(10, rate=2.0), "not before hold_ms"
    [(_, made)] = story.run(60, rate=2.0)
    assert made == MakeOffer(20 * GB)


def test_of_a_profile_of_several_instances_one_has_its_part_of_the_rate():
    whole = msgspec.json.decode(PROFILE)
    two = decode_profile(msgspec.json.encode(whole | {"stable_rate_per_s": 5.0, "num_instances": 2}), "test")
    story = Story(two)
    assert story.run(60, rate=2.0)
    assert any(isinstance(one, TakeBack) for _, one in story.run(15, rate=4.5)), "below the rate of both"


def test_without_a_profile_the_rate_at_which_memory_was_offered_is_the_steady_one():
    story = Story()
    [(_, made)] = story.run(30)
    assert made == MakeOffer(TOTAL - 10 * GB - TOTAL // 10)
    assert not story.run(30, rate=2.4)
    [(_, taken)] = story.run(20, rate=4.0)
    assert taken.keep_bytes == 0


def test_the_rate_of_an_offer_that_nobody_took_says_nothing_of_what_is_steady_later():
    story = Story()
    story.refuses = True
    assert story.run(15, rate=0.0), "idle"
    story.run(10, rate=3.0)
    story.refuses = False
    assert not story.offers
    [(at_ms, _)] = story.run(30, rate=3.0)
    assert at_ms <= 25_000 + 2_000, "steady for longer than it needs"
    assert not story.run(30, rate=3.0)


def test_an_offer_that_shrank_to_nothing_is_made_again_at_a_higher_rate():
    story = Story()
    story.run(15, rate=0.2)
    assert story.offers
    story.run(5, rate=0.2, needed=TOTAL)
    assert not story.offers
    assert [one for _, one in story.run(75, rate=3.0)] == [MakeOffer(TOTAL - TOTAL // 10 - 10 * GB)]


def test_a_queue_that_grows_takes_everything_back_at_the_next_reading():
    story = Story(decode_profile(PROFILE, "test"))
    story.run(30)
    [(_, taken)] = story.run(0.25, waiting=5)
    assert taken.keep_bytes == 0
    assert "queue" in taken.reason


def test_requests_that_need_more_take_back_what_they_need_and_no_more():
    story = Story(decode_profile(PROFILE, "test"))
    story.run(30)
    [(_, taken)] = story.run(5, needed=21 * GB)
    assert taken.keep_bytes == TOTAL - 21 * GB - TOTAL // 10
    assert not story.run(10, needed=21 * GB)


def gap_behind_a_shortage(story):
    """From taking back what its own cache needs to the next offer."""
    while not story.offers:
        story.run(0.25)
    story.short = True
    [(taken_ms, taken)] = story.run(0.25)
    assert "host memory" in taken.reason
    story.short = False
    while not story.offers:
        story.run(0.25)
    return story.now_ms - taken_ms


def test_who_lent_what_its_own_cache_needs_takes_it_back_and_lends_later_each_time():
    story = Story(rules=LendingRules(hold_ms=1_000, steady_ms=250))
    gaps = [gap_behind_a_shortage(story) for _ in range(4)]
    assert gaps == sorted(gaps)
    assert gaps[-1] >= 4 * gaps[0]


@pytest.mark.slow
def test_shortages_long_apart_hold_lending_up_no_longer_each_time():
    story = Story(rules=LendingRules(hold_ms=1_000, steady_ms=250))
    first, *_, last = [gap_behind_a_shortage(story) for _ in range(4)]
    assert not story.run(20 * last / 1_000), "ten times as long as the next hold"
    assert gap_behind_a_shortage(story) == first
    for _ in range(2):
        assert not story.run(3_600)
        assert gap_behind_a_shortage(story) <= first
    assert not story.run(3_600)
    [(taken_ms, _)] = story.run(0.25, waiting=5)
    while not story.offers:
        story.run(0.25)
    assert story.now_ms - taken_ms <= 2 * first, "nor behind what is no shortage"


@pytest.mark.parametrize(("role", "size"), [("consumer", -GB), ("neutral", 0)])
def test_whom_the_profile_calls_no_producer_lends_nothing(role, size):
    profile = msgspec.structs.replace(decode_profile(PROFILE, "test"), role=role, bytes_per_gpu=size)
    assert not Story(profile).run(120)


def test_less_than_the_threshold_is_not_offered():
    assert not Story().run(120, needed=27 * GB)
    assert Story(rules=LendingRules(threshold_bytes=5 * GB)).run(120, needed=27 * GB)


def test_a_consumer_asks_for_what_came_back_renews_while_it_uses_that_and_returns_it_when_idle():
    rules = LendingRules()
    consumer = Consumer(rules)
    assert not decide(consumer, Need(0, 0), [], 0)
    assert not decide(consumer, Need(rules.ask_bytes - 1, 0), [], 1_000)
    assert decide(consumer, Need(3 * rules.ask_bytes, 0), [], 2_000) == [
        Ask(3 * rules.ask_bytes, rules.ask_bytes)
    ]
    consumer.answered(2_100, granted=True)
    loan = Borrowed(LeaseId("l"), 3 * rules.ask_bytes, rules.ttl_ms, is_held=True)
    assert not decide(consumer, Need(3 * rules.ask_bytes, 0), [loan], 3_000)
    old = Borrowed(LeaseId("l"), 3 * rules.ask_bytes, rules.ttl_ms // 2, is_held=True)
    assert decide(consumer, Need(3 * rules.ask_bytes, 9), [old], 4_000) == [Renew(LeaseId("l"), rules.ttl_ms)]
    assert not decide(consumer, Need(3 * rules.ask_bytes, 9), [old], 5_000, lives=False), "nobody renews"
    assert decide(consumer, Need(3 * rules.ask_bytes, 9), [loan], 4_000 + rules.idle_ms) == [
        Return(LeaseId("l"))
    ]


def test_refusals_make_pauses_longer_up_to_a_limit():
    rules = LendingRules(ask_bytes=1, pause_ms=100, max_pause_ms=400)
    consumer, now_ms, left, pauses = Consumer(rules), 0, 0, []
    for _ in range(4):
        since_ms = now_ms
        while not decide(consumer, Need(left, 0), [], now_ms):
            now_ms, left = now_ms + 10, left + 1
        pauses.append(now_ms - since_ms)
        consumer.answered(now_ms, granted=False)
    assert pauses[1:] == [100, 200, 400]


def test_who_lends_borrows_nothing_and_the_other_way_round():
    rules = LendingRules(threshold_bytes=1, steady_ms=0, ask_bytes=1)
    consumer = Consumer(rules)
    decide(consumer, Need(0, 0), [], 0)
    assert not decide(consumer, Need(9, 0), [], 1, lends=True)
    assert not Producer(rules).decide(Load(100, 0), [], 0, keeps=True)
    assert Producer(rules).decide(Load(100, 0), [], 0)


@pytest.mark.parametrize(
    "wrong",
    [{"threshold_bytes": -1}, {"reserve_share": 1.0}, {"window_ms": 0}, {"pause_ms": 9, "max_pause_ms": 8}],
)
def test_a_rule_that_makes_no_sense_is_refused_by_name(wrong):
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        LendingRules(**wrong)


@pytest.mark.parametrize("data", [b"{}", b"", PROFILE.replace(b"quire-profile/1", b"other/1")])
def test_what_is_no_profile_is_refused(data):
    with pytest.raises(SettingsError, match=r"p\.json"):
        decode_profile(data, "p.json")
