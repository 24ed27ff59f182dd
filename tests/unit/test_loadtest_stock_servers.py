"""stock_servers: plain vLLM is told what our engines are told, and a client keeps sessions where their history is."""

import sys
import urllib.error
import urllib.request
from itertools import pairwise
from pathlib import Path

import pytest

from loadtest import bench_disaggregation as bench
from loadtest import stock_servers
from loadtest.disaggregation_plan import LAYOUTS, Point
from loadtest.http_client import Client
from loadtest.locality_cluster import Start
from loadtest.outcomes import Outcome
from loadtest.processes import Fleet, StartFailed
from loadtest.stock_servers import SessionsInTurn, StockServers, fill_in, serve_words
from shared.engine.worker_config import CPU_SEQS, GPU_SEQS


def test_plain_servers_are_told_what_our_engines_are_told_and_nothing_of_quire(tmp_path):
    asked = bench.parse(["--worker", "enforce_eager=true", "--worker", 'role="colocated"'])
    start = Start(asked.device, asked.engine, "", 0, asked.set, asked.worker)
    asked.folder = str(tmp_path)
    assert isinstance(
        bench.servers_of(asked, LAYOUTS[2][2], Point("stock", "sharegpt", 1.0, 1)), StockServers
    )
    words = serve_words(start, tmp_path / "model-8b", 1234)
    pairs = dict(pairwise(words))
    assert pairs["--kv-cache-memory-bytes"] == str(start.sections()["mempool"]["device_capacity_bytes"])
    assert (pairs["--max-num-seqs"], pairs["--max-model-len"], pairs["--load-format"]) == (
        "256",
        "16384",
        "dummy",
    )
    assert "--enforce-eager" in words
    assert not {"--role", "--max-num-batched-tokens", "--block-size", "--no-enable-prefix-caching"} & {*words}
    on_cpu = serve_words(Start("cpu", "vllm", cache_bytes=1 << 20), tmp_path, 1)
    assert on_cpu[on_cpu.index("--max-num-seqs") + 1] == str(CPU_SEQS)
    assert on_cpu[on_cpu.index("--kv-cache-memory-bytes") + 1] == str(1 << 20)
    on_gpu = serve_words(Start("cuda", "vllm", cache_bytes=1 << 20), tmp_path, 1)
    assert on_gpu[on_gpu.index("--max-num-seqs") + 1] == str(GPU_SEQS)


def test_every_turn_of_a_session_goes_to_one_server_and_sessions_go_in_turn():
    clients = [Client(f"http://127.0.0.1:{port}") for port in (9, 90)]
    routes = SessionsInTurn(clients)
    made = [
        routes.request_bytes("/v1/completions", {"user": name, "prompt": "\r\nhost: 127.0.0.1:9\r\n"})
        for name in "abcab"
    ]
    assert [[one.wrote(request) for one in clients] for request in made] == [
        [True, False], [False, True], [True, False], [True, False], [False, True],
    ]  # fmt: skip
    outcomes = [
        Outcome(1, "b", 0, prompt_tokens=100, cached_tokens=64, output_tokens=1),
        Outcome(2, "c", 0, prompt_tokens=100, output_tokens=1),
        Outcome(3, "a", 0, skipped=True),
    ]
    fill_in(outcomes, routes.server_of)
    assert [(one.instances, one.sources) for one in outcomes] == [
        (["stock-1"], {"engine": 64, "computed": 36}), (["stock-0"], {"computed": 100}), ([], {}),
    ]  # fmt: skip


@pytest.mark.slow
def test_servers_start_side_by_side_and_end_together(tmp_path, monkeypatch):
    (tmp_path / "health").write_text("ok")
    begun = []

    def words(_start, _model, port, _processes):
        begun.append(port)
        wait = "import http.server, sys, time; time.sleep(0.5); http.server.test(http.server.SimpleHTTPRequestHandler"
        return [
            sys.executable,
            "-c",
            f"import os; os.chdir({str(tmp_path)!r}); {wait}, port={port}, bind='127.0.0.1')",
        ]

    ready, wait_ready = [], Fleet.wait_ready

    def wait(fleet, name, ready_url, **more):
        ready.append(len(begun))
        wait_ready(fleet, name, ready_url, **more)

    monkeypatch.setattr(stock_servers, "serve_words", words)
    monkeypatch.setattr(Fleet, "wait_ready", wait)
    with StockServers(tmp_path, Start("cpu", "vllm"), 2):
        assert ready == [2, 2]  # nobody was waited for before all had begun
        for port in begun:
            assert urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200
    for port in begun:
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)


def test_a_server_that_ends_says_why_and_leaves_none_behind(tmp_path, monkeypatch):
    def words(_start, _model, port, _processes):
        return [sys.executable, "-c", "raise SystemExit('no such model')"]

    monkeypatch.setattr(stock_servers, "serve_words", words)
    servers = StockServers(tmp_path, Start("cpu", "vllm"), 2)
    with pytest.raises(StartFailed, match="no such model"):
        servers.__enter__()
    assert servers._fleet._running == {}


def test_a_plain_server_has_as_many_api_processes_as_the_gateway():
    """One is busy with 16 streams a second of an 8B shape; `vllm serve` alone starts more."""
    model = Path("/model")
    start = Start("cuda", "vllm", cluster=["gateway_processes=2"])
    words = serve_words(start, model, 8000)
    assert words[1:5] == ["-m", "vllm.entrypoints.cli.main", "serve", "/model"]
    assert words[words.index("--api-server-count") + 1] == "2"
    more = serve_words(start, model, 8000, 4)
    assert more[more.index("--api-server-count") + 1] == "4"
    alone = serve_words(Start("cuda", "vllm"), model, 8000)
    assert alone[2:5] == ["vllm.entrypoints.openai.api_server", "--model", "/model"]
    assert "--api-server-count" not in alone
