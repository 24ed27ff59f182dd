"""Woven batches: waves never grow, no part is empty, tokens keep their order, what is depended on comes first."""

from hypothesis import given
from hypothesis import strategies as st

from shared.weave.batch_cut import cut_batch
from shared.weave.smart_split import SmartSplit, SplitRules
from shared.weave.threshold import Measured, Timing, decide, pack_measured, unpack_measured
from shared.weave.waves import Gemm, Tile, split_ctas
from shared.weave.woven_order import PARTS, woven_order

sms = st.integers(1, 160)
gemms = st.lists(
    st.builds(
        Gemm,
        name=st.just("g"),
        columns=st.integers(1, 30_000),
        inner=st.integers(1, 30_000),
        tile=st.builds(Tile, tokens=st.sampled_from([64, 128, 256]), columns=st.sampled_from([64, 128, 256])),
    ),
    min_size=1,
    max_size=4,
)
tokens = st.integers(1, 20_000)
batches = st.lists(st.integers(1, 300), min_size=1, max_size=40).filter(lambda counts: sum(counts) > 1)


def waves(count: int, num_sms: int) -> int:
    return -(-count // num_sms)


@given(st.integers(0, 2_000), sms)
def test_two_parts_of_ctas_take_no_wave_more_and_no_more_equal_cut_does(count, num_sms):
    fair = [
        first
        for first in range(1, count)
        if waves(first, num_sms) + waves(count - first, num_sms) == waves(count, num_sms)
    ]
    found = split_ctas(count, num_sms)
    if count <= num_sms:
        assert found is None
        return
    assert found is not None
    assert sum(found) == count
    assert found[0] in fair
    assert abs(count - 2 * found[0]) == min(abs(count - 2 * first) for first in fair)


@given(gemms, tokens, sms, st.floats(0.05, 0.5))
def test_waves_never_grow_and_neither_part_is_empty_or_too_small(products, count, num_sms, least_share):
    split = SmartSplit(products, SplitRules(num_sms, least_share)).choose(count)
    if split is None:
        return
    assert split.first + split.second == count
    assert min(split.first, split.second) >= max(1, least_share * count)
    total = sum(g.waves(count, num_sms) for g in products)
    assert total == split.waves
    assert sum(g.waves(part, num_sms) for g in products for part in (split.first, split.second)) == total
    assert not split.extra_waves


@given(gemms, tokens, sms, st.floats(0.0, 1.0))
def test_extra_waves_cost_at_most_what_is_allowed_and_are_said(products, count, num_sms, allowed):
    rules = SplitRules(num_sms, max_extra_ratio=allowed)
    split = SmartSplit(products, rules).choose(count)
    strict = SmartSplit(products, SplitRules(num_sms)).choose(count)
    assert split == strict or strict is None
    if split is None:
        return
    whole = sum(g.waves(count, num_sms) * g.wave_cost for g in products)
    said = sum(
        (sum(g.waves(part, num_sms) for part in (split.first, split.second)) - g.waves(count, num_sms))
        * g.wave_cost
        for g in products
    )
    assert said / whole <= allowed + 1e-9
    assert abs(said / whole - split.extra_ratio) < 1e-9


@given(gemms, st.lists(tokens, min_size=1, max_size=8), sms)
def test_the_same_step_is_always_cut_at_the_same_token(products, counts, num_sms):
    rules = SplitRules(num_sms, max_extra_ratio=0.3)
    used = SmartSplit(products, rules)
    for count in [*counts, *counts]:
        assert used.choose(count) == SmartSplit(products, rules).choose(count)


@given(batches, st.data())
def test_tokens_keep_their_order_and_a_cut_requests_prefix_comes_first(batch, data):
    first_tokens = data.draw(st.integers(1, sum(batch) - 1))
    cut = cut_batch(batch, first_tokens)
    assert cut.first
    assert cut.second
    said = [
        (p.index, at)
        for part in (cut.first, cut.second)
        for p in part
        for at in range(p.start, p.start + p.count)
    ]
    assert said == [(index, at) for index, count in enumerate(batch) for at in range(count)]
    assert sum(p.count for p in cut.first) == first_tokens
    both = {p.index for p in cut.first} & {p.index for p in cut.second}
    assert len(both) <= 1
    assert bool(both) == cut.is_mid_request


@given(st.integers(0, 5), st.integers(1, 8))
def test_every_block_finds_what_it_depends_on_done(first_layer, num_layers):
    """Two queues: nothing is enqueued before what it waits for on the other one."""
    written: set[tuple[int, int]] = set()  # keys and values: (layer, part)
    sent: set[tuple[int, str, int]] = set()
    before: dict[int, tuple[int, str, int] | None] = dict.fromkeys(PARTS)
    for step in woven_order(first_layer, first_layer + num_layers):
        own = before[step.part]
        assert step.waits_for_own == (own is not None)
        assert own is None or own in sent
        if step.stage == "attn":
            assert all((step.layer, part) in written for part in range(step.part)), "a prefix is missing"
            written.add((step.layer, step.part))
        else:
            assert own == (step.layer, "attn", step.part)
        before[step.part] = (step.layer, step.stage, step.part)
        sent.add((step.layer, step.stage, step.part))
    assert len(sent) == num_layers * 2 * len(PARTS)


times = st.lists(
    st.builds(
        Timing,
        num_tokens=st.integers(1, 65_536),
        off_us=st.floats(1, 1e5),
        fuse_us=st.floats(1, 1e5),
        full_us=st.one_of(st.just(0.0), st.floats(1, 1e5)),
    ),
    unique_by=lambda timing: timing.num_tokens,
    max_size=10,
)


@given(times, st.floats(0.0, 0.2))
def test_no_measured_size_gets_a_way_that_lost_there(found, margin):
    rule = decide(found, margin)
    for timing in found:
        mode = rule.mode(timing.num_tokens)
        if mode == "full" and timing.full_us:  # else its step cannot be cut
            assert timing.full_us <= (1 - margin) * min(timing.off_us, timing.fuse_us)
        if mode == "fuse":
            assert timing.fuse_us <= (1 - margin) * timing.off_us
    assert decide(list(reversed(found)), margin) == rule
    assert decide([t for t in found if t.full_us], margin).full_min_tokens == rule.full_min_tokens
    whole = Measured(timings=found, tiles=[(128, 256)] * 4)
    assert unpack_measured(pack_measured("k", whole), "k") == whole
