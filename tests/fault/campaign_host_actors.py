"""Actors of the campaign on two hosts: engines with a space of their own, whose blocks leave it and come back.

As in campaign_actors.py, but a block's bytes are the same wherever it is: pages that the mempool filled by itself,
from another space, another host or host memory, hold what their block held where it was computed.
"""

import asyncio
import concurrent.futures
import mmap
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec

from shared.errors import InstanceUnknown, PeerGone
from shared.ids import BlockHash, Epoch, HandoffId, InstanceId, LeaseId, PageId, SpaceId
from shared.kv.layer_words import layer_word
from shared.kv.words import u32_list, u64_list
from shared.mempool.api import MemPoolApi
from shared.mempool.page_quota import SealedPage
from shared.mempool.rank_memory import RankMemory
from shared.vmm.words import Words
from shared.wire import mempool_api
from shared.wire.lending import Grant, Offer, ReclaimOrder, Token
from shared.wire.mempool import MemoryChanged
from shared.wire.mempool_api import PageAddress, TransferFlags
from shared.wire.mempool_lending import LendingDone
from shared.wire.mempool_swap import NO_PAGE, SwappedIn, SwappedOut
from tests.fault.campaign_actors import (
    BLOCK_TOKENS,
    CALL_WAIT_S,
    DESCRIPTION,
    GRANT_WAIT_S,
    Core,
    Front,
    Owned,
    Rank,
    pattern,
)
from tests.integration.mempool_rig import SEED

NUM_LAYERS = 3
HOST_DESCRIPTION = msgspec.structs.replace(DESCRIPTION, layout="layers-blocks", num_layers=NUM_LAYERS)
LAYER_BYTES = HOST_DESCRIPTION.block_bytes // NUM_LAYERS
PRESS_MS = 5_000
T = TypeVar("T")


def block_bytes(block_hash: bytes, rank: int) -> bytes:
    """The bytes of a block, in whatever page, on one rank."""
    return pattern(block_hash, 0, rank)


class HostRank(Rank):
    """A rank of an engine with a space of its own, and a word for how far its step is."""

    def attached(self) -> RankMemory:
        instance = self.order["instance"]
        memory = RankMemory(
            self.order["socket"], InstanceId(instance), HOST_DESCRIPTION, self.number,
            device=f"cpu:{instance}", capacity_bytes=self.order["capacity"],
        )  # fmt: skip
        fd = memory.layer_words()
        self.layer_word = Words(mmap.mmap(fd, mmap.PAGESIZE), 1)
        os.close(fd)
        return memory

    def bytes_of(self, block_hash: bytes, epoch: int) -> bytes:
        return block_bytes(block_hash, self.number)

    def write_layer(
        self, pages: list[Owned], hashes: list[bytes], step: int, layer: int, num_right: int
    ) -> None:
        """One layer of these blocks, and then the word for it; blocks from `num_right` on come out wrong."""
        for number, ((page, _), block_hash) in enumerate(zip(pages, hashes, strict=True)):
            start = page * self.page_bytes + layer * LAYER_BYTES
            part = block_bytes(block_hash, self.number)[layer * LAYER_BYTES :][:LAYER_BYTES]
            self.pages[start : start + LAYER_BYTES] = part if number < num_right else os.urandom(LAYER_BYTES)
        self.layer_word.store(0, layer_word(step, layer + 1))


class HostCore(Core):
    """A core whose blocks may be parked elsewhere, and whose space may have to give memory back."""

    description = HOST_DESCRIPTION

    def __init__(self, order: dict) -> None:
        super().__init__(order)
        self.asked_numbers: list[int] = []

    def absorb(self) -> int:
        """What an engine does between two steps; how many pages it has in hand."""
        self._absorb()
        return len(self.stock)

    def step_layers(
        self,
        handoff: str,
        target: str,
        step: int,
        pages: list[Owned],
        hashes: list[bytes],
        cached: list[bytes],
    ) -> None:
        entries = [
            SealedPage(PageId(page), Epoch(epoch), BlockHash(block), BlockHash(block), BLOCK_TOKENS)
            for (page, epoch), block in zip(pages, hashes, strict=True)
        ]
        self.quota.step_layers(
            HandoffId(handoff), InstanceId(target), step, entries, [BlockHash(h) for h in cached], ""
        )

    def layers_sealed(self, step: int, pages: list[Owned]) -> None:
        self.quota.layers_sealed(step, [(PageId(page), Epoch(epoch)) for page, epoch in pages])

    def swap_out(self, number: int, hashes: list[bytes]) -> None:
        self.quota.swap_out(number, [BlockHash(h) for h in hashes])

    def swap_in(self, number: int, hashes: list[bytes]) -> int:
        """How many pages of its own it gives for them: fewer when it is granted no more within the time."""
        self._absorb()
        while len(self.stock) < len(hashes) and self.quota.wait_granted(GRANT_WAIT_S) and not self.quota.lost:
            self._absorb()
        given = [self.stock.popleft() for _ in range(min(len(hashes), len(self.stock)))]
        self.quota.swap_in(number, [BlockHash(h) for h in hashes], given)
        return len(given)

    def swap_drop(self, number: int) -> None:
        self.quota.swap_drop(number)

    def swapped_out(self, number: int) -> list[bool] | None:
        """Of each block whether it is kept, once that is known. None: not yet."""
        for answer, _ in self.quota.take_swapped():
            if isinstance(answer, SwappedOut) and answer.swap == number:
                return [bool(kept) for kept in answer.kept]
        return None

    def swapped_in(self, number: int, hashes: list[bytes], parents: list[bytes]) -> list[Owned | None] | None:
        """Where each block is, None for one that is lost. None: not known yet."""
        for answer, _ in self.quota.take_swapped():
            if not isinstance(answer, SwappedIn) or answer.swap != number:
                continue
            out: list[Owned | None] = []
            rows = zip(u32_list(answer.pages), u64_list(answer.epochs), hashes, parents, strict=True)
            for page, epoch, block, parent in rows:
                out.append(None if page == NO_PAGE else (page, epoch))
                if page != NO_PAGE:
                    self.sealed[PageId(page)] = SealedPage(
                        PageId(page), Epoch(epoch), BlockHash(block), BlockHash(parent), BLOCK_TOKENS
                    )
            return out
        return None

    def asked(self) -> list[Owned]:
        """Sealed pages whose memory the pool wants back, as far as no lease of this engine reads them."""
        numbers, pages = self.quota.take_vacates()
        self.asked_numbers += numbers
        spare = [own for own in self.stock if own in pages]
        for own in spare:
            self.stock.remove(own)
        if spare:
            self.quota.give_back(spare)
        return [own for own in pages if own[0] in self.sealed and self.sealed[own[0]].epoch == own[1]]

    def vacate(self, pages: list[Owned]) -> int:
        """Let go of these of them, and say that this is all; to how many questions."""
        self.unpin(pages)
        numbers, self.asked_numbers = self.asked_numbers, []
        self.quota.vacated(numbers)
        return len(numbers)


class _Looping:
    """Whose client runs on a loop of its own: begin(), then done() until there is an answer."""

    loop: asyncio.AbstractEventLoop
    pending: concurrent.futures.Future[Any]

    def begin(self, call: Coroutine[Any, Any, Any]) -> None:
        self.pending = asyncio.run_coroutine_threadsafe(call, self.loop)

    def done(self) -> bool:
        """Whether what was begun has ended."""
        return self.pending.done()

    def wait(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self.loop).result(CALL_WAIT_S)


class HostFront(_Looping, Front):
    """A front that reads from another host, presses for memory, and presents what a market answered."""

    def __init__(self, order: dict) -> None:
        super().__init__(order)
        self.instance = InstanceId(order["instance"])

    def peer_address(self) -> str:
        return self.client.peer_address

    def acquire_from(self, hashes: list[bytes], handoff: str, wait_ms: int, source: str) -> None:
        call = self.client.acquire(
            [BlockHash(h) for h in hashes], handoff_id=HandoffId(handoff), wait_ms=wait_ms, ttl_ms=0,
            until_release=True, source_mempool=source,
        )  # fmt: skip
        self.waiting = asyncio.run_coroutine_threadsafe(call, self.loop)

    def has_acquired(self) -> bool:
        """Whether acquired() has its answer."""
        return self.waiting is None or self.waiting.done()

    def drop_handoff(self, handoff: str) -> None:
        """Its reader will not come."""
        self.loop.call_soon_threadsafe(self.client.drop_handoff, HandoffId(handoff))

    def press(self, num_bytes: int, regain: bool) -> None:
        """ReleaseMemory or RegainMemory of this instance's space."""
        change = self.client.regain_memory if regain else self.client.release_memory
        self.begin(change(num_bytes, wait_ms=PRESS_MS))

    def changed(self) -> tuple[int, int] | None:
        """The answer: bytes that changed, bytes that are released now. None: no answer."""
        found: MemoryChanged | None = self.pending.result(CALL_WAIT_S)
        return None if found is None else (found.num_bytes, found.released_bytes)

    def lend(self, number: int, mempool: str, space: int, num_bytes: int, consumer: str) -> tuple[str, int]:
        """Present an offer of this instance, and a grant of all of it. A refusal's code, or "", and the bytes."""
        boot = self.client.boot_generation
        offer = Offer(
            offer_id=f"o{number}", producer=self.instance, producer_epoch=Epoch(1),
            mempool=InstanceId(mempool), boot_generation=boot, space=SpaceId(space), length_bytes=num_bytes,
        )  # fmt: skip
        grant = Grant(
            lease_id=LeaseId(f"l{number}"), offer_id=offer.offer_id, consumer=InstanceId(consumer),
            purpose="overflow", mempool=InstanceId(mempool), address="", boot_generation=boot,
            space=SpaceId(space), length_bytes=num_bytes, token=Token(1, number), present_ms=60_000,
            ttl_ms=600_000, consumer_ttl_ms=300_000,
        )  # fmt: skip
        for what in (offer, grant):
            answer = self.wait(self.client.present(what))
            if not isinstance(answer, LendingDone):
                return getattr(answer, "code", "no answer"), 0
        return "", answer.num_bytes

    def reclaim(self, number: int, deadline_ms: int) -> bool:
        """Whether the mempool took the order to have all of the offer back."""
        order = ReclaimOrder(
            reclaim_id=f"r{number}", offer_id=f"o{number}", keep_bytes=0, deadline_ms=deadline_ms
        )
        return isinstance(self.wait(self.client.present(order)), LendingDone)


class Caller(_Looping):
    """A process that calls the nine calls: what it holds goes with its connection."""

    def __init__(self, order: dict) -> None:
        self.order = order
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.api: MemPoolApi | None = None

    def attach(self) -> bool:
        """Connect, anew after a loss. False: nobody is there yet."""
        if self.api is not None and not self.is_lost():
            return True
        if self.api is not None:
            self.loop.call_soon_threadsafe(self.api.close)
        api = MemPoolApi(
            self.order["api_socket"], InstanceId(self.order["serves"]), seed=SEED, block_tokens=BLOCK_TOKENS
        )
        try:
            self.wait(api.connect())
        except PeerGone:
            return False
        self.api = api
        return True

    def is_lost(self) -> bool:
        return self.api is None or not self.api._link.up

    def _lists(self, *raw: bytes) -> list[list[PageAddress]]:
        return [mempool_api.unpack_addresses(each) for each in raw]

    def alloc(self, count: int, mem_type: mempool_api.MemType, instance: str) -> bytes:
        assert self.api is not None
        return mempool_api.pack_list(self.wait(self.api.alloc_mem(count, mem_type, InstanceId(instance))))

    def free(self, addresses: bytes) -> int:
        assert self.api is not None
        return self.wait(self.api.free_mem(*self._lists(addresses)))

    def transfer(self, instance: str, sources: bytes, targets: bytes, tokens: list[int]) -> None:
        """With tokens: and insert."""
        assert self.api is not None
        own, given = self._lists(sources, targets)
        target = InstanceId(instance)
        if tokens:
            self.begin(self.api.transfer_with_insert(target, tokens, own, given))
        else:
            self.begin(self.api.transfer(target, own, given, TransferFlags.NONE))

    def transferred(self) -> bytes:
        """Raises: ClusterError; then nothing arrived."""
        return mempool_api.pack_list(self.pending.result(CALL_WAIT_S))

    def may_alloc(self, instance: str) -> bytes:
        """One page of an instance, which may not be known yet: b""."""
        try:
            return self.alloc(1, "hbm", instance)
        except (InstanceUnknown, PeerGone):
            if self.is_lost():
                raise
            return b""

    def match_at(self, instance: str, tokens: list[int]) -> bytes:
        """Where the prompt's blocks are there."""
        assert self.api is not None
        return mempool_api.pack_list(self.wait(self.api.match(tokens, instance=InstanceId(instance))))


HOST_ACTORS = {"host-rank": HostRank, "host-core": HostCore, "host-front": HostFront, "caller": Caller}
