"""The `cost` policy over random clusters: whom it never picks, what attracts and what repels it."""

from hypothesis import assume, given
from hypothesis import strategies as st

from services.scheduler.core.limits import PlacementLimits
from services.scheduler.core.load import InstanceLoad
from shared.costmodel.model import CostModel
from shared.wire.cost import CostCoefficients
from shared.wire.placement import Placed, Rejected
from tests.support.control_plane import place, report
from tests.support.cost_view import PREFILL_MS, SHAPE, View

TOKENS = 1_000
queues = st.lists(st.integers(0, 400), min_size=2, max_size=6)
hits = st.lists(st.integers(0, 31), min_size=6, max_size=6)


def view_of(waits, **cost):
    """Prefill instances with these queues, each on a host of its own that reaches nobody, and a decode instance."""
    view = View(disaggregation="always", **cost)
    for number, queue_ms in enumerate(waits):
        view.add(f"p{number}", host=number + 1, queued_prefill_ms=float(queue_ms))
    return view.add("d0", "decode", host=99)


def prefill_of(view, blocks, name="r"):
    held = {f"p{number}": 32 * count for number, count in enumerate(blocks)}
    answer = view.placer.place(place(name, tokens=TOKENS, hits=held), now_ms=view.now_ms)
    assert isinstance(answer, Placed)
    return answer


def total_ms(waits, blocks, number):
    return waits[number] + (TOKENS - 32 * blocks[number]) * PREFILL_MS


@given(queues, hits)
def test_without_brakes_it_takes_what_eq_1_says(waits, blocks):
    view = view_of(waits, hysteresis_ms=0.0, hysteresis_share=0.0)
    chosen = int(prefill_of(view, blocks[: len(waits)]).prefill.instance[1:])
    best = min(total_ms(waits, blocks, number) for number in range(len(waits)))
    assert abs(total_ms(waits, blocks, chosen) - best) < 1e-6


@given(st.integers(0, 400), st.integers(2, 6), hits)
def test_with_equal_loads_the_longest_prefix_wins(queue_ms, count, blocks):
    placed = prefill_of(view_of([queue_ms] * count), blocks[:count])
    assert placed.prefill_hit_tokens == 32 * max(blocks[:count])


@given(queues, hits, st.integers(1, 500))
def test_a_longer_queue_never_attracts(waits, blocks, more_ms):
    blocks = blocks[: len(waits)]
    chosen = int(prefill_of(view_of(waits), blocks).prefill.instance[1:])
    for other in range(len(waits)):
        if other == chosen:
            continue
        longer = [w + more_ms * (number == other) for number, w in enumerate(waits)]
        again = int(prefill_of(view_of(longer), blocks).prefill.instance[1:])
        assert again != other, "its queue grew, and now it is chosen"


@given(queues, hits)
def test_the_brake_costs_no_more_than_its_margin(waits, blocks):
    view = view_of(waits, hysteresis_ms=20.0, hysteresis_share=0.0)
    chosen = int(prefill_of(view, blocks[: len(waits)]).prefill.instance[1:])
    best = min(total_ms(waits, blocks, number) for number in range(len(waits)))
    assert total_ms(waits, blocks, chosen) <= best + 20.0 + 1e-6


@given(queues, hits, st.integers(0, 400))
def test_nobody_in_panic_is_chosen_while_another_is_not(waits, blocks, panic_ms):
    assume(min(waits) <= panic_ms)
    view = view_of(waits, panic_queue_ms=float(panic_ms) + 0.5)
    chosen = int(prefill_of(view, blocks[: len(waits)]).prefill.instance[1:])
    assert waits[chosen] <= panic_ms


rates = st.floats(0.0, 1.0)


@given(
    st.lists(st.integers(-10, 20_000), min_size=2, max_size=6), st.integers(1, 2_048),
    st.tuples(rates, rates, rates, rates),
)  # fmt: skip
def test_more_unfinished_tokens_never_mean_a_shorter_queue(sizes, step, costs):
    """Of an instance that borrows a model."""
    token_ms, request_ms, chunk_ms, matmul_ms = costs
    load = InstanceLoad(8, step)
    load.lend(
        CostModel(
            CostCoefficients(
                shape=SHAPE, token_ms=token_ms, request_ms=request_ms, chunk_ms=chunk_ms,
                matmul_ms_per_gflop=1e6 * matmul_ms, tile_tokens=16, max_batched_tokens=step,
            )
        )
    )  # fmt: skip
    before_ms = 0.0
    for seq, tokens in enumerate(sorted(sizes)):
        load.on_report(report("p0", seq=seq, unfinished_prefill_tokens=tokens), now_ms=0)
        queue_ms = load.view(now_ms=0).queue_ms
        assert queue_ms >= before_ms - 1e-9 * before_ms
        assert queue_ms >= token_ms * tokens * (1 - 1e-9)
        before_ms = queue_ms


@given(st.lists(st.integers(0, 12), min_size=3, max_size=3), st.sets(st.sampled_from(["p0", "p1", "d0"])))
def test_full_and_excluded_ones_are_left_out_alone_and_in_pairs(running, exclude):
    """Each instance takes 8 requests in a step and is full at 8."""
    view = View(limits=PlacementLimits(overload_factor=1.0))
    for name, role, count in zip(("p0", "p1", "d0"), ("prefill", "prefill", "decode"), running, strict=True):
        view.add(name, role, num_running=count)
    answer = view.placer.place(place(tokens=TOKENS, exclude=sorted(exclude)), now_ms=0)
    free = {name for name, count in zip(("p0", "p1", "d0"), running, strict=True) if count < 8}
    wanted = {"p0", "p1", "d0"} - exclude or {"p0", "p1", "d0"}
    if isinstance(answer, Rejected):
        assert not free & wanted
        return
    used = {answer.decode.instance, *([answer.prefill.instance] if answer.prefill else [])}
    assert used <= free & wanted


@given(st.integers(1, 40), st.integers(1, 30))
def test_a_burst_is_spread_by_predicted_work(num_requests, count):
    view = View(limits=PlacementLimits(overload_factor=1e9))
    for number in range(count):
        view.add(f"c{number}", "colocated", host=number + 1)
    placed = [
        view.placer.place(place(f"r{i}", tokens=TOKENS), now_ms=0).decode.instance
        for i in range(num_requests)
    ]
    per_instance = [placed.count(f"c{number}") for number in range(count)]
    assert max(per_instance) - min(per_instance) <= 1
