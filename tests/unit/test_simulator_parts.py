"""The simulator's parts: clock, links, tree, memory, engine steps, trace files."""

import json

import pytest

from loadtest.simulator.blocks import ROOT, BlockStore
from loadtest.simulator.cluster import simulate
from loadtest.simulator.events import EventQueue
from loadtest.simulator.links import Links, Rate
from loadtest.simulator.prices import LinearPrices
from loadtest.simulator.records import Record, Slo, summarize
from loadtest.simulator.request import BlockNames, SimRequest, infinite_cache
from loadtest.simulator.spec import ClusterSpec, Death, roles_of
from loadtest.simulator.task import EngineLimits
from loadtest.simulator.traces import TraceError, faster, read_trace, sample
from loadtest.simulator.tree import SimTree
from shared.prompttree.publisher import BATCH_WINDOW_MS
from tests.support.simulated import BLOCK_TOKENS, PRICES, mooncake_lines

NAMES = BlockNames()
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
    links = Links(peer=Rate(0.0, 10.0))
    assert links.send(0, 1, 100, 0.0) == 10.0
    assert links.send(0, 2, 100, 0.0) == 20.0  # its source sends the first
    assert links.send(3, 4, 100, 0.0) == 10.0
    assert links.send(5, 2, 100, 5.0) == 30.0  # its target still receives
    assert Links(peer=Rate(1.0, 0.0)).send(0, 1, 100, 7.0) == 7.0  # the same pages: nothing moves


def test_the_tree_knows_what_was_told_not_what_is_held():
    events = EventQueue()
    tree = SimTree(events, 3)
    blocks = NAMES.of([1, 2, 3])
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
    told = {"stored": [], "removed": []}
    made = BlockStore(
        10, capacity, dram, lambda b: told["stored"].extend(b), lambda b: told["removed"].extend(b)
    )
    return made, told


def test_what_was_used_longest_ago_makes_room_and_goes_behind_when_there_is_a_behind():
    for dram, removed in ((0, 2), (100, 0)):
        made, told = store(40, dram)
        old, new = NAMES.of([7, 8]), NAMES.of([9, 10])
        assert made.keep(ROOT, old, 20)
        assert made.keep(ROOT, new, 15)
        assert made.reserve(25)
        assert len(told["removed"]) == removed
        assert (made.num_evicted, len(made.match(new))) == (2, 2)
        assert made.match(old) == []
        assert made.match_dram(old) == (20 if dram else 0)


def test_pinned_blocks_and_private_memory_are_never_given_away():
    made, _ = store(40)
    assert made.reserve(20)
    entries = made.seal(ROOT, NAMES.of([11, 12]), 20)
    assert (made.room_tokens, made.private_tokens, made.pinned_tokens) == (20, 0, 20)
    assert not made.reserve(21)
    made.unpin(entries)
    assert made.reserve(40)
    assert made.match(NAMES.of([11, 12])) == []


def alone(prompt, output, **more):
    return SimRequest("q", 0.0, prompt, output, NAMES.of(range(50, 50 - -prompt // BLOCK_TOKENS)), **more)


def run_one(request, roles, *, limits=None, **more):
    spec = ClusterSpec(roles, block_tokens=BLOCK_TOKENS, limits=limits or EngineLimits(), **more)
    return simulate(spec, HAND, [request])


def test_one_request_alone_takes_what_its_steps_take():
    limits = EngineLimits(max_batched_tokens=100)
    record = run_one(alone(250, 5), roles_of(0, 0, 1), limits=limits).records[0]
    assert record.ttft_ms == pytest.approx(
        3 * 10 + 250 + 1.0 + 4 * 0.3
    )  # three chunks; the gateway, four messages
    assert record.tpot_ms == pytest.approx(10.0)
    assert (record.tokens_computed, record.kind) == (250, "colocated")


def test_a_handoff_costs_its_transfer_and_one_step_and_a_single_token_needs_none():
    peer = Rate(0.0, 2.0)
    record = run_one(alone(250, 5), roles_of(1, 1), peer=peer).records[0]
    assert record.ttft_ms == pytest.approx(10 + 250 + 125 + 10 + 1 + 1.0 + 6 * 0.3)
    assert (record.kind, record.prefill, record.decode) == ("disaggregated", "prefill-0", "decode-1")
    single = run_one(alone(250, 1), roles_of(1, 1), peer=peer)
    assert single.records[0].ttft_ms == pytest.approx(10 + 250 + 1.0 + 4 * 0.3)
    assert single.peer_bytes == 0


def test_a_request_that_never_fits_fails_and_one_that_fits_waits_for_memory():
    requests = [SimRequest("a", 0, 60, 50), SimRequest("b", 1, 60, 10), SimRequest("c", 2, 90, 20)]
    found = simulate(ClusterSpec(("colocated",), block_tokens=16, memory_tokens=100), HAND, requests).records
    assert [record.error for record in found] == ["context_length_exceeded", "", "context_length_exceeded"]
    pair = [SimRequest("a", 0, 60, 30), SimRequest("b", 1, 60, 10)]
    found = simulate(ClusterSpec(("colocated",), block_tokens=16, memory_tokens=100), HAND, pair).records
    assert found[1].queue_ms > 300


def test_decodes_that_outgrow_memory_are_computed_again_and_none_is_lost():
    pair = [SimRequest("a", 0, 40, 55), SimRequest("b", 1, 40, 55)]
    run = simulate(ClusterSpec(("colocated",), block_tokens=16, memory_tokens=100), HAND, pair)
    assert run.num_preempted >= 1
    assert all(record.ok for record in run.records)


def test_requests_of_a_dead_instance_run_elsewhere_unless_their_client_saw_a_token():
    requests = [SimRequest(f"q{n}", n * 10.0, 400, 20) for n in range(12)]
    spec = ClusterSpec(roles_of(0, 0, 2), deaths=(Death(700.0, 0),))
    records = simulate(spec, HAND, requests).records
    retried = [r for r in records if r.attempts > 1]
    assert retried
    assert all(r.ok and r.decode == "colocated-1" for r in retried)
    assert {r.error for r in records} <= {"", "peer.gone"}


def test_full_instances_reject_and_the_request_comes_again_or_fails_in_time():
    limits = EngineLimits(max_running=1)
    requests = [SimRequest(f"q{n}", 0.0, 300, 20) for n in range(40)]
    run = simulate(ClusterSpec(("colocated",), limits=limits), HAND, requests)
    assert run.num_rejected > 0
    assert {record.error for record in run.records} == {"", "overloaded"}


def test_summaries_are_of_what_was_answered_and_goodput_of_all():
    good = Record(
        "a", 0, 100, 2, ttft_ms=10, tpot_ms=1, jct_ms=11, tokens_local=40, tokens_computed=60, has_ended=True
    )
    late = Record("b", 0, 100, 2, ttft_ms=50, tpot_ms=1, jct_ms=51, tokens_computed=100, has_ended=True)
    lost = Record("c", 0, 100, 2, jct_ms=1000, error="overloaded", has_ended=True)
    found = summarize([good, late, lost], Slo(ttft_ms=20))
    assert found.hit_ratio == pytest.approx(0.2)
    assert found.num_failed == 1
    assert found.times_ms["ttft_p50"] == 10
    assert found.good_ratio == pytest.approx(1 / 3)
    assert found.goodput_per_s == pytest.approx(1.0)


def test_a_mooncake_file_is_read_with_its_sharing_and_sessions(tmp_path):
    path = tmp_path / "t.jsonl"
    rows = [(0, 1000, [1, 2]), (5, 1700, [1, 3, 4, 5]), (9, 600, [7, 3])]
    path.write_text(
        "\n".join(
            json.dumps({"timestamp": t, "input_length": n, "output_length": 600, "hash_ids": ids})
            for t, n, ids in rows
        )
    )
    first, second, third = read_trace(path)
    assert first.blocks[0] == second.blocks[0]
    assert second.session == first.session != third.session
    assert second.blocks[1] != third.blocks[1]  # the same id behind another prefix is another block
    assert len(first.output_blocks) == 2
    assert infinite_cache([first, second, third], 512).hit_tokens == 512


def test_azures_lengths_are_read_and_rates_and_samples_keep_the_order(tmp_path):
    path = tmp_path / "t.csv"
    lines = [f"2023-11-16 18:15:{n:02d}.5000000,{100 + n},{n}" for n in range(40)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines))
    found = read_trace(path)
    assert (found[3].arrival_ms, found[3].prompt_tokens, found[0].output_tokens) == (3000.0, 103, 1)
    assert faster(found, 2.0)[3].arrival_ms == 1500.0
    part = sample(found, 8)
    assert len(part) == 8
    assert part[0].arrival_ms == 0.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ('{"timestamp": 0', "line 1: not JSON"),
        (
            '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}',
            "1 hash_ids for 600 tokens",
        ),
        (
            '{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}',
            "line 1: input_length is 0",
        ),
        ('{"timestamp": "x", "input_length": 1, "output_length": 1, "hash_ids": [1]}', "timestamp is 'x'"),
        ("a,b\n1,2", "line 1: no column timestamp"),
        ("timestamp,prompt_tokens,output_tokens\n1,2", "line 2: 2 fields"),
        ("timestamp,prompt_tokens,output_tokens\n1,2,3\n0,2,3", "line 3: '0' is before"),
        ("timestamp,prompt_tokens,output_tokens\nsoon,2,3", "line 2: 'soon' is no time"),
        ("timestamp,prompt_tokens,output_tokens\n1,-2,3", "line 2: prompt_tokens is '-2'"),
    ],
)
def test_a_bad_file_is_an_error_that_names_the_line(tmp_path, text, says):
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(TraceError, match=says):
        read_trace(path)


def test_made_traces_are_read(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(mooncake_lines(1)))
    requests = read_trace(path)
    spec = ClusterSpec(roles_of(2, 1), policy="prompt_tree")
    found = summarize(simulate(spec, PRICES, requests).records)
    bound = infinite_cache(requests, 512).hit_ratio
    assert found.num_failed == 0
    assert 0.6 * bound < found.hit_ratio <= bound
