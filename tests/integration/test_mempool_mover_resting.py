"""Host memory that rests and wakes again while the background thread is busy, over fake GPUs that move real bytes."""

import asyncio
import threading

from tests.support.mover_spaces_rig import movers, until


def names_up_to_the_last_unlocking(driver):
    names = driver.names()
    return names[: len(names) - names[::-1].index("unregister_host")]


async def test_memory_that_wakes_before_it_was_unlocked_is_never_unlocked_under_a_copy(monkeypatch):
    with movers(monkeypatch) as rig:
        it = rig(pin_host=True)
        it.add(1, (0,))
        it.add(2, 1)
        await it.pinned()
        driver = it.gpus.drivers[0]
        let_go = [driver.hold(stream) for stream in list(driver.streams)]
        is_busy = threading.Event()
        it.mover._background.submit(is_busy.wait)  # as with another space's mapping
        for _ in range(2):
            it.mover.pinning.rest(2)
            it.mover.pinning.wake(2)
        copies = [asyncio.create_task(it.copy(*way)) for way in ((2, 1), (1, 2))]
        await asyncio.sleep(0.05)
        is_busy.set()
        await until(lambda: "unregister_host" in driver.names() and not it.mover.pinning.is_unlocking(2))
        before = names_up_to_the_last_unlocking(driver)
        assert not [name for name in before if name.startswith("copy")], "a copy runs there"
        for each in let_go:
            each()
        assert all(done.ok for done in await asyncio.gather(*copies))
        assert names_up_to_the_last_unlocking(driver) == before
        await it.pinned()
