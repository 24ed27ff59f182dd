"""bench_pages_variants.py: ratios over the mean of two defaults, counts of checksums, resume, exit status."""

import json
import subprocess
from pathlib import Path

import pytest

from loadtest import bench_pages_variants as bench
from loadtest import verify_results
from loadtest.progress import Progress
from loadtest.registry import MEASURES
from loadtest.results import check_metrics, load_result
from services.mempool import config

CHECKS = {
    "checks_pages_summed": 20, "checks_pages_checked": 8, "checks_pages_skipped": 1, "checks_pages_corrupt": 0,
    "checks_copies_wrong": 0,
}  # fmt: skip


def rows(
    variant: str, run: int, *, wall_s=1.0, step_ms=10.0, ttft_ms=100.0, leased=2, **checks: int
) -> list[dict]:
    """Two rounds of two prompts each; cached ones take half the time and half the TTFT."""
    common = {"variant": variant, "run": run}
    out = [
        {
            **common, "kind": kind, "round": number, "wall_s": wall_s * share, "output_tokens": 1_000,
            "ttft_ms": [ttft_ms * share] * 2, "gaps_ms": [step_ms], "steps_ms": [step_ms] * 3,
        }
        for number in range(2)
        for kind, share in (("cold", 1.0), ("cached", 0.5))
    ]  # fmt: skip
    leases = {"cold-0": 0, "cached-0": leased, "cached-1": 2}
    facts = {"block_tokens": 64, "leased": leases, "checks": CHECKS | checks, "unread": 0, "mapped": {}}
    return [*out, {**common, "kind": "facts", **facts}]


def whole(**checks: int) -> list[dict]:
    """All variants; the second default takes 1.5 times as long as the first."""
    return [
        *rows("default", 0), *rows("block-32", 1, wall_s=2.5, step_ms=15.0),
        *rows("checksums-all", 2, ttft_ms=300.0, leased=1, **checks), *rows("default", 3, wall_s=1.5, step_ms=30.0),
    ]  # fmt: skip


def test_ratios_are_over_the_mean_of_both_defaults():
    found = bench.metrics_from_samples(whole())
    base = (1_000 + 1_000 / 1.5) / 2
    assert found["default_cold_tokens_per_s"] == pytest.approx(base)
    assert found["default_cached_tokens_per_s"] == pytest.approx(2 * base)
    assert found["block_32_throughput_ratio"] == pytest.approx(400 / base)
    assert found["block_32_step_p99_ratio"] == pytest.approx(15 / 20)
    assert found["block_32_ttft_ratio"] == pytest.approx(1.0)
    assert found["checksums_cold_throughput_ratio"] == pytest.approx(1_000 / base)
    assert found["checksums_cached_throughput_ratio"] == pytest.approx(1_000 / base)
    assert found["checksums_cached_ttft_ratio"] == pytest.approx(3.0)
    assert check_metrics(found) == []


def test_two_defaults_beside_one_another_say_what_the_noise_is_whichever_was_faster():
    for samples in (whole(), [*rows("default", 0, wall_s=1.5, step_ms=30.0), *rows("default", 3)]):
        found = bench.metrics_from_samples(samples)
        assert found["default_repeat_ratio"] == pytest.approx(1 / 1.5)
        assert found["default_repeat_step_p99_ratio"] == pytest.approx(3.0)
        assert found["default_repeat_ttft_ratio"] == pytest.approx(1.0)


def test_pages_are_counted_where_all_have_a_sum_and_what_is_wrong_everywhere():
    samples = [*whole(checks_pages_corrupt=2), *rows("default", 4, checks_copies_wrong=1)]
    found = bench.metrics_from_samples(samples)
    counts = {key: value for key, value in found.items() if key.startswith("pages_")}
    assert counts == {
        "pages_summed_count": 20, "pages_checked_count": 8, "pages_skipped_count": 1, "pages_unread_count": 0,
        "pages_wrong_count": 3,
    }  # fmt: skip
    assert found["checksums_leased_ratio"] == 0.75
    assert found["default_leased_ratio"] == 1.0


def test_what_was_not_measured_has_no_metric_and_a_run_that_did_not_end_does_not_count():
    assert bench.metrics_from_samples([]) == {}
    samples = [*rows("default", 0), *rows("block-32", 1)[:-1]]
    found = bench.metrics_from_samples(samples)
    assert not any(key.startswith(("block_32", "default_repeat")) for key in found)
    never_all = [
        {**row, "steps_ms": []} if row["kind"] == "cached" else row for row in rows("checksums-all", 2)
    ]
    found = bench.metrics_from_samples([*rows("default", 0), *never_all])
    assert "checksums_cold_step_p99_ratio" in found
    assert not {"checksums_step_p99_ratio", "checksums_cached_step_p99_ratio"} & found.keys()
    assert "-" in bench.table(never_all).splitlines()[1].split()


@pytest.fixture
def fake(monkeypatch):
    """Engines that answer at once: what was begun, and which fail."""
    begun, failing = [], {}

    def run_variant(name, number, _folder, _options):
        begun.append((name, number))
        if number in failing:
            raise failing[number]
        return next([*group] for group in runs if group[-1]["run"] == number)

    everything = whole()
    runs = [[row for row in everything if row["run"] == number] for number in range(4)]
    monkeypatch.setattr(bench, "run_variant", run_variant)
    return begun, failing, runs


def call(tmp_path, *more: str) -> int:
    given = ["--model-dir", "m", "--out", str(tmp_path), "--keep", str(tmp_path / "keep.jsonl")]
    return bench.main([*given, "--commit", "abc", *more])


def test_a_variant_that_fails_leaves_the_others_and_a_later_call_measures_it_alone(fake, tmp_path, capsys):
    begun, failing, _ = fake
    failing[1] = subprocess.CalledProcessError(1, "engine")
    assert call(tmp_path) == 1
    assert [number for _, number in begun] == [0, 1, 2, 3]
    assert not (tmp_path / "h200-vmm-variants.json").exists()
    assert "not measured yet: block-32 1" in capsys.readouterr().out
    failing.clear()
    begun.clear()
    assert call(tmp_path) == 0
    assert begun == [("block-32", 1)]
    path = tmp_path / "h200-vmm-variants.json"
    found = load_result(path)
    assert found["settings"]["variants"]["checksums-all"]["mempool"] == ["--checksum-rate", "1"]
    assert "--keep keep.jsonl" in found["command"]
    assert len(found["samples"]) == 20
    assert verify_results.problems_of(path, root=tmp_path) == []
    assert capsys.readouterr().out.splitlines()[-1].split()[:3] == ["1", "block-32", "400.0"]


def test_nothing_begins_that_may_end_beyond_the_budget(fake, tmp_path, capsys):
    assert call(tmp_path, "--budget-s", "60") == 1
    assert fake[0] == []
    assert "checksums-all 2: no time left" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"checks_pages_corrupt": 1}, "1 pages or copies were wrong"),
        ({"checks_copies_wrong": 2}, "2 pages or copies were wrong"),
        ({"checks_pages_checked": 0}, "no page was looked at"),
    ],
)
def test_a_wrong_page_or_no_look_at_any_is_the_exit_status(fake, tmp_path, capsys, changed, said):
    fake[2][2][-1]["checks"] = CHECKS | changed
    assert call(tmp_path) == 1
    assert said in capsys.readouterr().out
    assert (tmp_path / "h200-vmm-variants.json").exists()


def test_quick_measures_each_variant_once_and_writes_no_result(fake, tmp_path):
    assert call(tmp_path, "--quick") == 0
    assert fake[0] == [("default", 0), ("block-32", 1), ("checksums-all", 2)]
    assert not (tmp_path / "h200-vmm-variants.json").exists()


def test_an_order_of_unknown_variants_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench.parsed(["--order", "default,block-16"])
    assert "block-16; there are default, block-32, checksums-all" in capsys.readouterr().err


def test_every_mempool_gets_host_memory_and_each_side_its_variant(monkeypatch, tmp_path):
    started, engines, states = [], [], [{"checks_waiting": 3}, {"checks_waiting": 0}]

    class Fleet:
        def __init__(self, folder):
            self.folder = folder

        def __enter__(self):
            self.folder.mkdir(parents=True)
            return self

        def __exit__(self, *_):
            started.append("stopped")

        def start(self, _name, words, *, ready_url):
            started.append((words[words.index("services.mempool") + 1 :], ready_url))
            (self.folder / "mempool.log").write_text('{"event":"page_not_summed","level":"warning"}\n')

    def run(words, **how):
        engines.append((words, how))
        found = {"samples": [{"kind": "cold", "round": 0}], "block_tokens": 64, "leased": {}}
        Path(words[words.index("pages") + 2]).write_text(json.dumps(found))

    class Reply:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def read(self):
            counters = CHECKS | {"acquires": 5}
            return json.dumps({"counters": counters, "copies": {"spaces": {"0": "mapped"}}, **states.pop(0)})

    monkeypatch.setattr(bench, "Fleet", Fleet)
    monkeypatch.setattr(bench.subprocess, "run", run)
    monkeypatch.setattr(bench.time, "sleep", lambda _s: None)
    monkeypatch.setattr(bench.urllib.request, "urlopen", lambda _url, timeout: Reply())
    options = bench.parsed(["--model-dir", "m", "--engine-flags", "--requests 8 --block-tokens 16"])
    sample, facts = bench.run_variant("checksums-all", 2, tmp_path, options)
    assert sample == {"variant": "checksums-all", "run": 2, "kind": "cold", "round": 0}
    assert (facts["kind"], facts["checks"], facts["unread"]) == ("facts", CHECKS, 1)
    assert facts["mapped"] == {"0": "mapped"}
    assert (facts["checks_waiting"], states) == (0, [])
    flags, ready_url = started[0]
    settings = config.load(flags)
    assert (settings.checksum_rate, settings.dram_bytes) == (1.0, 8 << 30)
    assert ready_url == f"http://{settings.admin_listen}/health"
    assert started[1] == "stopped"
    assert settings.socket in engines[0][0]
    assert engines[0][1]["timeout"] <= 300

    states.append({"checks_waiting": 0})
    bench.run_variant("block-32", 1, tmp_path, options)
    assert config.load(started[2][0]).checksum_rate == 0.001
    assert engines[1][0][-2:] == ["--block-tokens", "32"]  # whatever --engine-flags say


def test_it_is_registered_and_progress_keeps_variants_apart(tmp_path):
    assert MEASURES[bench.NAME] == bench.__name__
    progress = Progress(tmp_path / "keep.jsonl")
    for row in rows("block-32", 0):
        progress.add(row)
    options = bench.parsed(["--model-dir", "m"])
    assert "default 0" in bench.missing(options, progress.samples)
