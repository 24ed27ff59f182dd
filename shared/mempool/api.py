"""MemServe's memory pool as a library (Table 1), on asyncio: nine calls to this host's mempool, remote ids included.

    api = MemPoolApi(socket, InstanceId("prefill-0"), seed=chain_seed(...), block_tokens=16)
    await api.connect()
    pages = await api.alloc_mem(8, "hbm", InstanceId("prefill-0"))
    placed = await api.insert(tokens, pages)

What alloc_mem returns is the caller's until insert() names it, free_mem() gives it back, or the connection ends.
Calls may overlap; each ends by its timeout. Unlike MempoolClient, which only helps, every failure is an error. With
`pool_socket` a transfer between pages that this connection holds is this process's own copy (direct.py), if it can be.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from shared.errors import (
    ClusterError,
    CopyFailed,
    InstanceUnknown,
    InvalidRequest,
    NoReceiver,
    NotHeld,
    OutOfPages,
    Overloaded,
    PeerError,
    PeerGone,
    PeerTimeout,
    StaleEpoch,
)
from shared.ids import BlockHash, InstanceId
from shared.kv.block_hash import pack_tokens
from shared.mempool.api_hashes import HashMemory
from shared.mempool.direct import Direct
from shared.mempool.held_pages import AddressList
from shared.transport.unix_channel import UnixLink
from shared.transport.unix_socket import close_fds
from shared.wire import mempool_api as wire
from shared.wire.mempool_api import InsertFlags, MatchFlags, PageAddress, TransferFlags

CALL_TIMEOUT_MS = 5_000
SWAP_TIMEOUT_MS = 30_000
TRANSFER_TIMEOUT_MS = 10_000
ANSWER_MARGIN_MS = 1_000  # the mempool ends a transfer by its timeout; its answer may take so much longer
MAX_OPEN = 1_024

_ERRORS: dict[str, type[ClusterError]] = {
    error.code: error
    for error in (
        InvalidRequest, NotHeld, OutOfPages, StaleEpoch, Overloaded, InstanceUnknown, NoReceiver, CopyFailed,
        PeerGone, PeerTimeout,
    )
}  # fmt: skip
R = TypeVar("R", wire.Addresses, wire.Counted)


class MemPoolApi:
    """connect() once on a running loop, close() once. After a loss every call raises PeerGone.

    Args:
        seed: first link of the hash chain (model fingerprint and tenant salt).
        block_tokens: tokens in a page.
        on_delivered: gets what is transferred to `instance`; it must not raise or wait. Pages that were not
            inserted are this connection's from then on.
        on_evacuated: hears which leased pages went back to their owner; it must not raise or wait.
        pool_socket: the mempool's socket for engines and clients; "": every transfer asks the mempool.
    Attributes: `direct`: this process's own copies, from connect() on; None without a pool_socket.
    """

    def __init__(
        self,
        socket: str | Path,
        instance: InstanceId,
        *,
        seed: BlockHash,
        block_tokens: int,
        on_delivered: Callable[[wire.Delivered], None] | None = None,
        on_evacuated: Callable[[wire.Evacuated], None] | None = None,
        pool_socket: str | Path = "",
    ) -> None:
        self.instance = instance
        self.direct: Direct | None = None
        self._pool_socket = pool_socket
        self.seed = seed
        self.block_tokens = block_tokens
        self._memory = HashMemory(block_tokens)
        self._on_delivered = on_delivered
        self._on_evacuated = on_evacuated
        self._link: UnixLink[wire.ToMempoolApi, wire.FromMempoolApi] = UnixLink(
            Path(socket),
            out=wire.TO_MEMPOOL_API,
            into=wire.FROM_MEMPOOL_API,
            on_message=self._on_message,
            on_down=self._on_down,
        )
        self._pending: dict[int, asyncio.Future[wire.ApiReply]] = {}
        self._abandoned: OrderedDict[int, None] = OrderedDict()
        self._call_id = 0

    async def connect(self) -> None:
        """Raises: PeerGone when no mempool serves the socket."""
        await self._link.connect()
        self._link.send(wire.ApiHello(instance=self.instance, receives=self._on_delivered is not None))
        if self._pool_socket:
            self.direct = Direct(Path(self._pool_socket), self.instance, self._link.peer_lives, self._report)

    def close(self) -> None:
        """The mempool frees what this connection holds, when no copy of this process touches it any more. Harmless when
        closed already."""
        if self.direct is not None:
            self.direct.tell()
            self.direct.close()
        self._link.close()

    # -- memory -------------------------------------------------------------------------------------

    async def alloc_mem(
        self, size: int, mem_type: wire.MemType = "hbm", instance: InstanceId | None = None
    ) -> list[PageAddress]:
        """`size` pages (one block each) of an instance, by default this one: all of them, or OutOfPages.

        "leased": pages that a peer lends to the instance, and behind them as many in DRAM, in which their bytes are
        once on_evacuated names them.
        """
        call = wire.AllocMem(
            call_id=self._next(), num_blocks=size, mem_type=mem_type, instance=instance or self.instance
        )
        taken = self._listed((await self._call(call, wire.Addresses)).addresses)
        if self.direct is not None:
            self.direct.ways.knows(call.instance)
            self.direct.held.allocated(taken)
        return taken

    async def free_mem(self, addresses: Sequence[PageAddress]) -> int:
        """Give back pages and pins; how many of them were still held. A page that a copy reads goes after it."""
        call = wire.FreeMem(call_id=self._next(), addresses=wire.pack_list(addresses))
        if self.direct is not None:
            await self.direct.give_up(addresses)
        return (await self._call(call, wire.Counted)).count

    # -- index --------------------------------------------------------------------------------------

    async def insert(
        self,
        tokens: Sequence[int],
        addresses: Sequence[PageAddress],
        flags: InsertFlags = InsertFlags.NONE,
        *,
        first_block: int = 0,
    ) -> list[PageAddress]:
        """Active KV becomes historical: name the pages that hold the prompt's blocks, from `first_block` on.

        Args: addresses: one a block, allocated by this connection and written; with one more than there are
            full blocks, the last is the partial tail.
        Returns: where each block is: the page given, or one that was there before (then the given one is free).
        Raises: NotHeld, StaleEpoch, InvalidRequest; nothing has changed.
        """
        hashes, parent, last_tokens = self._path(tokens, first_block, len(addresses))
        call = wire.InsertBlocks(
            call_id=self._next(),
            parent=parent,
            hashes=b"".join(hashes),
            addresses=wire.pack_list(addresses),
            last_tokens=last_tokens,
            flags=flags,
        )
        if self.direct is not None:
            self.direct.name(addresses)
        placed = self._listed((await self._call(call, wire.Addresses)).addresses)
        if self.direct is not None and flags & InsertFlags.PIN:
            self.direct.held.pinned(placed)
        return placed

    async def match(
        self, tokens: Sequence[int], flags: MatchFlags = MatchFlags.NONE, instance: InstanceId | None = None
    ) -> list[PageAddress]:
        """Pages of the longest cached prefix, in HBM where there is a choice. A hint, unless pinned by the flag."""
        hashes = self._memory.with_tail(self.seed, pack_tokens(tokens))
        call = wire.MatchBlocks(
            call_id=self._next(), hashes=b"".join(hashes), instance=instance or self.instance, flags=flags
        )
        found = self._listed((await self._call(call, wire.Addresses)).addresses)
        if self.direct is not None and flags & MatchFlags.PIN:
            self.direct.ways.knows(call.instance)
            self.direct.held.pinned(found)
        return found

    async def delete(self, tokens: Sequence[int], instance: InstanceId | None = None) -> int:
        """Forget the prompt's blocks that nobody has pinned; how many pages are free now."""
        hashes = self._memory.with_tail(self.seed, pack_tokens(tokens))
        call = wire.DeleteBlocks(
            call_id=self._next(), hashes=b"".join(hashes), instance=instance or self.instance
        )
        return (await self._call(call, wire.Counted)).count

    async def swap_out(self, num_blocks: int, instance: InstanceId | None = None) -> list[PageAddress]:
        """Move the coldest blocks from HBM to DRAM; where they are now. Fewer, when fewer could go."""
        call = wire.SwapOut(call_id=self._next(), num_blocks=num_blocks, instance=instance or self.instance)
        reply = await self._call(call, wire.Addresses, SWAP_TIMEOUT_MS)
        return wire.unpack_addresses(reply.addresses)

    async def swap_in(self, addresses: Sequence[PageAddress]) -> list[PageAddress]:
        """Bring blocks in DRAM, pinned by match(), to HBM: an address for each, its own if it could not come.

        The pins pass to the pages in HBM.
        """
        call = wire.SwapIn(call_id=self._next(), addresses=wire.pack_list(addresses))
        if self.direct is not None:
            await self.direct.give_up(addresses)
        reply = await self._call(call, wire.Addresses, SWAP_TIMEOUT_MS)
        found = self._listed(reply.addresses)
        if self.direct is not None:
            self.direct.held.pinned(found)
        return found

    # -- transfers ----------------------------------------------------------------------------------

    async def transfer(
        self,
        instance: InstanceId,
        sources: Sequence[PageAddress],
        targets: Sequence[PageAddress] = (),
        flags: TransferFlags = TransferFlags.NONE,
        private: bytes = b"",
        *,
        timeout_ms: int = TRANSFER_TIMEOUT_MS,
    ) -> list[PageAddress]:
        """Copy pages to an instance; their addresses there, after the last byte.

        Args:
            sources: of this host, held by this connection.
            targets: pages allocated at the instance; without them it allocates, as `flags` say, and they belong
                to its receiver, who gets them with `private`.
        Raises: StaleEpoch, CopyFailed, NoReceiver, OutOfPages and others; then given targets hold anything.
        Cost: with a pool_socket and given targets at another instance of this host, 15 us and the copy, for lists that
            no answer brought 0.2 us a page more; by way of the mempool 0.6 ms and 3 us a page.
        """
        mine = self.direct if targets and not flags and not private else None
        if mine is not None and await mine.transfer(instance, sources, targets, timeout_ms):
            return list(targets)
        call = wire.Transfer(
            call_id=self._next(),
            target=instance,
            sources=wire.pack_list(sources),
            targets=wire.pack_list(targets),
            flags=flags,
            private=private,
            timeout_ms=timeout_ms,
        )
        return await self._transferred(call, sources, targets)

    async def transfer_with_insert(
        self,
        instance: InstanceId,
        tokens: Sequence[int],
        sources: Sequence[PageAddress],
        targets: Sequence[PageAddress] = (),
        flags: TransferFlags = TransferFlags.NONE,
        private: bytes = b"",
        *,
        first_block: int = 0,
        timeout_ms: int = TRANSFER_TIMEOUT_MS,
    ) -> list[PageAddress]:
        """As transfer(), and the instance indexes the blocks after the last byte; only what it lacks moves.

        Given targets of blocks that it has already stay with who allocated them.
        """
        hashes, parent, last_tokens = self._path(tokens, first_block, len(sources))
        call = wire.Transfer(
            call_id=self._next(),
            target=instance,
            sources=wire.pack_list(sources),
            targets=wire.pack_list(targets),
            flags=flags,
            private=private,
            insert=True,
            parent=parent,
            hashes=b"".join(hashes),
            last_tokens=last_tokens,
            timeout_ms=timeout_ms,
        )
        return await self._transferred(call, sources, targets)

    # -- parts --------------------------------------------------------------------------------------

    def _listed(self, raw: bytes) -> list[PageAddress]:
        """Of an answer; ready to be copied from or to."""
        found = wire.unpack_addresses(raw)
        return found if self.direct is None else AddressList(found)

    async def _transferred(
        self, call: wire.Transfer, sources: Sequence[PageAddress], targets: Sequence[PageAddress]
    ) -> list[PageAddress]:
        """Where the pages are: most often in the given targets, which need no decoding then."""
        if self.direct is not None:
            await self.direct.mediate(call, sources, targets)
        reply = await self._call(call, wire.Addresses, call.timeout_ms + ANSWER_MARGIN_MS)
        if reply.addresses == call.targets:
            return list(targets)
        return wire.unpack_addresses(reply.addresses)

    def _report(self, copied: wire.CopiedDirectly) -> None:
        with suppress(PeerGone, Overloaded):  # the next one, or nobody wants to know
            self._link.send(copied)

    def _path(self, tokens: Sequence[int], first: int, count: int) -> tuple[list[BlockHash], BlockHash, int]:
        """Hashes of blocks first to first + count, the hash before them, and the tokens of a partial last one."""
        raw = pack_tokens(tokens)
        end, num_full = first + count, len(tokens) // self.block_tokens
        num_rest = len(tokens) % self.block_tokens
        if count <= 0 or first < 0 or end > num_full + (num_rest > 0):
            raise InvalidRequest(f"blocks {first} to {end} of {len(tokens)} tokens")
        hashes = self._memory.with_tail(self.seed, raw)[:end]
        parent = hashes[first - 1] if first else self.seed
        return hashes[first:], parent, num_rest if end > num_full else 0

    def _next(self) -> int:
        self._call_id += 1
        return self._call_id

    async def _call(self, call: wire.ApiCall, kind: type[R], timeout_ms: int = CALL_TIMEOUT_MS) -> R:
        future: asyncio.Future[wire.ApiReply] = asyncio.get_running_loop().create_future()
        self._send(call, future)
        try:
            # wait() does not cancel the future: an answer in the turn of the caller's cancellation is in it
            await asyncio.wait([future], timeout=timeout_ms / 1000)
        except asyncio.CancelledError:
            self._abandon(call, future)
            raise
        finally:
            self._pending.pop(call.call_id, None)
        if not future.done():
            self._abandon(call, future)
            raise PeerTimeout(f"{type(call).__name__}: no answer within {timeout_ms} ms")
        reply = future.result()
        if isinstance(reply, wire.ApiFailed):
            raise _ERRORS.get(reply.code, PeerError)(reply.reason)
        if not isinstance(reply, kind):
            raise PeerError(f"{type(call).__name__} was answered by {type(reply).__name__}")
        return reply

    def _send(self, call: wire.ApiCall, future: "asyncio.Future[wire.ApiReply]") -> None:
        """Raises: Overloaded, PeerGone; it was not sent, so the mempool touches nothing for it."""
        try:
            if len(self._pending) >= MAX_OPEN:
                raise Overloaded(f"{MAX_OPEN} calls are open")
            self._pending[call.call_id] = future  # first: sending may be what finds that the mempool is gone
            self._link.send(call)
        except Exception:
            self._pending.pop(call.call_id, None)
            if self.direct is not None:
                self.direct.answered(call.call_id)
            raise

    def _abandon(self, call: wire.ApiCall, future: "asyncio.Future[wire.ApiReply]") -> None:
        """Nobody waits for the answer any more: what it gives to the caller goes back, now or when it comes."""
        pins = isinstance(call, wire.InsertBlocks | wire.MatchBlocks) and bool(call.flags)
        gives = pins or isinstance(call, wire.AllocMem | wire.SwapIn)
        if future.done():  # in this turn
            if future.exception() is None and gives:
                self._give_back(future.result())
        elif gives:
            self._abandoned[call.call_id] = None
            if len(self._abandoned) > MAX_OPEN:
                self._abandoned.popitem(last=False)

    def _give_back(self, reply: wire.ApiReply) -> None:
        if isinstance(reply, wire.Addresses) and reply.addresses:
            with suppress(PeerGone, Overloaded):  # they go at the end of the connection then
                self._link.send(wire.FreeMem(call_id=self._next(), addresses=reply.addresses))

    def _on_message(self, _seq: int, message: wire.FromMempoolApi, _raw: list[bytes], fds: list[int]) -> None:
        close_fds(fds)
        if isinstance(message, wire.Delivered):
            if self._on_delivered is not None:
                self._on_delivered(message)
            return
        if isinstance(message, wire.Evacuated):
            if self._on_evacuated is not None:
                self._on_evacuated(message)
            return
        if self.direct is not None:
            self.direct.answered(message.call_id, message.code if isinstance(message, wire.ApiFailed) else "")
        future = self._pending.get(message.call_id)
        if future is not None and not future.done():
            future.set_result(message)
        elif message.call_id in self._abandoned:
            del self._abandoned[message.call_id]
            self._give_back(message)

    def _on_down(self, error: Exception | None) -> None:
        if self.direct is not None:
            self.direct.close()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(PeerGone(f"the mempool's connection ended: {error or 'closed'}"))
