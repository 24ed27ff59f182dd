"""A burst's result tells where blocks went and why something was computed again."""

from loadtest.burst_counts import totals

ENGINE = {
    "num_preempted": 3, "num_recomputed_tokens": 5, "kv_used_share": 0.5,
    "fair_counts": {"dropped_for_pages": 2, "waits_for_blocks": 7},
}  # fmt: skip
POOL = {
    "counters": {
        "swap_blocks_out_peer": 4, "peer_blocks_out": 6, "dram_blocks_out": 9, "acquires": 11, "pages_evicted": 1,
    },
    "copies": {
        "paths": {"imported": {"copies": 2, "bytes": 8, "last_gb_per_s": 1.0}}, "failures": {"transfer.timeout": 1},
        "pinned_bytes": 64,
    },
    "spaces": [{"devices": ["cpu:dram"]}, {"devices": ["cuda:1"]}, {"devices": ["cpu:dram"]}],
}  # fmt: skip


def test_counts_are_of_slices_swaps_overflow_and_paths():
    found = totals(ENGINE, POOL)
    assert (found["num_preempted"], found["num_recomputed_tokens"], found["swap_lost_blocks"]) == (3, 5, 0)
    assert (found["fair_dropped_for_pages"], found["fair_waits_for_blocks"]) == (2, 7)
    assert (found["swap_blocks_out_peer"], found["peer_blocks_out"], found["dram_blocks_out"]) == (4, 6, 9)
    assert "acquires" not in found
    assert (found["path_imported_copies"], found["path_imported_bytes"]) == (2, 8)
    assert (found["copy_failed_transfer.timeout"], found["pinned_bytes"], found["dram_spaces"]) == (1, 64, 2)


def test_an_engine_in_order_of_arrival_and_a_mempool_that_copies_nothing_have_counts_too():
    assert totals({}, {"counters": {}, "copies": {}})["num_preempted"] == 0
