"""Whatever the coefficients: more tokens never cost less, more cached ones never more, a batch saves a part."""

from itertools import pairwise
from unittest.mock import patch

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.costmodel.model import CostModel, StepShape, pack_prefills
from shared.wire.cost import CostCoefficients, ModelShape
from tests.support.examples import examples

rates = st.floats(0, 1e3, allow_nan=False)
shapes = st.builds(
    ModelShape,
    num_layers=st.integers(1, 8), hidden_size=st.sampled_from([64, 192, 1024]),
    intermediate_size=st.sampled_from([128, 500, 4096]), num_heads=st.integers(1, 16), num_kv_heads=st.integers(1, 8),
    head_dim=st.sampled_from([32, 64]), vocab_size=st.integers(100, 50_000), dtype_bytes=st.sampled_from([2, 4]),
)  # fmt: skip
models = st.builds(
    CostCoefficients,
    shape=shapes, tp=st.integers(1, 4), pp=st.integers(1, 3), num_processors=st.sampled_from([1, 7, 132]),
    max_batched_tokens=st.sampled_from([64, 100, 2048]), tile_tokens=st.sampled_from([1, 16, 128, 256]),
    tile_columns=st.sampled_from([1, 64, 128]), matmul_ms_per_gflop=rates, memory_ms_per_gb=rates,
    attention_ms_per_gflop=rates, attention_square_ms_per_gflop=rates, kv_read_ms_per_gb=rates,
    step_overhead_ms=rates, chunk_ms=rates, decode_request_ms=rates, token_ms=rates, request_ms=rates,
    prompt_token_ms=rates, all_reduce_ms=rates, all_reduce_ms_per_gb=rates, stage_hop_ms=rates,
    graph_tokens=st.sampled_from([0, 128, 512]), launch_ms=rates, idle_launch_ms=rates,
).map(CostModel)  # fmt: skip
tokens = st.integers(1, 3000)
chunks = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 2000)), max_size=4)
decodes = st.one_of(st.just((0, 0)), st.tuples(st.integers(1, 64), st.integers(0, 100_000)))
steps = st.builds(lambda chunks, decodes: StepShape(chunks, *decodes), chunks, decodes)
EASE = 1 + 1e-9
STAGES = CostModel(
    CostCoefficients(
        shape=ModelShape(
            num_layers=1, hidden_size=64, intermediate_size=128, num_heads=1, num_kv_heads=1, head_dim=32,
            vocab_size=100, dtype_bytes=2,
        ),
        pp=2, max_batched_tokens=64, attention_square_ms_per_gflop=1.0,
    )
)  # fmt: skip


@settings(max_examples=examples(120), deadline=None)
@given(models, tokens, tokens, st.integers(0, 2999))
def test_time_grows_with_the_prompt(model: CostModel, a: int, b: int, cached: int):
    less, more = sorted((a, b))
    cached = min(cached, less - 1)
    assert 0 <= model.prefill_ms(less, cached) <= model.prefill_ms(more, cached) * EASE


@settings(max_examples=examples(120), deadline=None)
@given(models, tokens, st.integers(0, 3000), st.integers(0, 3000))
@example(STAGES, 2049, 0, 1)  # 33 chunks, of which the last is one token, and 32 full ones
def test_time_never_grows_with_what_is_cached(model: CostModel, x: int, a: int, b: int):
    less, more = sorted((a, b))
    assert model.prefill_ms(x, more) <= model.prefill_ms(x, less) * EASE


@settings(max_examples=examples(120), deadline=None)
@given(models, steps, steps)
def test_a_step_of_two_parts_costs_no_less_than_each_and_at_most_twice_both_and_a_launch(
    model: CostModel, a: StepShape, b: StepShape
):
    both = StepShape(
        [*a.chunks, *b.chunks],
        a.num_decodes + b.num_decodes,
        a.decode_context_tokens + b.decode_context_tokens,
    )
    apart = (model.step_ms(a), model.step_ms(b))
    assert max(apart) <= model.step_ms(both) * EASE
    c = model.coefficients
    assert model.step_ms(both) <= (2 * sum(apart) + max(c.launch_ms, c.idle_launch_ms)) * EASE


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(tokens, st.integers(-5, 4000)), max_size=6), st.sampled_from([64, 100, 2048]))
def test_packing_computes_every_token_once_and_fills_the_steps(prompts: list[tuple[int, int]], size: int):
    packed = pack_prefills(prompts, size)
    expected = sum(n - min(max(0, cached), n - 1) for n, cached in prompts)
    assert sum(step.num_tokens for step in packed) == expected
    assert all(step.num_tokens == size for step in packed[:-1])
    assert all(0 < step.num_tokens <= size for step in packed)


@settings(max_examples=examples(60), deadline=None)
@given(models, st.lists(st.tuples(tokens, st.integers(0, 2999)), min_size=1, max_size=5), st.integers(1, 4))
def test_what_waits_takes_as_long_as_the_first_alone_and_longer_with_each(model, prompts, most):
    with patch("shared.costmodel.model.MOST_TOGETHER", most):
        known = [model.waiting_ms(prompts[:number]) for number in range(len(prompts) + 1)]
    assert known[:2] == [0.0, model.prefill_ms(*prompts[0])]
    assert all(one <= other * EASE for one, other in pairwise(known))


@settings(max_examples=examples(60), deadline=None)
@given(models, tokens, st.integers(0, 2999))
def test_the_closed_form_of_a_prompt_is_the_sum_of_its_steps(model: CostModel, x: int, cached: int):
    c = msgspec.structs.replace(model.coefficients, pp=1, launch_ms=0.0, idle_launch_ms=0.0)
    plain = CostModel(c)
    by_steps = plain.batch_ms([(x, cached)]) + c.request_ms + x * c.prompt_token_ms
    assert abs(plain.prefill_ms(x, cached) - by_steps) <= 1e-6 * max(1.0, by_steps)
    launched = CostModel(msgspec.structs.replace(model.coefficients, pp=1)).prefill_ms(x, cached)
    more = max(model.coefficients.launch_ms, model.coefficients.idle_launch_ms)
    assert by_steps / EASE <= launched * (1 + 1e-6) <= (by_steps + more) * (1 + 1e-5)


@settings(max_examples=examples(60), deadline=None)
@given(models, tokens, st.integers(1, 4))
def test_more_ranks_without_communication_never_cost_more(model: CostModel, x: int, ranks: int):
    from msgspec.structs import replace

    free = CostModel(
        replace(model.coefficients, all_reduce_ms=0.0, all_reduce_ms_per_gb=0.0, stage_hop_ms=0.0)
    )
    one, more = free.scaled(tp=1), free.scaled(tp=ranks)
    assert more.prefill_ms(x) <= one.prefill_ms(x) * EASE
