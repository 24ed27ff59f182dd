"""Fair slices in simulated engines: turns by production's core, blocks of parked requests in swap space."""

import argparse
from statistics import fmean

import pytest

from loadtest.results import quantile
from loadtest.simulator.__main__ import main
from loadtest.simulator.cluster import simulate
from loadtest.simulator.links import Rate, gb_per_s
from loadtest.simulator.local import Local, add_local_options, local_of, rules_for
from loadtest.simulator.prices import LinearPrices
from loadtest.simulator.spec import ClusterSpec, roles_of
from loadtest.simulator.swaps import SwapSpace
from loadtest.simulator.task import EngineLimits
from shared.errors import SettingsError
from shared.fair.rules import FairRules
from tests.support.simulated import mooncake_lines, plain

PRICES = LinearPrices(step_base_ms=8.0, token_ms=0.02, context_ms=1e-4, kv_bytes_per_token=1 << 17)
RULES = ["patience_slices=64", "spread_ms=100", "chunk_tokens=128"]
TURNS = Local("cfs", rules_for("bursts", RULES), counted_gb_per_s=1e6)
ARRIVAL = Local()


def burst(count=40, every_ms=25.0):
    """Requests in a second, in memory for about ten of them."""
    return [
        plain(n, every_ms * n, 400 + 37 * n % 300, 40 + 53 * n % 120, blocks=n % 3 == 0) for n in range(count)
    ]


def run(local, requests=None, *, roles=("colocated",), memory_tokens=6_400, slots=64):
    limits = EngineLimits(slots, 4_096)
    spec = ClusterSpec(roles, block_tokens=64, memory_tokens=memory_tokens, limits=limits, local=local)
    return simulate(spec, PRICES, requests or burst())


def ttft_p90_ms(found):
    return quantile([one.ttft_ms for one in found.outcomes], 0.9)


def rct_ms(found):
    return fmean(one.jct_ms for one in found.outcomes)


def test_in_a_burst_turns_answer_soon_end_hardly_later_and_compute_nothing_twice():
    arrival, turns = run(ARRIVAL), run(TURNS)
    assert all(one.ok for one in (*arrival.outcomes, *turns.outcomes))
    assert ttft_p90_ms(arrival) > 4 * ttft_p90_ms(turns)
    assert rct_ms(turns) < 1.2 * rct_ms(arrival)
    assert (turns.turns.num_recomputed_tokens, turns.num_preempted) == (0, 0)
    assert arrival.turns.num_recomputed_tokens > 0
    assert turns.turns.num_parked > 0
    assert turns.turns.peak_swap_bytes > 0


def test_where_all_fit_the_order_is_that_of_arrival_to_the_millisecond():
    for local in (TURNS, Local("cfs")):
        found = run(local, memory_tokens=1 << 16)
        assert found.outcomes == run(ARRIVAL, memory_tokens=1 << 16).outcomes
        assert found.turns.num_parked == 0


def test_where_only_slots_are_short_turns_are_taken_and_no_byte_moves():
    found = run(TURNS, memory_tokens=1 << 16, slots=8)
    assert found.turns.num_parked > 0
    assert (found.turns.swapped_out_bytes, found.turns.num_recomputed_tokens) == (0, 0)
    assert ttft_p90_ms(run(ARRIVAL, memory_tokens=1 << 16, slots=8)) > 4 * ttft_p90_ms(found)


def test_without_swap_space_the_order_is_that_of_arrival_again():
    none = Local("cfs", TURNS.rules, peer_bytes=0, dram_bytes=0)
    found = run(none)
    assert all(one.ok for one in found.outcomes)
    assert found.turns.swapped_out_bytes == 0
    assert ttft_p90_ms(found) > 0.5 * ttft_p90_ms(run(ARRIVAL))


def test_swap_space_that_is_too_slow_is_measured_and_not_used_for_turns():
    def over(rate):
        return run(Local("cfs", TURNS.rules, gb_per_s(rate), peer_bytes=1 << 40, dram_bytes=0)).turns

    assert over(200.0).swapped_out_bytes > 1e9
    assert over(0.1).swapped_out_bytes < 0.1 * over(200.0).swapped_out_bytes


def test_slower_swap_space_ends_a_burst_later():
    ends = [
        run(Local("cfs", TURNS.rules, gb_per_s(rate, 3.0), dram_bytes=0, counted_gb_per_s=1e6)).end_ms
        for rate in (200.0, 2.0)
    ]
    assert ends[0] < 0.9 * ends[1]


def test_on_decode_instances_turns_keep_what_prefill_handed_over():
    found = run(TURNS, roles=roles_of(1, 1), memory_tokens=5_000)
    assert all(one.ok and one.placement == "disaggregated" for one in found.outcomes)
    assert found.turns.num_parked > 0
    assert found.turns.num_recomputed_tokens == 0


def test_lent_pages_are_taken_first_and_each_way_moves_one_swap_after_the_other():
    space = SwapSpace(
        Local("cfs", peer=Rate(1.0, 100.0), dram=Rate(2.0, 10.0), peer_bytes=1_000, dram_bytes=500)
    )
    assert space.put(1, 800, 0.0) == 8.0 + 1.0
    assert space.put(2, 600, 0.0) == 40.0 + 2.0  # 200 behind the first, 400 in host memory
    assert space.room_bytes == 100
    assert space.get(1, 400, 20.0) == 20.0 + 4.0 + 1.0  # what is found elsewhere is not copied
    assert space.put(3, 100, 50.0) == 50.0 + 10.0 + 2.0
    space.drop(1)
    assert (space.room_bytes, space.used_bytes, space.peak_bytes) == (800, 700, 1_500)


def options(*words):
    parser = argparse.ArgumentParser()
    add_local_options(parser)
    return parser.parse_args(words)


def test_options_are_a_workers_names_and_defaults():
    assert local_of(options()) == Local()
    found = local_of(options("--local-policy", "cfs", "--fair-for", "bursts", "--fair-rule", "chunk_tokens=64",
                             "--swap-peer-gb", "0", "--fair-swap-gb-per-s", "7"))  # fmt: skip
    assert found.rules == FairRules(
        quantum_tokens=1 << 20, patience_slices=128, spread_ms=500.0, chunk_tokens=64
    )
    assert (found.policy, found.peer_bytes, found.counted_gb_per_s) == ("cfs", 0, 7.0)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--fair-slice-steps", "0"], "--fair-slice-steps 0: at least 1"),
        (
            ["--fair-rule", "slices=1"],
            "--fair-rule slices=1: expected FIELD=NUMBER with a field of slice_steps",
        ),
        (["--fair-rule", "chunk_tokens=many"], "'many' is no int"),
        (["--fair-rule", "stay_ratio=0.5"], "stay_ratio at least 1"),
        (["--swap-peer-gb-per-s", "0"], "both above 0, or --swap-peer-gb 0"),
        (["--swap-dram-gb", "-1"], "--swap-dram-gb -1"),
        (["--swap-wait-ms", "-1"], "--swap-wait-ms -1: not below 0"),
        (["--fair-swap-gb-per-s", "-1"], "0 GB/s as measured"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_its_name(words, says):
    with pytest.raises(SettingsError, match=says):
        local_of(options(*words))


def test_the_command_simulates_turns_and_says_what_they_moved(tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(mooncake_lines(1, groups=20, gap_ms=5)))
    words = ["--trace", str(path), "--instances", "1", "--memory-tokens", "16000", "--fair-for", "bursts"]
    assert main([*words, "--local-policy", "cfs", "--fair-swap-gb-per-s", "1e6"]) == 0
    said = capsys.readouterr().out
    assert "engines cfs" in said
    assert "0 tokens computed again" in said
    assert " 0.0 GB to swap space" not in said
    assert main([*words, "--local-policy", "cfs", "--fair-rule", "patience=1"]) == 2
    assert "expected FIELD=NUMBER" in capsys.readouterr().err
