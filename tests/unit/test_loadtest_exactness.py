"""bench_exactness: what counts as equal, near a tie or wrong, what stock is asked, and that calls go on from a file."""

import json
import math

import pytest

from loadtest import bench_exactness as bench
from loadtest import exactness_rig as rig
from loadtest import exactness_shares as shares
from loadtest.results import check_metrics, load_result

GREEDY = {
    "id": "greedy-5",
    "prompt": [9],
    "params": {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True},
}
SEEDED = {"id": "seeded", "prompt": [9], "params": {"temperature": 0.5, "max_tokens": 4, "seed": 1}}
SCHEMA = {**GREEDY, "id": "json", "structured": "{}"}
CASES = [GREEDY, SEEDED, SCHEMA]


def stock_says(case, first=(1, 2, 3, 4), cached=None, **more):
    cached = cached or first
    choices = [[{"token_ids": list(tokens)}] for tokens in (first, cached)]
    return {
        "prompt": case["prompt"], "params": case["params"], "choices": choices[0], "cached_choices": choices[1],
        **more,
    }  # fmt: skip


def row(case, ours, first=(1, 2, 3, 4), cached=None):
    return shares.compared(case, [list(ours)], stock_says(case, first, cached))


@pytest.mark.parametrize(
    ("ours", "equal", "unlike"), [((1, 2), True, False), ((1, 3), False, False), ((1, 4), False, True)]
)
def test_an_answer_is_equal_to_the_first_or_like_the_second_or_unlike_either(ours, equal, unlike):
    found = row(GREEDY, ours, first=(1, 2), cached=(1, 3))
    assert (found["equal"], found["unlike_either"], found["kind"]) == (equal, unlike, "greedy")


def test_each_choice_may_be_like_another_of_stocks_two_answers():
    said = {"choices": [{"token_ids": [1]}, {"token_ids": [2]}]}
    said["cached_choices"] = [{"token_ids": [3]}, {"token_ids": [4]}]
    found = shares.compared(SEEDED, [[1], [4]], said)
    assert (found["equal"], found["unlike_either"]) == (False, False)
    assert shares.unlike_choices(shares.compared(SEEDED, [[1], [3]], said)) == [1]
    lost = shares.compared(SEEDED, [[1]], said)
    assert shares.unlike_choices(lost) == [1]
    assert not shares.can_ask(shares.question(lost, 1))


def test_stock_is_asked_where_the_answer_that_agrees_longer_parts():
    asked = shares.question(row(GREEDY, (1, 2, 7, 4), first=(1, 5, 3, 4), cached=(1, 2, 3, 4)), 0)
    assert (asked["at"], asked["ours"], asked["stock"], asked["cached"]) == (2, 7, 3, True)
    assert asked["common"] == [1, 2]
    same = shares.question(row(GREEDY, (1, 7, 3, 4), first=(1, 2, 3, 4), cached=(1, 3, 3, 4)), 0)
    assert (same["at"], same["stock"], same["cached"]) == (1, 2, False)
    short = shares.question(row(GREEDY, (1, 2), first=(1, 2, 3, 4)), 0)
    assert (short["at"], short["ours"], shares.can_ask(short)) == (2, None, False)


def test_a_greedy_share_is_of_the_probabilities_behind_the_common_tokens():
    asked = shares.question(row(GREEDY, (1, 2, 7, 4)), 0)
    cases = shares.cases_to_ask(3, asked, GREEDY, stock_says(GREEDY))
    assert [case["id"] for case in cases] == ["3-ours", "3-stock"]
    assert all(case["prompt"] == [9, 1, 2] and case["params"]["max_tokens"] == 1 for case in cases)
    assert [case["params"]["logit_bias"] for case in cases] == [{"7": 100.0}, {"3": 100.0}]

    def said(token, share):
        return {"choices": [{"token_ids": [token], "logprobs": [math.log(share)]}]}

    answers = {"3-ours": said(7, 0.27), "3-stock": said(3, 0.3)}
    assert shares.share_of(3, asked, GREEDY, answers) == pytest.approx(0.9)
    assert shares.share_of(3, asked, GREEDY, {**answers, "3-ours": said(8, 0.27)}) is None


def test_other_cases_are_asked_again_with_our_token_raised_until_it_is_drawn():
    biased = {**SEEDED, "params": {**SEEDED["params"], "logit_bias": {"7": 2.0}}}
    asked = shares.question(row(biased, (1, 2, 7, 4)), 0)
    cases = shares.cases_to_ask(0, asked, biased, stock_says(biased))
    raised = {case["id"]: case["params"]["logit_bias"]["7"] - 2.0 for case in cases}
    assert raised["0-1.0"] == 0.0
    assert raised["0-0.8"] == pytest.approx(0.5 * math.log(1 / 0.8))  # half as much: the temperature is 0.5
    assert biased["params"]["logit_bias"] == {"7": 2.0}
    answers = {case["id"]: stock_says(biased) for case in cases}
    assert shares.share_of(0, asked, biased, answers) is None
    answers["0-0.5"] = answers["0-0.99"] = stock_says(biased, (1, 2, 7, 9))
    answers["0-0.999"] = stock_says(biased, (1, 7, 7, 9))  # it went another way before
    assert shares.share_of(0, asked, biased, answers) == 0.99
    answers["0-0.999"] = stock_says(biased, cached=(1, 2, 7, 9))
    assert shares.share_of(0, {**asked, "cached": True}, biased, answers) == 0.999
    assert all(
        case["structured"] == "{}" for case in shares.cases_to_ask(0, asked, SCHEMA, stock_says(SCHEMA))
    )


@pytest.mark.parametrize(
    ("mode", "case", "near", "want"),
    [
        ("float32", GREEDY, [0.99], "near_tie"),
        ("float32+token-major", GREEDY, [0.79], "wrong"),
        ("bfloat16+graphs", GREEDY, [0.79], "wrong"),
        ("bfloat16+graphs", GREEDY, [None], "wrong"),
        ("bfloat16+graphs", GREEDY, [1.3], "near_tie"),
        ("bfloat16+graphs", SEEDED, [0.1], "not_judged"),
        ("bfloat16+graphs", SCHEMA, [None], "not_judged"),
        ("float32", SEEDED, [None], "wrong"),
        ("float32+graphs", SEEDED, [0.999, 0.5], "wrong"),
        ("float32+graphs", SCHEMA, [0.999], "near_tie"),
        ("float32", GREEDY, [], "wrong"),
    ],
)
def test_what_is_unlike_either_is_judged_by_its_shares_in_float32_always(mode, case, near, want):
    assert shares.verdict(mode, row(case, (1, 7)), near) == want


def answers_row(mode, topology, rows, **more):
    return {
        "kind": "answers", "mode": mode, "topology": topology, "device": "cuda", "cases": rows, "ready_s": 1.0,
        "all_s": 2.0, "placements": {topology: len(rows)}, "blocks_moved": 0, **more,
    }  # fmt: skip


def shares_row(mode, topology, *found):
    listed = [{"case": case["id"], "choice": 0, "share": share} for case, share in found]
    return {"kind": "shares", "mode": mode, "topology": topology, "device": "cuda", "shares": listed}


def test_metrics_count_by_run_and_name_the_least_share_of_what_is_judged():
    samples = [
        answers_row("float32", "disaggregated", [row(GREEDY, (1, 2, 3, 4)), row(SEEDED, (1, 2, 3, 4))]),
        shares_row("float32", "disaggregated"),
        answers_row("float32+graphs", "colocated", [row(GREEDY, (1, 7, 3, 4)), row(SEEDED, (1, 2, 3, 4))]),
        shares_row("float32+graphs", "colocated", (GREEDY, 0.98)),
        answers_row("bfloat16+graphs", "colocated", [row(GREEDY, (1, 7, 3, 4)), row(SEEDED, (1, 8, 3, 4))]),
        shares_row("bfloat16+graphs", "colocated", (GREEDY, 0.9), (SEEDED, 0.1)),
        answers_row("float32+token-major", "colocated", [row(GREEDY, (1, 7, 3, 4))]),  # stock not asked yet
    ]
    found = bench.metrics_from_samples(samples)
    assert check_metrics(found) == []
    assert found["float32_disaggregated_equal_count"] == 2
    assert found["float32_disaggregated_placed_apart_count"] == 2
    assert found["bfloat16_graphs_colocated_unlike_either_count"] == 2
    assert found["cases_count"] == 6
    assert found["float32_cases_count"] == 4
    assert found["float32_equal_ratio"] == 0.75
    assert found["least_share_ratio"] == 0.9
    assert (found["wrong_count"], found["not_judged_count"]) == (0, 1)
    assert len(bench.table(samples)) == 4
    assert bench.metrics_from_samples(samples[:2]).keys().isdisjoint({"least_share_ratio"})
    assert bench.metrics_from_samples([])["cases_count"] == 0


class Machine:
    """In place of what starts processes. `ours`: answers by (mode, topology), else stock's."""

    def __init__(self, monkeypatch, seconds=0.0):
        self.ours, self.broken, self.share, self.ran = {}, set(), 0.99, []
        self.now, self.seconds = 0.0, seconds
        monkeypatch.setattr(bench.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(rig, "cases", lambda: CASES)
        monkeypatch.setattr(rig, "stock_answers", self.stock_answers)
        monkeypatch.setattr(rig, "cluster_answers", self.cluster_answers)

    def stock_answers(self, _folder, asked, mode):
        self.ran.append(("stock", mode, len(asked)))
        if ("stock", mode) in self.broken:
            raise RuntimeError("stock does not start")
        if asked == CASES:
            return {case["id"]: stock_says(case) for case in asked}
        token = {case["id"]: int(*case["params"]["logit_bias"]) for case in asked}
        nearness = {"ours": math.log(self.share), "stock": 0.0}
        return {
            name: {"choices": [{"token_ids": [token[name]], "logprobs": [nearness[name.partition("-")[2]]]}]}
            for name in token
        }

    def cluster_answers(self, _folder, options, mode, topology, asked, stock):
        self.now += self.seconds
        self.ran.append((mode, topology))
        if (mode, topology) in self.broken:
            raise AssertionError("quire up: 1")
        ours = self.ours.get((mode, topology), {})
        rows = [shares.compared(c, [ours.get(c["id"], [1, 2, 3, 4])], stock[c["id"]]) for c in asked]
        return answers_row(mode, topology, rows, device=options.device)


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def call(tmp_path, *flags):
    return bench.main(
        ["--keep", str(tmp_path / "kept.jsonl"), "--out", str(tmp_path), "--commit", "c", *flags]
    )


def test_a_whole_call_asks_stock_once_for_each_mode_and_writes_the_result(machine, tmp_path):
    machine.ours["bfloat16+graphs", "colocated"] = {"greedy-5": [1, 2, 7, 4]}
    assert call(tmp_path) == 0
    asked = [ran for ran in machine.ran if ran[0] == "stock"]
    assert asked == [
        ("stock", "float32", 3),
        ("stock", "float32+graphs", 3),
        ("stock", "bfloat16+graphs", 3),
        ("stock", "bfloat16+graphs", 2),
    ]
    assert len(machine.ran) == 4 + 13
    result = load_result(tmp_path / "h200-exactness.json")
    assert result["metrics"] == bench.metrics_from_samples(result["samples"])
    assert result["metrics"]["least_share_ratio"] == pytest.approx(0.99)
    assert result["metrics"]["cases_count"] == 39
    before = len(machine.ran)
    assert call(tmp_path) == 0
    assert len(machine.ran) == before


def test_a_wrong_answer_is_written_and_ends_with_status_one(machine, tmp_path, capsys):
    machine.ours["bfloat16+graphs", "colocated"] = {"greedy-5": [1, 2, 7, 4]}
    machine.share = 0.6
    assert call(tmp_path) == 1
    metrics = json.loads((tmp_path / "h200-exactness.json").read_text())["metrics"]
    assert metrics["wrong_count"] == 1
    assert metrics["least_share_ratio"] == pytest.approx(0.6)
    assert "wrong: bfloat16+graphs colocated: greedy-5" in capsys.readouterr().out


def test_one_that_fails_leaves_the_others_and_is_run_again_by_the_next_call(machine, tmp_path, capsys):
    machine.broken = {("float32+token-major", "disaggregated"), ("stock", "float32+graphs")}
    assert call(tmp_path) == 1
    assert not (tmp_path / "h200-exactness.json").exists()
    assert "failed: float32+token-major disaggregated: quire up: 1" in capsys.readouterr().out
    assert machine.ran.count(("stock", "float32+graphs", 3)) == 1  # not again for the other topology
    machine.broken, machine.ran = set(), []
    assert call(tmp_path) == 0
    assert machine.ran == [
        ("stock", "float32+graphs", 3),
        ("float32+graphs", "disaggregated"),
        ("float32+graphs", "colocated"),
        ("float32+token-major", "disaggregated"),
        *(("float32+graphs", topology) for topology in bench.TWO_GPUS),
    ]
    assert (tmp_path / "h200-exactness.json").exists()


def test_what_failed_to_be_asked_is_asked_later_without_another_run(machine, tmp_path):
    machine.ours["bfloat16+graphs", "colocated"] = {"greedy-5": [1, 2, 7, 4]}
    flags = ("--modes", "bfloat16+graphs", "--topologies", "colocated")
    assert call(tmp_path, *flags) == 0
    kept = tmp_path / "kept.jsonl"
    kept.write_text("".join(line + "\n" for line in kept.read_text().splitlines() if '"shares"' not in line))
    machine.broken, machine.ran = {("stock", "bfloat16+graphs")}, []
    assert call(tmp_path, *flags) == 1
    machine.broken, machine.ran = set(), []
    assert call(tmp_path, *flags) == 0
    assert machine.ran == [("stock", "bfloat16+graphs", 2)]
    assert not (tmp_path / "h200-exactness.json").exists()  # the other runs are not there


def test_nothing_is_begun_without_time_for_it_and_the_next_call_goes_on(monkeypatch, tmp_path):
    machine = Machine(monkeypatch, seconds=100.0)
    assert call(tmp_path, "--budget-s", "250") == bench.OUT_OF_TIME
    runs = [ran for ran in machine.ran if ran[0] != "stock"]
    assert runs == [
        ("float32", "disaggregated"),
        ("float32", "colocated"),
        ("float32+token-major", "disaggregated"),
    ]
    while not (tmp_path / "h200-exactness.json").exists():
        call(tmp_path, "--budget-s", "250")
    runs = [ran for ran in machine.ran if ran[0] != "stock"]
    assert len(runs) == len(set(runs)) == 13


def test_a_run_on_the_cpu_is_none_of_the_gpus_and_writes_no_result(machine, tmp_path):
    assert call(tmp_path, "--device", "cpu") == 0
    assert not (tmp_path / "h200-exactness.json").exists()
    assert call(tmp_path) == 0
    assert json.loads((tmp_path / "h200-exactness.json").read_text())["metrics"]["cases_count"] == 39
    assert len(machine.ran) == 3 + 10 + 3 + 13


def test_unknown_names_are_refused():
    with pytest.raises(SystemExit):
        bench.parsed(["--modes", "float64"])


def test_the_modes_are_what_workers_know_and_stock_has_no_layouts():
    assert {rig.stock_mode(mode) for mode in bench.MODES} == {"float32", "float32+graphs", "bfloat16+graphs"}
    assert rig.worker_settings("float32", "cuda") == {"enforce_eager": "true"}
    assert rig.worker_settings("bfloat16+graphs", "cuda") == {}
    found = rig.worker_settings("float32+layer-major", "cuda")
    assert found == {
        "enforce_eager": "true", "kv_layout": "layer-major", "block_tokens": "4096", "slot_kernel": "torch_sdpa",
    }  # fmt: skip
    assert rig.worker_settings("float32+token-major", "cpu") == {"kv_layout": "token-major"}


def test_the_cases_are_fifty_and_only_plain_greedy_ones_are_asked_by_probabilities():
    cases = rig.cases()
    assert len(cases) == 50
    by_other_means = {case["id"] for case in cases if not shares.is_plain(case)}
    assert {"penalties", "json-schema", "eos-first", "min-tokens", "n3-short"} <= by_other_means
    assert not any(name.startswith(("greedy-", "second-", "stop-")) for name in by_other_means)
