"""loadtest/workloads: records, seeded tokens, sessions in causal order, trace files."""

import itertools
import json
from collections import Counter
from dataclasses import replace
from statistics import stdev

import pytest

from loadtest import drive
from loadtest.workloads import catalogue, stats, tokens, trace_files
from loadtest.workloads.catalogue import WORKLOADS, Options, build
from loadtest.workloads.request import Answer, Request, Segment, check, clipped, content_id, scaled
from loadtest.workloads.sessions import Session, Turn, copies, interleave
from loadtest.workloads.tokens import TokenRange

IDS = TokenRange(256, 4096)


def small(name: str, seed: int = 1) -> list[Request]:
    return build(name, Options(num_requests=60, seed=seed))


def test_tokens_are_the_same_in_every_process_and_inside_the_range():
    assert tokens.pseudo_tokens(7, 5, IDS).tolist() == [2263, 3100, 1282, 3019, 3290]
    found = tokens.pseudo_tokens(content_id("a"), 5_000, IDS)
    assert found.min() >= IDS.first
    assert found.max() < IDS.end
    assert len(set(found.tolist())) > 2_500


def test_a_shorter_run_is_the_beginning_of_a_longer_one_and_offsets_are_positions():
    whole = tokens.pseudo_tokens(9, 100, IDS).tolist()
    assert tokens.pseudo_tokens(9, 30, IDS).tolist() == whole[:30]
    assert tokens.pseudo_tokens(9, 20, IDS, offset=40).tolist() == whole[40:60]
    assert tokens.pseudo_tokens(10, 30, IDS).tolist() != whole[:30]


def test_real_answers_stand_in_the_prompt_where_the_plan_had_pseudo_tokens():
    prompt = (Segment(1, 3), Answer(0, 4), Segment(2, 2))
    planned = tokens.prompt_ids(prompt, IDS)
    real = tokens.prompt_ids(prompt, IDS, answered=lambda _: [1, 2])
    assert len(planned) == 9
    assert real == [*planned[:3], 1, 2, *planned[-2:]]


def test_messages_alternate_and_have_about_a_word_a_token():
    prompt = (Segment(1, 3), Segment(2, 2), Answer(0, 4), Segment(3, 2))
    found = tokens.messages(prompt, answered=lambda _: "said")
    assert [one["role"] for one in found] == ["user", "assistant", "user"]
    assert found[1]["content"] == "said"
    assert [len(one["content"].split()) for one in found] == [5, 1, 2]


def test_of_a_real_answer_no_more_is_sent_than_the_plan_has_room_for():
    prompt = (Segment(1, 3), Answer(0, 4))
    assert tokens.prompt_ids(prompt, IDS, answered=lambda _: [7] * 300)[3:] == [7] * 4
    said = tokens.messages(prompt, answered=lambda _: " one  two\nthree four five six\n")[1]["content"]
    assert said == " one  two\nthree four"
    assert tokens.messages(prompt, answered=lambda _: "a b c d \n")[1]["content"] == "a b c d \n"


def test_a_clipped_conversation_fits_its_context_with_the_real_answers_in_it():
    requests = clipped(build("sharegpt", Options(num_requests=400, seed=1)), 2048)
    long = {one.request_id: one.output_tokens for one in requests}  # the server answers just so many
    sent = [tokens.prompt_ids(one.prompt, IDS, answered=lambda of: [300] * long[of]) for one in requests]
    assert max(len(ids) + one.output_tokens for ids, one in zip(sent, requests, strict=True)) == 2048


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_gives_one_workload_and_another_seed_another(name):
    first = small(name)
    assert first == small(name)
    assert first != small(name, seed=2)
    check(first)
    assert len(first) == 60


def test_a_turn_takes_a_later_time_than_the_turn_before_and_carries_its_answer():
    requests = build("sharegpt", Options(num_requests=300, seed=3))
    by_id = {one.request_id: one for one in requests}
    followers = [one for one in requests if one.turn]
    assert len(followers) > 100
    for one in followers:
        assert one.depends_on is not None
        before = by_id[one.depends_on]
        assert (before.session, before.turn) == (one.session, one.turn - 1)
        assert before.arrival_ms < one.arrival_ms
        assert one.prompt[: len(before.prompt)] == before.prompt
        assert one.prompt[len(before.prompt)] == Answer(before.request_id, before.output_tokens)


def test_a_session_that_is_ready_comes_before_a_new_one_and_no_time_is_lost():
    turns = [Turn((Segment(1, 1),), 1), Turn((Segment(1, 1), Answer(0, 1)), 1, think_ms=15)]
    found = interleave(
        [Session("a", turns), Session("b", turns[:1]), Session("c", turns[:1])], [0, 10, 20, 30, 40]
    )
    assert [(one.session, one.turn) for one in found] == [("a", 0), ("b", 0), ("a", 1), ("c", 0)]
    assert [one.arrival_ms for one in found] == [0, 10, 20, 30]
    late = interleave([Session("a", turns)], [0, 1])
    assert [one.depends_on for one in late] == [None, 0]


def test_a_share_ratio_repeats_the_prompts_under_other_sessions():
    once = build("loogle", Options(seed=5, num_sessions=20))
    twice = build("loogle", Options(seed=5, num_sessions=20, share_ratio=2))
    assert len(twice) == 2 * len(once)
    assert Counter(one.prompt for one in twice) == Counter([one.prompt for one in once] * 2)
    assert len({one.session for one in twice}) == 40
    with pytest.raises(ValueError, match="share ratio"):
        copies([], 0)


def test_eighty_loogle_sessions_are_250_requests_of_a_document_of_1k_tokens():
    requests = build("loogle", Options(seed=1))
    assert (len(requests), len({one.session for one in requests})) == (250, 80)
    assert {one.prompt[0].num_tokens for one in requests} == {1_000}
    assert max(one.turn for one in requests) == 4


def test_aqua_sends_25_then_twice_the_rate_and_a_tenth_shares_a_prefix():
    options = Options(seed=1, rate_per_s=5, seconds=600, burst_s=60, long_share=0.1)
    requests = build("aqua", options)
    begin_ms = requests[24].arrival_ms
    burst = [one for one in requests[25:] if one.arrival_ms < begin_ms + 60_000]
    after = [one for one in requests if one.arrival_ms >= begin_ms + 60_000]
    assert len(burst) == pytest.approx(600, rel=0.15)
    assert len(after) / (600 - begin_ms / 1000 - 60) == pytest.approx(5, rel=0.1)
    long = [one for one in requests if one.shared == ("long",)]
    assert len(long) / len(requests) == pytest.approx(0.1, abs=0.02)
    assert {one.prompt_tokens for one in long} == {100_256}
    assert len({one.prompt[0] for one in long}) == 1
    assert len({one.prompt[1] for one in long}) == len(long)


def test_an_engine_that_keeps_its_answers_hits_more_than_one_that_keeps_prompts():
    requests = build("sharegpt", Options(num_requests=200, seed=2))
    prompts, both = (stats.infinite_cache_hit_ratio(requests, 16, answers=which) for which in (False, True))
    assert both > prompts + 0.05
    single = build("azure-conv", Options(num_requests=50))
    assert stats.infinite_cache_hit_ratio(single, 16, answers=True) == 0


@pytest.mark.parametrize("name", ["mooncake-synthetic", "mooncake-conversation"])
def test_who_goes_on_where_another_request_was_waits_for_its_answer(name):
    requests = build(name, Options(num_requests=300, seed=3))
    check(requests)
    by_id = {one.request_id: one for one in requests}
    followers = [one for one in requests if one.turn]
    assert len(followers) > 50
    for one in followers:
        before = by_id[one.depends_on]
        assert before.session == one.session
        assert before.prompt[0] == one.prompt[0] or before.prompt[0].content == one.prompt[0].content
    assert all(one.depends_on is None for one in requests if not one.turn)


def test_scaling_keeps_what_is_shared():
    requests = build("mooncake-synthetic", Options(num_requests=400, seed=2))
    short = scaled(requests, 1 / 16)
    before, after = (
        stats.infinite_cache_hit_ratio(requests, 512),
        stats.infinite_cache_hit_ratio(short, 32),
    )
    assert after == pytest.approx(before, abs=0.02)
    total = sum(one.prompt_tokens for one in requests)
    assert sum(one.prompt_tokens for one in short) == pytest.approx(total / 16, rel=0.01)
    halved = scaled(requests, 1.0, output_factor=0.5)
    assert [one.prompt_tokens for one in halved] == [one.prompt_tokens for one in requests]
    with pytest.raises(ValueError, match="above 0"):
        scaled(requests, 0)


def test_clipping_cuts_ends_and_leaves_room_for_the_output():
    requests = build("react", Options(num_requests=50, seed=2))
    for short, long in zip(clipped(requests, 1_024), requests, strict=True):
        assert short.prompt_tokens + short.output_tokens <= 1_024
        assert short.prompt[0] == replace(long.prompt[0], num_tokens=short.prompt[0].num_tokens)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"request_id": 0}, "twice"),
        ({"arrival_ms": 1.0}, "before"),
        ({"prompt": ()}, "0 prompt"),
        ({"output_tokens": 0}, "0 output"),
        ({"output_tokens": 2_000_001}, "2000001 output"),
        ({"depends_on": 7}, "needs 7"),
        ({"session": "b", "depends_on": 0}, "no earlier request of its session"),
    ],
)
def test_what_no_driver_could_run_is_refused(changed, match):
    fine = Request(0, 5.0, "a", 0, (Segment(1, 1),), 1)
    with pytest.raises(ValueError, match=match):
        check([fine, replace(fine, **{"request_id": 1, **changed})])


def test_options_that_a_workload_has_no_use_for_are_refused():
    with pytest.raises(ValueError, match="no use for share_ratio"):
        build("react", Options(share_ratio=2))
    with pytest.raises(ValueError, match="no workload"):
        build("nonsense", Options())
    with pytest.raises(ValueError, match="how many requests"):
        build("react", Options())
    assert catalogue.COMMON | {"think_ms"} == catalogue.COMMON | WORKLOADS["react"].takes


def test_a_mooncake_file_comes_back_with_its_lengths_times_and_sharing(tmp_path):
    requests = build("mooncake-synthetic", Options(num_requests=300, seed=4))
    path = tmp_path / "trace.jsonl"
    assert trace_files.write_mooncake(path, requests) == 300
    again = trace_files.read(path)
    assert [one.prompt_tokens for one in again] == [one.prompt_tokens for one in requests]
    assert [one.output_tokens for one in again] == [one.output_tokens for one in requests]
    first_ms = round(requests[0].arrival_ms)
    assert [one.arrival_ms for one in again] == [round(one.arrival_ms) - first_ms for one in requests]
    assert stats.cached_tokens(again) == stats.cached_tokens(requests)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    again_lines = [json.loads(line) for line in trace_files.mooncake_lines(again)]
    assert [row["hash_ids"] for row in lines] == [row["hash_ids"] for row in again_lines]
    fast = trace_files.read(path, speed=2, limit=10)
    assert len(fast) == 10
    assert fast[-1].arrival_ms == again[9].arrival_ms / 2


def test_equal_hash_ids_become_equal_tokens_and_sessions_follow_them(tmp_path):
    rows = [(0, 1_030, [1, 2, 3]), (5, 1_100, [1, 2, 4]), (9, 1_500, [1, 9, 8])]
    lines = [{"timestamp": at, "input_length": n, "output_length": 3, "hash_ids": ids} for at, n, ids in rows]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    found = trace_files.read(path)
    first, second, third = (tokens.prompt_ids(one.prompt, IDS) for one in found)
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:1030]
    assert third[:512] == first[:512]
    assert (found[1].session, found[1].turn) == (found[0].session, 1)
    assert found[2].session != found[0].session


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        '{"timestamp": 0}',
        '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
        '{"timestamp": 0, "input_length": 0, "output_length": 1}',
        '{"timestamp": 0, "input_length": 99999999, "output_length": 1}',
        "[1]",
    ],
)
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n' + line)
    with pytest.raises(trace_files.TraceError, match=r"trace\.jsonl:2"):
        trace_files.read(path)


@pytest.mark.parametrize(
    "names", ["timestamp,input_length,output_length", "arrival_ms, Prompt_Tokens ,output_tokens"]
)
def test_lengths_are_read_under_other_names_too(tmp_path, names):
    path = tmp_path / "lengths.csv"
    path.write_text(f"{names}\n1000,5,2\n1250.5,7,3\n")
    found = trace_files.read(path)
    assert [(r.arrival_ms, r.prompt_tokens, r.output_tokens) for r in found] == [(0.0, 5, 2), (250.5, 7, 3)]
    for line in ("nan,5,2", "1000,,2", "1000,5"):
        path.write_text(f"{names}\n{line}\n")
        with pytest.raises(trace_files.TraceError, match="input_length"):
            trace_files.read(path)


def test_lengths_without_times_come_at_a_rate_that_is_given_and_not_without_one(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("input_tokens,output_tokens\n" + "".join(f"{n + 1},{n % 7 + 1}\n" for n in range(400)))
    with pytest.raises(trace_files.NoTimes, match=r"lengths\.csv has no column of times .*give --rate"):
        trace_files.read(path)
    found = trace_files.read(path, rate_per_s=4.0, seed=3)
    assert [(one.prompt_tokens, one.output_tokens) for one in found] == [
        (n + 1, n % 7 + 1) for n in range(400)
    ]
    gaps = [b.arrival_ms - a.arrival_ms for a, b in itertools.pairwise(found)]
    assert sum(gaps) / len(gaps) == pytest.approx(250, rel=0.2)
    assert stdev(gaps) == pytest.approx(250, rel=0.25)  # Poisson
    assert trace_files.read(path, rate_per_s=4.0, seed=3) == found
    assert trace_files.read(path, rate_per_s=4.0, seed=4) != found
    with pytest.raises(trace_files.TraceError, match="above 0"):
        trace_files.read(path, rate_per_s=-1.0)
    path.write_text("input_tokens,output_tokens\n5,many\n")
    with pytest.raises(trace_files.TraceError, match=r"lengths\.csv:2"):
        trace_files.read(path, rate_per_s=1.0)


def test_a_rate_is_refused_where_a_trace_has_times(tmp_path):
    path = tmp_path / "timed.csv"
    path.write_text("timestamp,input_length,output_length\n1000,5,2\n")
    with pytest.raises(trace_files.TraceError, match="times of its own"):
        trace_files.read(path, rate_per_s=2.0)


def test_the_driver_replays_lengths_at_a_rate_and_says_what_is_missing(tmp_path, capsys):
    path, target = tmp_path / "lengths.csv", tmp_path / "out.jsonl"
    path.write_text("input_length,output_length\n" + "8,2\n" * 30)
    assert drive.main(["--trace", str(path), "--write-trace", str(target)]) == 2
    assert "give --rate" in capsys.readouterr().err
    assert drive.main(["--trace", str(path), "--rate", "5", "--write-trace", str(target)]) == 0
    assert len(target.read_text().splitlines()) == 30


def test_an_azure_file_is_read(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:50.9951690,396,109\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
    )
    found = trace_files.read(path)
    assert [(one.prompt_tokens, one.output_tokens) for one in found] == [(374, 44), (396, 109)]
    assert found[1].arrival_ms == pytest.approx(4_314.579, abs=0.01)
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n")
    with pytest.raises(trace_files.TraceError, match=r"azure\.csv:2"):
        trace_files.read(path)
