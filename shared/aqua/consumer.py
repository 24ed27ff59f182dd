"""The consumer's side of AQUA's library: one connection to the host's mempool, all tensors of a process.

    to_compute(): pages here are allocated -> the mempool copies into them -> they are mapped at the tensor's address
    offload(): the mempool copies from them -> unmapped -> free, which is the acknowledgement that no view is left
    at any moment: lent pages are wanted back -> the mempool copies them to host memory, and says so (Evacuated)
    step(): what peers have room for leaves host memory again

The process maps nothing but its own pages: a peer's and the host's are written and read by the mempool for it (decision
0018). So a reclaim waits for nobody here, and no byte of a tensor is at two addresses.
"""

import asyncio
import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import torch

from shared.aqua.borrower import Borrower
from shared.aqua.errors import AquaClosed, TensorLost
from shared.aqua.interrupts import InterruptsWait
from shared.aqua.local_memory import LocalMemory, mempool_device, open_window, settled_device
from shared.aqua.loop_thread import LoopThread
from shared.aqua.open_aquas import opened
from shared.aqua.own_space import OwnSpace
from shared.aqua.pages import Directory, Location, Pages, Placed
from shared.aqua.settings import AquaSettings, MemoryEvent
from shared.background_task import begin_task
from shared.errors import InvalidRequest, NotHeld, OutOfPages, PeerGone, StaleEpoch
from shared.ids import BlockHash, InstanceId
from shared.mempool.api import MemPoolApi
from shared.mempool.client import MempoolClient
from shared.transport.lending_client import LendingClient
from shared.wire.mempool_api import Evacuated, MemType, PageAddress

RETRY_S = 0.002  # between two tries of a copy whose pages a reclaim is moving
MAX_EVENTS = 4_096
T = TypeVar("T")


class Aqua:
    """Open from construction to close(), or as a context. Every method may be called from any thread: one at a time is
    let in. A mempool that ends takes what is away with it: from then on calls raise PeerGone. Ctrl-C waits while
    pages are taken, filled, mapped or given back, no longer than those calls take.

    Raises: PeerGone without mempool; ResourceError when it refuses; VmmError.
    """

    def __init__(self, settings: AquaSettings) -> None:
        self.is_closed = False
        self._settings = settings
        self._lock = threading.RLock()
        self._tensors: set[Placed] = set()
        self._directory = Directory()
        self._heard: deque[Evacuated] = deque()  # appended by the loop's thread
        self._events: deque[MemoryEvent] = deque(maxlen=MAX_EVENTS)
        self._garbage: deque[Placed] = deque()
        self._asking: asyncio.Task[None] | None = None
        self._try_at = 0.0  # when step() may ask for lent pages again
        device = settled_device(settings.device)
        name = InstanceId(settings.instance)
        self._own = OwnSpace(
            settings.socket, name, mempool_device(device, settings.instance), settings.page_bytes,
            settings.local_bytes, "token-major",
        )  # fmt: skip
        with contextlib.ExitStack() as undo:
            undo.callback(self._own.close)
            self._loop = LoopThread(f"aqua-{settings.instance}")
            undo.callback(self._loop.close)
            num_bytes = settings.address_bytes or 64 * settings.local_bytes
            window = open_window(self._own, -(-num_bytes // self._own.page_bytes), device)
            self._memory = LocalMemory(window, device)
            undo.callback(self._memory.close)
            self._api, self._client, self._market, self._borrower = self._call(self._connect(name))
            undo.pop_all()
        opened.add(self)

    async def _connect(
        self, name: InstanceId
    ) -> tuple[MemPoolApi, MempoolClient, LendingClient | None, Borrower | None]:
        settings = self._settings
        api = MemPoolApi(
            settings.api_socket,
            name,
            seed=BlockHash(bytes(32)),
            block_tokens=1,
            on_evacuated=self._heard.append,
        )
        client = MempoolClient(settings.socket, name)
        try:
            await api.connect()
            client.start()
            if not await client.wait_connected(settings.timeout_ms):
                raise PeerGone(f"mempool {settings.socket} does not answer")
        except BaseException:
            api.close()
            await client.close()
            raise
        if not (settings.coordinator_url and settings.borrow_bytes):
            return api, client, None, None
        market = LendingClient(settings.coordinator_url, key=settings.coordinator_key)
        borrower = Borrower(
            name, client, market, self._loan_changed, wanted_bytes=settings.borrow_bytes,
            min_bytes=self._own.page_bytes, ttl_ms=settings.ttl_ms, every_ms=settings.every_ms,
        )  # fmt: skip
        self._asking = begin_task(borrower.run(), "aqua-borrower")
        return api, client, market, borrower

    # -- tensors ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def making(self, num_bytes: int) -> Iterator[Placed]:
        """A new tensor, mapped here to be filled; offloaded behind the block. Raises: OutOfPages, InvalidRequest."""
        if num_bytes <= 0:
            raise InvalidRequest("an empty tensor has no bytes to move")
        with self._lock:
            self._check_open()
            self._hear()
            placed: Placed | None = None
            try:
                with InterruptsWait():
                    placed = self._new(-(-num_bytes // self._own.page_bytes))
                self._show(placed, None)
                yield placed
                self.store(placed, changed=True)
            except BaseException:
                if placed is not None:
                    self.drop(placed)
                raise

    def _new(self, count: int) -> Placed:
        """Of so many pages, away and without bytes. Raises: OutOfPages, and nothing has changed."""
        away = self._take_away(count)
        try:
            placed = Placed(self._memory.take(count), count, away)
        except OutOfPages:
            self._forget(away)
            raise
        self._tensors.add(placed)
        return placed

    def location(self, placed: Placed) -> Location:
        """Raises: AquaClosed."""
        with self._lock:
            self._hear()
            return "local" if placed.local else self._away(placed).location

    def address(self, placed: Placed) -> int:
        """Of its first place."""
        return self._memory.address(placed.first)

    def view(
        self, placed: Placed, shape: torch.Size, dtype: torch.dtype, owner: object = None
    ) -> torch.Tensor:
        """What is mapped at its places now. `owner` lives as long as what is returned, or any view of that."""
        with self._lock:
            assert placed.local, "it is not mapped"
            return self._memory.view(placed.first, shape, dtype, owner)

    def fetch(self, placed: Placed) -> None:
        """Its bytes at its places."""
        with self._lock:
            away = self._away(placed)
            if not placed.local:
                self._hear()  # first: what nobody sees any more gives its pages here back
                self._show(placed, away)

    def store(self, placed: Placed, *, changed: bool) -> None:
        """Its places are holes."""
        with self._lock:
            away = self._away(placed)
            if not placed.local:
                return
            local = placed.local
            self._hear()
            if away.is_lost:  # meanwhile: what is here is all that there is
                away = self._replace(placed, away)
            if changed or placed.is_ahead:
                placed.is_ahead = True  # also where the copy fails half way
                self._memory.wait()
                self._copy(lambda: local, away.current)
                placed.is_ahead = False
            self._hide(placed)

    def drop(self, placed: Placed) -> None:
        """It takes nothing any more. Nothing happens when it is dropped already."""
        with self._lock, InterruptsWait():
            if self.is_closed or placed not in self._tensors:
                return
            self._tensors.discard(placed)
            away, placed.away = self._away(placed), None
            try:
                if placed.local:
                    self._hide(placed)
            finally:  # also where the mempool answers too late: the tensor is known to nobody any more
                if not placed.local:  # else it is mapped still
                    self._memory.give_back(placed.first, placed.num_pages)
                self._forget(away)

    def drop_later(self, placed: Placed) -> None:
        """For the garbage collector, which may be on any thread: with the next call of somebody else."""
        self._garbage.append(placed)

    # -- between steps ----------------------------------------------------------------------------

    def step(self) -> list[MemoryEvent]:
        """Call it where no offloaded tensor is about to be used, between two steps of the program's loop.

        Moves up to step_bytes (one tensor at least) from host memory to peers that have room by now.
        Returns: what has happened since the last call, at most the newest 4,096.
        Raises: PeerGone; CopyFailed, and nothing has moved.
        """
        with self._lock:
            self._check_open()
            self._hear()
            if self._borrower is not None and time.monotonic() >= self._try_at:
                self._promote()
            return [self._events.popleft() for _ in range(len(self._events))]

    def _promote(self) -> None:
        all_bytes = left = self._settings.step_bytes
        too_many = sys.maxsize  # pages: peers have no room for so many
        for placed in list(self._tensors):
            if left <= 0:
                break
            old = placed.away
            if old is None or old.is_lost or old.location == "peer" or placed.num_pages >= too_many:
                continue
            try:
                if self._bring(placed, old):
                    left -= placed.num_pages * self._own.page_bytes
            except OutOfPages:
                too_many = placed.num_pages
        if too_many < sys.maxsize and left == all_bytes:  # as it is, nothing can move
            self._try_at = time.monotonic() + self._settings.every_ms / 1000

    def _bring(self, placed: Placed, old: Pages) -> bool:
        """From host memory to a peer; whether it was still there. Raises: OutOfPages, CopyFailed, PeerGone."""
        with InterruptsWait():
            found = self._alloc(placed.num_pages, "leased")
            new = Pages(found[: placed.num_pages], found[placed.num_pages :])
            self._directory.add(new)
            try:  # also of one in use: offload(changed=False) will move nothing
                self._copy(old.current, new.current)
            except TensorLost:  # heard meanwhile: the events say so, and whoever uses it
                self._forget(new)
                return False
            except BaseException:
                self._forget(new)
                raise
            placed.away = new
            self._forget(old)
            self._events.append(MemoryEvent("promoted", placed.num_pages * self._own.page_bytes))
            return True

    def _hear(self) -> None:
        """What the mempool has moved meanwhile."""
        while self._garbage:
            self.drop(self._garbage[0])
            self._garbage.popleft()
        while self._heard:
            with InterruptsWait():
                moved, lost = self._directory.hear(self._heard.popleft())
                if moved:
                    self._events.append(MemoryEvent("evacuated", moved * self._own.page_bytes))
                if lost:
                    self._events.append(MemoryEvent("lost", lost * self._own.page_bytes))

    def _loan_changed(self, num_bytes: int) -> None:
        """On the loop's thread."""
        self._events.append(MemoryEvent("borrowed" if num_bytes > 0 else "returned", abs(num_bytes)))
        self._try_at = 0.0

    # -- pages ------------------------------------------------------------------------------------

    def _away(self, placed: Placed) -> Pages:
        self._check_open()
        if placed.away is None:
            raise AquaClosed("this tensor was closed")
        return placed.away

    def _take_away(self, count: int) -> Pages:
        try:
            found = self._alloc(count, "leased")
            away = Pages(found[:count], found[count:])
        except OutOfPages:
            away = Pages(None, self._alloc(count, "dram"))
        self._directory.add(away)
        return away

    def _replace(self, placed: Placed, lost: Pages) -> Pages:
        """Pages without bytes yet instead of those that were lost. Raises: OutOfPages, and nothing has changed."""
        with InterruptsWait():
            placed.away, placed.is_ahead = self._take_away(placed.num_pages), True
            self._forget(lost)
            return placed.away

    def _forget(self, away: Pages) -> None:
        """Give back what it takes."""
        self._directory.remove(away)
        self._free(away.all())

    def _show(self, placed: Placed, away: Pages | None) -> None:
        """Pages here behind its places, with the bytes that are away, if any."""
        with InterruptsWait():
            try:
                local = self._alloc(placed.num_pages, "hbm")
            except OutOfPages:
                raise OutOfPages(
                    f"{placed.num_pages} pages of {self._own.num_pages} here for tensors in use: offload others, or "
                    f"raise local_bytes"
                ) from None
            try:
                if away is not None:
                    self._copy(away.current, lambda: local)
                self._memory.map(placed.first, [address.page for address in local])
            except BaseException:
                self._free(local)
                raise
            placed.local = local

    def _hide(self, placed: Placed) -> None:
        """Unmapped first, free then: which tells the mempool that no view is left."""
        with InterruptsWait():
            self._memory.unmap(placed.first, placed.num_pages)
            local, placed.local = placed.local, []
            self._free(local)

    def _copy(
        self, sources: Callable[[], list[PageAddress]], targets: Callable[[], list[PageAddress]]
    ) -> None:
        """By the mempool. A reclaim may have pages just now: they are looked up anew until it has let go of them.

        Raises: TensorLost, CopyFailed, PeerGone, PeerTimeout.
        """
        end_s = time.monotonic() + self._settings.timeout_ms / 1000
        name, timeout_ms = self._own.instance, self._settings.timeout_ms
        while True:
            self._hear()
            try:
                self._call(self._api.transfer(name, sources(), targets(), timeout_ms=timeout_ms))
            except (StaleEpoch, NotHeld, InvalidRequest):
                if time.monotonic() > end_s:
                    raise
                time.sleep(RETRY_S)
            else:
                return

    def _alloc(self, count: int, kind: MemType) -> list[PageAddress]:
        """Within InterruptsWait, until a tensor has them: nobody else knows that they are taken."""
        return self._call(self._api.alloc_mem(count, kind))

    def _free(self, addresses: list[PageAddress]) -> None:
        if addresses:
            self._call(self._api.free_mem(addresses))

    def _call(self, call: Coroutine[Any, Any, T]) -> T:
        return self._loop.call(call, 2 * self._settings.timeout_ms / 1000)

    # -- the end ----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.is_closed:
            raise AquaClosed("this Aqua was closed")

    def close(self) -> None:
        """Give everything back. Tensors that are in use fault from here on. Idempotent."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
            self._memory.close()
            try:
                self._call(self._disconnect())
            finally:
                self._loop.close()
                self._own.close()

    async def _disconnect(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])
        if self._borrower is not None:
            await self._borrower.give_back()
        self._api.close()
        await self._client.close()
        if self._market is not None:
            await self._market.close()

    def __enter__(self) -> "Aqua":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
