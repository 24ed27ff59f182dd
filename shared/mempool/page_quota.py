"""The pages that the mempool grants to an engine whose KV cache is the pool's memory. No torch, no event loop.

The engine core's thread, or another under its lock, takes pages and says what it sealed and uses no more; a reader
thread adds what the pool grants. Nothing here waits for the pool, except attach(). Every page that the engine has,
sealed or not, counts against its share; the pool fills a share up by itself whenever a page leaves it.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from shared.errors import ClusterError, ResourceError
from shared.ids import BlockHash, Epoch, HandoffId, InstanceId, LeaseId, PageId
from shared.kv.layout import EngineDescription
from shared.kv.page_table import TableHeader
from shared.kv.words import u32_bytes, u32_list, u64_bytes, u64_list
from shared.mempool.rank_memory import passes
from shared.transport.unix_blocking import BlockingUnixLink
from shared.transport.unix_socket import close_fds
from shared.wire import mempool as wire
from shared.wire.mempool_far import FarDrop, FarMoved, FarOut, FarPlaced
from shared.wire.mempool_swap import SwapDrop, SwapIn, SwapOut, SwappedIn, SwappedOut

ATTACH_TIMEOUT_MS = 10_000
PAGES_PER_MESSAGE = 8_192
SEND_TIMEOUT_MS = 1_000  # the socket holds hundreds of messages: a pool that reads none of them is lost

logger = logging.getLogger(__name__)
Owned = tuple[PageId, Epoch]
T = TypeVar("T")
_NO_EPOCH = Epoch(0)


class SealedPage(NamedTuple):
    """A page whose bytes are complete. `parent`: hash of the block before, or the chain's seed."""

    page: PageId
    epoch: Epoch
    block_hash: BlockHash
    parent: BlockHash
    valid_tokens: int


class PageQuota:
    """Attached from attach() on. After a loss (`lost`) pages that were granted may still be written: nobody else
    gets them before this process has reported them to the mempool's successor (reattach), or is dead.

    Args: quota_pages: the most that this engine can use.
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
        self.header: TableHeader | None = None
        self.lost = False
        self.closed = False
        self.counters: Counter[str] = Counter()
        self._path = Path(socket)
        self._attach = wire.Attach(
            kind="engine",
            instance=instance,
            instance_epoch=instance_epoch,
            description=description,
            quota_pages=quota_pages,
            works_in_pages=True,
            says_answers=True,
        )
        self._memory_id = _NO_EPOCH
        self._granted: deque[Owned] = deque()  # appended by the reader thread, popped by the engine's
        self._arrived = threading.Condition()
        self._shrink = 0
        self._uncache = 0
        self._vacates: deque[wire.Vacate] = deque()  # at most as many as the pool has pages under way
        self._swapped: deque[tuple[SwappedOut | SwappedIn, float]] = deque()  # one for each call
        self._far: deque[FarPlaced | FarMoved] = deque()
        # a successor may have made these leases before this engine was back
        self._unsent_releases: list[LeaseId] = []
        self._link = self._new_link()

    def _new_link(self) -> BlockingUnixLink[wire.ToMempool, wire.FromMempool]:
        return BlockingUnixLink(
            self._path,
            out=wire.TO_MEMPOOL,
            into=wire.FROM_MEMPOOL,
            on_message=self._on_message,
            on_down=self._on_down,
            send_timeout_ms=SEND_TIMEOUT_MS,
        )

    def attach(self, timeout_ms: int = ATTACH_TIMEOUT_MS) -> TableHeader:
        """Connect, and wait for the pool's answer.

        Raises: ResourceError when it refuses; ClusterError when it cannot be reached.
        """
        self._link.connect()
        reply, _, fds = self._link.call(self._attach, timeout_ms=timeout_ms)
        close_fds(fds)
        if not isinstance(reply, wire.Attached):
            self._link.close()
            raise ResourceError(f"mempool {self._path} refused this engine: {reply}")
        self.header = TableHeader(reply.boot_generation, reply.num_pages, reply.page_bytes)
        self._memory_id = reply.memory_id
        self._link.start()
        return self.header

    def reattach(self, holding: wire.Holding | None) -> bool:
        """After a loss: report to the mempool's successor what this engine has; None: it touches no page at all.
        False: not now, try again in a while.

        Call with everything that was granted taken (take_granted), and nothing else going on.
        Raises: ResourceError when this engine's memory, or what it holds, is not the successor's: begin anew.
        """
        link = self._new_link()
        attach = msgspec.structs.replace(self._attach, memory_id=self._memory_id, holding=holding)
        try:
            link.connect()
            reply, _, fds = link.call(attach, timeout_ms=ATTACH_TIMEOUT_MS)
            close_fds(fds)
        except ClusterError as error:
            reply = error
        if isinstance(reply, ClusterError) or passes(reply):
            logger.info("mempool %s: not back yet: %s", self._path, reply)
            link.close()
            return False
        if not isinstance(reply, wire.Attached):
            link.close()
            raise ResourceError(f"mempool {self._path} does not know this engine: {reply}")
        self._link.close()
        self.header = TableHeader(reply.boot_generation, reply.num_pages, reply.page_bytes)
        with self._arrived:
            self._link, self.lost, self._shrink, self._uncache = link, False, 0, 0
            self._vacates.clear()
        self.counters["reattached"] += 1
        link.start()
        while self._unsent_releases and not self.lost:
            self.release(self._unsent_releases.pop())
        return True

    def made(self, lease_id: str) -> bool:
        """Whether the mempool that this engine is, or last was, attached to made the lease."""
        return self.header is not None and lease_id.startswith(f"{self.header.boot_generation:x}-")

    # -- the engine's thread ------------------------------------------------------------------------

    def take_granted(self) -> list[Owned]:
        """Everything that was granted since the last call. Cost: nothing when there is nothing."""
        out: list[Owned] = []
        while self._granted:
            out.append(self._granted.popleft())
        return out

    @property
    def num_granted(self) -> int:
        """What take_granted() would take. From any thread."""
        return len(self._granted)

    def take_shrink(self, most: int | None = None) -> int:
        """How many pages the pool asked back since the last call; `most`: the others with the next. Once they are dealt
        with, whether there were as many or not, say so: give_back(answers)."""
        if not self._shrink:
            return 0
        with self._arrived:
            count = self._shrink if most is None else min(most, self._shrink)
            self._shrink -= count
        return count

    @property
    def num_asked(self) -> int:
        """What take_shrink() would say. From any thread."""
        return self._shrink

    def take_uncache(self) -> int:
        """How many cached pages, of those that no request uses, the pool wants unpinned since the last call."""
        if not self._uncache:
            return 0
        with self._arrived:
            count, self._uncache = self._uncache, 0
        return count

    def take_vacates(self, most: int = wire.PAGES_PER_VACATE) -> tuple[list[int], list[Owned]]:
        """The next pages whose memory the pool wants back, and the numbers to answer with: as many whole messages as
        have `most` pages, but one at least. A step waits for what the caller does with them. A page that was asked for
        twice is named once.
        """
        numbers: list[int] = []
        pages: dict[Owned, None] = {}
        while self._vacates and (not numbers or len(pages) + len(self._vacates[0].pages) // 4 <= most):
            asked = self._vacates.popleft()
            numbers.append(asked.number)
            epochs = map(Epoch, u64_list(asked.epochs))
            pages.update(dict.fromkeys(zip(map(PageId, u32_list(asked.pages)), epochs, strict=False)))
        return numbers, list(pages)

    def take_swapped(self) -> list[tuple[SwappedOut | SwappedIn, float]]:
        """Answers to swap_out() and swap_in() since the last call, and when each came (time.monotonic())."""
        out: list[tuple[SwappedOut | SwappedIn, float]] = []
        while self._swapped:
            out.append(self._swapped.popleft())
        return out

    def swap_out(self, swap: int, hashes: Sequence[BlockHash]) -> None:
        """After the seals of these blocks: keep them elsewhere, under a new number. At most PAGES_PER_MESSAGE."""
        self._send(SwapOut(swap=swap, hashes=b"".join(hashes)))

    def swap_in(self, swap: int, hashes: Sequence[BlockHash], pages: Sequence[Owned]) -> None:
        """Bring blocks back; as many pages, as for give_back(), are this engine's no more. As swap_out()."""
        self._send(
            SwapIn(
                swap=swap, hashes=b"".join(hashes),
                pages=u32_bytes(p for p, _ in pages), epochs=u64_bytes(e for _, e in pages),
            )
        )  # fmt: skip

    def swap_drop(self, swap: int) -> None:
        """Nobody wants the swap's blocks back."""
        self._send(SwapDrop(swap=swap))

    def take_far(self) -> list[FarPlaced | FarMoved]:
        """Answers to far_out(), and places that are wanted back, since the last call, in order."""
        out: list[FarPlaced | FarMoved] = []
        while self._far:
            out.append(self._far.popleft())
        return out

    def wait_far(self, timeout_s: float) -> bool:
        """Whether take_far() or take_granted() has something, or will within the time; also when the pool is lost."""
        with self._arrived:
            return self._arrived.wait_for(lambda: bool(self._far or self._granted) or self.lost, timeout_s)

    def far_out(self, number: int, hashes: Sequence[BlockHash]) -> None:
        """After the seals of these blocks: map copies of them at far places, under a new number."""
        self._send(FarOut(number=number, hashes=b"".join(hashes)))

    def far_drop(self, places: Sequence[int]) -> None:
        """No step, begun or to come, reads these far places."""
        self._send(FarDrop(places=u32_bytes(places)))

    def vacated(self, numbers: Sequence[int]) -> None:
        """All that is possible of take_vacates() has been said."""
        for number in numbers:
            self._send(wire.Vacated(number=number))

    def wait_asked(self, timeout_s: float) -> bool:
        """Whether the pool asks for pages back, or does so within the time; also when the pool is lost."""
        with self._arrived:
            return self._arrived.wait_for(
                lambda: (
                    self._shrink + self._uncache > 0 or bool(self._vacates) or bool(self._far) or self.lost
                ),
                timeout_s,
            )

    def wait_granted(self, timeout_s: float) -> bool:
        """Whether any page was granted, or is, within the time."""
        with self._arrived:
            return self._arrived.wait_for(lambda: bool(self._granted) or self.lost, timeout_s)

    def writing(self, pages: Sequence[Owned]) -> None:
        """The step that follows writes these."""
        self._send_pages(wire.Writing, pages)

    def seal(self, entries: Sequence[SealedPage]) -> None:
        """The step that wrote them is over on every rank; they stay pinned by this engine."""
        self.counters["pages_sealed"] += len(entries)
        for part in _parts(entries):
            self._send(
                wire.Sealed(
                    pages=u32_bytes(e.page for e in part),
                    epochs=u64_bytes(e.epoch for e in part),
                    hashes=b"".join(e.block_hash for e in part),
                    parents=b"".join(e.parent for e in part),
                    valid_tokens=u32_bytes(e.valid_tokens for e in part),
                )
            )

    def step_layers(
        self,
        handoff_id: HandoffId,
        target: InstanceId,
        step: int,
        pages: Sequence[SealedPage],
        cached: Sequence[BlockHash],
        traceparent: str,
    ) -> None:
        """After writing(): the step that follows completes these blocks of a prompt for `target`. At most
        PAGES_PER_MESSAGE of each list; layers_sealed() follows."""
        self._send(
            wire.StepLayers(
                handoff_id=handoff_id, target=target, step=step, cached=b"".join(cached), traceparent=traceparent,
                pages=u32_bytes(p.page for p in pages), epochs=u64_bytes(p.epoch for p in pages),
                hashes=b"".join(p.block_hash for p in pages),
            )
        )  # fmt: skip

    def layers_given_up(self, handoff_id: HandoffId, target: InstanceId) -> None:
        """The prompt of which step_layers() spoke will not be computed to its end."""
        self.step_layers(handoff_id, target, 0, (), (), "")

    def layers_sealed(self, step: int, pages: Sequence[Owned]) -> None:
        """After seal(): of what step_layers() named for the step, it has sealed these and no more. One message."""
        self._send(
            wire.LayersSealed(
                step=step, pages=u32_bytes(p for p, _ in pages), epochs=u64_bytes(e for _, e in pages)
            )
        )

    def unpin(self, pages: Sequence[Owned]) -> None:
        """Sealed pages that no step, begun or to come, uses any more."""
        self.counters["pages_unpinned"] += len(pages)
        self._send_pages(wire.Unpin, pages)

    def give_back(self, pages: Sequence[Owned], answers: int = 0) -> None:
        """Granted pages that no step writes, or will. `answers`: so many of those that take_shrink() said are done."""
        self.counters["pages_given_back"] += len(pages)
        parts = [*_parts(pages)] or [pages] * (answers > 0)
        for number, part in enumerate(parts, 1):
            pages_words, epochs_words = u32_bytes(p for p, _ in part), u64_bytes(e for _, e in part)
            answered = answers if number == len(parts) else 0
            self._send(wire.GiveBack(pages=pages_words, epochs=epochs_words, answers=answered))

    def handoff_ready(self, handoff_id: HandoffId, hashes: Iterable[BlockHash], ttl_ms: int) -> None:
        """After the seals of these blocks: hold them for the decode side."""
        self._send(wire.HandoffReady(handoff_id=handoff_id, hashes=b"".join(hashes), ttl_ms=ttl_ms))

    def release(self, lease_id: LeaseId) -> None:
        """No step, begun or to come, reads what this lease pins."""
        if self.lost:
            self._unsent_releases.append(lease_id)
        self._send(wire.Release(lease_id=lease_id))

    def close(self) -> None:
        """Ends the connection. The pages come back when all processes of this engine are dead."""
        self.closed = True
        self._link.close()

    # -- parts --------------------------------------------------------------------------------------

    def _on_message(self, _seq: int, message: wire.FromMempool, _raw: list[bytes], fds: list[int]) -> None:
        close_fds(fds)
        if isinstance(message, wire.Granted):
            pages = map(PageId, u32_list(message.pages))
            with self._arrived:
                self._granted.extend(zip(pages, map(Epoch, u64_list(message.epochs)), strict=False))
                self._arrived.notify_all()
        elif isinstance(message, wire.Shrink):
            with self._arrived:
                if message.cached:
                    self._uncache += message.count
                else:
                    self._shrink += message.count
                self._arrived.notify_all()
        elif isinstance(message, wire.Vacate):
            with self._arrived:
                self._vacates.append(message)
                self._arrived.notify_all()
        elif isinstance(message, FarPlaced | FarMoved):
            with self._arrived:
                self._far.append(message)
                self._arrived.notify_all()
        elif isinstance(message, SwappedOut | SwappedIn):
            self._swapped.append((message, time.monotonic()))

    def _on_down(self, error: Exception | None) -> None:
        if self.closed:
            return
        logger.warning("mempool %s: connection lost (%s)", self._path, error)
        with self._arrived:
            self.lost = True
            self._arrived.notify_all()

    def _send_pages(self, kind: type[wire.Writing] | type[wire.Unpin], pages: Sequence[Owned]) -> None:
        for part in _parts(pages):
            self._send(kind(pages=u32_bytes(p for p, _ in part), epochs=u64_bytes(e for _, e in part)))

    def _send(self, message: wire.ToMempool) -> None:
        if self.lost or self.closed:
            return
        try:
            self._link.send(message)
        except ClusterError as error:
            logger.warning("mempool %s: %s not sent: %s", self._path, type(message).__name__, error)
            self.lost = True


def _parts(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """No message names more pages than a pool takes at once."""
    for first in range(0, len(items), PAGES_PER_MESSAGE):
        yield items[first : first + PAGES_PER_MESSAGE]
