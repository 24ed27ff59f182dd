"""The host's part of a reload without a GPU: the mempool's core, its mover's thread and its page streams are real, the
driver is a model. Its copies end when NVLink's would have, its calls take as long as CUDA's and give the GIL away.
"""

import asyncio
import ctypes
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from services.mempool.core.actions import Action, CopyPages, PoolLimits, Send
from services.mempool.core.mempool import Mempool
from services.mempool.mover_engines import LANES
from services.mempool.mover_thread import PullThread
from shared.ids import BlockHash, Epoch, InstanceId
from shared.kernels.copy_pages.copies import U64, Order
from shared.kv.layout import EngineDescription
from shared.kv.words import u32_bytes, u32_list, u64_bytes, u64_list
from shared.mempool.give_parts import give_parts
from shared.transfer.interface import Moved, PathName
from shared.transfer.page_stream import PageStream, PageTicket
from shared.transfer.transfer_job import DrivenFuture
from shared.wire import mempool as wire

BLOCK_TOKENS, PAGE_BYTES = 64, 8 << 20  # of an 8B shape
SEED = BlockHash(b"\0" * 32)
TARGET, SOURCE, FRONT = 1, 2, 3  # connections
RANKS = 100  # and of their ranks
WAIT_MS, TIMEOUT_S = 30_000, 30.0
Owned = tuple[int, int]


class TimedDriver:
    """Of one GPU; see driver.CopyDriver.

    Args: bytes_per_s: of its link; call_us, page_us: that a call takes, and a page in a batch.
    """

    has_batch = True

    def __init__(self, bytes_per_s: float, call_us: float, page_us: float) -> None:
        self.num_calls = 0
        self._rate, self._call_us, self._page_us = bytes_per_s / LANES, call_us, page_us
        self._made = 0
        self._ends_s: dict[int, float] = {}  # of each stream's work
        self._marks_s: dict[int, float] = {}  # when each event passes
        self._busy_s = _waster()

    def _call(self, us: float) -> None:
        self.num_calls += 1
        self._busy_s(us * 1e-6)

    def make_current(self) -> None:
        """See CopyDriver."""
        self._call(self._call_us)

    def create_stream(self) -> int:
        """See CopyDriver."""
        self._made += 1
        self._ends_s[self._made] = 0.0
        return self._made

    def create_event(self) -> int:
        """See CopyDriver."""
        self._made += 1
        return self._made

    def destroy_stream(self, stream: int) -> None:
        """See CopyDriver."""
        del self._ends_s[stream]

    def destroy_event(self, event: int) -> None:
        """See CopyDriver."""
        del self._marks_s[event]

    def copy_batch(self, targets: U64, sources: U64, sizes: U64, order: Order, stream: int) -> None:
        """See CopyDriver."""
        self._call(self._page_us * targets.size)
        begin_s = max(time.perf_counter(), self._ends_s[stream])
        self._ends_s[stream] = begin_s + float(sizes.sum()) / self._rate

    def record(self, event: int, stream: int) -> None:
        """See CopyDriver."""
        self._call(self._call_us)
        self._marks_s[event] = self._ends_s[stream]

    def passed(self, event: int) -> bool:
        """See CopyDriver."""
        self._call(self._call_us)
        return time.perf_counter() >= self._marks_s[event]


def _waster() -> Callable[[float], None]:
    """A C function that works for so many seconds without the GIL."""
    libc, size = ctypes.CDLL(None), 1 << 22
    memory = ctypes.create_string_buffer(size)
    libc.memset(memory, 0, size)
    begin_s = time.perf_counter()
    for _ in range(32):
        libc.memset(memory, 0, size)
    bytes_per_s = 32 * size / (time.perf_counter() - begin_s)
    return lambda seconds: libc.memset(memory, 0, min(size, int(seconds * bytes_per_s)))


class _Copy(DrivenFuture):
    """One set on its way, as the mover's links have them."""

    def __init__(self, ticket: PageTicket) -> None:
        super().__init__()
        self._ticket = ticket
        self.drive = self._step

    def _step(self, _now_s: float) -> bool:
        if self._ticket.done():
            self.set_result(Moved(PathName.IMPORTED, 0, 0))
            return True
        return False


class Reload:
    """One context in a peer's pages, and a reader of it whose own pages an engine has in stock.

    Args: slower: each call of the core takes so many times its own time. The thread and the stream stay the caller's.
    """

    def __init__(self, num_blocks: int, thread: PullThread, stream: PageStream, slower: float) -> None:
        self._thread, self._stream, self._slower = thread, stream, slower
        self._num_pages = num_blocks + num_blocks // 7
        limits = PoolLimits(
            capacity_bytes=self._num_pages * PAGE_BYTES, kept_share=1.0, granted_share=1.0, idle_punch_ms=0,
            pull_patience_ms=WAIT_MS,
        )  # fmt: skip
        self._core = Mempool(limits, Epoch(1_000_000))
        self._granted: dict[int, list[Owned]] = {TARGET: [], SOURCE: []}
        self._asked = 0
        self._got: wire.Acquired | None = None
        self.bytes_moved = 0
        self.first_copy_s = 0.0
        self._hashes = _chain(num_blocks)
        for connection in (TARGET, SOURCE):
            self._attach(connection)
        front = wire.Attach(kind="client", instance=InstanceId(f"i{TARGET}"))
        self._core.on_attach(FRONT, 0, front, 0)
        pages = self._granted[SOURCE][:num_blocks]
        self._do(self._core.on_message(SOURCE, wire.Writing(**_named(pages)), 0))
        sealed = wire.Sealed(
            **_named(pages), hashes=b"".join(self._hashes), parents=b"".join([SEED, *self._hashes[:-1]]),
            valid_tokens=u32_bytes([BLOCK_TOKENS] * num_blocks),
        )  # fmt: skip
        self._do(self._core.on_message(SOURCE, sealed, 0))

    def _attach(self, connection: int) -> None:
        name = InstanceId(f"i{connection}")
        description = EngineDescription(
            model="m", fingerprint="f", dtype="bfloat16", layout="layers-blocks", backend="none",
            block_tokens=BLOCK_TOKENS, block_bytes=PAGE_BYTES,
        )  # fmt: skip
        rank = wire.Attach(kind="rank", instance=name, description=description, device=f"cpu:{connection}")
        self._do(self._core.on_attach(RANKS + connection, connection, rank, 0))
        engine = wire.Attach(
            kind="engine", instance=name, description=description, works_in_pages=True, says_answers=True,
            quota_pages=self._num_pages,
        )  # fmt: skip
        self._do(self._core.on_attach(connection, connection, engine, 0))

    async def run(self) -> float:
        """Seconds from the call to its answer. Raises: RuntimeError where not all came; TimeoutError."""
        loop, over = asyncio.get_running_loop(), asyncio.Event()

        def later(actions: list[Action]) -> None:
            self._do(actions, lambda copy: self._begin(copy, loop, later))
            if self._got is not None:
                over.set()

        begin_s = time.perf_counter()
        call = wire.Acquire(call_id=1, hashes=b"".join(self._hashes), wait_ms=WAIT_MS, until_release=True)
        later(self._slowly(lambda: self._core.on_message(FRONT, call, 0)))
        for message in self._answers():
            loop.call_soon(lambda m=message: later(self._slowly(lambda: self._core.on_message(TARGET, m, 0))))
        await asyncio.wait_for(over.wait(), TIMEOUT_S)
        took_s = time.perf_counter() - begin_s
        assert self._got is not None
        if self._got.num_blocks != len(self._hashes):
            raise RuntimeError(f"{self._got.num_blocks} of {len(self._hashes)} blocks came")
        self.first_copy_s -= begin_s
        return took_s

    def _answers(self) -> Iterable[wire.GiveBack]:
        """What the engine says to Shrink."""
        stock = self._granted[TARGET]
        for count in give_parts(self._asked):
            part, stock = stock[:count], stock[count:]
            yield wire.GiveBack(**_named(part), answers=count)

    def _slowly(self, call: Callable[[], list[Action]]) -> list[Action]:
        begin_s = time.thread_time()
        out = call()
        end_s = begin_s + self._slower * (time.thread_time() - begin_s)
        while time.thread_time() < end_s:
            pass
        return out

    def _do(self, actions: Iterable[Action], copy: Callable[[CopyPages], None] | None = None) -> None:
        for action in actions:
            if isinstance(action, CopyPages) and copy is not None:
                copy(action)
            elif isinstance(action, Send):
                self._hear(action.connection, action.message)

    def _hear(self, connection: int, message: wire.FromMempool) -> None:
        if isinstance(message, wire.Granted):
            pages = zip(u32_list(message.pages), u64_list(message.epochs), strict=True)
            self._granted[connection] += pages
        elif isinstance(message, wire.Shrink) and connection == TARGET:
            self._asked += message.count
        elif isinstance(message, wire.Acquired):
            self._got = message

    def _begin(
        self, copy: CopyPages, loop: asyncio.AbstractEventLoop, later: Callable[[list[Action]], None]
    ) -> None:
        sources = np.array([page for _, page in copy.sources], np.uint64) * np.uint64(PAGE_BYTES)
        targets = np.array(copy.targets, np.uint64) * np.uint64(PAGE_BYTES)
        self.bytes_moved += PAGE_BYTES * targets.size

        def ended() -> None:
            later(
                self._slowly(
                    lambda: self._core.on_copied(copy.copy_id, 0, failed=False, in_doubt=(), took_us=1_000)
                )
            )

        def start() -> None:
            future: Any = _Copy(self._stream.submit(sources, targets, PAGE_BYTES))
            self.first_copy_s = self.first_copy_s or time.perf_counter()
            future.add_done_callback(lambda _: loop.call_soon_threadsafe(ended))
            self._thread.watch(future)

        self._thread.post(start)


def _chain(count: int) -> list[BlockHash]:
    out, link = [], SEED
    for _ in range(count):
        link = BlockHash(hashlib.sha256(link).digest())
        out.append(link)
    return out


def _named(pages: Sequence[Owned]) -> dict[str, bytes]:
    return {"pages": u32_bytes(p for p, _ in pages), "epochs": u64_bytes(e for _, e in pages)}
