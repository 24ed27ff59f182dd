"""What a machine that joins a cluster says of the first one, before it starts anything and while it runs."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import msgspec
import pytest

from deploy.local import cmd_status, cmd_up, doctor_checks, first_machine, plan
from deploy.local.cluster_settings import ClusterSettings
from deploy.local.doctor_checks import Verdict
from deploy.local.troubles import joined_troubles
from shared.free_ports import free_port
from shared.wire.membership import InstanceList, InstanceView
from tests.support.control_plane import description


def view(name, model, state="live"):
    return InstanceView(
        instance=name, role="decode", endpoint="tcp://10.0.0.5:1", host="h", epoch=1, age_ms=0, state=state,
        description=description(model),
    )  # fmt: skip


class Coordinator(BaseHTTPRequestHandler):
    key, members, role = "", (), "leader"

    def do_GET(self):
        if self.path == "/ready":
            return self.reply(200, json.dumps({"ready": True, "role": self.role}).encode())
        if self.role == "standby":
            return self.reply(503, b'{"code": "market.standby"}')
        if self.key and self.headers.get("x-api-key") != self.key:
            return self.reply(401, b"{}")
        return self.reply(200, msgspec.json.encode(InstanceList(version=1, instances=list(self.members))))

    def reply(self, status, body):
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def serve():
    """Start one with attributes of Coordinator; returns its base port."""
    servers = []

    def start(port=0, **attributes):
        server = HTTPServer(("127.0.0.1", port), type("Coordinator", (Coordinator,), attributes))
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return server.server_port - 3

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def joining(base_port, **more):
    return ClusterSettings(engine="mock", join=f"127.0.0.1:{base_port}", address="127.0.0.1", **more)


def test_a_first_machine_that_does_not_answer_is_said_with_what_may_be_wrong():
    base_port = free_port() - 3
    found = first_machine.look(joining(base_port), "demo")
    assert found.may_pass
    assert f"http://127.0.0.1:{base_port + 3} does not answer" in found.problem
    assert "base port (not the gateway's)" in found.problem


def test_a_key_that_the_first_machine_refuses_is_said(serve, monkeypatch):
    base_port = serve(key="right")
    said = first_machine.look(joining(base_port), "demo")
    assert not said.may_pass
    assert "wants a key" in said.problem
    assert "QUIRE_WORKER_COORDINATOR_KEY" in said.problem
    monkeypatch.setenv("QUIRE_WORKER_COORDINATOR_KEY", "wrong")
    assert "refuses the key" in first_machine.look(joining(base_port), "demo").problem
    monkeypatch.setenv("QUIRE_WORKER_COORDINATOR_KEY", "right")
    assert first_machine.look(joining(base_port), "demo").problem == ""


def test_a_server_of_something_else_is_no_first_machine(serve):
    said = first_machine.look(joining(serve(role="")), "demo")
    assert "is no coordinator" in said.problem


def test_of_two_coordinators_one_has_to_answer(serve):
    base_port = serve(key="", role="standby")
    assert "stands by" in first_machine.look(joining(base_port), "demo").problem
    serve(port=base_port + 8)
    assert first_machine.look(joining(base_port, standby=True), "demo").problem == ""


def test_another_model_name_than_the_first_machines_is_said_and_other_joined_machines_decide_nothing(serve):
    base_port = serve(members=[view("decode-0", "demo"), view("decode-0-10-0-0-9", "typo")])
    assert first_machine.look(joining(base_port), "demo").problem == ""
    said = first_machine.look(joining(base_port), "typo")
    assert not said.may_pass
    assert said.problem.startswith("the cluster of 127.0.0.1 serves 'demo', not 'typo'")
    starting = serve(members=[view("decode-0", "old", "dead")])
    assert first_machine.look(joining(starting), "demo").problem == ""


def test_up_waits_for_a_first_machine_that_starts_and_no_longer(serve, monkeypatch, capsys):
    monkeypatch.setattr(first_machine, "PAUSE_S", 0.05)
    base_port = free_port() - 3
    threading.Timer(0.2, serve, kwargs={"port": base_port + 3}).start()
    first_machine.wait_for(joining(base_port), "demo", print)
    assert "does not answer" in capsys.readouterr().out
    monkeypatch.setattr(first_machine, "WAIT_S", 0.2)
    began = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        cmd_up._meet_first(joining(free_port() - 3), plan.Model(folder="/m", name="demo"))
    assert (ended.value.code, time.monotonic() - began < 5) == (1, True)
    assert "does not answer" in capsys.readouterr().err


def test_the_doctor_asks_too(serve):
    assert doctor_checks.check_first_machine(ClusterSettings()).verdict is Verdict.OK
    assert doctor_checks.check_first_machine(joining(serve())).verdict is Verdict.OK
    found = doctor_checks.check_first_machine(joining(free_port() - 3))
    assert (found.verdict, "does not answer" in found.found) == (Verdict.FAIL, True)


WELL = {"registered": True, "coordinator_problem": "", "scheduler": "welcomed", "scheduler_problem": ""}
WORKER = {"name": "decode-0-10-0-0-6", "state": "ready", "health": "ok"}


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, ""),
        ({"scheduler": "down"}, "gets no requests: it does not reach the scheduler of 10.0.0.5"),
        ({"scheduler": "up"}, "gets no requests: the scheduler has not welcomed it"),
        (
            {"scheduler": "up", "scheduler_problem": "its 'demo' is another model"},
            "gets no requests: the scheduler refuses it: its 'demo' is another model",
        ),
        ({"coordinator_problem": "timed out"}, "does not reach the coordinator of 10.0.0.5: timed out"),
    ],
)
def test_a_joined_worker_that_serves_nobody_is_not_called_well(more, reason):
    lines = joined_troubles([WORKER], {WORKER["name"]: {**WELL, **more}}, "10.0.0.5", "")
    assert lines == ([f"decode-0-10-0-0-6 {reason}"] if reason else [])


def test_a_joined_machines_status_says_that_its_first_machine_is_gone():
    found = {"joined": "10.0.0.5", "model": "demo", "services": [WORKER], "workers": {}}
    urls = [f"http://127.0.0.1:{free_port()}"]
    (line,) = cmd_status._troubles({**found, "coordinators": urls})
    assert "does not answer" in line
    both = joined_troubles(
        [WORKER], {WORKER["name"]: {**WELL, "coordinator_problem": "x"}}, "10.0.0.5", "it is gone"
    )
    assert both == ["it is gone"], "once"


def test_a_status_that_was_not_told_the_workers_key_is_no_trouble(serve):
    found = {"joined": "10.0.0.5", "model": "demo", "services": [WORKER], "workers": {WORKER["name"]: WELL}}
    assert cmd_status._troubles({**found, "coordinators": [f"http://127.0.0.1:{serve(key='k') + 3}"]}) == []
