"""loadtest.drive, its client and its report: no time is left out, an odd answer costs one request, errors one line."""

import asyncio
import json
import math
import shutil

import pytest

from loadtest import drive, readme_table, registry, verify_results
from loadtest.http_client import Client
from loadtest.open_loop import OpenLoop, Plan
from loadtest.outcomes import Outcome, Run
from loadtest.reports.summary import Slo, summarise
from loadtest.simulator.__main__ import main as simulate
from loadtest.sse import StreamError, read_pieces
from loadtest.workloads import arrivals, catalogue, stats
from loadtest.workloads.catalogue import Options, build
from loadtest.workloads.request import Request, Segment

DONE = b"data: [DONE]\n\n"
WORD = {"choices": [{"text": "x"}]}


def event(content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def usage(tokens: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": tokens}})


class Server:
    """Answers POSTs with what it is given, in turn, and lists one model."""

    def __init__(self, *bodies: bytes) -> None:
        self._bodies = list(bodies)
        self.asked: list[bytes] = []

    async def __aenter__(self) -> "Server":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.asked.append(head.split(b"\r\n")[0])
        body = b'{"data": [{"id": "m"}]}' if head.startswith(b"GET /v1/models ") else b""
        if head.startswith(b"POST"):
            body = self._bodies.pop(0) if len(self._bodies) > 1 else self._bodies[0]
        status = b"200 OK" if body else b"404 Not Found"
        writer.write(
            b"HTTP/1.1 %s\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body
        )
        await writer.drain()
        writer.close()


def requests(number: int) -> list[Request]:
    return [Request(n, float(n), f"s{n}", 0, (Segment(n, 4),), 3) for n in range(number)]


async def outcomes_of(*bodies: bytes) -> list[Outcome]:
    async with Server(*bodies) as server:
        client = Client(server.url)
        found = await OpenLoop(client, Plan(model="m", timeout_s=20)).run(requests(len(bodies)))
        client.close()
    return found


def slow_to_connect(monkeypatch, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    stock = loop.create_connection

    async def slow(*args, **kwargs):
        await asyncio.sleep(seconds)
        return await stock(*args, **kwargs)

    monkeypatch.setattr(loop, "create_connection", slow)


# -- times ----------------------------------------------------------------------------------------------------


async def test_the_time_to_connect_is_part_of_ttft_and_jct(monkeypatch):
    slow_to_connect(monkeypatch, 0.3)
    (found,) = await outcomes_of(event(WORD) + usage(1) + DONE)
    assert found.ok, found.error
    assert found.ttft_ms >= 300
    assert found.jct_ms >= found.ttft_ms


async def test_a_server_that_lets_nobody_connect_runs_into_the_timeout(monkeypatch):
    slow_to_connect(monkeypatch, 60)
    client = Client("http://127.0.0.1:9")
    async with asyncio.timeout(20):
        with pytest.raises(TimeoutError):
            await client.post(client.request_bytes("/", {}), timeout_s=0.1)


def test_an_answer_ends_with_its_last_token_also_where_that_shows_no_text():
    pieces = [
        (10.1, event(WORD)),
        (10.2, event(WORD)),
        (11.1, event({"choices": [{"text": "", "finish_reason": "length"}]})),
        (11.2, usage(11) + DONE),
    ]
    times = read_pieces(pieces, 10.0)
    assert times.ended_ms == pytest.approx(1100)
    assert times.tpot_ms == pytest.approx(100), "10 tokens came in the second behind the first"
    assert times.gaps_ms == pytest.approx([100])
    silent = read_pieces(pieces[2:], 10.0)
    assert (silent.ttft_ms, silent.tpot_ms, silent.ended_ms) == (0, 0, pytest.approx(1100))


async def test_an_answer_whose_tokens_show_no_text_is_reported_and_not_within_the_slo():
    silent = (
        event(
            {
                "choices": [{"text": "", "finish_reason": "length"}],
                "quire_receipt": {"predicted_ttft_ms": 5.0},
            }
        )
        + usage(20)
        + DONE
    )
    found = await outcomes_of(
        silent, event({**WORD, "quire_receipt": {"predicted_ttft_ms": 5.0}}) + usage(1) + DONE
    )
    assert [one.ok for one in found] == [True, True]
    assert (found[0].ttft_ms, found[0].jct_ms > 0) == (0, True), "when it ended is known"
    report = summarise(Run({}, found), Slo(math.inf, math.inf))
    assert report.slo_share.value == 0.5
    assert set(report.predicted) == {"p50", "p90"}


async def test_token_ids_are_asked_for_where_that_is_wanted():
    class Keeps:
        bodies: list[dict] = []

        def request_bytes(self, path, body):
            self.bodies.append(body)
            return b""

        async def post(self, request, *, timeout_s=0.0, reply=None):
            raise OSError("nobody is there")

    for text in (False, True):
        await OpenLoop(Keeps(), Plan(model="m", text=text, token_ids=True)).run(requests(1))  # pyright: ignore
    assert [body.get("return_token_ids") for body in Keeps.bodies] == [True, True]


# -- odd answers ----------------------------------------------------------------------------------------------

ODD = {
    "not UTF-8": b'data: {"choices":[{"text":"\xff"}]}\n\n',
    "null": b"data: null\n\n",
    "a list": b"data: []\n\n",
    "nested": b"data: " + b"[" * 100_000 + b"\n\n",
    "text": b"data: words\n\n",
    "usage without tokens": event({"choices": [], "usage": {"prompt_tokens": 5}}),
    "usage of words": event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": "4"}}),
    "usage of parts": event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4.5}}),
    "usage below 0": event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": -4}}),
    "a number as text": event({"choices": [{"text": 5}]}),
    "a choice of null": event({"choices": [None]}),
    "an odd receipt": event({"choices": [], "quire_receipt": ["x"]}),
    "an odd stage": event({"choices": [], "quire_receipt": {"stages": [{"tokens_pool": "many"}]}}),
    "a token too many": b'data: {"choices": [], "quire_receipt": {"stages": [{"bytes_moved": 1e999}]}}\n\n',
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
async def test_one_odd_answer_costs_its_request_and_not_the_run(odd):
    good = event(WORD) + usage(1) + DONE
    found = await outcomes_of(good, event(WORD) + odd + DONE, good)
    assert sorted(one.ok for one in found) == [False, True, True]
    (bad,) = (one for one in found if not one.ok)
    assert bad.error


@pytest.mark.parametrize("odd", list(ODD.values())[:11], ids=list(ODD)[:11])
def test_what_is_no_event_of_an_answer_is_a_stream_error(odd):
    with pytest.raises(StreamError):
        read_pieces([(1.0, odd + DONE)], 0.0)


# -- values that make no sense --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: arrivals.Poisson(-1.0), lambda: arrivals.Poisson(math.inf), lambda: arrivals.Poisson(math.nan),
        lambda: arrivals.Burst(1.0, factor=-1.0), lambda: arrivals.Burst(1.0, factor=0.0),
        lambda: arrivals.Gamma(1e-300, 1.0), lambda: arrivals.OnOff(-1.0, 2.0, 3.0, 10.0),
        lambda: arrivals.take(arrivals.Poisson(1.0), num_requests=3, seconds=math.nan),
        lambda: arrivals.take(arrivals.Poisson(1e9), seconds=60.0),
        lambda: stats.blocks_of([Segment(1, 5)], 0), lambda: stats.blocks_of([Segment(1, 5)], -3),
        lambda: build("sharegpt", Options(num_requests=3, context_tokens=1)),
        lambda: build("sharegpt", Options(num_requests=3, think_ms=-5.0)),
        lambda: build("aqua", Options(num_requests=3, long_share=math.nan)),
        lambda: build("aqua", Options(num_requests=3, warm=-1)),
        lambda: build("loogle", Options(document_tokens=0)),
    ],
)  # fmt: skip
def test_a_workload_that_would_never_end_is_refused_when_it_is_made(make):
    with pytest.raises(ValueError, match=r"\S"):
        make()


def test_options_of_a_workload_are_named_when_they_are_wrong():
    with pytest.raises(ValueError, match="want NAME=VALUE"):
        catalogue.settings(["seed=3"])
    with pytest.raises(ValueError, match="'many' is no whole number"):
        catalogue.settings(["warm=many"])
    assert catalogue.settings(["warm=3", "burst_factor=1.5"]) == {"warm": 3, "burst_factor": 1.5}


WRONG = [
    (["--rate", "-1"], "--rate -1"), (["--rate", "inf"], "--rate inf"), (["--seconds", "nan"], "--seconds nan"),
    (["--block-tokens", "0"], "--block-tokens 0"), (["--requests", "-5"], "--requests -5"),
    (["--timeout-s", "0"], "--timeout-s 0"), (["--scale", "nan"], "--scale nan"),
    (["--max-in-flight", "0"], "--max-in-flight 0"), (["--slo-ttft-ms", "nan"], "--slo-ttft-ms nan"),
    (["--tokens", "abc"], "--tokens abc"), (["--tokens", "9:3"], "--tokens 9:3"), (["--set", "seed=3"], "--set seed=3"),
    (["--workload", "aqua", "--set", "burst_factor=0"], "factor 0"),
    (["--workload", "aqua", "--set", "burst_factor=-1"], "burst_factor"),
    (["--seconds", "1e-9"], "no request"), (["--url", "http://localhost"], "--url http://localhost"),
    (["--url", "https://localhost:1"], "--url https"), (["--url", "http://localhost:1/v2"], "--url http"),
    (["--write-trace", "/proc/nope"], "/proc/nope"), (["--out", "."], "directory"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "said"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_wrong_values_of_the_driver_are_one_line_and_status_2_before_anything_is_sent(
    words, said, capsys, tmp_path
):
    bounds = [] if words[0] in ("--requests", "--seconds") else ["--requests", "3"]
    out = [] if words[0] == "--out" else ["--out", str(tmp_path / "run.jsonl")]
    assert drive.main(["--url", "http://127.0.0.1:9", "--model", "m", *bounds, *out, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert said in line
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_is_not_there_is_one_line(capsys, tmp_path):
    more = ["--requests", "1", "--out", str(tmp_path / "run.jsonl")]
    assert drive.main(["--url", "http://127.0.0.1:9", *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "http://127.0.0.1:9/v1/models" in line
    assert "--model" in line


async def test_the_address_that_quire_up_prints_is_taken(tmp_path, capsys):
    out = tmp_path / "run.jsonl"
    async with Server(event({"choices": [{"text": ""}]}) + usage(3) + DONE) as server:
        flags = ["--url", f"{server.url}/v1/", "--workload", "azure-conv", "--rate", "50", "--requests", "2"]
        flags += ["--max-lag-ms", "20000", "--scale", "0.01", "--out", str(out)]
        assert await asyncio.to_thread(drive.main, flags) == 0
    assert server.asked[0] == b"GET /v1/models HTTP/1.1"
    assert server.asked[1] == b"POST /v1/completions HTTP/1.1"
    assert "2 answers showed no text" in capsys.readouterr().out
    assert len(out.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    "words",
    [
        "--instances-per-host 0", "--speed nan", "--speed 0", "--instances 0", "--noise nan", "--noise -1",
        "--max-running 0", "--remote-gb-per-s 0", "--peer-gb-per-s -1", "--peer-gb-per-s nan", "--limit -1",
        "--dram-tokens -1", "--memory-tokens -1", "--rate -1", "--tp -1", "--slo-tpot-ms 0", "--split a:b",
        "--split 6:-2",
    ],
)  # fmt: skip
def test_values_that_no_cluster_can_have_are_refused_by_the_simulator(words, capsys, tmp_path):
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 10, "output_length": 5}\n')
    assert simulate(["--trace", str(trace), *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words.split()[0] in line


# -- result files ---------------------------------------------------------------------------------------------


def result_in(folder, **changes):
    """A copy of a result that may be quoted, with changes."""
    name = "placer"
    content = json.loads((registry.RESULTS / f"{name}.json").read_text())
    if there := content.get("samples_file"):
        (folder / "samples").mkdir(exist_ok=True)
        shutil.copy(registry.RESULTS / there, folder / there)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content | changes))
    return path


def test_a_result_that_was_measured_with_uncommitted_changes_fails(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(verify_results, "problems_of", lambda path: [])
    path = result_in(tmp_path)
    assert verify_results.main([str(tmp_path)]) == 0
    assert verify_results.uncommitted(path) == []
    for dirty in (True, None):
        result_in(tmp_path, dirty=dirty)
        assert verify_results.main([str(tmp_path)]) == 1
        assert "in no commit (dirty)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "error", [IndexError, AttributeError, OverflowError, ZeroDivisionError, ModuleNotFoundError]
)
def test_a_result_whose_samples_cannot_be_read_fails_alone(tmp_path, capsys, monkeypatch, error):
    def fails(samples):
        raise error("no")

    result_in(tmp_path)
    monkeypatch.setattr("loadtest.bench_placer.metrics_from_samples", fails)
    (tmp_path / "zzz.json").write_text("{}")
    assert verify_results.main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "fails on its samples" in out
    assert "FAIL zzz.json" in out


@pytest.mark.parametrize(
    "changes",
    [{"metrics": []}, {"metrics": {"a_ms": "fast"}}, {"samples": 7}, {"samples": [[]]}],
)
def test_a_result_with_odd_fields_fails_and_the_check_goes_on(tmp_path, changes):
    assert verify_results.problems_of(result_in(tmp_path, **changes))


@pytest.mark.parametrize("content", ["null", "7", '{"samples_file": 7}', "[]"])
def test_a_file_that_is_no_object_is_no_result(tmp_path, content):
    path = tmp_path / "placer.json"
    path.write_text(content)
    assert verify_results.problems_of(path)
    assert verify_results.main([str(tmp_path)]) == 1


def test_a_folder_that_is_not_there_is_not_all_good(tmp_path, capsys):
    assert verify_results.main([str(tmp_path / "none")]) == 2
    assert "is no folder" in capsys.readouterr().err


def test_help_of_the_table_of_figures_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(readme_table, "README", tmp_path / "README.md")
    monkeypatch.setattr(readme_table, "ALL", tmp_path / "measured.md")
    with pytest.raises(SystemExit) as ended:
        readme_table.main(["--help"])
    assert ended.value.code == 0
    assert "rewrites the tables" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
