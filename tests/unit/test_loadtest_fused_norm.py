"""Figures of the fused all-reduce come from samples: gains over the best rival, shares of the link's limit."""

import pytest

from loadtest.bench_fused_norm import SHARE_BYTES, limit_us, metrics_from_samples

MB8 = 8 << 20


def sample(world: int, who: str, num_bytes: int, us: float, sms: int = 0) -> dict:
    return {
        "world": world,
        "who": who,
        "bytes": num_bytes,
        "tokens": num_bytes // 16384,
        "sms": sms,
        "us": [us, us, 9 * us],
    }


def test_gains_are_over_the_best_rival_and_the_least_of_all_sizes_and_groups():
    rows = []
    for world, size, ours in ((2, 1 << 20, 20.0), (4, MB8, 40.0), (8, MB8, 50.0), (8, 2 * MB8, 60.0)):
        rows += [
            sample(world, "ours", size, ours),
            sample(world, "nccl", size, 90.0),
            sample(world, "torch two-shot", size, 66.0),
        ]
    found = metrics_from_samples(rows)
    assert found["min_gain_8mb_up_ratio"] == pytest.approx(66 / 60)
    assert found["min_gain_any_ratio"] == pytest.approx(66 / 60)
    assert found["min_gain_8mb_up_tp4_ratio"] == pytest.approx(66 / 40)
    assert "min_gain_8mb_up_tp2_ratio" not in found
    slow = metrics_from_samples([*rows, sample(2, "ours", 4096, 10.0), sample(2, "nccl", 4096, 5.0)])
    assert slow["min_gain_any_ratio"] == pytest.approx(0.5)
    assert slow["min_gain_8mb_up_ratio"] == pytest.approx(66 / 60), "groups of two have no bar"


def test_shares_are_of_the_fastest_way_and_of_the_worse_group():
    rows = [
        sample(4, "two_shot/plain", SHARE_BYTES, 400.0), sample(4, "two_shot/bulk", SHARE_BYTES, 320.0),
        sample(4, "two_shot/bulk", SHARE_BYTES, 380.0, sms=16), sample(8, "two_shot/bulk", SHARE_BYTES, 500.0),
    ]  # fmt: skip
    found = metrics_from_samples(rows)
    assert found["limit_share_64mb_tp4_ratio"] == pytest.approx(limit_us(4, SHARE_BYTES) / 320)
    assert found["limit_share_64mb_ratio"] == pytest.approx(limit_us(8, SHARE_BYTES) / 500)
    assert found["speed_at_16_sms_ratio"] == pytest.approx(limit_us(4, SHARE_BYTES) / 380)
    assert metrics_from_samples([]) == {}
