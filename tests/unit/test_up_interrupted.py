"""An interrupted `quire up`, or one with a late supervisor, leaves none; `quire down` waits for what begins."""

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
from typer.testing import CliRunner

from deploy.local import cmd_down, cmd_up, config, plan, run_supervisor
from deploy.local.cli import app
from deploy.local.control import ControlClient, ControlServer
from deploy.local.interrupts import NUMBERS, Interrupts

MOMENT_S = 0.3


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("QUIRE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "home"))
    config.make_folders(config.paths_of(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(autouse=True)
def as_at_a_terminal():
    """Who runs the tests under nohup, or behind a shell's &, has some of them ignored."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    for number in NUMBERS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def wanted(home):
    return cmd_up.Wanted(config.load(), config.paths_of(home), "quire")


@pytest.fixture
def supervisor():
    """One that has not come to its control socket yet."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield child
        child.kill()


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("number", NUMBERS)
def test_an_interrupted_start_leaves_no_supervisor(wanted, supervisor, capsys, number, is_early):
    with Interrupts() as interrupts:
        if is_early:  # while the process was being made
            signal.raise_signal(number)
        else:
            threading.Timer(MOMENT_S, os.kill, (os.getpid(), number)).start()
        with pytest.raises(SystemExit) as ended:
            cmd_up._wait(wanted, supervisor, interrupts)
    assert ended.value.code == 130
    assert supervisor.returncode == -signal.SIGTERM
    assert "interrupted" in capsys.readouterr().out


def test_a_supervisor_that_is_late_is_ended(wanted, supervisor, monkeypatch):
    monkeypatch.setattr(cmd_up, "SUPERVISOR_START_S", MOMENT_S)
    with Interrupts() as interrupts, pytest.raises(SystemExit) as ended:
        cmd_up._wait(wanted, supervisor, interrupts)
    assert (ended.value.code, supervisor.returncode) == (1, -signal.SIGTERM)


def test_a_start_whose_supervisor_goes_before_it_is_asked_says_that_it_was_stopped(
    wanted, supervisor, monkeypatch, capsys
):
    """It listens for as long as its guard takes to end, and answers nobody."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(wanted.paths.control))
    listener.listen()
    client = ControlClient(wanted.paths.control)
    listener.close()  # its connections are reset
    monkeypatch.setattr(cmd_up, "_wait_for_control", lambda *_: client)
    with Interrupts() as interrupts, pytest.raises(SystemExit) as ended:
        cmd_up._wait(wanted, supervisor, interrupts)
    assert ended.value.code == 1
    assert "it was stopped or killed; `quire down` makes sure" in " ".join(capsys.readouterr().err.split())


def test_a_cluster_that_serves_is_not_stopped_because_the_output_is_full(
    wanted, supervisor, monkeypatch, capsys
):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cmd_up, "_wait_for_control", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(cmd_up, "_follow", lambda *_, **__: {})
    monkeypatch.setattr(cmd_up, "_summary", full)
    with Interrupts() as interrupts, pytest.raises(SystemExit) as ended:
        cmd_up._wait(wanted, supervisor, interrupts)
    assert (ended.value.code, supervisor.poll()) == (1, None)
    said = " ".join(capsys.readouterr().err.split())
    assert said.startswith("error: cannot write the output: No space left on device; the cluster serves: ")


def test_a_supervisor_has_the_time_that_looking_at_the_gpus_may_take():
    assert cmd_up.SUPERVISOR_START_S > plan.NVIDIA_SMI_TIMEOUT_S + 10


def test_handlers_come_back_and_what_is_ignored_stays_ignored():
    before = [signal.getsignal(number) for number in NUMBERS]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup quire up
    try:
        with Interrupts() as interrupts:
            interrupts.let()
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGTERM) is not before[1]
    finally:
        signal.signal(signal.SIGHUP, before[2])
    assert [signal.getsignal(number) for number in NUMBERS] == before


def down(*words):
    return CliRunner().invoke(app, ["down", *words])


def test_down_waits_for_an_up_that_ends_by_itself(home):
    lock = run_supervisor.take_lock(config.paths_of(home))
    threading.Timer(MOMENT_S, lock.close).start()
    told = down()
    assert (told.exit_code, lock.closed, told.stdout) == (0, True, "nothing is running\n")


async def test_down_waits_until_a_start_can_be_stopped(home):
    server = ControlServer(config.paths_of(home).control, lambda _: {})
    with run_supervisor.take_lock(config.paths_of(home)):
        found = []
        waiting = threading.Thread(target=lambda: found.append(cmd_down._connected()))
        waiting.start()
        waiting.join(MOMENT_S)
        assert waiting.is_alive()
        await server.start()
        waiting.join(10)
    found[0].close()
    await server.close()


def test_down_does_not_call_a_start_nothing(home, monkeypatch):
    monkeypatch.setattr(cmd_down, "UNDER_WAY_WAIT_S", MOMENT_S)
    with run_supervisor.take_lock(config.paths_of(home)):
        told = down()
    assert (told.exit_code, "a `quire up` is under way" in told.stderr) == (1, True)
    assert down().stdout == "nothing is running\n"
