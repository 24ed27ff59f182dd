"""bench_pool_transfer.py: what its metrics are of which samples."""

import pytest

from loadtest.bench_pool_transfer import MIB, metrics_from_samples
from loadtest.results import check_metrics


def pool(pages: int, page_mib: int, us: list[float]) -> dict:
    return {
        "section": "pool", "set": f"{pages} x {page_mib} MiB", "case": "MemPool.transfer", "pages": pages,
        "page_bytes": page_mib * MIB, "bytes": pages * page_mib * MIB, "wall_us": us,
    }  # fmt: skip


def attach(pool_gib: float, attach_s: float) -> dict:
    fds = {"worker": 2, "worker_most": 130, "mempool": 15_360, "keeper": 15_361}
    return {
        "section": "attach", "pool_gib": pool_gib, "made_s": 1.0, "attach_s": attach_s, "first_contact_s": 0.0,
        "cold_us": 1_000.0, "bytes": 64 * MIB, "fds": fds,
    }  # fmt: skip


def test_the_worst_set_of_at_least_64_mib_counts_and_small_ones_do_not():
    found = metrics_from_samples(
        [pool(1, 2, [100.0]), pool(32, 2, [210.0, 200.0, 190.0]), pool(64, 8, [1_500.0])]
    )
    assert found["pool_transfer_gb_per_s"] == pytest.approx(64 * MIB / 200 / 1e3)
    assert found["pool_transfer_best_gb_per_s"] == pytest.approx(512 * MIB / 1_500 / 1e3)
    assert check_metrics(found) == []


def test_both_ways_and_the_overhead_have_figures_of_their_own():
    mediated = {**pool(8, 8, [900.0]), "case": "mediated"}
    tiny = [
        {**pool(n, 8, [us]), "page_bytes": 4096, "bytes": n * 4096} for n, us in ((1, 50.0), (101, 150.0))
    ]
    bare = [
        {**row, "section": "overhead", "wall_us": [us]} for row, us in zip(tiny, (30.0, 50.0), strict=True)
    ]
    found = metrics_from_samples([pool(8, 8, [200.0]), mediated, *tiny, *bare])
    assert found["pool_transfer_8x8mib_us"] == 200.0
    assert found["pool_transfer_gb_per_s"] == pytest.approx(64 * MIB / 200 / 1e3)
    assert found["mediated_8x8mib_us"] == 900.0
    assert (found["pool_transfer_fixed_us"], found["pool_transfer_page_us"]) == (50.0, 1.0)
    assert (found["direct_overhead_fixed_us"], found["direct_overhead_page_us"]) == (30.0, 0.2)
    assert check_metrics(found) == []


def test_of_several_pools_the_largest_one_says_what_attaching_takes():
    found = metrics_from_samples([attach(120.0, 1.5), attach(4.0, 0.1)])
    assert (found["attach_s"], found["attach_pool_gib"]) == (1.5, 120.0)
    assert found["attach_mempool_fds_count"] == 15_360
    assert check_metrics(found) == []


def test_peers_of_the_same_run_give_ratios_and_stale_sources_are_counted():
    nixl = {"section": "nixl", "set": "64 x 2 MiB", "case": "read", "bytes": 128 * MIB, "wall_us": [900.0]}
    stale = {"section": "stale", "asked": 32, "refused": 32}
    found = metrics_from_samples([pool(64, 2, [450.0]), nixl, stale, stale])
    assert found["pool_over_nixl_ratio"] == pytest.approx(2.0)
    assert found["stale_refused_count"] == found["stale_asked_count"] == 64
