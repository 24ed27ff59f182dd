"""Slabs under pressure: a thread of its own unmaps them, slowly while steps are run, as fast as it goes without."""

import threading
import time

from shared.errors import ResourceError
from shared.mempool.slab_unmaps import BATCH, IDLE_S, STEPS_BYTES_PER_S, SlabUnmaps


class Rig:
    """A driver on a clock that only the test moves."""

    def __init__(self, broken: int = -1) -> None:
        self.now = 100.0
        self.broken = broken
        self.gone: list[int] = []
        self.calls: list[tuple[int, int, str]] = []  # how many, at which rate, on which thread
        self.said: list[list[int]] = []
        self.unmaps = SlabUnmaps(self, lambda done: self.said.append(list(done)), clock=lambda: self.now)

    def unmap(self, slabs, bytes_per_s=0):
        self.calls.append((len(slabs), bytes_per_s, threading.current_thread().name))
        for slab in slabs:
            if slab == self.broken:
                raise ResourceError("the driver refuses")
            if slab not in self.gone:
                self.gone.append(slab)

    def wait_for(self, count: int) -> None:
        end = time.monotonic() + 30
        while sum(map(len, self.said)) < count and time.monotonic() < end:
            time.sleep(0.001)
        assert [slab for part in self.said for slab in part] == self.gone
        assert len(self.gone) == count


def test_while_steps_are_run_slabs_go_in_small_batches_at_a_bounded_rate():
    rig = Rig()
    rig.now += 1
    rig.unmaps.step_launched()
    rig.unmaps.add(range(3 * BATCH + 1))
    rig.wait_for(3 * BATCH + 1)
    assert [count for count, _, _ in rig.calls] == [BATCH, BATCH, BATCH, 1]
    assert {rate for _, rate, _ in rig.calls} == {STEPS_BYTES_PER_S}
    assert {thread for _, _, thread in rig.calls} == {"quire-unmap"}
    rig.unmaps.close()


def test_without_steps_they_go_as_fast_as_the_driver_takes_them():
    rig = Rig()
    rig.unmaps.step_launched()
    rig.now += 1.5 * IDLE_S
    rig.unmaps.add([1, 2, 3])
    rig.wait_for(3)
    assert {rate for _, rate, _ in rig.calls} == {0}
    rig.unmaps.close()


def test_a_slab_that_the_driver_keeps_is_not_said_to_be_unmapped_and_holds_up_no_other():
    rig = Rig(broken=2)
    rig.unmaps.add([1, 2, 3])
    rig.wait_for(2)
    assert rig.said == [[1, 3]]
    rig.unmaps.close()


def test_nothing_is_unmapped_while_another_thread_maps():
    rig = Rig()
    with rig.unmaps.lock:
        rig.unmaps.add([1])
        time.sleep(0.05)
        assert rig.calls == []
    rig.wait_for(1)
    rig.unmaps.close()
