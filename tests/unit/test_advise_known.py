"""What a running cluster measured of itself reaches the verdict of `quire advise`: corrections, links, sizes."""

import json

import msgspec
import pytest
from typer.testing import CliRunner

from deploy.local import cmd_advise
from deploy.local.cli import app
from deploy.local.instances import cost_of
from loadtest.simulator.cluster import simulate
from loadtest.simulator.hardware import (
    MEMORY_TOKENS,
    from_coefficients,
    from_data_sheet,
    from_file,
    kv_bytes_of,
    weights_gb,
)
from loadtest.simulator.known import Setting, setting_of
from loadtest.simulator.prices import ModelPrices
from loadtest.simulator.spec import ClusterSpec, roles_of
from services.mempool.core.pd_caching import PdCaching
from shared.errors import SettingsError
from tests.support.simulated import mooncake_lines, plain

COEFFICIENTS = from_data_sheet("h200", "llama-8b").prices.coefficients
PLAIN = msgspec.to_builtins(COEFFICIENTS)


def slower(times):
    """The same instance, every cost so many times as high."""
    costs = [name for name in COEFFICIENTS.__struct_fields__ if "_ms" in name and name != "calibration_ms"]
    changes = {name: times * getattr(COEFFICIENTS, name) for name in costs}
    return msgspec.to_builtins(msgspec.structs.replace(COEFFICIENTS, **changes))


def corrections(prefill=(1.0, 0), decode=(1.0, 0)):
    return {
        kind: {"factor": factor, "error_ratio": 0.1, "num_observed": seen}
        for kind, (factor, seen) in (("prefill", prefill), ("decode", decode))
    }


def link(gb_per_s, latency_ms=1.0, num_measured=0, num_given_up=0):
    return {
        "gb_per_s": gb_per_s, "latency_ms": latency_ms, "num_measured": num_measured, "num_given_up": num_given_up
    }  # fmt: skip


def machine(rows, **how):
    return from_coefficients(rows, memory_tokens=0, source="a cluster", **how)


def test_predictions_are_corrected_by_who_has_seen_most_of_each_kind_of_work():
    rows = {
        "prefill-0": {"coefficients": PLAIN, "corrections": corrections(prefill=(1.5, 40))},
        "prefill-1": {"coefficients": PLAIN, "corrections": corrections(prefill=(3.0, 2))},
        "decode-0": {"coefficients": slower(2), "corrections": corrections(decode=(0.4, 900))},
    }
    found, plain_one = machine(rows), machine({"prefill-0": {"coefficients": PLAIN}})
    assert found.prices.prefill_ms(3_000) == pytest.approx(1.5 * plain_one.prices.prefill_ms(3_000))
    # decode-0's coefficients say twice the time of those that are taken, and 0.4 of that is right
    assert found.prices.decode_ms(8, 8_192) == pytest.approx(0.8 * plain_one.prices.decode_ms(8, 8_192))
    assert "prefill x 1.5 (40 seen by prefill-0), decode x 0.8 (900 seen by decode-0)" in found.words
    assert "corrected" not in plain_one.words
    assert (found.calibrated, machine(rows, tp=2).calibrated) == (True, False)


def test_an_instance_of_another_shape_corrects_nothing():
    other = {**PLAIN, "shape": {**PLAIN["shape"], "num_layers": 2}}
    rows = {
        "decode-0": {"coefficients": PLAIN, "corrections": corrections()},
        "decode-1": {
            "coefficients": other,
            "corrections": corrections(decode=(3.0, 99)),
            "engine": {"kv_tokens": 9},
        },
    }
    found = machine(rows)
    assert (found.prices.decode_correction, found.memory_tokens) == (1.0, MEMORY_TOKENS)
    assert found.memory_source == "assumed"


@pytest.mark.parametrize(
    "bad", [{"corrections": {"decode": {"factor": 0.0}}}, {"links": {"peer": link(-1.0)}}]
)
def test_a_factor_or_rate_that_is_none_is_refused(bad):
    with pytest.raises(SettingsError, match="a cluster has no cost coefficients"):
        machine({"decode-0": {"coefficients": PLAIN, **bad}})


def test_the_simulated_scheduler_knows_the_corrections_as_the_real_one_does():
    prices = ModelPrices(COEFFICIENTS, prefill_correction=4.0)
    requests = [
        plain(n, 30_000.0 * n, 6_000, 5) for n in range(3)
    ]  # long after the last: a correction could fade
    found = simulate(ClusterSpec(roles_of(0, 0, 1)), prices, requests).outcomes
    for one in found:
        assert one.predicted_ttft_ms == pytest.approx(one.ttft_ms, rel=0.1)


def test_the_link_that_most_transfers_took_is_taken_and_named():
    peer, remote = link(3.0, 0.7, 5), link(0.5, 2.5, 30, 2)
    rows = {
        "prefill-0": {
            "coefficients": PLAIN,
            "links": {"peer": peer, "remote": link(1.0), "dram": link(11.0, 0.5, 1)},
        },
        "decode-0": {"coefficients": PLAIN, "links": {"peer": link(5.0), "remote": remote}},
    }
    found = setting_of(machine(rows).known, "theirs")
    assert (found.link_gb_per_s, found.link_latency_ms) == (0.5, 2.5)
    assert found.source("link_gb_per_s") == "measured by decode-0: 30 transfers from another host, 2 given up"
    assert found.dram.bytes_per_ms == 11e6
    given = setting_of(machine(rows).known, "theirs", 7.0)
    assert (given.link_gb_per_s, given.link_latency_ms) == (7.0, Setting().link_latency_ms)
    assert given.source("link_gb_per_s") == "given"
    del rows["decode-0"]["links"]["remote"]
    assert setting_of(machine(rows).known, "theirs").link_gb_per_s == 3.0
    del rows["prefill-0"]["links"]["peer"]
    nobody = setting_of(machine(rows).known, "theirs")
    assert (nobody.link_gb_per_s, nobody.source("link_gb_per_s")) == (20.0, "assumed")


def test_sizes_that_nobody_says_are_assumed_and_the_least_of_the_others_counts():
    rows = {
        "prefill-0": {"coefficients": PLAIN, "engine": {"max_num_seqs": 64, "pd_caching": "1"}},
        "decode-0": {"coefficients": PLAIN, "engine": {"max_num_seqs": 16, "kv_tokens": 5_000}},
    }
    found = setting_of(machine(rows).known, "theirs")
    assert (found.max_running, found.source("max_running")) == (16, "theirs")
    assert (found.pd_caching, found.source("pd_caching")) == (PdCaching.PREFILL, "theirs")
    assert (found.dram_tokens, found.source("dram_tokens")) == (0, "assumed")
    assert (machine(rows).memory_tokens, machine(rows).memory_source) == (5_000, "from a cluster")


def test_an_engine_of_more_gpus_has_as_many_bytes_for_weights_and_kv_on_each():
    tokens, shape = 500_000, COEFFICIENTS.shape
    rows = {"colocated-0": {"coefficients": PLAIN, "engine": {"kv_tokens": tokens}}}
    two = machine(rows, tp=2)
    weights = weights_gb(shape) * 1e9 / kv_bytes_of(shape, 1)
    assert two.memory_tokens == pytest.approx(2 * tokens + weights, abs=2)
    assert "as many bytes a GPU at TP 2" in two.memory_source
    sixteen = machine(rows, tp=16).memory_tokens  # 8 KV heads: each is on two of its GPUs
    assert sixteen == pytest.approx((16 * tokens + 15 * weights) / 2, abs=2)
    halved = {"colocated-0": {"coefficients": {**PLAIN, "tp": 2}, "engine": {"kv_tokens": 100_000}}}
    with pytest.raises(SettingsError, match="no room for the weights"):
        machine(halved, tp=1)
    assert from_coefficients(rows, memory_tokens=77, source="a cluster", tp=2).memory_tokens == 77


def test_a_worker_tells_its_engines_sizes_and_its_share_of_host_memory():
    cost = {"coefficients": PLAIN, "corrections": corrections()}
    status = {
        "cost": cost, "num_kv_blocks": 100, "block_tokens": 32, "block_bytes": 1_000, "content_key": "c",
        "max_num_seqs": 48, "pd_caching": "2",
    }  # fmt: skip
    dram = {"content_key": "c", "devices": ["cpu:dram"], "num_pages": 60, "page_bytes": 1_000, "engines": []}
    gpu = {**dram, "devices": ["cuda:0"], "engines": ["engine decode-0: 1 of 9 pages"]}
    pool = {"spaces": [gpu, {**gpu, "devices": ["cuda:1"]}, dram, {**dram, "content_key": "other"}]}
    assert cost_of(status, pool)["engine"] == {
        "kv_tokens": 3_200, "max_num_seqs": 48, "dram_tokens": 30 * 32, "pd_caching": "2"
    }  # fmt: skip
    assert cost_of(status, {"spaces": [gpu]})["engine"]["dram_tokens"] == 0
    assert "dram_tokens" not in cost_of(status)["engine"]
    assert cost_of({"cost": cost})["engine"] == {}


# -- to the verdict -----------------------------------------------------------------------------------


class Told:
    """`quire advise --cost running` of an instance twenty times slower than an H200 that says this."""

    def __init__(self, folder, monkeypatch):
        self._path, self._monkeypatch = folder / "t.jsonl", monkeypatch
        self._path.write_text("\n".join(mooncake_lines(2, count=30)))
        monkeypatch.setattr(cmd_advise, "BUDGET_S", 600.0)  # on a busy machine as on a quiet one
        self.plain = self.read()

    def __call__(self, *words, **row):
        row = {"coefficients": slower(20), "corrections": corrections(), "links": {}, **row}
        self._monkeypatch.setattr(cmd_advise, "instances", lambda: {"colocated-0": row})
        words = (
            "--cost",
            "running",
            "--gpus",
            2,
            "--requests",
            30,
            "--slo-ttft-ms",
            4000,
            "--slo-tpot-ms",
            400,
            *words,
        )
        done = CliRunner().invoke(app, ["advise", str(self._path), *map(str, words)])
        assert done.exit_code == 0, done.output
        return " ".join(done.stdout.split())

    def read(self, **row):
        return json.loads(self("--json", **row))


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Told(tmp_path_factory.mktemp("advise"), monkeypatch)


THRICE = corrections(decode=(3.0, 40))


@pytest.mark.slow
def test_a_correction_turns_the_verdict_and_so_does_a_measured_link(told):
    assert not told.plain["disaggregate"]
    fast = told(corrections=THRICE, links={"peer": link(5.0, 1.0, 7)})
    assert "Disaggregate, 1 prefill to 1 decode" in fast
    assert "corrected as measured since: decode x 3 (40 seen by colocated-0)" in fast
    assert "link: 5 GB/s (measured by colocated-0: 7 transfers from another space)" in fast
    assert "stops paying (measured now: 5 GB/s)" in fast
    slow = told.read(corrections=THRICE, links={"peer": link(0.05, 1.0, 7)})
    assert (slow["disaggregate"], slow["link_gb_per_s"]) == (False, 0.05)


@pytest.mark.slow
def test_sizes_of_the_running_engines_reach_the_verdict(told):
    both, assumed = told.plain["layouts"], told.plain["engine_sources"]
    assert set(assumed.values()) == {"assumed"}
    one = told.read(engine={"max_num_seqs": 1})
    assert 0 < one["layouts"][0]["max_rate_per_s"] < 0.5 * both[0]["max_rate_per_s"]
    assert one["engine_sources"] == {**assumed, "max_running": "from the running cluster"}
    basic = told.read(engine={"pd_caching": "basic"})
    assert [layout["hit_ratio"] for layout in basic["layouts"]] == [0.0, 0.0]
    assert 0 < basic["layouts"][0]["max_rate_per_s"] < both[0]["max_rate_per_s"]
    small = told.read(engine={"kv_tokens": 6_000})
    behind = told.read(engine={"kv_tokens": 6_000, "dram_tokens": 200_000})
    assert behind["layouts"][1]["hit_ratio"] > 1.2 * small["layouts"][1]["hit_ratio"]
    assert behind["engine"] == {
        "memory_tokens": 6_000,
        "max_running": 256,
        "dram_tokens": 200_000,
        "pd_caching": "3",
    }


@pytest.mark.slow
def test_what_is_assumed_and_what_is_given_is_said(told, monkeypatch):
    monkeypatch.setattr(cmd_advise, "BUDGET_S", 0.0)
    said = told("--memory-tokens", 50_000, "--link-gb-per-s", 4, links={"peer": link(5.0, 1.0, 7)})
    assert "link: 4 GB/s (given); an engine: KV of 50000 tokens (given)" in said
    assert "at most 256 requests at once (assumed)" in said


def test_a_file_of_model_show_is_taken_as_the_running_cluster_is(tmp_path):
    path = tmp_path / "shown.json"
    row = {"coefficients": PLAIN, "corrections": THRICE, "links": {"peer": link(5.0, 1.0, 7)}}
    path.write_text(json.dumps({"decode-0": {**row, "engine": {"kv_tokens": 5_000}}}))
    found = from_file(path)
    assert (found.prices.decode_correction, found.memory_tokens) == (3.0, 5_000)
    assert setting_of(found.known, "shown.json").link_gb_per_s == 5.0
