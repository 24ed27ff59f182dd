"""When a worker says Hello to the scheduler, and how often."""

from types import SimpleNamespace

import pytest

from shared.engine.interface import EngineLoad
from shared.engine.worker_config import WorkerSettings
from shared.engine.worker_cost import WorkerCost
from shared.engine.worker_reports import SchedulerReports
from shared.ids import Epoch
from shared.wire.reports import Hello, Refused, Report, Resync, Welcome
from tests.support.control_plane import hello

INTERVAL_S = 60.0


@pytest.fixture
async def reports():
    made = SchedulerReports(
        WorkerSettings(report_interval_ms=int(INTERVAL_S * 1_000), hello_timeout_ms=600_000),
        hello=lambda epoch: hello("d0", epoch), load=EngineLoad, cost=WorkerCost(), on_stale=lambda: None,
    )  # fmt: skip
    made._link = SimpleNamespace(send=SENT.append, up=True, endpoint="", close=lambda: None)
    SENT.clear()
    yield made
    made.close()


SENT = []


def said(kind):
    return sum(isinstance(message, kind) for message in SENT)


async def test_a_scheduler_that_wants_a_hello_behind_each_report_gets_one_an_interval(reports):
    """It welcomes the epoch that the coordinator's list does not name any more, and does not place on it."""
    reports.set_epoch(Epoch(5))
    for _ in range(100):
        reports._on_message(0, Welcome(report_interval_ms=60_000), [])
        reports._on_message(0, Resync(), [])
        reports._tick()
    assert said(Hello) == 1
    assert not reports.welcomed
    reports._hello_at -= INTERVAL_S + 1
    reports._tick()
    assert said(Hello) == 2


async def test_a_scheduler_that_was_started_again_gets_its_hello_at_once(reports):
    reports.set_epoch(Epoch(5))
    reports._on_message(0, Welcome(report_interval_ms=60_000), [])
    assert (said(Hello), said(Report)) == (1, 1)
    reports._hello_at -= INTERVAL_S + 1
    reports._on_message(0, Resync(), [])
    assert said(Hello) == 2


async def test_a_hello_that_nobody_answers_is_said_again_after_its_own_time(reports):
    reports.set_epoch(Epoch(5))
    reports._hello_at -= INTERVAL_S + 1
    reports._tick()
    assert said(Hello) == 1
    reports._hello_at -= 600
    reports._tick()
    assert said(Hello) == 2


async def test_a_worker_that_the_scheduler_refuses_says_why_until_it_is_welcomed(reports):
    reports.set_epoch(Epoch(5))
    reports._on_message(0, Refused(code="model.other", reason="its 'demo' is another model"), [])
    assert (reports.welcomed, reports.refusal) == (False, "its 'demo' is another model")
    reports._on_message(0, Welcome(report_interval_ms=60_000), [])
    assert (reports.welcomed, reports.refusal) == (True, "")
