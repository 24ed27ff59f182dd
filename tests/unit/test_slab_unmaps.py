"""Slabs under pressure: few behind each step, all of them by a thread while no steps are run."""

import threading
import time

from shared.errors import ResourceError
from shared.mempool.slab_unmaps import IDLE_S, MAX_STEP_S, STEP_SHARE, SlabUnmaps

SLAB_S = 0.0001


class Rig:
    """A driver that takes SLAB_S a slab, on a clock that only it and the test move."""

    def __init__(self, broken: int = -1) -> None:
        self.now = 100.0
        self.broken = broken
        self.gone: list[tuple[int, str]] = []
        self.said: list[list[int]] = []
        self.unmaps = SlabUnmaps(self, lambda done: self.said.append(list(done)), clock=lambda: self.now)

    def unmap(self, slabs):
        for slab in slabs:
            if slab == self.broken:
                raise ResourceError("the driver refuses")
            self.now += SLAB_S
            self.gone.append((slab, threading.current_thread().name))

    def wait_for(self, count: int) -> None:
        end = time.monotonic() + 30
        while len(self.gone) < count and time.monotonic() < end:
            time.sleep(0.001)
        assert len(self.gone) >= count


def test_a_step_unmaps_for_a_share_of_its_time_and_never_for_longer_than_a_millisecond():
    rig = Rig()
    rig.unmaps.step_launched()  # steps are run: the thread keeps away
    rig.unmaps.add(range(100))
    for step_s, most_s in ((0.002, 0.002 * STEP_SHARE), (0.005, 0.005 * STEP_SHARE), (0.015, MAX_STEP_S)):
        assert step_s < IDLE_S, "longer, and the thread might have its turn"
        done = len(rig.gone)
        rig.now = stepped = rig.now + step_s
        rig.unmaps.step_launched()
        assert 1 <= len(rig.gone) - done <= most_s / SLAB_S + 1.001
        rig.now = stepped
    assert {thread for _, thread in rig.gone} == {"MainThread"}
    rig.unmaps.close()


def test_without_steps_the_thread_unmaps_everything_and_says_so():
    rig = Rig()
    rig.unmaps.add([1, 2, 3])
    rig.wait_for(3)
    assert {thread for _, thread in rig.gone} == {"quire-unmap"}
    end = time.monotonic() + 30
    while sum(map(len, rig.said)) < 3 and time.monotonic() < end:
        time.sleep(0.001)
    assert sorted(slab for part in rig.said for slab in part) == [1, 2, 3]
    rig.unmaps.close()


def test_a_slab_that_the_driver_keeps_is_not_said_to_be_unmapped_and_holds_up_no_other():
    rig = Rig(broken=2)
    rig.unmaps.step_launched()
    rig.unmaps.add([1, 2, 3])
    rig.now += 0.01
    rig.unmaps.step_launched()
    assert rig.said == [[1, 3]]
    rig.unmaps.close()


def test_a_step_does_not_wait_while_another_thread_maps():
    rig = Rig()
    rig.unmaps.step_launched()
    rig.unmaps.add([1])
    held, free = threading.Event(), threading.Event()

    def map_slabs() -> None:
        with rig.unmaps.lock:
            held.set()
            free.wait(30)

    thread = threading.Thread(target=map_slabs)
    thread.start()
    held.wait(30)
    rig.unmaps.step_launched()
    assert rig.gone == []
    free.set()
    thread.join()
    rig.unmaps.step_launched()
    assert [slab for slab, _ in rig.gone] == [1]
    rig.unmaps.close()
