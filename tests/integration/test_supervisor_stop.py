"""The supervisor told to stop while something is under way: how it waits, and how it is told not to."""

import os
import resource
import signal
import time

import pytest

from deploy.local.control import ControlClient
from tests.integration.test_supervisor import LIMIT_S, eventually, guard_of, run  # noqa: F401 - run is a fixture

HOURS_MS = 3_600_000


@pytest.fixture
def busy(run):  # noqa: F811
    """A gateway with two answers under way, which a worker serves; they do not end by themselves."""
    run.add("worker").add("gateway", "--in-flight", "2", served_by=["worker"], drain_ms=HOURS_MS)
    return run.start().wait_ready()


def waits(busy):
    """It says so, and both still run."""
    eventually(lambda: "2 answers are under way" in (busy.home / "stderr").read_text(), "the notice")
    assert busy.lines("stop") == []


def ended(busy):
    """By themselves, in order."""
    assert busy.process.wait(timeout=LIMIT_S) == 0
    assert [name for name, _ in busy.lines("stop")] == ["gateway", "worker"]


def test_a_closed_terminal_is_an_orderly_stop_and_saying_so_twice_is_no_hurry(run):  # noqa: F811
    run.add("a").add("gateway", "--in-flight", "2", depends_on=["a"], drain_ms=HOURS_MS).start().wait_ready()
    run.process.send_signal(signal.SIGHUP)  # the kernel says it, and then the shell
    waits(run)
    run.process.send_signal(signal.SIGHUP)
    time.sleep(1.0)
    waits(run)
    run.process.terminate()
    assert run.process.wait(timeout=LIMIT_S) == 0
    assert [name for name, _ in run.lines("stop")] == ["gateway", "a"]


def test_under_nohup_a_closed_terminal_stops_nothing(run):  # noqa: F811
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which a child inherits
    try:
        run.add("a").start()
    finally:
        signal.signal(signal.SIGHUP, before)
    run.wait_ready()
    run.process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert run.call(op="status")["ready"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once_what_the_first_one_waited_for(busy, number):
    busy.process.send_signal(number)
    waits(busy)
    busy.process.send_signal(number)
    ended(busy)


def test_a_second_stop_ends_at_once_what_the_first_one_waited_for_and_who_waits_hears_all_of_it(busy):
    with ControlClient(busy.paths.control) as client:
        assert client.call(op="stop")["longest_stop_s"] == HOURS_MS / 1000 + 2
        waits(busy)
        assert busy.call(op="stop")["ok"]
        events = list(client.events(timeout_s=LIMIT_S))
    assert [event["name"] for event in events if event["event"] == "waiting"] == ["gateway"]
    ended(busy)


def test_a_stop_at_once_waits_for_nothing(busy):
    began = time.monotonic()
    assert busy.call(op="stop", now=True)["ok"]
    ended(busy)
    assert time.monotonic() - began < 20
    assert "under way" not in (busy.home / "stderr").read_text()


def test_a_service_and_the_guard_that_die_while_nothing_can_be_started_are_back_later(run):  # noqa: F811
    run.add("a").start().wait_ready()
    old = run.service("a")["pid"]
    of_files = run.process.pid, resource.RLIMIT_NOFILE
    soft, hard = resource.prlimit(*of_files)
    resource.prlimit(*of_files, (3, hard))  # no pipe
    os.kill(guard_of(run), signal.SIGKILL)
    os.kill(old, signal.SIGKILL)
    time.sleep(0.5)
    resource.prlimit(*of_files, (soft, hard))
    run.wait_new("a", old)
    eventually(lambda: guard_of(run), "another guard")
    run.process.terminate()
    assert run.process.wait(timeout=LIMIT_S) == 0
