"""A hung engine is found, and nobody else is taken for one."""

import asyncio

import pytest

from shared.engine import engine_watch
from shared.engine.engine_watch import EngineWatch
from shared.errors import PeerGone


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(engine_watch, "TICK_S", 0.01)


async def watched(
    ping, seconds: float, limit_s: float = 0.1, *, once_said: bool = False
) -> tuple[EngineWatch, list[str]]:
    """Args: once_said: the seconds begin when it has said something."""
    said: list[str] = []
    was_said = asyncio.Event()

    def say(text: str) -> None:
        said.append(text)
        was_said.set()

    watch = EngineWatch(ping, limit_s, say)
    task = asyncio.create_task(watch.run())
    if once_said:
        await was_said.wait()
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return watch, said


async def turn() -> None:
    await asyncio.sleep(0)


async def never() -> None:
    await asyncio.sleep(3600)


async def test_an_engine_that_never_answers_is_told_of_once():
    watch, said = await watched(never, 0.3, once_said=True)
    assert len(said) == 1
    assert watch.is_suspect


async def test_an_engine_whose_steps_are_long_is_let_be_and_no_longer_suspect_when_it_answers():
    suspects: list[bool] = []
    enough = asyncio.Event()

    async def slow() -> None:
        while len(suspects) < 2 and not watches[0].is_suspect:
            await turn()
        suspects.append(watches[0].is_suspect)
        if len(suspects) == 3:
            enough.set()

    watches: list[EngineWatch] = []
    said: list[str] = []
    watches.append(EngineWatch(slow, 0.2, said.append))
    task = asyncio.create_task(watches[0].run())
    await enough.wait()
    assert suspects == [True, True, False]
    assert said == []
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_an_engine_that_died_is_somebody_elses_to_tell():
    async def dead() -> None:
        raise PeerGone("the engine died")

    watch, said = await watched(dead, 0.2)
    assert (said, watch.silent_s) == ([], 0.0)


async def test_time_in_which_this_process_stood_still_is_not_the_engines(monkeypatch):
    """One tick, however long it took: the whole machine may have been asleep."""
    loop = asyncio.get_running_loop()
    ahead_s = [0.0]
    real = loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + ahead_s[0])
    said: list[str] = []
    watch = EngineWatch(never, 1_000.0, said.append)
    task = asyncio.create_task(watch.run())
    await asyncio.sleep(0.05)
    ahead_s[0] = 5_000.0
    await asyncio.sleep(0.05)
    assert said == []
    assert watch.silent_s < 10
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
