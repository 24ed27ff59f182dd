"""Staged copies: the CPU packs or unpacks pinned slots, the copy engine moves packed slots.

Worth it when many small host pieces are one range on the device, and when host memory is not pinned. To the
device the CPU packs at submit; to the host it unpacks when the ticket is asked. Slots are lent to one copy at a time.
"""

import time
from collections import deque

from shared.kernels.copy_pages.copies import U64, CopyFailed, Direction, Order
from shared.kernels.copy_pages.driver import CopyDriver
from shared.kernels.copy_pages.host_memory import move
from shared.kernels.copy_pages.plan import Group, Plan

SLOT_WAIT_S = 5.0
POLL_S = 0.00002


class StagingSlots:
    """Pinned slots, each with the event behind its last use. Not thread-safe: the copier holds its lock."""

    def __init__(self, driver: CopyDriver, num_slots: int, slot_bytes: int) -> None:
        self._driver = driver
        self._num_slots = num_slots
        self._slot_bytes = slot_bytes
        self._base = 0
        self._free: deque[tuple[int, int]] = deque()  # (address, event), the longest unused first
        self._all: list[tuple[int, int]] = []
        self._stays = False

    def _open(self) -> None:
        if not self._base:
            self._base = self._driver.allocate_host(self._num_slots * self._slot_bytes)
            for number in range(self._num_slots):
                slot = (self._base + number * self._slot_bytes, self._driver.create_event())
                self._all.append(slot)
                self._free.append(slot)

    def take(self) -> tuple[int, int] | None:
        """A slot whose last copy has passed; None when there is none now."""
        self._open()
        if self._free and self._driver.passed(self._free[0][1]):
            return self._free.popleft()
        return None

    @property
    def is_free(self) -> bool:
        """Whether take() has one now."""
        self._open()
        return bool(self._free) and self._driver.passed(self._free[0][1])

    @property
    def all_lent(self) -> bool:
        """Whether every slot is with a copy to the host that nobody has asked for."""
        self._open()
        return not self._free

    def take_soon(self) -> tuple[int, int]:
        """A slot, after waiting for the copy engine if need be. Raises: CopyFailed when it stands still."""
        deadline_s = time.monotonic() + SLOT_WAIT_S
        while (slot := self.take()) is None:
            if time.monotonic() >= deadline_s:
                raise CopyFailed("staging", f"no slot came free within {SLOT_WAIT_S} s")
            time.sleep(POLL_S)
        return slot

    def give_back(self, slot: tuple[int, int]) -> None:
        """It may be taken again once its event has passed."""
        self._free.append(slot)

    def keep(self) -> None:
        """A copy through one of them may never be over: close() frees none."""
        self._stays = True

    def close(self) -> None:
        """After every copy through them is done, or keep()."""
        if self._stays:
            return
        for _, event in self._all:
            self._driver.destroy_event(event)
        if self._base:
            self._driver.free_host(self._base)
        self._all, self._base = [], 0
        self._free.clear()


class StagedCopy:
    """One staged set under way. The copier holds its lock around every call."""

    def __init__(
        self, driver: CopyDriver, slots: StagingSlots, plan: Plan, order: Order, stream: int
    ) -> None:
        self._driver = driver
        self._slots = slots
        self._stream = stream
        # The slots themselves are written before the call, so to the device any stream order is right.
        self._order = order if plan.direction is Direction.DEVICE_TO_HOST else Order.STREAM
        self._to_device = plan.direction is Direction.HOST_TO_DEVICE
        self._waiting = deque(plan.groups)
        self._flying: deque[tuple[Group, tuple[int, int]]] = deque()
        self._refused: list[tuple[int, int]] = []  # one at most: its event does not tell whether it is in use

    def start(self) -> None:
        """To the device: all of it. To the host: as much as slots are free. Raises: CopyFailed."""
        while self._to_device and self._waiting:
            self._pack(self._waiting.popleft(), self._slots.take_soon())
        self._fill()

    def abandon(self, *, settled: bool) -> None:
        """After a failure: give the slots back. Unless nothing of the set runs, one may be nobody's for good."""
        while self._flying:
            self._slots.give_back(self._flying.popleft()[1])
        if not settled:
            self._slots.keep()
        while settled and self._refused:
            self._slots.give_back(self._refused.pop())
        self._waiting.clear()

    def done(self) -> bool:
        """Unpack what has arrived, start what has a slot now; whether nothing is left to do."""
        while self._flying and self._driver.passed(self._flying[0][1][1]):
            group, slot = self._flying.popleft()
            move(group.host, slot[0] + group.offsets, group.sizes)
            self._slots.give_back(slot)
        self._fill()
        return not self._flying and not self._waiting

    def _pack(self, group: Group, slot: tuple[int, int]) -> None:
        """Host pieces into the slot, the slot to the device."""
        move(slot[0] + group.offsets, group.host, group.sizes)
        self._send(slot, group.device, slot[0] + group.run_offsets, group.run_sizes)
        self._slots.give_back(slot)

    def _fill(self) -> None:
        """Start groups from the device while slots are free."""
        while self._waiting and (slot := self._slots.take()) is not None:
            group = self._waiting.popleft()
            self._send(slot, slot[0] + group.run_offsets, group.device, group.run_sizes)
            self._flying.append((group, slot))

    def _send(self, slot: tuple[int, int], targets: U64, sources: U64, sizes: U64) -> None:
        """And the slot's event behind it. Raises: CopyFailed, and the slot is neither free nor flying."""
        try:
            self._copy(targets, sources, sizes)
            self._driver.record(slot[1], self._stream)
        except CopyFailed:
            self._refused.append(slot)
            raise

    def _copy(self, targets: U64, sources: U64, sizes: U64) -> None:
        if targets.size > 1 and self._driver.has_batch:
            self._driver.copy_batch(targets, sources, sizes, self._order, self._stream)
            return
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            self._driver.copy(target, source, size, self._stream)
