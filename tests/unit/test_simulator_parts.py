"""The simulator's parts: clock, links, tree, memory, engine steps, trace files."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from loadtest import registry
from loadtest.outcomes import Outcome, read_run
from loadtest.reports.summary import Slo
from loadtest.simulator.__main__ import main
from loadtest.simulator.blocks import ROOT, BlockStore
from loadtest.simulator.cluster import simulate
from loadtest.simulator.events import EventQueue
from loadtest.simulator.links import Links, Rate
from loadtest.simulator.prices import LinearPrices
from loadtest.simulator.records import summarize
from loadtest.simulator.request import (
    SimRequest,
    densest,
    faster,
    from_workload,
    infinite_cache,
    mean_rate_per_s,
)
from loadtest.simulator.spec import ClusterSpec, Death, roles_of
from loadtest.simulator.task import EngineLimits
from loadtest.simulator.tree import SimTree
from loadtest.workloads.request import Answer, Request, Segment
from loadtest.workloads.trace_files import read
from shared.prompttree.publisher import BATCH_WINDOW_MS
from tests.support.simulated import BLOCK_TOKENS, PRICES, conversations, mooncake_lines, names, plain

pytestmark = pytest.mark.slow

HAND = LinearPrices(
    step_base_ms=10.0, token_ms=1.0, context_ms=0.0, decode_ms_per_request=0.0, kv_bytes_per_token=1
)


def test_events_of_one_time_keep_their_order_and_time_never_goes_back():
    events, seen = EventQueue(), []
    events.at(5, lambda: (seen.append("b"), events.at(1, lambda: seen.append(events.now_ms))))
    events.at(5, seen.append, "c")
    events.at(2, seen.append, "a")
    events.run(lambda: False)
    assert seen == ["a", "b", "c", 5]


def test_a_transfer_waits_for_both_of_its_ends():
    links = Links(remote=Rate(0.0, 10.0))
    assert links.send(0, 1, 100, 0.0) == 10.0
    assert links.send(0, 2, 100, 0.0) == 20.0  # its source sends the first
    assert links.send(3, 4, 100, 0.0) == 10.0
    assert links.send(5, 2, 100, 5.0) == 30.0  # its target still receives
    assert (
        Links(peer=Rate(1.0, 0.0), instances_per_host=2).send(0, 1, 100, 7.0) == 7.0
    )  # the same pages: nothing moves


def test_a_thousand_instances_serve_what_ten_do_and_find_what_each_other_computed():
    requests = conversations(5, sessions=10, turns=3)
    ends = {}
    for count in (10, 1_000):
        found = simulate(
            ClusterSpec(roles_of(0, 0, count), block_tokens=BLOCK_TOKENS), PRICES, requests
        ).outcomes
        assert all(outcome.ok for outcome in found)
        ends[count] = [outcome.output_tokens for outcome in found]
        assert summarize(found).hit_ratio > 0.3
    assert ends[10] == ends[1_000] == [request.output_tokens for request in requests]


def test_a_thousand_instances_play_hundreds_of_requests_in_seconds():
    requests = conversations(6, sessions=80, turns=3, gap_ms=30.0)
    assert len(requests) > 300
    found = simulate(ClusterSpec(roles_of(0, 0, 1_000), block_tokens=BLOCK_TOKENS), PRICES, requests).outcomes
    assert all(outcome.ok for outcome in found)
    assert [outcome.output_tokens for outcome in found] == [request.output_tokens for request in requests]
    used = {name for outcome in found for name in outcome.instances}
    assert len(used) > 50  # load is spread, and most stay idle
    assert summarize(found).hit_ratio > 0.3


def test_the_tree_knows_what_was_told_not_what_is_held():
    events = EventQueue()
    tree = SimTree(events, 3)
    blocks = names(1, 2, 3)
    tree.stored(0, blocks)
    tree.stored(2, blocks[:1])
    assert tree.lookup(blocks) == []
    events.run(lambda: events.now_ms > BATCH_WINDOW_MS + 5)
    assert sorted(tree.lookup(blocks)) == [(0, 3), (2, 1)]
    tree.removed(0, blocks[2:])
    assert (0, 3) in tree.lookup(blocks)
    events.run(lambda: False)
    assert sorted(tree.lookup(blocks)) == [(0, 2), (2, 1)]
    tree.expire(0)
    assert tree.lookup(blocks) == [(2, 1)]


def store(capacity, dram=0):
    told = {"stored": [], "evicted": [], "removed": []}
    made = BlockStore(10, capacity, dram, *(found.extend for found in told.values()))
    return made, told


def test_what_was_used_longest_ago_makes_room_and_goes_behind_when_there_is_a_behind():
    for dram, removed in ((0, 2), (100, 0)):
        made, told = store(40, dram)
        old, new = names(7, 8), names(9, 10)
        assert made.keep(ROOT, old, 20)
        assert made.keep(ROOT, new, 15)
        assert made.reserve(25)
        assert (len(told["evicted"]), len(told["removed"])) == (2, removed)
        assert (made.num_evicted, len(made.match(new))) == (2, 2)
        assert made.match(old) == []
        assert made.match_dram(old) == (20 if dram else 0)


def test_pinned_blocks_and_private_memory_are_never_given_away():
    made, _ = store(40)
    assert made.reserve(20)
    entries = made.seal(ROOT, names(11, 12), 20)
    assert (made.room_tokens, made.private_tokens, made.pinned_tokens) == (20, 0, 20)
    assert not made.reserve(21)
    made.unpin(entries)
    assert made.reserve(40)
    assert made.match(names(11, 12)) == []


def run_one(request, roles, *, limits=None, **more):
    spec = ClusterSpec(roles, block_tokens=BLOCK_TOKENS, limits=limits or EngineLimits(), **more)
    return simulate(spec, HAND, [request])


def test_one_request_alone_takes_what_its_steps_take():
    limits = EngineLimits(max_batched_tokens=100)
    record = run_one(plain(1, 0.0, 250, 5, blocks=True), roles_of(0, 0, 1), limits=limits).outcomes[0]
    assert record.ttft_ms == pytest.approx(
        3 * 10 + 250 + 1.0 + 4 * 0.3
    )  # three chunks; the gateway, four messages
    assert record.tpot_ms == pytest.approx(10.0)
    assert (record.sources, record.placement) == ({"computed": 250}, "colocated")


def test_a_handoff_lies_behind_the_first_token_and_a_single_token_needs_none():
    slow = Rate(0.0, 2.0)
    record = run_one(plain(1, 0.0, 250, 5, blocks=True), roles_of(1, 1), remote=slow).outcomes[0]
    assert record.ttft_ms == pytest.approx(10 + 250 + 1.0 + 4 * 0.3)
    assert record.jct_ms - record.ttft_ms == pytest.approx(0.3 + 125 + 10 + 1 + 3 * 10 + 0.3)
    assert (record.placement, record.instances) == ("disaggregated", ["prefill-0", "decode-1"])
    single = run_one(plain(1, 0.0, 250, 1, blocks=True), roles_of(1, 1), remote=slow)
    assert single.outcomes[0].ttft_ms == pytest.approx(10 + 250 + 1.0 + 4 * 0.3)
    assert single.peer_bytes == 0


def test_what_an_instance_of_the_same_host_holds_is_fetched_whatever_it_takes():
    prefix = tuple(names(*range(300, 316)))
    first, second = (SimRequest(n, 2000.0 * n, 1024, 2, prefix) for n in (0, 1))
    slow, fast = Rate(0.0, 1e-2), Rate(0.0, 1e3)
    for shared_host, rate, fetched in ((1, fast, False), (2, fast, True), (2, slow, True)):
        spec = ClusterSpec(
            roles_of(0, 0, 2), block_tokens=BLOCK_TOKENS, policy="least_load", instances_per_host=shared_host,
            peer=rate, remote=rate,
        )  # fmt: skip
        found = simulate(spec, HAND, [first, second]).outcomes
        assert found[0].instances != found[1].instances  # idle ones take turns
        assert found[1].sources == ({"peer": 1008, "computed": 16} if fetched else {"computed": 1024})
        if fetched:
            assert found[1].stages["fetch_ms"] == pytest.approx(1008 / rate.bytes_per_ms)


def test_a_request_that_never_fits_fails_and_one_that_fits_waits_for_memory():
    requests = [plain(0, 0, 60, 50), plain(1, 1, 60, 10), plain(2, 2, 90, 20)]
    found = simulate(ClusterSpec(("colocated",), block_tokens=16, memory_tokens=100), HAND, requests).outcomes
    assert [record.error for record in found] == ["context_length_exceeded", "", "context_length_exceeded"]
    pair = [plain(0, 0, 60, 30), plain(1, 1, 60, 10)]
    found = simulate(ClusterSpec(("colocated",), block_tokens=16, memory_tokens=100), HAND, pair).outcomes
    assert found[1].stages["queue_ms"] > 300


def test_decodes_that_outgrow_memory_are_computed_again_and_none_is_lost():
    pair = [plain(0, 0, 40, 55), plain(1, 1, 40, 55)]
    run = simulate(ClusterSpec(("colocated",), block_tokens=16, memory_tokens=100), HAND, pair)
    assert run.num_preempted >= 1
    assert all(record.ok for record in run.outcomes)


def test_requests_of_a_dead_instance_run_elsewhere_unless_their_client_saw_a_token():
    requests = [plain(n, n * 10.0, 400, 20) for n in range(12)]
    spec = ClusterSpec(roles_of(0, 0, 2), deaths=(Death(700.0, 0),))
    run = simulate(spec, HAND, requests)
    assert run.num_retries > 1
    late = [r for r in run.outcomes if r.ended_ms > 700]
    assert all(r.instances == ["colocated-1"] for r in late if r.ok)
    assert {r.error for r in run.outcomes} <= {"", "peer.gone"}


def test_full_instances_reject_and_the_request_comes_again_or_fails_in_time():
    limits = EngineLimits(max_running=1)
    requests = [plain(n, 0.0, 300, 20) for n in range(40)]
    run = simulate(ClusterSpec(("colocated",), limits=limits), HAND, requests)
    assert run.num_rejected > 0
    assert {record.error for record in run.outcomes} == {"", "overloaded"}


def test_summaries_are_of_what_was_answered_and_goodput_of_all():
    def outcome(number, **more):
        return Outcome(number, "s", 0, prompt_tokens=100, **more)

    good = outcome(
        0, output_tokens=2, ttft_ms=10, tpot_ms=1, jct_ms=11, sources={"engine": 40, "computed": 60}
    )
    late = outcome(1, output_tokens=2, ttft_ms=50, tpot_ms=1, jct_ms=51, sources={"computed": 100})
    lost = outcome(2, jct_ms=1000, error="overloaded")
    found = summarize([good, late, lost], Slo(ttft_ms=20))
    assert found.hit_ratio == pytest.approx(0.2)
    assert found.num_failed == 1
    assert found.times_ms["ttft_p50"] == 10
    assert found.good_ratio == pytest.approx(1 / 3)
    assert found.goodput_per_s == pytest.approx(1.0)


def test_a_history_repeats_its_answers_blocks_and_strangers_share_nothing():
    first = Request(0, 0.0, "s", 0, (Segment(1, 100),), 60)
    history = (Segment(1, 100), Answer(0, 60), Segment(2, 40))
    second = Request(1, 5.0, "s", 1, history, 10, depends_on=0, think_ms=3.0)
    other = Request(2, 9.0, "t", 0, (Segment(3, 100),), 60)
    one, two, three = from_workload([first, second, other], 32)
    assert one.blocks[:3] + one.output_blocks == two.blocks[:4]  # 159 tokens of KV: 4 whole blocks
    assert one.blocks[3] not in two.blocks  # partial
    assert (two.depends_on, two.think_ms) == (0, 3.0)
    assert not {*one.blocks, *one.output_blocks} & {*three.blocks, *three.output_blocks}
    assert infinite_cache([one, two, three], 32).hit_tokens == 96


def test_the_densest_part_of_a_trace_is_cut_out_and_waits_for_nothing_outside():
    calm = [plain(n, 1000.0 * n, 10, 1) for n in range(8)]
    burst = [plain(8 + n, 8000.0 + n, 10, 1) for n in range(8)]
    chained = [replace(r, depends_on=n - 1 if n else None) for n, r in enumerate(calm + burst)]
    part = densest(chained, 8)
    assert [r.request_id for r in part] == list(range(8, 16))
    assert part[0].arrival_ms == 0.0
    assert [r.depends_on for r in part] == [None, *range(7)]
    assert mean_rate_per_s(part) == pytest.approx(1000.0)
    assert faster(part, 2.0)[1].arrival_ms == 0.5


def test_the_last_tick_of_a_trace_lasts_as_long_as_the_others():
    assert mean_rate_per_s([plain(n, n // 60 * 3000.0, 10, 1) for n in range(600)]) == pytest.approx(20.0)
    assert mean_rate_per_s([plain(n, 0.0, 10, 1) for n in range(5)]) == 0.0


@pytest.mark.parametrize("policy", ["least_load", "prompt_tree"])
def test_a_trace_file_is_replayed_from_end_to_end(tmp_path, capsys, policy):
    path, out = tmp_path / "t.jsonl", tmp_path / "run.jsonl"
    path.write_text("\n".join(mooncake_lines(1, groups=20)))
    options = ["--trace", str(path), "--split", "6:2", "--policy", policy, "--out", str(out)]
    assert main(options) == 0
    assert "120 requests, 0 failed" in capsys.readouterr().out
    requests = from_workload(read(path), 512)
    found = summarize(read_run(out).outcomes)
    bound = infinite_cache(requests, 512).hit_ratio
    assert 0.1 * bound < found.hit_ratio <= bound
    assert (found.hit_ratio > 0.8 * bound) == (policy == "prompt_tree")


def test_what_cannot_be_read_or_simulated_is_said_and_ends_with_status_2(tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}')
    for more, says in (
        ([], ":1: 600 tokens are 2 blocks"),
        (["--gpu", "abacus"], "no data sheet"),
        (["--model", "llama-70b"], "use a larger --tp"),
        (["--cost", str(path)], "no cost coefficients"),
    ):
        assert main(["--trace", str(path), *more]) == 2
        assert says in capsys.readouterr().err


def test_every_process_simulates_the_same_whatever_its_hash_seed(tmp_path):
    """Two instances held as much of a prompt, and which of them sent it followed from the order of a set of names."""
    path, told = tmp_path / "t.jsonl", set()
    path.write_text("\n".join(mooncake_lines(1, groups=20, count=200, gap_ms=10)))
    words = ["--trace", str(path), "--split", "2:1:1", "--memory-tokens", "12000", "--json"]
    for seed in ("1", "2", "3"):
        ran = subprocess.run(
            [sys.executable, "-m", "loadtest.simulator", *words], cwd=registry.ROOT, check=True, capture_output=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )  # fmt: skip
        told.add(ran.stdout)
    assert len(told) == 1
