"""The supervisor with real processes: order, restarts, no orphans, quick end, clear messages."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploy.local.config import paths_of
from deploy.local.control import ControlClient
from deploy.local.ports import busy_ports
from shared.errors import PeerGone
from shared.free_ports import free_port
from shared.ids import Epoch
from shared.mempool.keeper_client import KeeperClient
from tests.support.processes import is_gone

REPO = Path(__file__).resolve().parents[2]
DUMMY = Path(__file__).with_name("supervised_dummy.py")
LIMIT_S = 60
PATIENT_MS = 30_000  # of grace, for who ends by itself


def eventually(check, what, limit_s=LIMIT_S):
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        value = check()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"never: {what}")


def alive(pid) -> bool:
    return not is_gone(pid)


class Run:
    """A supervisor process over dummies, and its control socket."""

    def __init__(self, home: Path):
        self.home = home
        self.journal = home / "journal"
        self.paths = paths_of(home)
        self.process = None
        self.services = []
        self.rules = {}

    def add(self, name, *flags, depends_on=(), **more):
        port = free_port()
        command = [sys.executable, str(DUMMY), "--port", str(port), "--name", name]
        command += ["--journal", str(self.journal), *flags]
        self.services.append(
            {"name": name, "command": command, "port": port, "depends_on": list(depends_on), **more}
        )
        return self

    def start(self, stderr_path=None):
        table = self.home / "table.json"
        table.write_text(json.dumps({"services": self.services, "rules": self.rules}))
        (self.home / "stderr").touch()
        with (stderr_path or self.home / "stderr").open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.supervised_run", str(self.home), str(table)],
                cwd=REPO,
                stderr=stderr,
            )
        # a run that ends at once has it for less than a poll
        eventually(lambda: self.paths.control.exists() or self.process.poll() is not None, "control socket")
        return self

    def call(self, **request):
        with ControlClient(self.paths.control) as client:
            return client.call(**request)

    def service(self, name):
        return next(s for s in self.call(op="status")["services"] if s["name"] == name)

    def wait_ready(self):
        eventually(lambda: self.call(op="status")["ready"], "ready")
        return self

    def wait_new(self, name, old_pid):
        """The service is ready again as another process; its description."""

        def check():
            found = self.service(name)
            return found if found["state"] == "ready" and found["pid"] != old_pid else None

        return eventually(check, f"{name} again")

    def lines(self, word):
        if not self.journal.exists():
            return []
        rows = [line.split() for line in self.journal.read_text().splitlines()]
        return [(row[1], int(row[2])) for row in rows if row[0] == word]

    def pids(self):
        return {pid for word in ("start", "grandchild") for _, pid in self.lines(word)}


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path)
    yield made
    if made.process is not None:
        made.process.kill()
        made.process.wait()
        eventually(lambda: not any(alive(p) for p in made.pids()), "everything gone after the test")
        assert "Traceback" not in (made.home / "stderr").read_text()


def test_services_start_in_order_behind_health_gates(run):
    run.add("c", depends_on=("b",)).add("b", "--ready-after-s", "0.5", depends_on=("a",)).add("a")
    began = time.monotonic()
    run.start().wait_ready()
    assert [name for name, _ in run.lines("start")] == ["a", "b", "c"]
    assert time.monotonic() - began >= 0.5


def test_a_killed_service_comes_back_and_the_others_stay(run):
    run.add("a").add("b", depends_on=("a",)).start().wait_ready()
    old = run.service("a")["pid"]
    other = run.service("b")["pid"]
    assert run.call(op="kill", name="a")["pid"] == old
    again = run.wait_new("a", old)
    assert again["restarts"] == 1
    assert again["last_exit"] == "signal 9"
    assert run.service("b")["pid"] == other


def add_keeper(run):
    """The real one; its socket."""
    path = str(run.paths.sockets / "keeper.sock")
    row = {"name": "keeper", "module": "services.mempool.keeper", "command": ["--socket", path]}
    run.services.append({**row, "probe": "keeper", "path": path})
    return path


def test_a_killed_keeper_comes_back_and_gets_the_mempools_descriptors_again(run):
    socket_path = add_keeper(run)
    run.start().wait_ready()
    assert run.service("keeper")["probe"] == f"unix:{socket_path}"
    client = KeeperClient(socket_path, Epoch(5), lambda keeper: keeper.keep("s", "pages", 0, [0], count=7))
    client.connect()
    with contextlib.closing(client):
        old = run.service("keeper")["pid"]
        run.call(op="kill", name="keeper")
        run.wait_new("keeper", old)
        assert client.restore()
        assert [(one.space, one.num_fds) for one in client.list_spaces()] == [("s", {"pages": 1})]


def test_a_keeper_that_hangs_is_replaced(run):
    run.rules = {"silent_ms": 4000}
    add_keeper(run)
    run.start().wait_ready()
    old = run.service("keeper")["pid"]
    os.kill(old, signal.SIGSTOP)
    run.wait_new("keeper", old)


def test_a_supervisor_that_stood_still_goes_on_with_the_same_processes(run):
    run.rules = {"silent_ms": 4000}
    run.add("a").add("b", depends_on=("a",)).start().wait_ready()
    pids = {name: run.service(name)["pid"] for name in ("a", "b")}
    run.process.send_signal(signal.SIGSTOP)
    time.sleep(5)
    run.process.send_signal(signal.SIGCONT)
    time.sleep(1)
    run.wait_ready()
    assert {name: run.service(name)["pid"] for name in pids} == pids
    assert not any(run.service(name)["restarts"] for name in pids)


def test_what_a_dead_service_had_started_is_gone_before_it_starts_again(run):
    run.add("a", "--grandchild").start().wait_ready()
    (_, grandchild) = run.lines("grandchild")[0]
    old = run.service("a")["pid"]
    os.kill(old, signal.SIGKILL)
    run.wait_new("a", old)
    assert not alive(grandchild)


def test_sigkill_of_the_supervisor_leaves_no_orphans(run):
    run.add("a", "--grandchild").add("b", "--deaf", "--grandchild", depends_on=("a",)).start().wait_ready()
    pids = run.pids()
    assert len(pids) == 4
    assert all(alive(pid) for pid in pids)
    run.process.kill()
    eventually(lambda: not any(alive(pid) for pid in pids), "no orphans")


def guard_of(run):
    """Its pid; None where there is no guard just now."""
    return next(
        (
            int(entry)
            for entry in os.listdir("/proc")
            if entry.isdigit()
            and f"PPid:\t{run.process.pid}\n" in _read(f"/proc/{entry}/status")
            and "guard.py" in _read(f"/proc/{entry}/cmdline")
        ),
        None,
    )


def test_the_guard_may_be_killed_and_orphans_still_do_not_stay(run):
    run.add("a", "--grandchild").start().wait_ready()
    first = guard_of(run)
    os.kill(first, signal.SIGKILL)
    # on a busy machine the first one is still there for a while
    eventually(lambda: guard_of(run) not in (None, first), "another guard")
    run.process.kill()
    eventually(lambda: not any(alive(pid) for pid in run.pids()), "no orphans")


def test_services_die_with_the_supervisor_even_without_the_guard(run):
    run.add("a", "--deaf").start().wait_ready()
    os.kill(guard_of(run), signal.SIGKILL)
    run.process.kill()
    eventually(lambda: not any(alive(pid) for pid in run.pids()), "no orphans")


def _read(path):
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def test_stop_is_quick_and_ends_dependents_first(run):
    run.add("a", stop_grace_ms=PATIENT_MS).add("b", depends_on=("a",), stop_grace_ms=PATIENT_MS)
    run.add("deaf", "--deaf", depends_on=("b",), stop_grace_ms=500)
    run.start().wait_ready()
    began = time.monotonic()
    with ControlClient(run.paths.control) as client:
        assert client.call(op="stop")["ok"]
        for _ in client.events(timeout_s=LIMIT_S):
            pass
    took_s = time.monotonic() - began
    assert 0.5 <= took_s < 10
    assert [name for name, _ in run.lines("stop")] == ["b", "a"]
    assert run.process.wait(timeout=30) == 0
    assert not any(alive(pid) for pid in run.pids())
    assert not run.paths.control.exists()
    with pytest.raises(PeerGone):
        ControlClient(run.paths.control)


def test_sigterm_of_the_supervisor_is_an_orderly_stop(run):
    run.add("a", stop_grace_ms=PATIENT_MS).start().wait_ready()
    run.process.terminate()
    assert run.process.wait(timeout=30) == 0
    assert [name for name, _ in run.lines("stop")] == ["a"]


def test_a_service_that_cannot_start_is_reported_with_its_last_log_lines(run):
    is_watched = run.home / "watched"
    run.add("a", "--ready-when", str(is_watched)).add("bad", "--crash", depends_on=("a",))
    run.rules = {"first_backoff_ms": 300}
    run.start()
    with ControlClient(run.paths.control) as client:
        client.call(op="watch")
        is_watched.touch()
        events = list(client.events(timeout_s=LIMIT_S))
    last = next(e for e in events if e["event"] == "give_up")
    assert last["name"] == "bad"
    assert last["log_tail"][-1] == "bad: the disk is on fire"
    assert last["log"].endswith("bad.log")
    assert run.process.wait(timeout=30) == 1
    assert [name for name, _ in run.lines("start")] == ["a", "bad", "bad", "bad"]


def test_a_later_crash_loop_is_told_and_does_not_end_the_cluster(run):
    run.add("a").add("b")
    run.rules = {"crash_loop_failures": 3, "first_backoff_ms": 20, "max_backoff_ms": 50}
    run.start().wait_ready()
    told = []
    with ControlClient(run.paths.control) as client:
        client.call(op="watch")
        for _ in range(3):
            pid = run.service("b")["pid"]
            run.call(op="kill", name="b")
            run.wait_new("b", pid)
        for event in client.events(timeout_s=LIMIT_S):
            told.append(event["event"])
            if event["event"] == "crash_loop":
                break
    assert told.count("exited") == 3
    assert run.service("a")["restarts"] == 0


def test_the_control_socket_is_private_and_survives_nonsense(run):
    run.add("a").start().wait_ready()
    assert run.paths.control.stat().st_mode & 0o777 == 0o600
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(run.paths.control))
        raw.sendall(
            b'nonsense\n[1]\n{"op":"kill","name":"a","signal":"x"}\n{"op":"fly"}\n{"op":"kill","name":7}\n'
        )
        with raw.makefile("rb") as lines:
            answers = [json.loads(lines.readline()) for _ in range(5)]
    assert all("error" in answer for answer in answers)
    with socket.socket(socket.AF_UNIX) as raw, contextlib.suppress(OSError):
        raw.connect(str(run.paths.control))
        raw.sendall(b"x" * (2 << 20))
    run.wait_ready()
    assert run.service("a")["restarts"] == 0


def add_zygote(run):
    """A zygote and the worker w that it forks."""
    port = free_port()
    run.services = [
        {
            "name": "engine-zygote",
            "module": "tests.integration.supervised_zygote",
            "command": ["--socket", str(run.paths.sockets / "zygote.sock")],
            "probe": "zygote",
        },
        {
            "name": "w",
            "module": "tests.integration.supervised_forked",
            "command": [str(port), str(run.journal)],
            "port": port,
            "launcher": "zygote",
            "env": {"SUPERVISED_FORKED": "seen"},
        },
    ]
    return run


def test_workers_are_forked_by_the_zygote_and_follow_it(run):
    add_zygote(run).start().wait_ready()
    zygote, worker = run.service("engine-zygote")["pid"], run.service("w")["pid"]
    assert f"PPid:\t{zygote}\n" in _read(f"/proc/{worker}/status")
    assert "forked says seen" in (run.paths.logs / "w.log").read_text()
    run.call(op="kill", name="w")
    worker = run.wait_new("w", worker)["pid"]
    assert run.service("engine-zygote")["pid"] == zygote
    run.call(op="kill", name="engine-zygote")
    worker = run.wait_new("w", worker)["pid"]
    assert run.service("engine-zygote")["pid"] != zygote
    run.process.kill()
    eventually(lambda: not any(alive(pid) for pid in run.pids()), "no orphans")


def test_a_zygote_that_hangs_is_replaced_when_a_worker_is_to_start(run):
    """It counted as ready, and was given every start of a worker, of which none came."""
    add_zygote(run)
    run.rules = {"silent_ms": 3_000}
    run.start().wait_ready()
    zygote, worker = run.service("engine-zygote")["pid"], run.service("w")["pid"]
    os.kill(zygote, signal.SIGSTOP)
    os.kill(worker, signal.SIGKILL)  # which only the zygote could say
    run.wait_new("engine-zygote", zygote)
    run.wait_new("w", worker)


def test_a_stop_waits_for_no_zygote_that_hangs(run):
    add_zygote(run).add("db").start().wait_ready()
    os.kill(run.service("engine-zygote")["pid"], signal.SIGSTOP)
    run.call(op="stop")
    assert run.process.wait(timeout=12) == 0
    assert not any(alive(pid) for pid in run.pids())


def test_a_supervisor_whose_log_is_on_a_full_disk_starts_and_restarts_as_ever(run):
    add_zygote(run).add("a", depends_on=("w",)).start(stderr_path=Path("/dev/full")).wait_ready()
    zygote = run.service("engine-zygote")["pid"]
    for name in ("a", "w"):
        old = run.service(name)["pid"]
        run.call(op="kill", name=name)
        run.wait_new(name, old)
    assert run.service("engine-zygote")["pid"] == zygote


def test_a_service_whose_log_cannot_be_opened_counts_as_one_that_cannot_start(run):
    (run.paths.logs / "a.log").mkdir(parents=True)
    run.add("a").start()
    assert run.process.wait(timeout=30) == 1


def test_a_busy_port_is_named_with_its_owner():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (line,) = busy_ports([("gateway", "127.0.0.1", port), ("redis", "127.0.0.1", free_port())])
    assert f"port {port}, wanted by gateway on 127.0.0.1, is in use by" in line
    assert f"(pid {os.getpid()})" in line
