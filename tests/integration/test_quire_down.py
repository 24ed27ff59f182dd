"""What a user's streams see of `quire down`: a whole cluster with mock engines, and answers under way."""

import json
import os
import re
import signal
import subprocess
import threading
import time

import httpx
import pytest

from tests.integration.test_quire_up_twice import Quire, said

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

BODY = {"model": "quire-demo", "prompt": [7] * 400, "max_tokens": 40, "stream": True}


@pytest.fixture
def quire(tmp_path):
    found = Quire(tmp_path / "home")
    found.up = (*found.up, "--topology", "disaggregated")
    found.env |= {"QUIRE_WORKER_MOCK_STEP_MS": "50", "QUIRE_WORKER_MOCK_PREFILL_TOKENS_PER_S": "200"}
    yield found
    found("down", "--now")


class Stream:
    """One that a thread reads."""

    def __init__(self, url: str, **more) -> None:
        self.text, self.began = "", threading.Event()
        self._url, self._body = url, {**BODY, **more}
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with (
            httpx.Client(trust_env=False, timeout=120) as client,
            client.stream("POST", f"{self._url}/v1/completions", json=self._body) as reply,
        ):
            for part in reply.iter_text():
                self.text += part
                self.began.set()

    def events(self) -> list[str]:
        self._thread.join(120)
        return re.findall(r"^data: (.*)$", self.text, re.MULTILINE)


def in_flight(url: str) -> bool:
    return "requests_in_flight 1.0" in httpx.get(f"{url}/metrics", trust_env=False, timeout=30).text


def began_waiting(down: "subprocess.Popen[str]") -> str:
    """Its first line."""
    assert down.stdout is not None
    return down.stdout.readline()


def test_answers_under_way_end_whole_also_those_that_have_not_come_to_their_prefill(quire):
    assert quire(*quire.up)[0] == 0
    stream = Stream(quire.url)
    while not in_flight(quire.url):
        time.sleep(0.02)
    assert not stream.began.is_set()
    code, out, err = quire("down")
    assert (code, "1 answer is under way: waiting for it, at most 30 s" in out) == (0, True), out + err
    *events, last = stream.events()
    assert last == "[DONE]"
    found = [json.loads(event) for event in events]
    assert not [event for event in found if "error" in event]
    assert found[-1]["choices"][0]["finish_reason"] == "length"
    assert len("".join(event["choices"][0]["text"] for event in found)) >= BODY["max_tokens"]


def test_an_answer_that_takes_longer_than_the_drain_deadline_ends_with_an_error_event(quire):
    quire.env["QUIRE_GATEWAY_DRAIN_DEADLINE_MS"] = "1000"
    assert quire(*quire.up)[0] == 0
    stream = Stream(quire.url, max_tokens=2_000)
    assert stream.began.wait(60)
    began = time.monotonic()
    code, out, err = quire("down")
    assert (code, "at most 1 s" in out) == (0, True), out + err
    assert time.monotonic() - began < 30
    *_, error, last = stream.events()
    assert (json.loads(error)["error"]["code"], last) == ("draining", "[DONE]")


def test_ctrl_c_ends_what_is_under_way_at_once(quire):
    quire.env |= {"QUIRE_GATEWAY_DRAIN_DEADLINE_MS": "300000", "QUIRE_WORKER_DRAIN_DEADLINE_MS": "300000"}
    assert quire(*quire.up)[0] == 0
    stream = Stream(quire.url, max_tokens=2_000)
    assert stream.began.wait(60)
    down = quire.begin("down")
    assert "at most 300 s" in began_waiting(down)
    began = time.monotonic()
    down.send_signal(signal.SIGINT)
    code, out, err = said(down)
    assert (code, "ending what is under way" in out) == (0, True), out + err
    assert time.monotonic() - began < 30
    *_, error, last = stream.events()
    assert (json.loads(error)["error"]["code"], last) == ("draining", "[DONE]")


def test_a_stop_where_nothing_is_under_way_waits_for_nobody(quire):
    assert quire(*quire.up)[0] == 0
    with httpx.Client(trust_env=False, timeout=30) as client:  # a connection that stays open is none
        assert client.get(f"{quire.url}/v1/models").status_code == 200
        code, out, err = quire("down")
    assert (code, "under way" in out) == (0, False), out + err
    assert float(re.search(r"stopped in ([\d.]+) s", out).group(1)) < 10


def test_a_service_that_hangs_holds_a_stop_up_for_its_grace_and_not_for_a_drain_time(quire):
    quire.env |= {"QUIRE_GATEWAY_DRAIN_DEADLINE_MS": "300000", "QUIRE_WORKER_DRAIN_DEADLINE_MS": "300000"}
    assert quire(*quire.up)[0] == 0
    services = json.loads(quire("status", "--json")[1])["services"]
    for pid in [one["pid"] for one in services if one["name"] in ("gateway", "decode-0")]:
        os.kill(pid, signal.SIGSTOP)
    code, out, err = quire("down")
    assert (code, "stopped in" in out) == (0, True), out + err
    assert float(re.search(r"stopped in ([\d.]+) s", out).group(1)) < 60
