"""`quire advise`: the verdict follows the workload and the link, ends in time, and bad files are named by line."""

import itertools
import json
import math

import msgspec
import pytest
from typer.testing import CliRunner

from deploy.local import cmd_advise
from deploy.local.cli import app
from loadtest.profiler.simulated import machine_of
from loadtest.registry import RESULTS
from loadtest.reports.summary import Slo
from loadtest.simulator.advice import BreakEven, Layout, LinkNow, sentence
from loadtest.simulator.advise import Advisor, Question, default_slo
from loadtest.simulator.hardware import from_coefficients, from_data_sheet, from_file, model_shape
from loadtest.simulator.known import Setting
from loadtest.simulator.request import mean_rate_per_s
from loadtest.simulator.sustained import EndlessTrace
from shared.errors import InvalidRequest, SettingsError
from tests.support.simulated import conversations, mooncake_lines, plain

pytestmark = pytest.mark.slow

MACHINE = from_data_sheet("h200", "llama-8b")
# long prompts between decodes that may not wait: chunks of 8,192 tokens take 200 ms on this machine
STEADY = [plain(n, 250.0 * n, 8000, 60) for n in range(48)]


def ask(link_gb_per_s, *, slo=None, budget_s=60.0, instances=3, requests=STEADY):
    question = Question(requests, MACHINE, instances, slo or Slo(4000, 15), Setting(link_gb_per_s))
    return Advisor(question, lambda: 0.0 if budget_s else 1.0, budget_s).advise()


def test_tight_gaps_between_tokens_and_a_fast_link_want_disaggregation():
    advice = ask(100.0)
    assert advice.disaggregate
    assert (advice.prefill, advice.decode) == (2, 1)
    assert 0.1 < advice.break_even_gb_per_s < 100
    assert advice.sentence.startswith("Disaggregate, 2 prefill to 1 decode")
    assert [layout.name for layout in advice.layouts] == ["3 colocated", "1P:2D", "2P:1D"]


def test_a_spent_budget_still_gives_a_verdict_and_says_so():
    advice = ask(100.0, budget_s=0.0)
    assert not advice.within_budget
    assert not advice.decided
    assert advice.sentence.startswith("Undecided")
    assert advice.num_simulations <= 6


def test_the_runs_at_the_traces_own_rate_keep_to_the_budget_too():
    ticks = itertools.count()  # one a report
    advice = Advisor(Question(STEADY, MACHINE, 3, Slo(4000, 15)), lambda: next(ticks), 2_000.0).advise()
    assert advice.num_simulations == 2, "one whole run of 48 requests, and a part of the next"
    assert [layout.is_simulated for layout in advice.layouts] == [True, False, False]
    assert [layout.ttft_p50_ms > 0 for layout in advice.layouts] == [True, False, False]
    assert {layout.rate_words() for layout in advice.layouts} == {"not tried"}


def test_a_run_lasts_no_longer_than_is_simulated_however_late_a_first_token_may_be():
    trace = EndlessTrace(STEADY, Slo(600_000, 50), 4.0)
    assert trace.num_at(1.0) <= 1_200 + len(STEADY)
    for ttft_ms in (600_001, math.inf):
        with pytest.raises(InvalidRequest, match="--slo-ttft-ms of at most 600000"):
            ask(1.0, slo=Slo(ttft_ms, 50))


def test_of_a_trace_in_ticks_those_are_judged_who_are_counted():
    # 60 at once every 3 s, of which 24 are in time; the warm-up ends within such a tick
    ticks = [plain(n, n // 60 * 3000.0, 3000, 20) for n in range(120)]
    found = []
    for share in (0.3, 0.4, 0.42):
        advisor = Advisor(Question(ticks, MACHINE, 2, Slo(2000, 50), good_share=share), lambda: 0.0, 1.0)
        found.append(advisor._holds(Layout("2 colocated", 0, 0, 2), 4.0, 20.0))
    assert found == [True, True, False]


def test_where_a_run_may_not_be_long_enough_the_rate_is_said_to_be_at_least():
    question = Question(STEADY, MACHINE, 3, Slo(2000, 10_000), Setting(100.0), most_simulated=300)
    advice = Advisor(question, lambda: 0.0, 1.0).advise()
    assert not advice.disaggregate
    assert not advice.decided
    assert "3 colocated sustain at least 4." in advice.sentence
    assert advice.layouts[0].failed_rate_per_s == 0


def test_copies_of_a_trace_share_nothing_with_one_another_and_keep_what_is_shared_within():
    first = conversations(3)
    trace = EndlessTrace(first, Slo(2000, 50), mean_rate_per_s(first))
    load = trace.at(trace.rate_per_s * 4)
    n = len(first)
    assert load.num_judged % n == 0
    judged = [one for one in load.requests if one.request_id in load.judged_ids()]
    assert judged == load.requests[-load.num_judged :]
    assert judged[-1].arrival_ms - judged[0].arrival_ms > 0.9 * 30_000
    assert len({one.request_id for one in load.requests}) == len(load.requests)
    times = [one.arrival_ms for one in load.requests]
    assert times == sorted(times)
    assert not {b for one in load.requests[:n] for b in one.blocks} & {
        b for one in load.requests[n : 2 * n] for b in one.blocks
    }
    for one, other in zip(first, load.requests[n : 2 * n], strict=True):
        assert [b[4:] for b in one.blocks] == [b[4:] for b in other.blocks]
        assert (one.depends_on is None) == (other.depends_on is None)
        assert other.depends_on is None or other.depends_on == one.depends_on + n
        assert other.session == f"{one.session}#1"


def test_what_cannot_be_divided_or_met_is_said():
    with pytest.raises(InvalidRequest, match="at least 2 instances"):
        ask(1.0, instances=1)
    assert "loosen it" in ask(1.0, slo=Slo(0.001, 0.001)).sentence


def test_the_default_slo_follows_the_machine_and_is_never_tighter_than_two_seconds():
    assert default_slo([plain(0, 0, 100, 5)], MACHINE) == Slo(2000.0, 50.0)
    assert default_slo([plain(0, 0, 60_000, 5)], MACHINE).ttft_ms > 4000


def test_coefficients_come_as_they_are_or_as_quire_model_show_prints_them():
    plain_json = json.loads(json.dumps({"shape": {
        "num_layers": 2, "hidden_size": 8, "intermediate_size": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4,
        "vocab_size": 10, "dtype_bytes": 4}, "step_overhead_ms": 7.0}))  # fmt: skip
    for read in (plain_json, {"prefill-0": {}, "decode-0": {"coefficients": plain_json, "corrections": {}}}):
        machine = from_coefficients(read, memory_tokens=100, source="a file")
        assert machine.prices.decode_ms(1, 0) >= 7.0
        assert machine.prices.kv_bytes_per_token == 64
    with pytest.raises(SettingsError, match="quire model show --json"):
        from_coefficients({"prefill-0": {}}, memory_tokens=100, source="a file")


def test_calibrated_coefficients_are_scaled_to_the_engines_that_are_asked_for():
    read = msgspec.to_builtins(msgspec.structs.replace(MACHINE.prices.coefficients, tp=1, device="d"))
    one = from_coefficients(read, memory_tokens=100, source="a file")
    two = from_coefficients(read, memory_tokens=100, source="a file", tp=2)
    assert (one.calibrated, two.calibrated) == (True, False)
    assert two.words == "coefficients of d from a file, scaled from TP 1 to 2"
    assert two.prices.prefill_ms(8_000) < 0.7 * one.prices.prefill_ms(8_000)
    same = from_coefficients(read | {"tp": 2}, memory_tokens=100, source="a file", tp=0)
    assert (same.prices.coefficients.tp, same.calibrated) == (2, True)


def test_a_cost_model_result_is_taken_as_costs_and_another_file_is_refused_in_words(tmp_path):
    path = RESULTS / "cost-model.json"
    found = from_file(path, gpu="h200", model="llama-8b")
    measured = machine_of("h200", "llama-8b", 1, chunk_tokens=8192)
    assert found.calibrated
    assert found.prices.coefficients == measured.prices.coefficients
    assert found.memory_tokens == measured.memory_tokens
    assert not from_file(path, gpu="h200", model="llama-8b", tp=2).calibrated
    with pytest.raises(SettingsError, match=r"no costs of llama-8b on h100; it was measured on .*H200"):
        from_file(path, gpu="h100", model="llama-8b")
    with pytest.raises(SettingsError, match=r"crossover\.json is a result file without cost coefficients"):
        from_file(RESULTS / "crossover.json")
    other = tmp_path / "other.json"
    other.write_text('{"some": 1}')
    with pytest.raises(SettingsError, match=r"other\.json has no cost coefficients; expected what"):
        from_file(other)


def test_where_the_costs_come_from_is_said_before_the_verdict(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(mooncake_lines(2, count=20)))
    for gpu, words in (("h200", "calibrated: llama-8b on 1 x NVIDIA H200"), ("l40s", "data sheet: llama-8b")):
        done = quire(path, "--gpus", 2, "--requests", 10, "--slo-ttft-ms", 0.01, "--gpu", gpu)
        told = " ".join(done.stdout.split())
        assert words in told
        assert told.index(words) < told.index("No layout keeps the SLO")


@pytest.mark.parametrize("link", [None, 0.01, 2.0])
def test_a_division_that_gains_too_little_is_not_said_to_stop_paying(link):
    colocated, best = Layout("2 colocated", 0, 0, 2, 10.0, 10.4), Layout("1P:1D", 1, 1, 0, 10.2, 10.6)
    found = BreakEven(link, best if link else None, is_known=True)
    words = sentence(colocated, best, pays=False, gain=1.02, link=found, link_now=LinkNow(20.0, "assumed"))
    assert words.startswith("Keep them colocated")
    assert "1.02x; it takes 1.05x" in words
    assert "stops paying" not in words


def quire(*words):
    return CliRunner().invoke(app, ["advise", *map(str, words)])


def test_a_stretch_that_is_only_a_burst_of_the_trace_is_said_to_be_one(tmp_path):
    path = tmp_path / "bursts.csv"
    times = [60_000 * burst + 100 * n for burst in range(4) for n in range(20)]
    path.write_text("timestamp,input_tokens,output_tokens\n" + "".join(f"{at},3000,5\n" for at in times))
    words = (path, "--gpus", 2, "--slo-ttft-ms", 0.01)
    assert "a burst of a trace with 0.4" in " ".join(quire(*words, "--requests", 20).stdout.split())
    assert "a burst of a trace" not in " ".join(quire(*words, "--requests", 80).stdout.split())


def test_lengths_alone_are_advised_on_at_a_rate(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("input_tokens,output_tokens\n" + "3000,5\n" * 20)
    words = (path, "--gpus", 2, "--slo-ttft-ms", 0.01, "--requests", 20)
    read = json.loads(quire(*words, "--rate", 3, "--json").stdout)
    assert read["simulated_requests"] == 20
    assert 1.5 < read["trace_rate_per_s"] < 6


def test_what_there_was_no_time_to_simulate_is_not_shown_as_nothing(tmp_path, monkeypatch):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(mooncake_lines(2, count=20)))
    monkeypatch.setattr(cmd_advise, "BUDGET_S", 0.0)
    told = " ".join(quire(path, "--gpus", 2, "--requests", 10).stdout.split())
    assert "1P:1D not tried - - - - - -" in told
    assert "0.0%" not in told


def test_a_request_that_is_not_simulated_needs_no_room(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("timestamp,input_tokens,output_tokens\n0,1500000,5\n" + "900000,3000,5\n" * 40)
    words = (path, "--gpus", 2, "--slo-ttft-ms", 0.01, "--json", "--requests")
    assert json.loads(quire(*words, 20).stdout)["simulated_requests"] == 20
    assert "1500005 tokens has no room" in str(quire(*words, 41).exception)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_a_data_sheet_is_refused_for_a_mixture_of_experts(tmp_path, key):
    config = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32,
              "vocab_size": 32000}  # fmt: skip
    path = tmp_path / "config.json"
    for dense in (config, config | {key: None}, config | {key: 1, "num_experts_per_tok": 0}):
        path.write_text(json.dumps(dense))
        assert from_data_sheet("h200", str(tmp_path)).memory_tokens > 100_000
    path.write_text(json.dumps(config | {key: 8, "num_experts_per_tok": 2}))
    with pytest.raises(SettingsError, match=r"mixture of experts.*--cost"):
        from_data_sheet("h200", str(tmp_path))
    assert model_shape(str(tmp_path)).intermediate_size == 2 * 14336, "of measured costs it is looked for"


def test_bad_files_and_options_are_errors_that_say_what_is_expected(tmp_path, capsys):
    path = tmp_path / "t.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,5,5\n")
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("input_tokens,output_tokens\n5,5\n")
    for words, says in (
        ((path,), "t.csv:2"),
        ((path,), "expected the columns TIMESTAMP"),
        ((tmp_path / "none.csv",), "cannot be read"),
        ((lengths,), "give --rate"),
        ((path, "--share", 2), "--share"),
    ):
        done = quire(*words)
        assert done.exit_code != 0
        assert says in done.output + capsys.readouterr().err + str(done.exception or "")
