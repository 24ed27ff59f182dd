"""The supervisor told to stop while something is under way: how it waits, and how it is told not to."""

import signal
import time

import pytest

from deploy.local.control import ControlClient
from tests.integration.test_supervisor import LIMIT_S, eventually, run  # noqa: F401 - run is a fixture

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
