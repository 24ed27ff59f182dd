"""Who lends when: whatever the load does, no space is promised away that requests need, and nothing flaps."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.ids import LeaseId
from shared.lending.budget import AUTO_SHARE, Budget, auto_budget_bytes_per_s
from shared.lending.consumer import Ask, Borrowed, Consumer, Need, Renew, Return
from shared.lending.load import Load
from shared.lending.producer import MAX_HOLDS, MakeOffer, OnOffer, Producer, TakeBack
from shared.lending.rules import EngineProfile, LendingRules

TOTAL = 1_000
RULES = LendingRules(
    threshold_bytes=100, reserve_share=0.1, steady_ms=1_000, hold_ms=3_000, window_ms=1_000, peak_ms=2_000,
    queue_limit=2, silent_ms=700, reclaim_deadline_ms=200, budget_bytes_per_s=1_000, ask_bytes=50, borrow_bytes=300,
    idle_ms=2_000, pause_ms=100, max_pause_ms=800, ttl_ms=1_000,
)  # fmt: skip
PROFILE = EngineProfile(
    format="quire-profile/1", model="m", tp=1, role="producer", bytes_per_gpu=500, stable_rate_per_s=20.0
)


@dataclass
class Rig:
    """A mempool and a coordinator for one producer: they answer late, with less, or not at all."""

    producer: Producer
    now_ms: int = 0
    offers: dict[str, int] = field(default_factory=dict)
    asked: list[tuple[int, int]] = field(default_factory=list)  # (bytes, when it is answered)
    made_at_ms: list[int] = field(default_factory=list)
    taken_at_ms: list[int] = field(default_factory=list)
    unsteady_at_ms: int = 0
    number: int = 0
    arrived: int = 0

    def on_offer(self, lent):
        return [OnOffer(name, size, min(size, lent)) for name, size in self.offers.items()]

    def step(self, dt, load, lent, delay, share, *, short=False):
        self.now_ms += dt
        for size, at_ms in list(self.asked):
            if at_ms <= self.now_ms:
                self.asked.remove((size, at_ms))
                refused = share == 0
                self.producer.answered(self.now_ms, retry_after_ms=500 if refused else 0)
                if not refused and not self.taken_since(at_ms - delay):
                    self.number += 1
                    self.offers[f"o{self.number}"] = size * share // 4  # engines gave less
        before = dict(self.offers)
        decided = self.producer.decide(load, self.on_offer(lent), self.now_ms, is_short=short)
        for one in decided:
            if isinstance(one, MakeOffer):
                self.made_at_ms.append(self.now_ms)
                self.asked.append((one.length_bytes, self.now_ms + delay))
            else:
                self.taken_at_ms.append(self.now_ms)
                assert one.keep_bytes < self.offers[one.offer_id], "what is there already is not taken again"
                self.offers[one.offer_id] = one.keep_bytes
        self.offers = {name: size for name, size in self.offers.items() if size}
        return before, decided

    def taken_since(self, at_ms):
        return any(at <= self.now_ms and at >= at_ms for at in self.taken_at_ms)


step = st.tuples(
    st.integers(50, 600),  # ms
    st.integers(0, TOTAL),  # needed
    st.integers(0, 8),  # waiting
    st.integers(0, 40),  # arrivals
    st.integers(0, 300),  # the longest request
    st.sampled_from([True, True, True, True, False]),  # whether it reports
    st.integers(0, TOTAL),  # lent
    st.sampled_from([0, 0, 300, 900]),  # the coordinator's delay
    st.integers(0, 4),  # quarters of an offer that engines give; 0: refused
    st.sampled_from([False, False, False, True]),  # its own blocks come back from host memory
)
calm = st.tuples(
    st.just(250), st.integers(0, 300), st.integers(0, 1), st.just(0), st.just(0), st.just(True),
    st.integers(0, TOTAL), st.sampled_from([0, 300]), st.integers(0, 4), st.just(False),
)  # fmt: skip
story = st.lists(st.one_of(st.lists(calm, min_size=3, max_size=12), st.lists(step, max_size=6)), max_size=12)


def readings(parts, rig):
    for dt, needed, waiting, arrivals, least, reports, *rest in (x for part in parts for x in part):
        rig.arrived += arrivals
        yield dt, Load(TOTAL, needed, least, waiting, rig.arrived) if reports else None, *rest


@settings(deadline=None)
@given(parts=story, profiled=st.booleans())
def test_offers_never_reach_into_what_requests_need_and_the_reserve(parts, profiled):
    rig = Rig(Producer(RULES, [PROFILE] if profiled else []))
    for dt, load, lent, delay, share, short in readings(parts, rig):
        rig.step(dt, load, lent, delay, share, short=short)
        if load is None:
            continue
        spare = TOTAL - load.needed_bytes - max(load.least_bytes, TOTAL // 10)
        coming = sum(size for size, at_ms in rig.asked if at_ms - delay == rig.now_ms)
        assert sum(rig.offers.values()) <= max(0, spare)
        assert not (short and rig.offers)
        assert not coming or sum(rig.offers.values()) + coming <= spare
        assert not profiled or sum(rig.offers.values()) + coming <= PROFILE.bytes_per_gpu or not coming


@settings(deadline=None)
@given(parts=story)
def test_memory_is_offered_after_a_calm_time_only_and_never_soon_after_it_was_taken_back(parts):
    rig = Rig(Producer(RULES))
    calm_since = None
    for dt, load, lent, delay, share, short in readings(parts, rig):
        _, decided = rig.step(dt, load, lent, delay, share, short=short)
        taken = any(isinstance(one, TakeBack) for one in decided)
        if load is not None and (load.num_waiting > RULES.queue_limit or taken):
            calm_since = None
        elif load is not None and calm_since is None:
            calm_since = rig.now_ms
        for one in decided:
            if isinstance(one, MakeOffer):
                assert calm_since is not None
                assert rig.now_ms - calm_since >= RULES.steady_ms
                assert all(rig.now_ms - at_ms >= RULES.hold_ms for at_ms in rig.taken_at_ms)
                assert one.length_bytes > RULES.threshold_bytes
                assert len(rig.asked) == 1, "one at a time"


@settings(deadline=None)
@given(parts=story, grown=st.integers(RULES.queue_limit + 1, 20), lent=st.integers(0, TOTAL))
def test_a_queue_that_grows_takes_everything_back_at_once_by_a_deadline_within_the_budget(parts, grown, lent):
    rig = Rig(Producer(RULES))
    for dt, load, lent_then, delay, share, short in readings(parts, rig):
        rig.step(dt, load, lent_then, delay, share, short=short)
    rig.asked.clear()
    rig.step(10, Load(TOTAL, 0, 0, 0, rig.arrived), 0, 0, 4)
    before, decided = rig.step(10, Load(TOTAL, 0, 0, grown, rig.arrived), lent, 0, 4)
    assert not rig.offers
    taken = [one for one in decided if isinstance(one, TakeBack)]
    assert {one.offer_id for one in taken} == set(before)
    for one in taken:
        moving = min(before[one.offer_id], lent)
        copied_ms = -(-moving * 1_000 // RULES.budget_bytes_per_s)
        assert one.deadline_ms == copied_ms + RULES.reclaim_deadline_ms


@settings(deadline=None)
@given(parts=story)
def test_a_silent_engine_gets_its_memory_back(parts):
    rig = Rig(Producer(RULES))
    for dt, load, lent, delay, share, short in readings(parts, rig):
        rig.step(dt, load, lent, delay, share, short=short)
    rig.step(RULES.silent_ms, None, 0, 0, 4)
    rig.step(RULES.silent_ms, None, 0, 0, 4)
    assert not rig.offers
    assert not any(isinstance(one, MakeOffer) for one in rig.step(RULES.hold_ms, None, 0, 0, 4)[1])


@settings(deadline=None)
@given(parts=story, arrivals=st.integers(0, 20))
def test_a_load_that_stays_as_it_is_is_lent_to_in_the_end_whatever_was_before(parts, arrivals):
    rig = Rig(Producer(RULES))
    for dt, load, lent, delay, share, short in readings(parts, rig):
        rig.step(dt, load, lent, delay, share, short=short)
    end_ms = rig.now_ms + MAX_HOLDS * RULES.hold_ms + RULES.peak_ms + RULES.steady_ms
    while rig.now_ms < end_ms and not rig.offers:
        rig.arrived += arrivals
        rig.step(250, Load(TOTAL, 0, 0, 0, rig.arrived), 0, 0, 4)
    assert rig.offers


need = st.tuples(st.integers(20, 700), st.integers(0, 120), st.booleans(), st.sampled_from(["", "no", "yes"]))


@settings(deadline=None)
@given(needs=st.lists(need, max_size=40), profiled=st.booleans())
def test_a_consumer_borrows_no_more_than_it_may_and_asks_one_thing_at_a_time(needs, profiled):
    profile = EngineProfile(
        format="quire-profile/1", model="m", tp=2, role="consumer", bytes_per_gpu=-80, stable_rate_per_s=1.0
    )
    most = 160 if profiled else RULES.borrow_bytes
    consumer = Consumer(RULES, [profile] if profiled else [])
    loans: dict[str, tuple[int, int]] = {}
    now = left = moved = refused_at = 0
    pending: Ask | None = None
    for dt, leaves, moves, answer in needs:
        now += dt
        left, moved = left + leaves, moved + moves
        loans = {name: (size, end) for name, (size, end) in loans.items() if end > now}
        if pending is not None and answer:
            consumer.answered(now, granted=answer == "yes")
            if answer == "yes":
                loans[f"l{now}"] = (pending.length_bytes, now + RULES.ttl_ms)
            else:
                refused_at = now
            pending = None
        held = [Borrowed(LeaseId(n), size, end - now, is_held=True) for n, (size, end) in loans.items()]
        consumer.note(Need(left, moved), now)
        decided = consumer.decide(held, now)
        asks = [one for one in decided if isinstance(one, Ask)]
        assert not asks or pending is None
        assert not (asks and refused_at and now - refused_at < RULES.pause_ms)
        for one in asks:
            pending = one
            assert RULES.ask_bytes <= one.length_bytes or one.length_bytes <= most
            assert one.length_bytes + sum(size for size, _ in loans.values()) <= most
            assert 0 < one.least_bytes <= one.length_bytes
        for one in decided:
            if isinstance(one, Renew):
                loans[one.lease_id] = (loans[one.lease_id][0], now + one.ttl_ms)
            elif isinstance(one, Return):
                del loans[one.lease_id]


@settings(deadline=None)
@given(
    rate=st.integers(1, 10_000_000),
    burst=st.integers(0, 1_000_000),
    moves=st.lists(st.tuples(st.integers(0, 2_000), st.integers(1, 500_000)), max_size=60),
)
def test_no_more_bytes_pass_in_any_time_than_the_budget_its_burst_and_one_copy(rate, burst, moves):
    budget = Budget(rate, burst)
    now, passed = 0, [(0, 0)]
    for dt, size in moves:
        now += dt
        if budget.is_open(now):
            assert budget.opens_at_ms(now) is None
            budget.spend(size, now)
            passed.append((now, size))
        else:
            opens = budget.opens_at_ms(now)
            assert opens is not None
            assert opens > now
            assert not budget.is_open(opens - 1)
            assert budget.is_open(opens)
            now = opens
    for first, (begin, _) in enumerate(passed):
        for last in range(first, len(passed)):
            sizes = [size for _, size in passed[first : last + 1]]
            allowed = (passed[last][0] - begin) * rate / 1_000 + burst + max(sizes)
            assert sum(sizes) <= allowed + 1


GPUS = ["a", "b", "c", "d"]


@given(
    mine=st.sets(st.sampled_from(GPUS)),
    rates=st.dictionaries(
        st.tuples(st.sampled_from(GPUS), st.sampled_from(GPUS)), st.floats(0.001, 1_000.0), max_size=12
    ),
    faster=st.floats(1.0, 10.0),
)
def test_a_budget_of_its_own_is_below_half_of_what_the_gpus_copy_and_rises_only_with_it(mine, rates, faster):
    outward = [rate for pair, rate in rates.items() if len(mine.intersection(pair)) == 1 != len(set(pair))]
    found = auto_budget_bytes_per_s(mine, rates)
    if not outward:
        assert found == 0
        return
    most = max(outward)
    assert 0 < found <= AUTO_SHARE * most * 1e9 * len(mine)
    assert found < 0.5 * most * 1e9 * len(mine)
    assert auto_budget_bytes_per_s(mine, {pair: rate * faster for pair, rate in rates.items()}) >= found
    others = {pair: rate for pair, rate in rates.items() if not mine.intersection(pair)}
    assert auto_budget_bytes_per_s(mine, others) == 0
