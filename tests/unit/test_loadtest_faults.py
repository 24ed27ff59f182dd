"""bench_faults.py: whom it touches, and what it makes of answers that are whole, cut off, and wrong."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from deploy.local.services_table import ROWS
from loadtest import bench_faults, faults_rig, processes
from loadtest.faults_rig import Heard

READY = ["coordinator", "decode-0", "gateway", "mempool", "prefill-0", "redis", "scheduler"]
CASE = {"id": "a", "params": {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}}


def stock(first: list[int], cached: list[int]) -> dict:
    return {
        "prompt": [1, 2], "params": CASE["params"], "choices": [{"token_ids": first}],
        "cached_choices": [{"token_ids": cached}],
    }  # fmt: skip


def heard(tokens: list[int], *, ended: bool) -> Heard:
    return Heard({0: tokens}, ended, 200)


@pytest.mark.parametrize("seed", range(20))
def test_the_last_ready_worker_is_stopped_and_never_killed(seed):
    rng = random.Random(seed)
    for _ in range(50):
        fault = faults_rig.plan(rng, ["mempool", "prefill-0", "scheduler"])
        assert fault is not None
        assert not (fault.service == "prefill-0" and fault.how == faults_rig.KILL)


def test_every_service_and_the_engine_cores_have_their_turn_and_nobody_ready_is_nobody():
    rng = random.Random(1)
    seen = [faults_rig.plan(rng, READY) for _ in range(400)]
    assert {one.service for one in seen} == set(READY)
    assert {(one.how, one.part) for one in seen} == {
        (how, part) for how in (faults_rig.KILL, faults_rig.STOP) for part in ("", "core")
    }
    assert all(one.part == "" for one in seen if not one.service.startswith(faults_rig.WORKERS))
    assert faults_rig.plan(rng, []) is None


def test_those_who_are_touched_have_the_names_that_quire_gives_them():
    assert set(faults_rig.OTHERS) <= set(ROWS)
    assert set(faults_rig.WORKERS) < {"colocated", *ROWS}


FORKS = """
import os, time
if os.fork() == 0:
    while True:
        time.sleep(0.01)
print("begun", flush=True)
while True:
    time.sleep(0.01)
"""


def states(pids: list[int]) -> list[str]:
    """Of processes: T stopped, Z dead, "" gone."""
    return [
        path.read_text().rpartition(")")[2].split()[0] if (path := Path(f"/proc/{pid}/stat")).exists() else ""
        for pid in pids
    ]


@pytest.mark.parametrize("how", [faults_rig.KILL, faults_rig.STOP])
def test_all_of_a_gateways_processes_are_killed_or_stopped_with_it(how):
    """They serve on by themselves while the one that started them stands still."""
    expected = {"S", "R"} if how == faults_rig.STOP else {"Z", ""}

    async def done_to(pid: int) -> tuple[list[str], list[str]]:
        pids = processes.family(pid)
        assert len(pids) == 2
        doing = asyncio.ensure_future(faults_rig.do(faults_rig.Fault(how, "gateway", "", 0.5), pid))
        await asyncio.sleep(0.1)
        meanwhile = states(pids)
        assert await doing
        for _ in range(100):
            if set(then := states(pids)) <= expected:
                break
            await asyncio.sleep(0.02)
        return meanwhile, then

    with subprocess.Popen(
        [sys.executable, "-c", FORKS], stdout=subprocess.PIPE, start_new_session=True
    ) as first:
        try:
            assert first.stdout.readline() == b"begun\n"
            meanwhile, then = asyncio.run(done_to(first.pid))
        finally:
            os.killpg(first.pid, signal.SIGKILL)
    if how == faults_rig.STOP:
        assert meanwhile == ["T", "T"]
    assert set(then) <= expected
    assert not asyncio.run(faults_rig.do(faults_rig.Fault(how, "gateway", "", 0.1), first.pid))  # it is gone


class Gateway(asyncio.Protocol):
    """Answers with so much, and is gone."""

    def __init__(self, said: bytes) -> None:
        self.said = said

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.transport.write(self.said)
        asyncio.get_running_loop().call_later(0.02, self.transport.abort)


def test_of_a_gateway_that_is_killed_a_client_tells_no_connection_from_a_stream_that_broke_off():
    chunk = json.dumps({"choices": [{"index": 0, "token_ids": [5, 6]}]})
    event = f"data: {chunk}\n\n".encode()
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    begun = head + f"{len(event):x}\r\n".encode() + event + b"\r\n"

    async def of(said: bytes | None, *, stream: bool) -> Heard:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Gateway(said), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        if said is None:
            server.close()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            heard = await faults_rig.ask(client, {"stream": stream})
        server.close()
        return heard

    for stream in (False, True):
        refused = asyncio.run(of(None, stream=stream))
        assert (refused.why, refused.status, refused.ended, refused.choices) == ("ConnectError", 0, False, {})
        gone = asyncio.run(of(b"", stream=stream))
        assert gone.why in ("ReadError", "RemoteProtocolError")
        assert (gone.status, gone.ended) == (0, False)
        assert faults_rig.judge(CASE, refused, stock([5, 6], [5, 7])) is None
    broken = asyncio.run(of(begun, stream=True))
    assert broken.why in ("ReadError", "RemoteProtocolError")
    assert (broken.status, broken.ended, broken.choices) == (200, False, {0: [5, 6]})
    assert faults_rig.judge(CASE, broken, stock([5, 6, 7, 8], [5, 6, 9, 9]))["equal"]
    ended = asyncio.run(of(head + b"e\r\ndata: [DONE]\n\n\r\n", stream=True))
    assert ended.ended  # whatever came of the connection behind it


def test_an_answer_without_a_token_is_one():
    answers = stock([], [])
    assert faults_rig.judge(CASE, Heard({}, True, 200), answers)["equal"]
    assert faults_rig.judge(CASE, Heard({}, True, 200), stock([5], [5]))["unlike_either"]


def test_an_answer_is_compared_whole_and_one_that_broke_off_as_far_as_it_was_heard():
    answers = stock([5, 6, 7, 8], [5, 6, 9, 9])
    assert faults_rig.judge(CASE, Heard(), answers) is None
    assert faults_rig.judge(CASE, heard([5, 6, 7, 8], ended=True), answers)["equal"]
    like_cached = faults_rig.judge(CASE, heard([5, 6, 9, 9], ended=True), answers)
    assert not like_cached["equal"]
    assert not like_cached["unlike_either"]
    assert faults_rig.judge(CASE, heard([5, 6], ended=True), answers)["unlike_either"]
    assert faults_rig.judge(CASE, heard([5, 6], ended=False), answers)["equal"]
    assert faults_rig.judge(CASE, heard([5, 4], ended=False), answers)["unlike_either"]
    assert faults_rig.judge(CASE, heard([5, 6, 7, 8, 8], ended=False), answers)["unlike_either"]


@pytest.mark.parametrize("stream", [False, True])
def test_whatever_a_server_does_a_request_ends_with_what_was_heard(stream):
    chunk = json.dumps({"choices": [{"index": 0, "token_ids": [5, 6]}]})
    error = json.dumps({"error": {"message": "gone", "type": "t", "param": None, "code": "c"}})
    said = {
        "/whole": httpx.Response(200, text=f"data: {chunk}\n\ndata: [DONE]\n\n" if stream else chunk),
        "/error": httpx.Response(200, text=f"data: {chunk}\n\ndata: {error}\n\ndata: [DONE]\n\n"),
        "/cut": httpx.Response(200, text=f"data: {chunk}\n\n"),
        "/refused": httpx.Response(503, text=error),
        "/odd": httpx.Response(200, text="no JSON" if not stream else "data: no JSON\n\n"),
    }

    async def of(path: str) -> Heard:
        def answer(request: httpx.Request) -> httpx.Response:
            if path == "/gone":
                raise httpx.ReadError("reset", request=request)
            return said[path]

        transport = httpx.MockTransport(answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await faults_rig.ask(client, {"stream": stream})

    whole = asyncio.run(of("/whole"))
    assert (whole.ended, whole.choices, whole.why) == (True, {0: [5, 6]}, "")
    for path in ("/refused", "/odd", "/gone", *(("/error", "/cut") if stream else ())):
        found = asyncio.run(of(path))
        assert not found.ended, path
        assert found.why or path == "/cut", path
        assert found.choices == ({0: [5, 6]} if path in ("/error", "/cut") else {}), path


def test_an_answer_that_stock_calls_no_near_tie_is_wrong_also_where_it_broke_off():
    def answer(found: str, *, ended: bool = True, after: bool = False, **more) -> dict:
        return {"kind": "answer", "found": found, "ended": ended, "after": after, "took_s": 1.0, **more}

    rows = [faults_rig.judge(CASE, heard([5, 4], ended=False), stock([5, 6], [5, 7]))]
    samples = [
        answer("equal"), answer("like_cached"), answer("nothing", ended=False), answer("equal", ended=False),
        answer("unlike", which=0), answer("unlike", ended=False, which=1), answer("equal", after=True),
        {"kind": "fault", "how": "kill", "service": "mempool", "part": ""},
        {"kind": "fault", "how": "stop", "service": "decode-0", "part": "core"},
        {"kind": "unlike", "case": rows[0], "shares": [0.97]}, {"kind": "unlike", "case": rows[0], "shares": [0.1]},
        {"kind": "end", "back_s": 12.0, "left_leases_count": 0, "left_handoffs_count": 0},
    ]  # fmt: skip
    metrics = bench_faults.metrics_from_samples(samples)
    assert (metrics["answers_count"], metrics["refused_count"], metrics["broken_off_count"]) == (3, 3, 2)
    assert (metrics["near_tie_count"], metrics["wrong_count"]) == (1, 1)
    assert (metrics["faults_count"], metrics["kills_count"], metrics["cores_count"]) == (2, 1, 1)
    assert (metrics["after_count"], metrics["after_unanswered_count"], metrics["back_s"]) == (1, 0, 12.0)


def test_stock_is_asked_once_about_all_unlike_answers_and_each_has_its_own_shares(monkeypatch, tmp_path):
    answers = stock([5, 6], [5, 7])
    twice = {**answers, "choices": answers["choices"] * 2, "cached_choices": answers["cached_choices"] * 2}
    rows = [
        faults_rig.judge(CASE, Heard({0: [5, 4], 1: [5, 3]}, True, 200), twice),
        faults_rig.judge(CASE, heard([9, 9], ended=True), answers),
    ]
    asked = []

    def shares_row(_folder, run, _cases, _stock):
        asked.append(run)
        given = [{"case": "a", "at": 1, "ours": 4, "stock": 6, "share": share} for share in (0.9, 0.8, 0.1)]
        return {"shares": given}

    monkeypatch.setattr(bench_faults.rig, "shares_row", shares_row)
    samples = bench_faults.judged(tmp_path, rows, [CASE], {"a": answers})
    assert len(asked) == 1
    assert [one["shares"] for one in samples] == [[0.9, 0.8], [0.1]]
