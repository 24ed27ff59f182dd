"""Memory that comes again is in the mover's windows too, sooner or later: they are asked for as often as it takes."""

import asyncio

import pytest

from services.mempool import system_memory
from services.mempool.system_memory import SystemMemory
from tests.support.mover_spaces_rig import until

SPACE = 3


class Slabs:
    def __init__(self):
        self.present = set()

    def restore(self, slab):
        self.present.add(slab)

    def release(self, slab):
        self.present.discard(slab)

    def is_present(self, slab):
        return slab in self.present


class Window:
    """It refuses so often to map anything, having mapped the first one."""

    def __init__(self, refusals):
        self.refusals, self.asked, self.mapped = refusals, [], set()

    def remap(self, slabs):
        self.asked.append(list(slabs))
        if self.refusals:
            self.refusals -= 1
            self.mapped.update(slabs[:1])
            raise OSError(24, "Too many open files")
        self.mapped.update(slabs)

    def unmap(self, slabs):
        self.mapped.difference_update(slabs)


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.setattr(system_memory, "RETRY_MIN_S", 0.02)
    made = []

    def make(*windows):
        made.append(SystemMemory(lambda number: list(windows) if number == SPACE else []))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def said(monkeypatch):
    found = []
    monkeypatch.setattr(system_memory.log, "error", lambda event, **fields: found.append((event, fields)))
    return found


async def restored(memory, slabs, which):
    done = asyncio.get_running_loop().create_future()
    memory.restore(slabs, SPACE, which, done.set_result)
    return await done


async def test_memory_that_windows_could_not_map_twice_is_mapped_the_third_time(memory, said):
    windows, slabs = [Window(0), Window(2)], [Slabs(), Slabs()]
    it = memory(*windows)
    assert await restored(it, slabs, [1, 2, 5]) == 3, "engines get it all the same"
    await until(lambda: windows[1].mapped == {1, 2, 5})
    assert [(event, fields["again_s"]) for event, fields in said] == [
        ("slabs_not_mapped", 0.02),
        ("slabs_not_mapped", 0.04),
    ]


async def test_memory_that_went_again_meanwhile_is_not_mapped(memory, said):
    window, slabs = Window(1), Slabs()
    it = memory(window)
    assert await restored(it, [slabs], [1, 2, 5]) == 3
    gone = asyncio.get_running_loop().create_future()
    it.release([slabs], SPACE, [2], gone.set_result)
    await gone
    await until(lambda: len(window.asked) == 2)
    assert window.asked[1] == [1, 5]
    assert window.mapped == {1, 5}


async def test_windows_are_tried_no_more_when_the_memory_ends(memory, said):
    window = Window(1_000)
    it = memory(window)
    assert await restored(it, [Slabs()], [1]) == 1
    await until(lambda: len(window.asked) == 2)
    it.close()
    asked = len(window.asked)
    await asyncio.sleep(0.2)
    assert len(window.asked) == asked
