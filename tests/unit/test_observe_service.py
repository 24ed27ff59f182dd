"""The frame of a service's process: signals, bugs and wrong settings each end it with their own status."""

import asyncio
import logging
import os
import signal
from collections.abc import Iterator, Sequence

import msgspec
import pytest
import structlog

from shared.background_task import begin_task
from shared.errors import SettingsError
from shared.observe import service


class Settings(msgspec.Struct, frozen=True):
    instance: str = "x-0"
    log_level: str = "info"
    trace_endpoint: str = ""
    trace_dir: str = ""
    trace_sample_ratio: float = 1.0


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    root = logging.getLogger()
    before = list(root.handlers)
    yield
    root.handlers = before
    structlog.reset_defaults()


def raising() -> None:
    raise ValueError("our bug")


async def after_a_signal(_: Settings) -> int:
    ended = service.end_on_signal()
    os.kill(os.getpid(), signal.SIGTERM)
    return await asyncio.wait_for(ended, 30)


async def after_a_bug(_: Settings) -> int:
    ended = service.end_on_signal()
    states: list[int] = []

    def state() -> dict[str, int]:
        states.append(1)
        return {"pages": 3}

    service.end_on_bug("x", ended, state)
    asyncio.get_running_loop().call_soon(raising)
    status = await asyncio.wait_for(ended, 30)
    assert states == [1], "its state is logged"
    return status


async def fails() -> None:
    raising()


async def after_a_background_task_that_a_bug_ended(_: Settings) -> int:
    ended = service.end_on_signal()
    service.end_on_bug("x", ended)
    begin_task(fails(), "x-tick")
    return await asyncio.wait_for(ended, 30)


async def who_hears_of_lost_tasks_alone(_: Settings) -> int:
    ended = service.end_on_signal()
    service.end_on_lost_task("x", ended)
    asyncio.get_running_loop().call_soon(raising)
    await asyncio.sleep(0.01)
    assert not ended.done(), "a callback was one request's"
    begin_task(fails(), "x-tick")
    return await asyncio.wait_for(ended, 30)


async def after_a_lost_tasks_error(_: Settings) -> int:
    ended = service.end_on_signal()
    service.end_on_bug("x", ended)
    asyncio.get_running_loop().call_exception_handler({"message": "Task exception was never retrieved"})
    await asyncio.sleep(0.01)
    assert not ended.done(), "no callback raised"
    os.kill(os.getpid(), signal.SIGINT)
    return await asyncio.wait_for(ended, 30)


async def with_a_taken_address(_: Settings) -> int:
    raise SettingsError("setting x.listen: taken")


@pytest.mark.parametrize(
    ("run", "status"),
    [
        (after_a_signal, 0),
        (after_a_bug, 70),
        (after_a_background_task_that_a_bug_ended, 70),
        (who_hears_of_lost_tasks_alone, 70),
        (after_a_lost_tasks_error, 0),
        (with_a_taken_address, 2),
    ],
)
def test_every_end_has_its_status(run, status, capsys):
    assert service.main("x", lambda argv: Settings(), run) == status
    assert ("setting x.listen: taken" in capsys.readouterr().err) is (status == 2)


def test_wrong_settings_are_said_on_stderr_before_anything_runs(capsys):
    def load(argv: Sequence[str]) -> Settings:
        raise SettingsError("setting x.y: 3 is not 4")

    assert service.main("x", load, after_a_signal) == 2
    assert capsys.readouterr().err == "x: setting x.y: 3 is not 4\n"
