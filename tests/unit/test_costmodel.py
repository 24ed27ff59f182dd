"""The cost model computes what its coefficients say; the fit finds coefficients again."""

import random
from typing import Any

import msgspec
import pytest

from shared.costmodel.fit import fit, fit_arch, relative_errors
from shared.costmodel.model import CostModel, StepShape, pack_prefills
from shared.costmodel.observation import Observation, Point, ProfileLimits, grid, predict
from shared.costmodel.online import OnlineCorrection, PrefillLedger, weighted_median
from shared.costmodel.shapes import shape_of
from shared.costmodel.transfer import LinkRates, should_fetch
from shared.errors import ClusterError, SettingsError
from shared.wire.cost import CostCoefficients, LinkRate, ModelShape

SHAPE = ModelShape(
    num_layers=6, hidden_size=192, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=64,
    vocab_size=4096, dtype_bytes=4,
)  # fmt: skip
LLAMA_8B = ModelShape(
    num_layers=32, hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8, head_dim=128,
    vocab_size=128256,
)  # fmt: skip
CPU = CostCoefficients(
    shape=SHAPE, device="cpu", matmul_ms_per_gflop=25.0, memory_ms_per_gb=100.0, attention_ms_per_gflop=40.0,
    kv_read_ms_per_gb=200.0, step_overhead_ms=6.0, decode_request_ms=0.1, request_ms=2.0, prompt_token_ms=0.002,
)  # fmt: skip
LIMITS = ProfileLimits(
    max_model_len=4096,
    max_batched_tokens=2048,
    max_running=64,
    kv_tokens=16384,
    block_tokens=32,
    budget_ms=1e9,
)


GPU_FRAME = CostCoefficients(shape=LLAMA_8B, device="gpu", num_processors=132, max_batched_tokens=8192)
GPU = msgspec.structs.replace(
    GPU_FRAME, matmul_ms_per_gflop=0.0012, memory_ms_per_gb=0.28, attention_ms_per_gflop=0.0018,
    kv_read_ms_per_gb=0.33, step_overhead_ms=0.3, request_ms=4.0,
)  # fmt: skip
GPU_LIMITS = ProfileLimits(32768, 8192, 256, 400_000, 64, 1e9)


def seen_on(model: CostModel, noise: float = 0.0, points: list[Point] | None = None) -> list[Observation]:
    rng, out = random.Random(5), []

    def note(**what: Any) -> None:
        out.append(_with_ms(Observation(ms=1.0, **what), model, rng, noise))

    for point in points or grid(LIMITS):
        if point.behind:
            note(kind="batch", prompts=point.prompts)
        elif len(point.prompts) == 1:
            note(kind="prefill", prompts=point.prompts)
        if point.output_tokens > 2:
            context = sum(n + 4 for n, _ in point.prompts)
            note(kind="decode", num_decodes=len(point.prompts), context_tokens=context)
    return out


def _with_ms(one: Observation, model: CostModel, rng: random.Random, noise: float) -> Observation:
    ms = predict(model, one) * (1 + rng.uniform(-noise, noise))
    return Observation(one.kind, ms, one.prompts, one.num_decodes, one.context_tokens)


def test_waves_count_whole_tiles_over_all_processors():
    one_wave = CostCoefficients(
        shape=LLAMA_8B, num_processors=132, tile_tokens=128, tile_columns=128, matmul_ms_per_gflop=1.0
    )
    model = CostModel(one_wave)
    assert model.step_ms(StepShape([(65, 0)])) == model.step_ms(StepShape([(128, 0)]))
    assert model.step_ms(StepShape([(129, 0)])) > model.step_ms(StepShape([(128, 0)]))


def test_a_short_step_costs_the_reading_of_the_weights():
    model = CostModel(CostCoefficients(shape=LLAMA_8B, matmul_ms_per_gflop=1 / 600, memory_ms_per_gb=1 / 4))
    weights_gb = 15.0  # 8 billion values of two bytes, less the embeddings
    assert model.decode_step_ms(1, 0) == pytest.approx(weights_gb / 4, rel=0.05)
    assert model.decode_step_ms(8, 0) < 1.1 * model.decode_step_ms(1, 0)


def test_chunks_of_a_prompt_add_up_to_its_steps():
    model = CostModel(CPU)
    steps = pack_prefills([(5000, 128)], CPU.max_batched_tokens)
    assert [sum(new for new, _ in step.chunks) for step in steps] == [2048, 2048, 776]
    total = sum(model.step_ms(step) for step in steps)
    assert model.prefill_ms(5000, 128) == pytest.approx(total + 2.0 + 5000 * 0.002)


def test_prompts_that_wait_are_packed_into_full_steps():
    steps = pack_prefills([(1500, 0), (1500, 1000), (1500, 1500)], 2048)
    assert [list(step.chunks) for step in steps] == [[(1500, 0), (500, 1000), (1, 1499)]]
    assert [step.num_tokens for step in pack_prefills([(3000, 0), (100, 0)], 2048)] == [2048, 1052]


def test_tensor_parallelism_divides_operators_and_not_the_constant_share():
    model = CostModel(CPU)
    half = model.scaled(tp=2)
    constant = CPU.step_overhead_ms + CPU.request_ms + CPU.prompt_token_ms * 1000
    whole, divided = model.prefill_ms(1000) - constant, half.prefill_ms(1000) - constant
    assert 0.5 < divided / whole < 0.55
    slow_link = CostModel(msgspec.structs.replace(CPU, all_reduce_ms=0.5, all_reduce_ms_per_gb=100.0))
    assert slow_link.prefill_ms(1000) == model.prefill_ms(1000)
    more = slow_link.scaled(tp=2).prefill_ms(1000) - half.prefill_ms(1000)
    assert more == pytest.approx(12 * (0.5 + 100.0 * 1000 * 192 * 4 / 1e9))


def test_pipeline_stages_work_on_different_chunks_at_once():
    work = CostModel(msgspec.structs.replace(CPU, request_ms=0.0, prompt_token_ms=0.0, step_overhead_ms=0.0))
    assert work.scaled(pp=2).prefill_ms(1000) == pytest.approx(work.prefill_ms(1000))
    # of four chunks, each dearer than the one before: the first stage's half of all, then the second's of the last one
    whole_ms, last_ms = work.prefill_ms(8192), work.prefill_ms(8192, 8192 - 2048)
    assert whole_ms / 4 < last_ms < whole_ms
    assert work.scaled(pp=2).prefill_ms(8192) == pytest.approx(0.5 * (whole_ms + last_ms))


@pytest.mark.parametrize("pp", [2, 4])
def test_prompts_that_wait_for_pipeline_stages_overlap_as_the_chunks_of_one_do(pp: int):
    """16 tokens behind a long prompt doubled what it was said to wait: their steps were added stage by stage."""
    model = CostModel(msgspec.structs.replace(GPU, pp=pp))
    alone_ms = model.waiting_ms([(32_768, 0)])
    assert model.waiting_ms([(32_768, 0), (16, 0)]) < 1.1 * alone_ms
    assert alone_ms < model.waiting_ms([(32_768, 0)] * 2) < 2 * alone_ms
    assert model.batch_ms([(500, 0)] * 4) == model.step_ms(StepShape([(500, 0)] * 4)), "a step alone"


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_fit_predicts_what_it_has_not_seen(noise: float):
    truth = CostModel(CPU)
    found = CostModel(fit(CostCoefficients(shape=SHAPE, device="cpu"), seen_on(truth, noise)))
    off_grid = [Point(((n, c),)) for n, c in ((100, 0), (777, 0), (1500, 640), (3000, 2560), (3900, 0))]
    errors = relative_errors(found, seen_on(truth, 0.0, off_grid))
    assert max(errors) < (0.02 if noise == 0 else 0.06), errors
    decode = [found.decode_step_ms(n, n * 900) / truth.decode_step_ms(n, n * 900) for n in (2, 10, 40)]
    assert decode == pytest.approx([1, 1, 1], abs=0.02 if noise == 0 else 0.08)


def test_one_wild_sample_does_not_spoil_the_fit():
    truth = CostModel(CPU)
    seen = seen_on(truth, 0.02)
    seen[4] = Observation(seen[4].kind, seen[4].ms * 6, seen[4].prompts)
    found = CostModel(fit(CostCoefficients(shape=SHAPE, device="cpu"), seen))
    assert found.prefill_ms(1500) == pytest.approx(truth.prefill_ms(1500), rel=0.06)


@pytest.mark.slow
def test_the_fit_sees_from_which_size_on_steps_wait_for_their_launches():
    true = msgspec.structs.replace(GPU, graph_tokens=256, launch_ms=14.0, idle_launch_ms=0.0)
    seen = seen_on(CostModel(true), 0.03, grid(GPU_LIMITS))
    for known in (None, 256):
        found = fit(GPU_FRAME, seen, graph_tokens=known)
        assert found.graph_tokens == 256
        assert found.launch_ms == pytest.approx(14.0, rel=0.15)
        for tokens in (100, 200, 300, 700, 1500, 20_000):
            assert CostModel(found).prefill_ms(tokens) == pytest.approx(
                CostModel(true).prefill_ms(tokens), rel=0.1
            )
    assert fit(msgspec.structs.replace(GPU_FRAME, num_processors=1), seen).launch_ms == 0.0


def test_an_idle_engine_waits_for_its_launches_and_a_busy_one_for_what_the_step_before_does_not_hide():
    plain = CostModel(CPU)
    model = CostModel(msgspec.structs.replace(CPU, graph_tokens=128, launch_ms=400.0, idle_launch_ms=90.0))
    assert plain._dense_sum_ms(32, 1) < 90.0, "the work of this step is shorter than its launches"
    for prompt, launch_ms in ((32, 0), 90.0), ((900, 868), 90.0), ((200, 0), 400.0), ((900, 700), 400.0):
        work_ms = plain._dense_sum_ms(prompt[0] - prompt[1], 1)
        assert model.prefill_ms(*prompt) == pytest.approx(plain.prefill_ms(*prompt) + launch_ms - work_ms)
    late = model.prefill_ms(2048 + 32) - model.prefill_ms(2048)
    assert late == pytest.approx(plain.prefill_ms(2048 + 32) - plain.prefill_ms(2048)), "it is behind a chunk"
    for step in (StepShape([(32, 0)]), StepShape([(16, 0)], 16, 100), StepShape([], 128, 100)):
        assert model.step_ms(step) == plain.step_ms(step), "a graph holds it"
    before_ms, step = plain._dense_sum_ms(1, 1), StepShape([(100, 0)], 60, 100)
    more_ms = model.step_ms(step) - plain.step_ms(step)
    assert more_ms == pytest.approx(400.0 - before_ms - plain._dense_sum_ms(160, 61))


def test_every_step_of_an_engine_without_graphs_waits_for_its_launches():
    model = CostModel(msgspec.structs.replace(CPU, launch_ms=400.0))
    assert model.decode_step_ms(1, 100) >= 400.0
    assert model.step_ms(StepShape([(16, 0)], 16, 100)) >= 400.0
    true = msgspec.structs.replace(GPU, graph_tokens=0, launch_ms=14.0, idle_launch_ms=0.0)
    found = fit(GPU_FRAME, seen_on(CostModel(true), 0.03, grid(GPU_LIMITS)), graph_tokens=0)
    assert found.graph_tokens == 0
    assert found.launch_ms == pytest.approx(14.0, rel=0.1)
    for tokens in (40, 300, 1500, 20_000):
        assert CostModel(found).prefill_ms(tokens) == pytest.approx(
            CostModel(true).prefill_ms(tokens), rel=0.05
        )


@pytest.mark.slow
def test_the_fit_tells_an_idle_engines_launches_from_what_a_request_costs():
    true = msgspec.structs.replace(GPU, graph_tokens=128, launch_ms=19.0, idle_launch_ms=9.0)
    found = fit(GPU_FRAME, seen_on(CostModel(true), 0.03, grid(GPU_LIMITS)))
    assert found.graph_tokens == 128
    assert found.request_ms == pytest.approx(4.0, rel=0.15)
    assert CostModel(found).prefill_ms(90) == pytest.approx(13.3, rel=0.03)
    batch = [(500, 0)] * 20
    assert CostModel(found).batch_ms(batch) == pytest.approx(CostModel(true).batch_ms(batch), rel=0.05)


def test_a_batch_that_took_less_than_a_decode_step_is_no_measurement():
    truth = CostModel(CPU)
    seen = seen_on(truth, 0.02)
    decode_ms = min(one.ms for one in seen if one.kind == "decode")
    wrong = [Observation("batch", decode_ms / 9, ((400, 0), (300, 0)))] * 3
    frame = CostCoefficients(shape=SHAPE, device="cpu")
    assert fit(frame, [*seen, *wrong]) == fit(frame, seen)


def test_the_fit_keeps_the_frame_and_says_its_errors():
    frame = CostCoefficients(shape=SHAPE, device="cpu", max_batched_tokens=512, all_reduce_ms=0.3)
    found = fit(frame, seen_on(CostModel(msgspec.structs.replace(CPU, max_batched_tokens=512)), 0.05))
    assert (found.shape, found.max_batched_tokens, found.all_reduce_ms) == (SHAPE, 512, 0.3)
    assert 0 < found.median_error_ratio <= found.p90_error_ratio < 0.1
    assert found.num_samples == len(seen_on(CostModel(CPU)))


def test_too_few_measurements_are_refused():
    with pytest.raises(ClusterError, match="needs 4"):
        fit(CostCoefficients(shape=SHAPE), [Observation("prefill", 3.0, ((16, 0),))])


def test_the_arch_level_model_is_halved_as_a_whole():
    truth = CostModel(CPU)
    arch = fit_arch(seen_on(truth))
    assert arch.prefill_ms(1000) == pytest.approx(truth.prefill_ms(1000), rel=0.15)
    assert arch.scaled(tp=2).prefill_ms(1000) == pytest.approx(arch.prefill_ms(1000) / 2)


def test_a_correction_is_the_median_of_clipped_ratios():
    correction = OnlineCorrection()
    for measured in (20.0, 30.0, 2000.0, 21.0):
        correction.observe(10.0, measured)
    assert correction.factor == 1.0  # not enough seen
    for measured in (20.0, 19.0, 21.0, 20.0, 20.0):
        correction.observe(10.0, measured)
    correction.observe(float("nan"), 1.0)
    correction.observe(0.0, 1.0)
    assert correction.factor == pytest.approx(2.0)
    for _ in range(40):
        correction.observe(10.0, 1e6)
    assert correction.factor == pytest.approx(4.0)
    assert correction.num_observed == 49


def test_a_correction_that_nothing_confirms_goes_and_one_that_is_confirmed_stays():
    correction = OnlineCorrection()
    for now_ms in range(0, 4_000, 100):
        correction.observe(10.0, 40.0, now_ms)
    correction.age(60_000)
    assert correction.factor == pytest.approx(4.0)
    correction.age(200_000)
    assert correction.factor == pytest.approx(1.0)
    correction.age(1e12)
    assert correction.factor == pytest.approx(1.0)
    for now_ms in range(300_000, 900_000, 10_000):
        correction.observe(10.0, 40.0, now_ms)
    assert correction.factor == pytest.approx(4.0)


def test_a_weighted_median_has_half_of_the_weight_on_either_side():
    assert weighted_median([(3.0, 1.0)]) == 3.0
    assert weighted_median([(1.0, 1.0), (9.0, 1.0)]) == 5.0
    assert weighted_median([(9.0, 0.1), (1.0, 0.1), (2.0, 0.1)]) == 2.0
    assert weighted_median([(1.0, 1.0), (2.0, 1.0), (3.0, 5.0)]) == 3.0
    assert weighted_median([(5.0, 1.0), (2.0, 1.0), (1.0, 2.0)]) == 1.5


def test_a_correction_is_of_the_work_and_not_of_the_number_of_prompts():
    """Prompts whose prefix was fetched are short, and constant costs are most of them; they were half of the ratios."""
    correction = OnlineCorrection()
    for _ in range(8):
        for predicted, measured in ((15.0, 22.0), (17.0, 25.0), (20.0, 28.0), (100.0, 110.0), (400.0, 440.0)):
            correction.observe(predicted, measured)
    assert correction.factor == pytest.approx(1.1)


def test_no_single_prompt_decides_a_correction():
    correction = OnlineCorrection()
    for _ in range(30):
        correction.observe(10.0, 10.0)
    correction.observe(5_000.0, 20_000.0)
    assert correction.factor == pytest.approx(1.0)


def test_a_ledger_measures_busy_spans_and_counts_what_is_queued():
    model = CostModel(CPU)
    ledger = PrefillLedger(model)
    ledger.begin("a", 1000, 0, 0.0)
    ledger.begin("b", 500, 480, 1.0)
    assert ledger.queued_ms == pytest.approx(model.waiting_ms([(1000, 0), (500, 480)]))
    assert ledger.first_output("a", 0, 90.0) is None
    pair = ledger.first_output("b", 0, 130.0)
    assert pair == pytest.approx((model.waiting_ms([(1000, 0), (500, 0)]), 130.0))
    assert ledger.queued_ms == 0.0
    ledger.begin("c", 100, 0, 200.0)
    ledger.begin("d", 100, 0, 200.0)
    ledger.abandon("c", 210.0)
    assert ledger.first_output("d", 0, 220.0) is None
    assert ledger.first_output("unknown", 0, 220.0) is None


def test_short_prompts_that_wait_together_share_what_a_step_takes_of_itself():
    """Follow-ups of documents on an H200: 60 new tokens take 13 ms alone, most of it launching (by the cost model)."""
    model = CostModel(msgspec.structs.replace(CPU, launch_ms=10.0, idle_launch_ms=10.0, step_overhead_ms=5.0))
    alone_ms = model.prefill_ms(300, 290)
    assert model.waiting_ms([(300, 290)] * 4) < 2 * alone_ms
    assert model.waiting_ms([(300, 0)] * 4) > model.waiting_ms([(300, 0)] * 3) > 2 * alone_ms
    assert model.waiting_ms([]) == 0.0


@pytest.mark.parametrize("most", [1, 8, 40])
@pytest.mark.parametrize("lengths", [(64, 128, 256, 512), (512, 2048, 6000)])
def test_a_ledger_that_is_fed_the_models_own_times_learns_nothing(lengths: tuple[int, ...], most: int):
    """Each prompt was counted as if it had a launch and a step of its own: bursts of short ones taught 0.25 to 0.35."""
    model = CostModel(msgspec.structs.replace(GPU, graph_tokens=256, launch_ms=14.0, idle_launch_ms=9.0))
    ledger, correction, rng, now_ms = PrefillLedger(model), OnlineCorrection(), random.Random(3), 0.0
    for _ in range(60):
        prompts = [(rng.choice(lengths), 0) for _ in range(rng.randint(min(3, most), most))]
        for number, (tokens, cached) in enumerate(prompts):
            ledger.begin(f"{number}", tokens, cached, now_ms)
        left, number = [tokens for tokens, _ in prompts], 0
        now_ms += model.waiting_ms(prompts) - model.batch_ms(prompts)
        for step in pack_prefills(prompts, GPU.max_batched_tokens):
            now_ms += model.step_ms(step)
            for new, _ in step.chunks:
                left[number] -= new
                if not left[number]:
                    pair = ledger.first_output(f"{number}", 0, now_ms)
                    number += 1
                    if pair is not None:
                        correction.observe(*pair)
        now_ms += 5.0
    assert correction.num_observed >= 60
    assert correction.factor == pytest.approx(1.0, abs=0.03)


def test_what_spoils_one_measurement_of_a_busy_instance_spoils_no_other():
    model, pairs = CostModel(CPU), []
    ledger = PrefillLedger(model)
    for number in range(30):
        ledger.begin(f"{number}", 1_000, 0, 0.0)
    for number in range(30):
        pairs.append(ledger.first_output(f"{number}", 0, 10.0 * number))
        if number == 7:  # the last of the first measurement decodes on
            ledger.spoil()
    batch_ms = model.batch_ms([(1_000, 0)] * 8)
    assert pairs[8] == pytest.approx((model.waiting_ms([(1_000, 0)] * 8), 70.0))
    assert pairs[16] is None
    assert pairs[24] == pytest.approx((batch_ms, 80.0))


def test_a_handed_over_prompt_teaches_nothing_of_prompts():
    model = CostModel(CPU)
    ledger = PrefillLedger(model)
    ledger.begin("handed", 1_025, 1_024, now_ms=0.0)
    assert ledger.first_output("handed", 1_024, 5.0) is None
    ledger.begin("beside a prompt", 1_025, 1_024, now_ms=10.0)
    ledger.begin("a", 1_000, 0, now_ms=10.0)
    ledger.first_output("beside a prompt", 1_024, 15.0)
    assert ledger.first_output("a", 0, 60.0) is None
    ledger.begin("b", 1_000, 998, now_ms=100.0)
    assert ledger.first_output("b", 998, 120.0) == (model.prefill_ms(1_000, 998), 20.0)


def test_eq_2_fetches_where_moving_is_cheaper_than_computing():
    links = LinkRates({"peer": LinkRate(gb_per_s=10.0, latency_ms=0.5)})
    assert links.transfer_ms("peer", 10_000_000) == pytest.approx(1.5)
    assert links.transfer_ms("peer", 0) == 0.0
    assert links.transfer_ms("nonsense", 1_000_000) == pytest.approx(3.0)
    assert should_fetch(1.5, 10.0, 8.0)
    assert not should_fetch(2.5, 10.0, 8.0)


def test_a_shape_is_read_from_the_models_configuration():
    config = {
        "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100,
        "intermediate_size": 128, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    }  # fmt: skip
    shape = shape_of(config, "float32")
    assert (shape.intermediate_size, shape.num_kv_heads, shape.head_dim, shape.dtype_bytes) == (64, 4, 16, 4)
    with pytest.raises(SettingsError, match="vocab_size"):
        shape_of({"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}, "float32")
