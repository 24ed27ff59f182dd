"""How many gateway processes a machine gets."""

import os
import tempfile
from contextlib import nullcontext

import pytest

from services.gateway import __main__ as gateway_main
from services.gateway import config
from services.gateway.config import useful_processes
from services.gateway.core.beats import AWAY_AFTER_S, LOOK_S, SILENT_S, Beats
from services.gateway.core.restarts import FIRST_PAUSE_S, LONGEST_PAUSE_S, STABLE_S, Restarts
from shared.cpus import usable_cpus


@pytest.mark.parametrize(
    ("cores", "processes"), [(0.5, 1), (1, 1), (2, 1), (15, 1), (16, 2), (32, 4), (192, 8)]
)
def test_a_gateway_has_a_process_for_every_eight_cores(cores, processes):
    assert useful_processes(cores) == processes


@pytest.mark.parametrize(
    ("quota", "limit"),
    [("150000 100000", 1.5), ("max 100000", None), ("", None), ("5 0", None), ("x y", None)],
)
def test_a_containers_quota_counts_where_it_is_less_than_the_cores(tmp_path, quota, limit):
    cores = len(os.sched_getaffinity(0))
    (tmp_path / "cpu.max").write_text(quota)
    assert usable_cpus(tmp_path) == min(cores, limit or cores)
    assert usable_cpus(tmp_path / "absent") == cores


def test_the_metrics_of_a_killed_gateway_go_with_the_next_one(tmp_path, monkeypatch):
    killed, seen = tmp_path / "quire-gateway-metrics-killed", []
    killed.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "")
    monkeypatch.setattr(config, "load", lambda _: config.GatewaySettings(processes=2))
    monkeypatch.setattr(gateway_main, "bind", lambda _: nullcontext())
    monkeypatch.setattr(gateway_main, "run_many", lambda *_: seen.extend(tmp_path.iterdir()))
    assert gateway_main.main([]) == 0
    assert len(seen) == 1
    assert seen != [killed]
    assert not list(tmp_path.iterdir())


def test_a_process_that_ends_at_every_start_starts_again_later_and_later():
    it, now_s, pauses_s = Restarts(), 100.0, []
    for _ in range(8):
        it.began(1, now_s)
        due_s = it.ended(1, now_s + 1)
        pauses_s.append(due_s - now_s - 1)
        now_s = due_s
    assert pauses_s == [0.5, 1, 2, 4, 8, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    it.began(2, now_s)
    assert it.ended(2, now_s) == now_s + FIRST_PAUSE_S, "another one has not failed"
    it.began(1, now_s)
    assert it.ended(1, now_s + STABLE_S) == now_s + STABLE_S + FIRST_PAUSE_S, "it ran well meanwhile"


@pytest.mark.parametrize("content", [None, b"", b"k\xff\n"])
def test_gateways_that_cannot_read_their_keys_end_with_status_2_before_they_fork(
    tmp_path, monkeypatch, capsys, content
):
    (tmp_path / "tokenizer.json").write_text("{}")
    if content is not None:
        (tmp_path / "keys.txt").write_bytes(content)
    monkeypatch.setattr(gateway_main, "run_many", lambda *_: pytest.fail("it forks"))
    words = ["--model-dir", str(tmp_path), "--api-keys-file", str(tmp_path / "keys.txt"), "--processes", "2"]
    assert gateway_main.main([*words, "--listen", "127.0.0.1:0"]) == 2
    assert "gateway: setting gateway.api_keys_file: " in capsys.readouterr().err


def looked(it: Beats, first_s: int, last_s: int) -> list[int]:
    """Asked every second; what it says last."""
    return [it.silent(now_s) for now_s in range(first_s, last_s + 1)][-1]


def test_a_process_hangs_when_it_was_heard_and_is_no_more():
    it = Beats()
    it.heard(1, 100)
    it.heard(2, 100)
    assert looked(it, 100, 129) == []
    it.heard(2, 129)
    assert looked(it, 130, 130) == [1]
    it.ended(1)
    assert looked(it, 131, 158) == []
    assert looked(it, 159, 159) == [2]


def test_a_process_that_still_starts_does_not_hang():
    it = Beats()
    assert looked(it, 100, 1000) == []
    it.heard(1, 1000)
    assert looked(it, 1001, 1029) == []
    it.ended(1)
    assert looked(it, 1030, 2000) == [], "its successor starts"


def test_time_in_which_the_leader_stood_still_is_no_processs_silence():
    it = Beats()
    it.heard(1, 100)
    assert looked(it, 100, 110) == []
    assert it.silent(1000.0) == [], "a machine that slept"
    assert looked(it, 1001, 1000 + int(SILENT_S - LOOK_S) - 11) == []
    assert looked(it, 1000 + int(SILENT_S - LOOK_S) - 10, 1020) == [1]
    late = Beats()
    late.heard(1, 0)
    step_s = AWAY_AFTER_S + 0.5
    assert [late.silent(n * step_s) for n in range(100)][-1] == [1], (
        "a leader that is always late finds it, too"
    )
