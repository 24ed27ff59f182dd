"""Waves, cuts, order, threshold and tiles of woven batches: the paper's figures and what is refused."""

import pytest

from shared.weave.batch_cut import Part, cut_batch
from shared.weave.role_choice import Choice, choose, in_words
from shared.weave.smart_split import SmartSplit, SplitRules
from shared.weave.threshold import (
    FILE_VERSION,
    Measured,
    Timing,
    WeaveRule,
    decide,
    pack_measured,
    unpack_measured,
)
from shared.weave.tiles import tile_of
from shared.weave.waves import Gemm, Tile, layer_gemms, split_ctas

SMS = 132
TILES = [(256, 128), (128, 128), (128, 256), (64, 128)]
LLAMA_70B = {"hidden": 8192, "intermediate": 28672, "num_heads": 64, "num_kv_heads": 8, "head_dim": 128}


def timing(num_tokens: int, off: float, fuse: float, full: float = 0.0) -> Timing:
    return Timing(num_tokens=num_tokens, off_us=off, fuse_us=fuse, full_us=full)


def test_300_ctas_on_132_multiprocessors_are_cut_into_132_and_168():
    assert split_ctas(300, SMS) == (132, 168)  # TokenWeave 3.1.1


def test_one_wave_of_ctas_has_no_cut():
    assert split_ctas(SMS, SMS) is None
    assert split_ctas(SMS + 1, SMS) == (66, 67)
    with pytest.raises(ValueError, match="multiprocessors"):
        split_ctas(10, 0)


def test_tokens_are_cut_where_the_papers_ctas_are():
    gemm = Gemm("one", columns=1, inner=1, tile=Tile(1, 1))
    split = SmartSplit([gemm], SplitRules(SMS)).choose(300)
    assert split is not None
    assert (split.first, split.second, split.waves, split.extra_waves) == (132, 168, 3, 0)


def test_products_of_a_70b_layer_over_eight_ranks():
    qkv, o, gate_up, down = layer_gemms(**LLAMA_70B, tp=8, tiles=[Tile(128, 256)])
    assert [g.columns for g in (qkv, o, gate_up, down)] == [1280, 8192, 7168, 8192]
    assert [g.inner for g in (qkv, o, gate_up, down)] == [8192, 1024, 8192, 3584]
    assert gate_up.ctas(4096) == 32 * 28
    assert gate_up.waves(4096, SMS) == 7
    with pytest.raises(ValueError, match="over 3 ranks"):
        layer_gemms(**LLAMA_70B, tp=3, tiles=[Tile(128, 256)])
    with pytest.raises(ValueError, match="2 tiles"):
        layer_gemms(**LLAMA_70B, tp=8, tiles=[Tile(128, 256)] * 2)


def test_a_large_70b_step_is_cut_without_an_extra_wave_and_a_small_one_only_if_told_so():
    gemms = layer_gemms(**LLAMA_70B, tp=8, tiles=[Tile(128, 256)])
    split = SmartSplit(gemms, SplitRules(SMS)).choose(8192)
    assert split is not None
    assert split.extra_waves == 0
    assert SmartSplit(gemms, SplitRules(SMS)).choose(4096) is None
    split = SmartSplit(gemms, SplitRules(SMS, max_extra_ratio=0.05)).choose(4096)
    assert split is not None
    assert split.extra_waves == 2
    assert split.extra_ratio < 0.05


@pytest.mark.parametrize(
    "wrong", [{"num_sms": 0}, {"num_sms": 1, "least_share": 0.6}, {"num_sms": 1, "max_extra_ratio": 2}]
)
def test_a_rule_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match=list(wrong)[-1]):
        SplitRules(**wrong)


def test_a_request_that_is_cut_has_its_prefix_in_the_first_part():
    cut = cut_batch([1, 1, 100, 30], 60)
    assert cut.first == (Part(0, 0, 1), Part(1, 0, 1), Part(2, 0, 58))
    assert cut.second == (Part(2, 58, 42), Part(3, 0, 30))
    assert cut.is_mid_request
    assert not cut_batch([5, 5], 5).is_mid_request


@pytest.mark.parametrize(("tokens", "first"), [([3, 4], 0), ([3, 4], 7), ([], 1), ([3, 0, 4], 2)])
def test_no_part_is_empty(tokens, first):
    with pytest.raises(ValueError, match=r"empty|without tokens"):
        cut_batch(tokens, first)


def test_a_way_is_taken_from_the_size_on_from_which_it_always_wins():
    times = [
        timing(512, 100, 90, 120),
        timing(1024, 200, 170, 160),  # a lucky one: the next larger one loses
        timing(2048, 400, 360, 370),
        timing(4096, 800, 700, 600),
        timing(8192, 1600, 1400, 1200),
    ]
    rule = decide(times)
    assert rule == WeaveRule(fuse_min_tokens=512, full_min_tokens=4096)
    assert [rule.mode(n) for n in (1, 512, 4095, 4096)] == ["off", "fuse", "fuse", "full"]


def test_a_way_that_wins_by_less_than_noise_or_was_not_measured_is_not_taken():
    assert decide([timing(1024, 100, 99, 98.5), timing(2048, 100, 99)]) == WeaveRule()
    assert WeaveRule().mode(1 << 20) == "off"
    with pytest.raises(ValueError, match="no times"):
        decide([timing(1024, 0, 1)])


def test_a_size_that_cannot_be_cut_is_no_loss_of_weaving():
    won = [timing(1024, 200, 170, 150), timing(4096, 800, 700, 600)]
    for uncut in (timing(512, 100, 95), timing(2048, 400, 360), timing(8192, 1600, 1500)):
        assert decide([*won, uncut]) == WeaveRule(
            fuse_min_tokens=min(1024, uncut.num_tokens), full_min_tokens=1024
        )
    assert decide([timing(512, 100, 95), timing(1024, 200, 170)]).full_min_tokens == 0, "no size is woven"


def test_kept_times_are_read_for_the_same_engine_only():
    times = [timing(1024, 100, 90, 80), timing(2048, 200, 180)]
    found = Measured(timings=times, tiles=TILES)
    data = pack_measured("abc", found)
    assert unpack_measured(data, "abc") == found
    assert unpack_measured(data, "abd") is None
    assert unpack_measured(data.replace(b'"version": %d' % FILE_VERSION, b'"version": 99'), "abc") is None
    assert unpack_measured(data[:-5], "abc") is None
    for wrong in (
        Measured(timings=[timing(1024, 0, 0)], tiles=TILES),
        Measured(timings=times, tiles=TILES[:3]),
        Measured(timings=times, tiles=[(0, 128)] * 4),
    ):
        assert unpack_measured(pack_measured("abc", wrong), "abc") is None


@pytest.mark.parametrize(
    ("name", "tokens", "columns"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_TNT", 256, 128),
        ("cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_64x3_tn_align8", 128, 256),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x64x64_warpgroupsize1x1x1", 64, 128),
    ],
)
def test_a_kernels_name_tells_its_tile(name, tokens, columns):
    assert tile_of(name) == Tile(tokens, columns)


def test_a_name_without_a_tile_tells_none():
    assert tile_of("void at::native::vectorized_elementwise_kernel<4>") is None
    assert tile_of("reduce_1x1_9999x9999_") is None


PROMPTS = [timing(512, 100, 101, 120), timing(1024, 100, 97, 96), timing(2048, 100, 97, 90)]
ANSWERS = [timing(1, 100, 101), timing(8, 100, 97), timing(32, 100, 90)]


def test_prompts_are_woven_and_answers_fused_from_where_each_wins():
    assert choose([*ANSWERS, *PROMPTS], "prefill") == Choice("full", 1024, 2048)
    assert choose([*PROMPTS, *ANSWERS], "decode") == Choice("fuse", 8)
    assert choose([*PROMPTS, *ANSWERS], "colocated") == Choice("full", 1024, 2048)
    assert choose(PROMPTS, "decode") is None
    assert choose([timing(512, 100, 97), timing(1024, 100, 90)], "prefill") == Choice("fuse", 512)


def test_where_only_weaving_wins_steps_below_its_threshold_are_not_fused():
    assert choose([timing(512, 100, 105, 104), timing(1024, 100, 99, 95)], "prefill") == Choice(
        "full", 1024, 1024
    )


def test_an_engine_of_both_roles_takes_nothing_from_its_decode_steps():
    assert choose([timing(1, 100, 103), *PROMPTS], "colocated") is None
    assert choose([timing(1, 100, 103), *PROMPTS], "prefill") is not None


@pytest.mark.parametrize("role", ["prefill", "decode", "colocated"])
def test_nothing_measured_or_nothing_won_is_vllms_own_way(role):
    assert choose([], role) is None
    assert choose([timing(n, 100, 99, 99) for n in (1, 8, 512, 2048)], role) is None
    assert "win nothing" in in_words(None)


def test_a_choice_is_said_with_its_sizes():
    assert (
        in_words(Choice("full", 512, 2048)) == "steps are fused from 512 tokens on, in two parts from 2048 on"
    )
    assert in_words(Choice("fuse", 8)) == "steps are fused from 8 tokens on"
