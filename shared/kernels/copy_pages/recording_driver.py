"""A driver without a GPU: records every call, and moves the bytes when a test lets the stream go on.

Streams keep their work until it is run, so that what depends on order can be seen: `run()` runs everything that
its events allow; a stream under `hold` stands still until released. Device memory is ordinary memory.
"""

import ctypes
from collections import deque
from collections.abc import Callable

import numpy as np

from shared.kernels.copy_pages.copies import U64, CopyFailed, Order
from shared.kernels.copy_pages.host_memory import move, view


class RecordingDriver:
    """See driver.CopyDriver. Not thread-safe."""

    key = "recording driver"

    def __init__(
        self, *, has_batch: bool = True, has_kernel: bool = True, eager: bool = True, polls: int = 0
    ) -> None:
        """`eager`: copies happen in the call. Otherwise they wait for `run()`, or for every `polls`-th poll."""
        self.has_batch = has_batch
        self.has_kernel = has_kernel
        self.eager = eager
        self.polls = polls
        self._num_polls = 0
        self.calls: list[tuple[str, tuple[object, ...]]] = []
        self.fail_at: dict[str, int] = {}  # name of a call: fail the n-th next one (1: the next)
        self.memory: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.registered: dict[int, int] = {}
        self.streams: dict[int, deque[Callable[[], bool]]] = {}
        self.events: dict[int, tuple[int, int]] = {}  # event: records begun, records passed
        self.closed = False
        self._next = 1000

    def _note(self, name: str, *args: object) -> None:
        self.calls.append((name, args))
        if name in self.fail_at:
            self.fail_at[name] -= 1
            if self.fail_at[name] == 0:
                del self.fail_at[name]
                raise CopyFailed(name, "CUDA_ERROR_INVALID_VALUE")

    def names(self) -> list[str]:
        """Names of the calls so far, without polls and context switches."""
        return [name for name, _ in self.calls if name not in ("passed", "make_current")]

    def run(self) -> None:
        """Run every stream until nothing can go on."""
        moving = True
        while moving:
            moving = False
            for work in self.streams.values():
                while work and work[0]():
                    work.popleft()
                    moving = True

    def hold(self, stream: int) -> Callable[[], None]:
        """The stream goes no further than its work of now until the function returned here is called."""
        held = [True]
        self._put(stream, lambda: not held[0])

        def release() -> None:
            held[0] = False
            self.run()

        return release

    def _put(self, stream: int, step: Callable[[], bool]) -> None:
        self.streams.setdefault(stream, deque()).append(step)
        if self.eager:
            self.run()

    def _handle(self) -> int:
        self._next += 1
        return self._next

    def make_current(self) -> None:
        """Nothing to bind."""
        self.calls.append(("make_current", ()))

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """A plain copy."""
        self._note("copy", target, source, num_bytes, stream)
        columns = [np.array([value], np.uint64) for value in (target, source, num_bytes)]
        self._put(stream, lambda: _moved(*columns))

    def copy_batch(self, targets: U64, sources: U64, sizes: U64, order: Order, stream: int) -> None:
        """DURING_CALL and ANY read out of stream order, at once, as a real driver may; STREAM reads in its turn."""
        self._note("copy_batch", targets.tolist(), sources.tolist(), sizes.tolist(), order, stream)
        if order is Order.STREAM:
            columns = targets.copy(), sources.copy(), sizes.copy()
            self._put(stream, lambda: _moved(*columns))
            return
        taken = [
            ctypes.string_at(int(source), int(size)) for source, size in zip(sources, sizes, strict=True)
        ]
        places = targets.tolist()
        self._put(stream, lambda: all(_write(place, data) for place, data in zip(places, taken, strict=True)))

    def copy_rows(self, table: int, rows: int, ctas: int, stream: int) -> None:
        """The kernel reads its table when its turn comes."""
        self._note("copy_rows", table, rows, ctas, stream)

        def step() -> bool:
            columns = view(table, 24 * rows).view(np.uint64).reshape(3, rows)
            assert not (columns % 16).any(), "vectors of 16 bytes"
            return _moved(columns[1], columns[0], columns[2])

        self._put(stream, step)

    def create_stream(self) -> int:
        """A number."""
        self._note("create_stream")
        handle = self._handle()
        self.streams[handle] = deque()
        return handle

    def destroy_stream(self, stream: int) -> None:
        """Forget it."""
        self._note("destroy_stream", stream)
        del self.streams[stream]

    def create_event(self) -> int:
        """A number."""
        self._note("create_event")
        handle = self._handle()
        self.events[handle] = (0, 0)
        return handle

    def destroy_event(self, event: int) -> None:
        """Forget it."""
        self._note("destroy_event", event)
        del self.events[event]

    def record(self, event: int, stream: int) -> None:
        """Passes when the stream gets there."""
        self._note("record", event, stream)
        begun, passed = self.events[event]
        self.events[event] = (begun + 1, passed)

        def step() -> bool:
            if event in self.events:
                self.events[event] = (self.events[event][0], max(begun + 1, self.events[event][1]))
            return True

        self._put(stream, step)

    def wait_event(self, stream: int, event: int) -> None:
        """The stream stands still until the record of now has passed."""
        self._note("wait_event", stream, event)
        begun, _ = self.events[event]
        self._put(stream, lambda: event not in self.events or self.events[event][1] >= begun)

    def passed(self, event: int) -> bool:
        """Whether the last record has passed."""
        self._note("passed", event)
        self._num_polls += 1
        if self.polls and self._num_polls % self.polls == 0:
            self.run()
        begun, passed = self.events[event]
        return passed >= begun

    def allocate_host(self, num_bytes: int) -> int:
        """Zeroed memory."""
        self._note("allocate_host", num_bytes)
        buffer = ctypes.create_string_buffer(num_bytes)
        address = ctypes.addressof(buffer)
        self.memory[address] = buffer
        return address

    def free_host(self, address: int) -> None:
        """Of allocate_host."""
        self._note("free_host", address)
        del self.memory[address]

    def register_host(self, address: int, num_bytes: int) -> None:
        """Noted only."""
        self._note("register_host", address, num_bytes)
        self.registered[address] = num_bytes

    def unregister_host(self, address: int) -> None:
        """Of register_host."""
        self._note("unregister_host", address)
        del self.registered[address]

    def allocate_device(self, num_bytes: int) -> int:
        """Ordinary memory."""
        return self.allocate_host(num_bytes)

    def free_device(self, address: int) -> None:
        """Of allocate_device."""
        self.free_host(address)

    def close(self) -> None:
        """Noted."""
        self._note("close")
        self.closed = True


def _moved(targets: U64, sources: U64, sizes: U64) -> bool:
    move(targets, sources, sizes)
    return True


def _write(place: int, data: bytes) -> bool:
    ctypes.memmove(place, data, len(data))
    return True
