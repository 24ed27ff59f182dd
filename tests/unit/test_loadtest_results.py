"""Result files are written whole, and verify_results.py refuses those that cannot be quoted."""

import json
import lzma
import shutil
import subprocess

import pytest

from loadtest import bench_gateway, measure, registry, results, verify_results

SAMPLES = [
    {"system": "quire", "series": "closed_loop", "count": 10, "cpu_us": 3_000, "wall_s": 0.5, "failed": 0},
    {"system": "quire", "series": "closed_loop", "count": 10, "cpu_us": 5_000, "wall_s": 0.25, "failed": 1},
    {"system": "quire", "series": "closed_loop", "count": 10, "cpu_us": 4_000, "wall_s": 1.0, "failed": 0},
    {"system": "quire", "series": "ttft", "count": 4, "failed": 0, "ttft_ms": [1.0, 2.0, 3.0, 9.0]},
    {"system": "quire", "series": "tokenize", "count": 4, "cpu_us": 100},
    {"system": "litellm", "series": "streams", "count": 100, "cpu_us": 5_000, "wall_s": 1.0, "failed": 0},
]

TIMES = [number / 7 for number in range(9_000)]  # sixteen digits each
LONG = [{**row, "ttft_ms": TIMES} if row["series"] == "ttft" else row for row in SAMPLES]


def write(folder, **changes):
    fields = {"claim": "c", "command": "x", "settings": {}, "samples": SAMPLES}
    fields["metrics"] = bench_gateway.metrics_from_samples(changes.get("samples", SAMPLES))
    return results.write_result("gateway-cpu", folder=folder, **(fields | changes))


def samples_of(path):
    return path.parent / "samples" / f"{path.name}.xz"


def change_samples(path, change_text):
    text = lzma.decompress(samples_of(path).read_bytes()).decode()
    samples_of(path).write_bytes(lzma.compress(change_text(text).encode()))


def change(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return path


@pytest.fixture
def repo(tmp_path):
    """A repository with the measuring script in two commits, newest first."""
    if shutil.which("git") is None:
        pytest.skip("no git")
    script = tmp_path / registry.script_of("gateway-cpu")
    script.parent.mkdir(parents=True)

    def git(*args):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
        done = subprocess.run(
            ["git", "-C", tmp_path, *identity, *args], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    git("init", "-q", "-b", "main")
    commits = []
    for text in ("one", "two"):
        script.write_text(text)
        git("add", "-A")
        git("commit", "-q", "-m", text)
        commits.insert(0, git("rev-parse", "HEAD"))
    git("checkout", "-q", "-b", "side", commits[1])
    (tmp_path / "other").touch()
    git("add", "-A")
    git("commit", "-q", "-m", "side")
    commits.append(git("rev-parse", "HEAD"))
    git("checkout", "-q", "main")
    return tmp_path, commits, script


def test_metrics_are_medians_of_runs_and_quantiles_of_requests():
    assert bench_gateway.metrics_from_samples(SAMPLES) == {
        "cpu_us_per_request": 400.0,
        "closed_loop_requests_per_s": 20.0,
        "disaggregated_added_ttft_p50_ms": 2.0,
        "disaggregated_added_ttft_p99_ms": 9.0,
        "tokenize_us_per_request": 25.0,
        "cpu_without_tokenizing_us_per_request": 375.0,
        "litellm_cpu_us_per_chunk": 50.0,
        "failed_requests": 1.0,
        "litellm_failed_requests": 0.0,
    }


def test_a_written_file_can_be_read_by_people_and_names_its_origin(tmp_path):
    path = write(tmp_path)
    result = json.loads(path.read_text())
    assert set(verify_results.FIELDS) <= set(result)
    assert result["samples"] == SAMPLES
    assert result["script"] == "loadtest/bench_gateway.py"
    assert result["machine"]["num_cpus"] >= 1
    assert len(path.read_text().splitlines()) < 80


def test_times_of_which_only_quantiles_are_taken_are_kept_by_size(tmp_path):
    times = [float(one * 37 % 101) for one in range(200)]
    rows = [
        {"system": "quire", "series": "ttft", "ttft_ms": times, "times": {"tree_ms": times, "few_ms": [3, 1]}}
    ]
    kept = results.load_result(write(tmp_path, samples=rows))["samples"]
    assert kept[0]["ttft_ms"] == kept[0]["times"]["tree_ms"] == sorted(times)
    assert kept[0]["times"]["few_ms"] == [3, 1]


def test_the_file_of_before_moves_to_history(tmp_path):
    first = json.loads(write(tmp_path).read_text())
    write(tmp_path, claim="another")
    (old,) = (tmp_path / "history").iterdir()
    assert json.loads(lzma.decompress(old.read_bytes())) == first


def test_long_samples_lie_in_a_file_beside_the_readable_one_and_read_back_the_same(tmp_path):
    path = write(tmp_path, samples=LONG)
    head = json.loads(path.read_text())
    assert set(verify_results.FIELDS) - set(head) == {"samples"}
    assert head["samples_file"] == "samples/gateway-cpu.json.xz"
    assert len(path.read_text()) < 4_000
    assert samples_of(path).stat().st_size < len(json.dumps(LONG)) / 2
    found = results.load_result(path)
    assert found.pop("samples") == LONG
    assert found == {key: value for key, value in head.items() if key != "samples_file"}


def test_a_file_of_exactly_the_most_bytes_is_not_divided(tmp_path, monkeypatch):
    at_once = write(tmp_path / "a")
    whole = len(at_once.read_text())
    monkeypatch.setattr(results, "MAX_BYTES", whole)
    head = json.loads(at_once.read_text())
    samples = head.pop("samples")
    results._store(at_once, head, samples)
    assert "samples_file" not in json.loads(at_once.read_text())
    monkeypatch.setattr(results, "MAX_BYTES", whole - 1)
    results._store(at_once, head, samples)
    assert "samples_file" in json.loads(at_once.read_text())
    assert results.load_result(at_once) == head | {"samples": samples}


def test_the_same_samples_are_the_same_bytes(tmp_path):
    one, other = write(tmp_path / "a", samples=LONG), write(tmp_path / "b", samples=LONG, claim="another")
    assert samples_of(one).read_bytes() == samples_of(other).read_bytes()


def test_history_keeps_long_samples_with_their_file_and_none_is_left_behind(tmp_path):
    first = results.load_result(write(tmp_path, samples=LONG))
    assert "samples" not in json.loads(write(tmp_path, samples=[*LONG, SAMPLES[0]]).read_text())
    (old,) = (tmp_path / "history").iterdir()
    assert json.loads(lzma.decompress(old.read_bytes())) == first
    old.unlink()
    path = write(tmp_path)
    (old,) = (tmp_path / "history").iterdir()
    assert json.loads(lzma.decompress(old.read_bytes()))["samples"] == [*LONG, SAMPLES[0]]
    assert results.load_result(path)["samples"] == SAMPLES
    assert not samples_of(path).exists()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"no xz"),
        lambda path: path.write_bytes(path.read_bytes()[:-9]),
        lambda path: path.write_bytes(lzma.compress(b"[1,")),
        lambda path: path.write_bytes(lzma.compress(b"\xff")),
    ],
    ids=["missing", "empty", "not compressed", "cut off", "not JSON", "not UTF-8"],
)
def test_samples_that_cannot_be_read_are_an_error_that_names_their_file(tmp_path, spoil):
    path = write(tmp_path, samples=LONG)
    before = path.read_text()
    spoil(samples_of(path))
    with pytest.raises(
        ValueError, match=r"gateway-cpu\.json has its samples in samples/gateway-cpu\.json\.xz, which"
    ):
        results.load_result(path)
    assert "samples/gateway-cpu.json.xz" in verify_results.problems_of(path)[0]
    with pytest.raises(ValueError, match="cannot be read"):
        write(tmp_path)
    assert path.read_text() == before
    assert not (tmp_path / "history").exists()


@pytest.mark.parametrize(
    "metrics", [{"speed": 1.0}, {"cpu_us": float("nan")}, {"cpu_us": True}, {"ratio_of_things": 1.0}]
)
def test_metrics_without_unit_or_value_are_not_written(tmp_path, metrics):
    with pytest.raises(ValueError, match="metric"):
        write(tmp_path, metrics=metrics)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "key",
    [
        "ready_s",
        "pss_bytes",
        "cpu_us_per_request",
        "p99_ms",
        "hit_ratio",
        "out_tokens_per_s",
        "copy_gb_per_s",
    ],
)
def test_units_that_count(key):
    assert results.check_metrics({key: 1}) == []


def test_a_file_of_this_commit_whose_metrics_follow_from_its_samples_is_good(repo, tmp_path):
    root, commits, _ = repo
    path = change(write(tmp_path / "out"), commit=commits[0])
    assert verify_results.problems_of(path, root=root) == []


def test_a_changed_figure_or_sample_is_found(repo, tmp_path):
    root, commits, _ = repo
    path = change(write(tmp_path / "out"), commit=commits[0])
    good = json.loads(path.read_text())
    change(path, metrics=good["metrics"] | {"cpu_us_per_request": 399.0})
    assert "its samples say 400.0" in verify_results.problems_of(path, root=root)[0]
    change(path, metrics=good["metrics"] | {"extra_ms": 1.0})
    assert "does not come from the samples" in verify_results.problems_of(path, root=root)[0]
    change(path, metrics={})
    assert len(verify_results.problems_of(path, root=root)) == 9
    change(path, metrics=good["metrics"], samples=SAMPLES[1:])
    assert verify_results.problems_of(path, root=root)
    change(path, samples=[{"nonsense": 1}])
    assert "fails on its samples" in verify_results.problems_of(path, root=root)[0]


def test_a_changed_sample_is_found_where_samples_have_a_file_of_their_own(repo, tmp_path):
    root, commits, _ = repo
    path = change(write(tmp_path / "out", samples=LONG), commit=commits[0])
    assert verify_results.problems_of(path, root=root) == []
    change_samples(path, lambda text: text.replace('"cpu_us":4000', '"cpu_us":4001'))
    assert sorted(verify_results.problems_of(path, root=root)) == [
        "metric 'cpu_us_per_request' is 400.0, its samples say 400.1",
        "metric 'cpu_without_tokenizing_us_per_request' is 375.0, its samples say 375.1",
    ]
    change_samples(path, lambda text: "[]")
    assert verify_results.problems_of(path, root=root)


def test_samples_that_belong_to_no_result_are_found(tmp_path, capsys):
    path = write(tmp_path, samples=LONG)
    assert verify_results.strays(tmp_path) == []
    (tmp_path / "samples" / "gone.json.xz").touch()
    whole = results.load_result(path)
    assert verify_results.strays(tmp_path) == ["gone.json.xz"]
    path.write_text(json.dumps(whole))
    assert verify_results.strays(tmp_path) == ["gateway-cpu.json.xz", "gone.json.xz"]
    path.unlink()
    assert verify_results.main([str(tmp_path)]) == 1
    assert "FAIL samples/gone.json.xz" in capsys.readouterr().out


def test_another_branch_an_unknown_commit_and_a_changed_script_are_found(repo, tmp_path):
    root, commits, script = repo
    path = write(tmp_path / "out")
    for commit, reason in (
        (commits[2], "no ancestor"),
        (commits[1], "has changed since"),
        ("0" * 40, "is not here"),
        ("", "is not here"),
    ):
        change(path, commit=commit)
        assert reason in verify_results.problems_of(path, root=root)[0]
    change(path, commit=commits[0])
    script.write_text("changed, not committed")
    assert "has changed since" in verify_results.problems_of(path, root=root)[0]


def test_files_that_are_no_results_are_found(tmp_path):
    path = tmp_path / "gateway-cpu.json"
    path.write_text("{")
    assert "not JSON" in verify_results.problems_of(path)[0]
    path.write_text('{"name": "gateway-cpu"}')
    assert "lacks claim" in verify_results.problems_of(path)[0]
    other = write(tmp_path / "out").rename(tmp_path / "other.json")
    assert "is named" in verify_results.problems_of(other)[0]
    change(other, name="other")
    assert "nothing measures" in verify_results.problems_of(other)[0]


def test_the_exit_status_says_whether_all_are_good(tmp_path, capsys):
    assert verify_results.main([str(tmp_path)]) == 0
    (tmp_path / "bad.json").write_text("{")
    assert verify_results.main([str(tmp_path)]) == 1
    assert "FAIL bad.json" in capsys.readouterr().out


def test_an_unknown_measurement_is_refused_with_the_nearest(capsys):
    assert measure.main(["gateway-cup"]) == 2
    assert "did you mean gateway-cpu?" in capsys.readouterr().err
    assert measure.main([]) == 2


def test_every_registered_script_exists():
    for name in registry.MEASURES:
        assert (registry.ROOT / registry.script_of(name)).is_file(), name


def test_quantiles_are_values_that_occurred():
    assert results.quantile([3, 1, 2], 0.5) == 2
    assert results.quantile(list(range(1, 101)), 0.99) == 99
    assert results.quantile([5], 0.0) == 5
    with pytest.raises(ValueError, match="no values"):
        results.quantile([], 0.5)
