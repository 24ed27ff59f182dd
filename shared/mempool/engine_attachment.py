"""An engine's side of the mempool: granted pages to write, sealed pages to read. No torch, no event loop.

Nothing here raises into the engine for a lost pool: then there are no pages to take and nothing reads as
valid, until a thread of its own has attached to the pool, or its successor, again. Between two attachments
every view of the earlier memory must be gone (shared/mempool/mapping.py): a reader that took its view before
the change can therefore never find that view valid after it.
"""

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from shared.errors import ClusterError
from shared.ids import BlockHash, Epoch, HandoffId, InstanceId, PageId
from shared.kv.layout import EngineDescription
from shared.kv.page_table import TableHeader
from shared.kv.words import u32_bytes, u32_list, u64_bytes, u64_list
from shared.mempool.mapping import PoolMapping, Scratch
from shared.transport.unix_blocking import BlockingUnixLink
from shared.transport.unix_socket import close_fds
from shared.wire import mempool as wire

SEND_TIMEOUT_MS = 50  # the socket holds hundreds of messages: a pool that reads none is as good as lost
ATTACH_TIMEOUT_MS = 5_000
RETRY_MIN_S, RETRY_MAX_S = 0.02, 0.5
REFUSED_RETRY_S = 2.0
DRAIN_POLL_S = 0.01
DRAIN_WARNING_S = 10.0
REFILL_SHARE = 0.75  # ask for more when fewer of the quota are in stock or on their way

logger = logging.getLogger(__name__)
Owned = tuple[PageId, Epoch]
_NO_EPOCH = Epoch(0)  # unknown: no fencing between engines of one instance


class SealEntry(NamedTuple):
    """A page whose bytes are complete. `parent`: hash of the block before, or the chain's seed."""

    page: PageId
    epoch: Epoch
    block_hash: BlockHash
    parent: BlockHash
    valid_tokens: int


class EngineAttachment:
    """Attaches in the background as soon as it is made, and again after every loss. Thread-safe.

    Args:
        socket: path of the mempool's unix socket.
        quota_pages: how many granted pages to keep in stock.
    """

    def __init__(
        self,
        socket: str | Path,
        instance: InstanceId,
        description: EngineDescription,
        quota_pages: int,
        *,
        instance_epoch: Epoch = _NO_EPOCH,
    ) -> None:
        self.description = description
        self._path = Path(socket)
        self._attach = wire.Attach(
            kind="engine",
            instance=instance,
            instance_epoch=instance_epoch,
            description=description,
            quota_pages=quota_pages,
            says_answers=True,
            lets_go=True,  # an attachment ends when no view of its memory is left
        )
        self._quota = quota_pages
        self._lock = threading.Lock()
        self._mapping: PoolMapping | Scratch = Scratch(description.block_bytes)
        self._pool: PoolMapping | None = None  # the mapping while attached and usable, else None
        self._link: BlockingUnixLink[wire.ToMempool, wire.FromMempool] | None = None
        self._stock: deque[Owned] = deque()
        self._asked = 0  # pages asked for and not granted yet
        self._taken: dict[PageId, Epoch] = {}
        self._lost: dict[PageId, Epoch] = {}  # taken under an earlier attachment, not let go of yet
        self._poison: tuple[Epoch, dict[int, int]] = (_NO_EPOCH, {})  # boot generation, PoolMapping.poison
        self._counters: Counter[str] = Counter()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._stay_attached, name="quire-mempool", daemon=True)
        self._thread.start()

    # -- state ------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether pages may be taken and read now."""
        return self._pool is not None

    @property
    def boot_generation(self) -> Epoch:
        """Of the attached pool, 0 without one."""
        pool = self._pool
        return pool.header.boot_generation if pool else _NO_EPOCH

    @property
    def counters(self) -> dict[str, int]:
        """A copy: attaches, losses, refusals, pages taken, sealed, given back, lost."""
        with self._lock:
            return dict(self._counters)

    def wait_connected(self, timeout_s: float) -> bool:
        """For start-up and tools: whether it is connected within the time."""
        deadline = time.monotonic() + timeout_s
        while not self.connected and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.connected

    # -- reading ----------------------------------------------------------------------------------

    def page_view(self, page: PageId) -> memoryview:
        """block_bytes of a page, writable. Let go of it soon: the next attachment waits for all views to go.

        Without a pool, or for a page that this engine took from an earlier attachment, it is a scratch page:
        writes to it are lost and the page never reads as sealed.
        """
        with self._lock:
            if page in self._lost and isinstance(self._mapping, PoolMapping):
                return self._mapping.scratch_view(page)
            return self._mapping.view(page)

    def word(self, page: PageId) -> int:
        """The page's word (shared/kv/page.py); 0 without a pool."""
        pool = self._pool
        return pool.word(page) if pool else 0

    def is_sealed(self, page: PageId, epoch: Epoch) -> bool:
        """Ask before and after a copy; True both times means that the copy is good."""
        pool = self._pool
        return pool is not None and pool.is_sealed(page, epoch)

    def is_current(self, page: PageId, epoch: Epoch) -> bool:
        """Whether the page is granted, written or sealed under this epoch: worth keeping in mind."""
        pool = self._pool
        return pool is not None and pool.is_live(page, epoch)

    # -- writing ----------------------------------------------------------------------------------

    def take_pages(self, count: int) -> list[Owned]:
        """Up to `count` pages out of the stock, at once: the caller writes them, then seals or gives back."""
        with self._lock:
            if self._pool is None:
                return []
            taken = self._from_stock(count)
            self._taken.update(taken)
            self._counters["pages_taken"] += len(taken)
            self._counters["pages_short"] += count - len(taken)
            short = self._quota - len(self._stock) - self._asked
            if len(self._stock) + self._asked < self._quota * REFILL_SHARE:
                self._asked += short
            else:
                short = 0
        if short:
            self._send(wire.NeedPages(count=short))
        return taken

    def _from_stock(self, count: int) -> list[Owned]:
        """Under the lock. Not a page that is in hand from an earlier attachment too: its views are scratch pages."""
        taken: list[Owned] = []
        still_lost: list[Owned] = []
        while self._stock and len(taken) < count:
            own = self._stock.popleft()
            (still_lost if own[0] in self._lost else taken).append(own)
        self._stock.extendleft(still_lost)
        return taken

    def writing(self, pages: Sequence[Owned]) -> None:
        """Say it before the first byte is written."""
        with self._lock:
            mine = [own for own in pages if self._taken.get(own[0]) == own[1]]
        self._send_pages(wire.Writing, mine)

    def seal(self, entries: Sequence[SealEntry]) -> None:
        """Their bytes are complete, nobody writes them again. Those of an earlier attachment are dropped."""
        with self._lock:
            mine = [e for e in entries if self._taken.get(e.page) == e.epoch]
            self._let_go((e.page, e.epoch) for e in entries)
            self._counters["pages_sealed"] += len(mine)
            self._counters["pages_lost"] += len(entries) - len(mine)
        if not mine:
            return
        self._send(
            wire.Sealed(
                pages=u32_bytes(e.page for e in mine),
                epochs=u64_bytes(e.epoch for e in mine),
                hashes=b"".join(e.block_hash for e in mine),
                parents=b"".join(e.parent for e in mine),
                valid_tokens=u32_bytes(e.valid_tokens for e in mine),
            )
        )

    def give_back(self, pages: Sequence[Owned]) -> None:
        """Pages that were taken and will not be written (any more)."""
        with self._lock:
            mine = [own for own in pages if self._taken.get(own[0]) == own[1]]
            self._let_go(pages)
            self._counters["pages_given_back"] += len(mine)
        self._send_pages(wire.GiveBack, mine)

    def handoff_ready(self, handoff_id: HandoffId, hashes: Sequence[BlockHash], ttl_ms: int) -> None:
        """After the seals of these blocks: hold them for the decode side."""
        self._send(wire.HandoffReady(handoff_id=handoff_id, hashes=b"".join(hashes), ttl_ms=ttl_ms))

    def close(self) -> None:
        """Detach. If nobody holds a view, granted pages go back at once, else when this process ends."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        self._thread.join(timeout=ATTACH_TIMEOUT_MS / 1000)
        with self._lock:
            link, self._link = self._link, None
            earlier, self._mapping = self._mapping, Scratch(self.description.block_bytes)
            drained, self._pool = earlier.try_close(), None
        if link is not None:
            if drained:
                with contextlib.suppress(ClusterError):
                    link.send(wire.Detach())
            link.close()

    # -- attaching, on the thread of its own --------------------------------------------------------

    def _stay_attached(self) -> None:
        retry_s = RETRY_MIN_S
        while not self._closing:
            self._wake.clear()
            try:
                attached = self._attach_once()
            except (ClusterError, ValueError, OSError) as error:
                logger.info("mempool %s: %s", self._path, error)
                attached = False
            if attached:
                retry_s = RETRY_MIN_S
                if not self._closing:
                    self._wake.wait()
                if self._closing:
                    return
                self._detach()
            else:
                self._wake.wait(retry_s)
                retry_s = min(2 * retry_s, RETRY_MAX_S)

    def _attach_once(self) -> bool:
        link: BlockingUnixLink[wire.ToMempool, wire.FromMempool] = BlockingUnixLink(
            self._path,
            out=wire.TO_MEMPOOL,
            into=wire.FROM_MEMPOOL,
            on_message=self._on_message,
            on_down=self._on_down,
            send_timeout_ms=SEND_TIMEOUT_MS,
        )
        try:
            link.connect()
            reply, _, fds = link.call(self._attach, timeout_ms=ATTACH_TIMEOUT_MS)
            if not isinstance(reply, wire.Attached) or len(fds) != 2:
                close_fds(fds)
                self._refused(reply)
                link.close()
                return False
            header = TableHeader(reply.boot_generation, reply.num_pages, reply.page_bytes)
            block_bytes = self.description.block_bytes
            pool = PoolMapping(fds[0], fds[1], header, block_bytes)
            earlier = self._install(pool)
            if not self._drain(earlier):
                link.close()
                return False
        except BaseException:
            link.close()
            raise
        with self._lock:
            # pages that were asked for a scratch view until just now stay invalid
            self._stock.clear()
            self._asked = self._quota
            self._link, self._pool = link, pool
            self._counters["attaches"] += 1
        link.start()
        return True

    def _install(self, pool: PoolMapping) -> PoolMapping | Scratch:
        """Views come from the new pool from now on; returns what they came from until now.

        A reader that looked at a page's word before the loss, and got a scratch page after it, must not
        find the same word again. It could only in the same boot: what was asked for stays invalid there.
        """
        with self._lock:
            earlier, self._mapping = self._mapping, pool
            boot, poison = self._poison
            if boot == pool.header.boot_generation:
                pool.poison.update(poison)
                for page in earlier.asked if isinstance(earlier, Scratch) else ():
                    pool.spoil(page)
            self._poison = (pool.header.boot_generation, pool.poison)
        return earlier

    def _refused(self, reply: wire.FromMempool) -> None:
        with self._lock:
            self._counters["attaches_refused"] += 1
        logger.warning("mempool %s refused this engine: %s", self._path, reply)
        self._wake.wait(REFUSED_RETRY_S)

    def _drain(self, mapping: PoolMapping | Scratch) -> bool:
        """Wait until nobody holds a view of an earlier mapping. False when this attachment is closing."""
        warn_at = time.monotonic() + DRAIN_WARNING_S
        while not mapping.try_close():
            if self._closing:
                return False
            if time.monotonic() > warn_at:
                warn_at += DRAIN_WARNING_S
                logger.warning("mempool %s: views of its earlier memory are held", self._path)
            time.sleep(DRAIN_POLL_S)
        return True

    def _detach(self) -> None:
        """The link is down: nothing is valid from here on, and pages in hand are lost."""
        with self._lock:
            pool, self._pool = self._mapping, None
            link, self._link = self._link, None
            assert isinstance(pool, PoolMapping)
            self._lost.update(self._taken)
            self._taken.clear()
            self._stock.clear()
            self._mapping = Scratch(self.description.block_bytes)
            self._counters["losses"] += 1
        if link is not None:
            link.close()
        self._drain(pool)

    # -- callbacks of the link, on its reader thread --------------------------------------------------

    def _on_message(self, _seq: int, message: wire.FromMempool, _raw: list[bytes], fds: list[int]) -> None:
        close_fds(fds)
        if isinstance(message, wire.Granted):
            pages = map(PageId, u32_list(message.pages))
            granted = list(zip(pages, map(Epoch, u64_list(message.epochs)), strict=False))
            with self._lock:
                self._stock.extend(granted)
                self._asked = max(0, self._asked - len(granted))
        elif isinstance(message, wire.Shrink):
            with self._lock:
                spare = [self._stock.pop() for _ in range(min(message.count, len(self._stock)))]
                self._counters["pages_given_back"] += len(spare)
            given, epochs = u32_bytes(p for p, _ in spare), u64_bytes(e for _, e in spare)
            self._send(wire.GiveBack(pages=given, epochs=epochs, answers=message.count))
        elif isinstance(message, wire.Vacate):  # pages in hand are being written
            wanted = set(zip(u32_list(message.pages), u64_list(message.epochs), strict=False))
            with self._lock:
                spare = [own for own in self._stock if own in wanted]
                self._stock = deque(own for own in self._stock if own not in wanted)
                self._counters["pages_given_back"] += len(spare)
            self._send_pages(wire.GiveBack, spare)
            self._send(wire.Vacated(number=message.number))

    def _on_down(self, error: Exception | None) -> None:
        logger.info("mempool %s: connection lost (%s)", self._path, error)
        with self._lock:
            self._pool = None
        self._wake.set()

    # -- parts --------------------------------------------------------------------------------------

    def _let_go(self, pages: Iterable[Owned]) -> None:
        """The engine is done with these, whichever attachment they came from. Under the lock."""
        for page, epoch in pages:
            for held in (self._taken, self._lost):
                if held.get(page) == epoch:
                    del held[page]

    def _send_pages(self, kind: type[wire.GiveBack] | type[wire.Writing], pages: Sequence[Owned]) -> None:
        if pages:
            self._send(_pages_message(kind, pages))

    def _send(self, message: wire.ToMempool) -> None:
        """By the calling thread, because the decode side may be waiting for it. A lost link is no error."""
        link = self._link
        if link is None:
            return
        try:
            link.send(message)
        except ClusterError as error:
            logger.info("mempool %s: %s not sent: %s", self._path, type(message).__name__, error)


def _pages_message(
    kind: type[wire.GiveBack] | type[wire.Writing], pages: Sequence[Owned]
) -> wire.GiveBack | wire.Writing:
    return kind(pages=u32_bytes(p for p, _ in pages), epochs=u64_bytes(e for _, e in pages))
