"""The campaign's engine processes: the real client library, driven command by command over a packet socket.

An instance that works in the pages is a core (shared/mempool/page_quota.py), two ranks that map the pages
(rank_memory.py) and a front (client.py); one that copies is a single process (engine_attachment.py). What a core
does with its pages is what shared/engine/page_pool.py and page_scheduler.py do with them, without vLLM.
"""

import asyncio
import concurrent.futures
import hashlib
import mmap
import os
import socket
import threading
from collections import deque
from collections.abc import Sequence

import msgspec

from shared.errors import ClusterError, ResourceError
from shared.ids import BlockHash, Epoch, HandoffId, InstanceId, LeaseId, PageId
from shared.kv.layout import EngineDescription
from shared.kv.words import u32_bytes, u32_list, u64_bytes, u64_list
from shared.mempool.client import MempoolClient
from shared.mempool.engine_attachment import EngineAttachment, SealEntry
from shared.mempool.page_quota import PageQuota, SealedPage
from shared.mempool.rank_memory import RankMemory
from shared.wire.mempool import Acquired, HeldLease, Holding

NUM_RANKS = 2
BLOCK_TOKENS = 4
BLOCK_BYTES = 6000  # less than a page: what lies behind is nobody's
HALF_BYTES = BLOCK_BYTES // 2
DESCRIPTION = EngineDescription(
    model="m", fingerprint="f", dtype="float32", layout="cross-layer", backend="none", tp_size=NUM_RANKS,
    block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES,
)  # fmt: skip
GRANT_WAIT_S = 20.0
CALL_WAIT_S = 30.0
MAX_COMMAND_BYTES = 1 << 18

Owned = tuple[int, int]  # page, epoch: as it comes from a command
Typed = tuple[PageId, Epoch]


def pattern(block_hash: bytes, epoch: int, rank: int) -> bytes:
    """The bytes that a block has in a page, under the page's epoch, on one rank."""
    seed = hashlib.sha256(block_hash + epoch.to_bytes(8, "little") + bytes([rank])).digest()
    return (seed * (BLOCK_BYTES // len(seed) + 1))[:BLOCK_BYTES]


class Rank:
    """A process that computes: it writes and reads the pages themselves and never looks back."""

    def __init__(self, order: dict) -> None:
        self.order = order
        self.number: int = order["rank"]

    def attach(self) -> None:
        memory = self.attached()
        header = memory.header
        self.page_bytes = header.page_bytes
        self.pages = mmap.mmap(memory.fd, header.num_pages * header.page_bytes, offset=memory.offset_bytes)
        memory.stay_attached()
        self.memory = memory

    def attached(self) -> RankMemory:
        """The pages as the mempool gives them to this process."""
        return RankMemory(self.order["socket"], InstanceId(self.order["instance"]), DESCRIPTION, self.number)

    def bytes_of(self, block_hash: bytes, epoch: int) -> bytes:
        """What this rank's part of a page with the block holds."""
        return pattern(block_hash, epoch, self.number)

    def write(self, pages: list[Owned], hashes: list[bytes], half: int) -> None:
        for (page, epoch), block_hash in zip(pages, hashes, strict=True):
            start = page * self.page_bytes + half * HALF_BYTES
            part = self.bytes_of(block_hash, epoch)[half * HALF_BYTES :][:HALF_BYTES]
            self.pages[start : start + HALF_BYTES] = part

    def scribble(self, pages: list[Owned]) -> None:
        """A step that was under way when the core died, over pages that this instance was writing."""
        for page, _ in pages:
            start = page * self.page_bytes
            self.pages[start : start + BLOCK_BYTES] = os.urandom(BLOCK_BYTES)

    def read(self, pages: list[Owned], hashes: list[bytes]) -> list[bool]:
        """Whether each page holds its block."""
        out: list[bool] = []
        for (page, epoch), block_hash in zip(pages, hashes, strict=True):
            start = page * self.page_bytes
            out.append(self.pages[start : start + BLOCK_BYTES] == self.bytes_of(block_hash, epoch))
        return out


class Core:
    """An engine's core: allocates from its quota, seals, pins, releases, and reports to a new mempool."""

    description = DESCRIPTION

    def __init__(self, order: dict) -> None:
        self.quota = PageQuota(
            order["socket"], InstanceId(order["instance"]), self.description, order["quota"]
        )
        self.stock: deque[Typed] = deque()
        self.writes: dict[PageId, Epoch] = {}
        self.sealed: dict[PageId, SealedPage] = {}
        self.leases: dict[str, list[Owned]] = {}

    def attach(self) -> int:
        return self.quota.attach().boot_generation

    def is_lost(self) -> bool:
        return self.quota.lost or self.quota.header is None

    def take(self, count: int) -> list[Typed]:
        """Fewer when the pool grants no more within the time."""
        self._absorb()
        while len(self.stock) < count and self.quota.wait_granted(GRANT_WAIT_S):
            if self.quota.lost:
                break
            self._absorb()
        taken = [self.stock.popleft() for _ in range(min(count, len(self.stock)))]
        self.writes.update(taken)
        return taken

    def _absorb(self) -> None:
        self.stock.extend(self.quota.take_granted())
        asked = self.quota.take_shrink()
        self.quota.give_back([self.stock.pop() for _ in range(min(asked, len(self.stock)))], answers=asked)

    def writing(self, pages: list[Owned]) -> None:
        self.quota.writing([_owned(own) for own in pages])

    def seal(self, pages: list[Owned], hashes: list[bytes], parents: list[bytes]) -> None:
        entries = [
            SealedPage(PageId(page), Epoch(epoch), BlockHash(block), BlockHash(parent), BLOCK_TOKENS)
            for (page, epoch), block, parent in zip(pages, hashes, parents, strict=True)
        ]
        for entry in entries:
            del self.writes[entry.page]
            self.sealed[entry.page] = entry
        self.quota.seal(entries)

    def unpin(self, pages: list[Owned]) -> None:
        for page, _ in pages:
            del self.sealed[PageId(page)]
        self.quota.unpin([_owned(own) for own in pages])

    def give_back(self, pages: list[Owned]) -> None:
        for page, _ in pages:
            del self.writes[PageId(page)]
        self.quota.give_back([_owned(own) for own in pages])

    def ready(self, handoff: str, hashes: list[bytes], ttl_ms: int) -> None:
        self.quota.handoff_ready(HandoffId(handoff), [BlockHash(h) for h in hashes], ttl_ms)

    def made(self, lease_id: str) -> bool:
        """Whether the mempool that this engine knows made the lease."""
        return self.quota.made(lease_id)

    def take_lease(self, lease_id: str, pages: list[Owned]) -> bool:
        """False for a lease of another mempool than this engine knows: it was not, or is not, reported."""
        if not self.quota.made(lease_id):
            return False
        self.leases[lease_id] = [_owned(own) for own in pages]
        return True

    def release(self, lease_id: str) -> None:
        del self.leases[lease_id]
        self.quota.release(LeaseId(lease_id))

    def reattach(self) -> str:
        """ "not yet", "attached", or why this engine must begin anew."""
        if self.quota.header is None:
            return "it never was attached"
        if not self.quota.lost:
            return "attached"
        self._absorb()
        try:
            return "attached" if self.quota.reattach(self._holding()) else "not yet"
        except ResourceError as error:
            return error.message

    def _holding(self) -> Holding:
        held = [*self.stock, *self.writes.items()]
        sealed = list(self.sealed.values())
        return Holding(
            pages=u32_bytes(page for page, _ in held),
            epochs=u64_bytes(epoch for _, epoch in held),
            sealed_pages=u32_bytes(s.page for s in sealed),
            sealed_epochs=u64_bytes(s.epoch for s in sealed),
            sealed_hashes=b"".join(s.block_hash for s in sealed),
            sealed_parents=b"".join(s.parent for s in sealed),
            sealed_valid_tokens=u32_bytes(s.valid_tokens for s in sealed),
            leases=[
                HeldLease(
                    lease_id=LeaseId(lease_id),
                    pages=u32_bytes(page for page, _ in pages),
                    epochs=u64_bytes(epoch for _, epoch in pages),
                )
                for lease_id, pages in self.leases.items()
            ],
        )


class CopyEngine:
    """Writes blocks into pages, and copies them out under the seqlock rule. Of rank 0 only."""

    def __init__(self, order: dict) -> None:
        instance = InstanceId(order["instance"])
        self.attachment = EngineAttachment(order["socket"], instance, DESCRIPTION, order["quota"])
        self.copies: list[tuple[Typed, bytes, memoryview, bool, bytes]] = []
        self.in_hand: dict[Typed, int] = {}  # taken -> how many attachments were over then

    def attach(self) -> int:
        return self.attachment.boot_generation

    def is_lost(self) -> bool:
        return not self.attachment.connected

    def losses(self) -> int:
        return self.attachment.counters.get("losses", 0)

    def take(self, count: int) -> list[Typed]:
        taken = self.attachment.take_pages(count)
        self.in_hand.update(dict.fromkeys(taken, self.losses()))
        return taken

    def writing(self, pages: list[Owned]) -> None:
        self.attachment.writing([_owned(own) for own in pages])

    def write(self, pages: list[Owned], hashes: list[bytes], half: int) -> None:
        for (page, epoch), block_hash in zip(pages, hashes, strict=True):
            part = pattern(block_hash, epoch, 0)[half * HALF_BYTES :][:HALF_BYTES]
            self.attachment.page_view(PageId(page))[half * HALF_BYTES :][:HALF_BYTES] = part

    def seal(self, pages: list[Owned], hashes: list[bytes], parents: list[bytes]) -> None:
        self._drop(pages)
        self.attachment.seal(
            [
                SealEntry(PageId(page), Epoch(epoch), BlockHash(block), BlockHash(parent), BLOCK_TOKENS)
                for (page, epoch), block, parent in zip(pages, hashes, parents, strict=True)
            ]
        )

    def ready(self, handoff: str, hashes: list[bytes], ttl_ms: int) -> None:
        self.attachment.handoff_ready(HandoffId(handoff), [BlockHash(h) for h in hashes], ttl_ms)

    def give_back(self, pages: Sequence[Owned]) -> None:
        self._drop(pages)
        self.attachment.give_back([_owned(own) for own in pages])

    def give_all_back(self) -> None:
        """Of this attachment: the requests that took them are over."""
        self.give_back([own for own, when in self.in_hand.items() if when == self.losses()])

    def let_go_of_earlier(self) -> None:
        """Requests are over that outlived attachments: pages that they took may be another's by now."""
        self.give_back([own for own, when in self.in_hand.items() if when != self.losses()])

    def _drop(self, pages: Sequence[Owned]) -> None:
        for own in pages:
            self.in_hand.pop(_owned(own), None)

    def begin_copy(self, pages: list[Owned], hashes: list[bytes]) -> None:
        """Look at the words, copy the first halves, keep the views: a reader in the middle of its copies."""
        for (page, epoch), block_hash in zip(pages, hashes, strict=True):
            is_sealed = self.attachment.is_sealed(PageId(page), Epoch(epoch))
            view = self.attachment.page_view(PageId(page))
            half = bytes(view[:HALF_BYTES])
            self.copies.append(((PageId(page), Epoch(epoch)), block_hash, view, is_sealed, half))

    def end_copy(self) -> list[tuple[bool, bool, str]]:
        """(both looks at the word said that the copy is good, the copy is right, what it was) of each."""
        out: list[tuple[bool, bool, str]] = []
        for (page, epoch), block_hash, view, was_sealed, half in self.copies:
            whole = half + bytes(view[HALF_BYTES:])
            is_good = was_sealed and self.attachment.is_sealed(page, epoch)
            view.release()
            what = (
                f"page {page} epoch {epoch} {block_hash.hex()[:8]} bytes {whole[:4].hex()} {whole[-4:].hex()}"
            )
            out.append((is_good, whole == pattern(block_hash, epoch, 0), what))
        self.copies.clear()
        return out

    def detach(self) -> None:
        self.attachment.close()


class Front:
    """A worker's front: leases pages for requests. Its client runs on a loop of its own."""

    def __init__(self, order: dict) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.client = MempoolClient(order["socket"], InstanceId(order["instance"]))
        self.loop.call_soon_threadsafe(self.client.start)
        self.waiting: concurrent.futures.Future[Acquired] | None = None

    def attach(self) -> int:
        return self.client.boot_generation

    def is_lost(self) -> bool:
        return not self.client.connected

    def losses(self) -> int:
        return self.client.counters["losses"]

    def acquire(self, hashes: list[bytes], handoff: str, wait_ms: int, ttl_ms: int) -> None:
        """ttl_ms 0: an engine of this instance will release it."""
        call = self.client.acquire(
            [BlockHash(h) for h in hashes],
            handoff_id=HandoffId(handoff),
            wait_ms=wait_ms,
            ttl_ms=ttl_ms,
            until_release=ttl_ms == 0,
        )
        self.waiting = asyncio.run_coroutine_threadsafe(call, self.loop)

    def acquired(self) -> tuple[str, list[Owned]]:
        """The answer to acquire(): lease and pages, ("", []) for none."""
        assert self.waiting is not None
        got: Acquired = self.waiting.result(CALL_WAIT_S)
        pages, epochs = u32_list(got.pages), u64_list(got.epochs)
        return got.lease_id, list(zip(map(PageId, pages), map(Epoch, epochs), strict=True))

    def release(self, lease_id: str) -> None:
        self.loop.call_soon_threadsafe(self.client.release, LeaseId(lease_id))

    def match(self, hashes: list[bytes]) -> int:
        call = self.client.match([BlockHash(h) for h in hashes])
        return asyncio.run_coroutine_threadsafe(call, self.loop).result(CALL_WAIT_S)


ACTORS = {"rank": Rank, "core": Core, "copy": CopyEngine, "front": Front}


def _owned(own: Owned) -> Typed:
    return PageId(own[0]), Epoch(own[1])


def serve(actor: object, control: socket.socket) -> None:
    """One command after another: [name, *args] in, [whether it went well, result or reason] out."""
    while data := control.recv(MAX_COMMAND_BYTES):
        name, *args = msgspec.msgpack.decode(data)
        try:
            answer = [True, getattr(actor, name)(*args)]
        except ClusterError as error:
            answer = [False, f"{type(error).__name__}: {error.message}"]
        control.send(msgspec.msgpack.encode(answer))
