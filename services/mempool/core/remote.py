"""Blocks that a reader here wants and the mempool of another host has: brought before the reader is answered. No I/O.

    Acquire(source_mempool) -> own prefix pinned -> RemoteAcquire -> pages claimed -> PullRemote -> CheckEpochs
                            -> sealed and indexed up to the first stale block -> RemoteRelease, the reader is answered

The source's pins are a courtesy, which it may end early; what counts is its word, asked for after the last byte, that
every page is still sealed under the epoch that it gave (ARCHITECTURE.md, rule 4). From the first block that
is not, the reader gets a miss and computes. A reader is answered by the time that it said, whatever a network does;
what is on its way then still comes, for the next one, within copy_timeout_ms. Bytes have that long, or as long as the
first reader waits. Targets that a failed pull may still write are quarantined.

Blocks land in host memory: of a space on GPUs, in the DRAM behind it (dram.py), from where pulls.py brings them.

What returns.py has brought back nobody waits for: it takes a part of the spare pages (decision 0054), and those that
come in a while will do.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from services.mempool.core.actions import NOBODY, Action, AskPeer, PoolLimits, PullRemote
from services.mempool.core.claims import SPARE_PART
from services.mempool.core.entry import Entry
from services.mempool.core.pool import Pool
from services.mempool.core.pull import ASK_AGAIN_MS, SPARE_WITHIN_MS, Reader
from services.mempool.core.remote_pull import Back, RemotePull, Step, entries_of, say_late, shorten
from shared.errors import PeerProtocolError
from shared.ids import BlockHash, HandoffId, PageId
from shared.kv.words import u32_bytes, u32_list, u64_bytes
from shared.wire import mempool_peer as wire
from shared.wire.mempool import Acquire

CHECK_TIMEOUT_MS = 2_000  # for the source's word after the last byte
BACK_TIMEOUT_MS = 2_000  # for its first answer, of blocks that nobody waits for


class Remote:
    """Decides pulls from other mempools.

    Args:
        answer: called with readers to answer now, from what this mempool has.
        landing: the space in host memory into which blocks for this one can come; None: there is none.
        reachable: the longest prefix of these that spaces of this mempool have.
    """

    def __init__(
        self,
        limits: PoolLimits,
        answer: Callable[[Pool, Reader, int], None],
        landing: Callable[[Pool], Pool | None],
        reachable: Callable[[Pool, Sequence[BlockHash]], list[tuple[Pool, Entry]]],
        counters: Counter[str],
    ) -> None:
        self._limits = limits
        self._answer = answer
        self.landing = landing
        self._reachable = reachable
        self._counters = counters
        self._out: list[Action] = []
        self._next_number = 1
        self.pulls: dict[int, RemotePull] = {}
        self._arriving: dict[tuple[int, BlockHash], RemotePull] = {}  # first block that is missing

    def take_actions(self) -> list[Action]:
        """What was decided since the last call."""
        out, self._out = self._out, []
        return out

    # -- readers ----------------------------------------------------------------------------------

    def want(self, pool: Pool, reader: Reader, now_ms: int) -> bool:
        """Begin to bring what the reader misses. False: nothing is to come, answer it now."""
        own = self._reachable(pool, reader.hashes)
        missing = reader.hashes[len(own) :]
        landing = self.landing(pool)
        if pool.memory is None or not missing or now_ms >= reader.until_ms:
            self._drop_handoff(pool, reader)
            return False
        if landing is None or landing.memory is None or self._too_many(landing, missing):
            self._counters["remote_refused"] += 1
            self._drop_handoff(pool, reader)
            return False
        arriving = self._arriving.get((landing.number, missing[0]))
        if arriving is not None:
            arriving.readers.append((pool, reader))
            return True
        self._begin(pool, landing, reader, own, missing, now_ms).readers.append((pool, reader))
        return True

    def _begin(
        self, pool: Pool, landing: Pool, reader: Reader, own: list[tuple[Pool, Entry]],
        missing: list[BlockHash], now_ms: int,
    ) -> RemotePull:  # fmt: skip
        for home, entry in own:
            home.index.pin([entry])
        call, number = reader.call, self._next_number
        self._next_number += 1
        pull = RemotePull(number, landing, call.source_mempool, reader, own, missing, [], reader.until_ms)
        self.pulls[number] = self._arriving[landing.number, missing[0]] = pull
        self._counters["remote_pulls"] += 1
        assert pool.memory is not None
        acquire = wire.RemoteAcquire(
            call_id=number,
            content_key=pool.memory.content_key,
            family_key=pool.memory.family_key,
            hashes=b"".join(missing),
            handoff_id=call.handoff_id,
            wait_ms=reader.until_ms - now_ms if call.wait_ms > 0 else 0,
        )
        self._out.append(AskPeer(pull.address, acquire, landing.number))
        return pull

    def bring_back(
        self, pool: Pool, address: str, hashes: list[BlockHash], back: Back, now_ms: int, *, is_first: bool
    ) -> bool:
        """Begin to bring consecutive blocks for this space without a reader. False: none of them can come, or they are
        here. What they continue must be here, unless they are the first of their chain: nobody could use them alone."""
        before = [] if is_first else [back.parent]
        own = self._reachable(pool, [*before, *hashes])
        missing = hashes[len(own) - len(before) :] if len(own) >= len(before) else []
        landing = self.landing(pool)
        if pool.memory is None or landing is None or landing.memory is None:
            return False
        on_way = sum(len(blocks) for blocks in self.coming_back())
        missing = missing[: max(0, landing.num_spare // SPARE_PART - on_way)]
        if not missing or (landing.number, missing[0]) in self._arriving or self._too_many(landing, missing):
            return False
        nobody = Reader(
            0, NOBODY, Acquire(call_id=0, hashes=b"", source_mempool=address), [], now_ms + BACK_TIMEOUT_MS
        )
        self._begin(pool, landing, nobody, own, missing, now_ms).back = back
        self._counters["push_backs"] += 1
        return True

    def coming_back(self) -> list[list[BlockHash]]:
        """What bring_back() has begun and has not ended."""
        return [pull.missing for pull in self.pulls.values() if pull.back is not None]

    def _too_many(self, landing: Pool, missing: list[BlockHash]) -> bool:
        """Of readers, or of blocks."""
        assert landing.memory is not None
        num_readers = sum(len(pull.readers) for pull in self.pulls.values())
        most = self._limits.max_waiting
        return max(num_readers, len(self.pulls)) >= most or len(missing) > landing.memory.table.num_pages

    def _drop_handoff(self, pool: Pool, reader: Reader) -> None:
        """The source need not hold its pages any longer for this reader."""
        if not reader.call.handoff_id or pool.memory is None:
            return
        drop = wire.RemoteAcquire(
            call_id=0,
            content_key=pool.memory.content_key,
            hashes=b"",
            handoff_id=HandoffId(reader.call.handoff_id),
        )
        self._out.append(AskPeer(reader.call.source_mempool, drop))

    def forget(self, connection: int) -> None:
        """The connection closed: nobody wants these answers. What is on its way still comes."""
        for pull in self.pulls.values():
            pull.readers = [found for found in pull.readers if found[1].connection != connection]

    def arriving(self, number: int, address: str) -> tuple[int, Sequence[PageId]]:
        """Space and pages of a pull whose bytes have come from there, and which waits for its source's last word.

        Without pages: there is none, or its blocks were cut anew, so that no sum of a page is the source's.
        """
        pull = self.pulls.get(number)
        if pull is None or pull.address != address or pull.step is not Step.CHECKING or pull.claim is None:
            return 0, ()
        if pull.lease is not None and pull.lease.is_recut:
            return 0, ()
        return pull.pool.number, pull.claim.pages

    # -- what the source says -----------------------------------------------------------------------

    def on_message(self, address: str, message: wire.ToReader, now_ms: int) -> None:
        """An answer. Raises: PeerProtocolError when it cannot be one; its pull has ended then."""
        if not isinstance(message, wire.RemoteAcquired | wire.EpochsChecked | wire.CallRefused):
            raise PeerProtocolError(f"{type(message).__name__} is no answer to a reader's call")
        pull = self.pulls.get(message.call_id)
        expected = {wire.RemoteAcquired: (Step.ASKED,), wire.EpochsChecked: (Step.CHECKING,)}
        steps = expected.get(type(message), (Step.ASKED, Step.CHECKING))
        if pull is None or pull.address != address or pull.step not in steps:
            if isinstance(message, wire.RemoteAcquired) and message.lease_id:
                self._counters["remote_late"] += 1
                self._out.append(AskPeer(address, wire.RemoteRelease(lease_id=message.lease_id)))
            return
        try:
            match message:
                case wire.RemoteAcquired():
                    self._on_acquired(pull, message, now_ms)
                case wire.EpochsChecked():
                    self._on_checked(pull, message, now_ms)
                case wire.CallRefused():
                    self._counters["remote_refusals"] += 1
                    self._give_up(pull, now_ms)
        except PeerProtocolError:
            self._counters["remote_malformed"] += 1
            self._give_up(pull, now_ms)
            raise

    def _on_acquired(self, pull: RemotePull, lease: wire.RemoteAcquired, now_ms: int) -> None:
        pull.lease = lease if lease.lease_id else None
        if lease.num_blocks == 0:
            self._counters["remote_misses"] += 1
            self._give_up(pull, now_ms)
            return
        if not lease.lease_id:  # nothing keeps these pages at the source
            raise PeerProtocolError("RemoteAcquired: blocks without a lease")
        assert pull.pool.memory is not None
        pull.pages, pull.entries = entries_of(pull, lease, pull.pool.memory.block_tokens)
        is_back = pull.back is not None
        pull.claim = pull.pool.claim(len(pull.entries), keeps=True, is_last=is_back)
        pull.step = Step.CLAIMING
        if is_back:
            pull.due_ms = now_ms + SPARE_WITHIN_MS
        else:
            pull.ask_ms = now_ms + ASK_AGAIN_MS

    def _on_checked(self, pull: RemotePull, message: wire.EpochsChecked, now_ms: int) -> None:
        try:
            stale = u32_list(message.stale)
        except ValueError as error:
            raise PeerProtocolError(f"EpochsChecked: {error}") from error
        num_good = min([len(pull.entries), *stale])
        assert pull.claim is not None
        pull.pool.take_in(pull.entries[:num_good])
        pull.claim.pages = pull.claim.pages[num_good:]
        self._counters["remote_blocks"] += num_good
        self._counters["blocks_pushed_back"] += num_good if pull.back is not None else 0
        if pull.lease is not None and pull.lease.is_recut:
            self._counters["remote_blocks_recut"] += num_good
        for _, reader in pull.readers:
            reader.came["remote"] += num_good
        self._counters["remote_blocks_stale"] += len(pull.entries) - num_good
        self._give_up(pull, now_ms)

    def on_lost(self, address: str, now_ms: int) -> None:
        """The mempool at the address is not reached, or not any more. Copies that run end by on_pulled."""
        self._counters["remote_links_lost"] += 1
        for pull in [p for p in self.pulls.values() if p.address == address]:
            pull.lease = None  # it ends at the source too
            if pull.step is not Step.PULLING:
                self._counters["remote_pulls_lost"] += 1
                self._give_up(pull, now_ms, lost=address)

    def on_pulled(self, number: int, *, failed: bool, in_doubt: Collection[int], now_ms: int) -> None:
        """PullRemote has ended. A failed one may still write the pages `in_doubt`, until settled."""
        pull = self.pulls[number]
        assert pull.claim is not None
        if failed:
            self._counters["remote_pulls_failed"] += 1
            if now_ms - pull.began_ms >= pull.timeout_ms:
                say_late(pull, now_ms)
            doubtful = [page for page in pull.claim.pages if page in in_doubt]
            pull.pool.quarantine(doubtful)
            pull.claim.pages = [page for page in pull.claim.pages if page not in in_doubt]
            self._give_up(pull, now_ms)
            return
        if pull.lease is None:  # the link broke in the moment in which the last byte came
            self._give_up(pull, now_ms)
            return
        pull.step, pull.due_ms = Step.CHECKING, now_ms + CHECK_TIMEOUT_MS
        pages, epochs = zip(*pull.pages, strict=True)
        question = wire.CheckEpochs(
            call_id=number, space=pull.lease.space, pages=u32_bytes(pages), epochs=u64_bytes(epochs)
        )
        self._out.append(AskPeer(pull.address, question))

    # -- time -------------------------------------------------------------------------------------

    def advance(self, now_ms: int) -> None:
        """After every event: start what has its pages, answer who waited long enough, give up what is due."""
        for pull in list(self.pulls.values()):
            if pull.step is Step.CLAIMING and pull.claim is not None:
                if pull.back is not None and now_ms >= pull.due_ms:
                    shorten(pull, pull.claim)
                if pull.ask_ms is not None and pull.claim.lacking and now_ms >= pull.ask_ms:
                    pull.ask_ms = now_ms + ASK_AGAIN_MS
                    pull.pool.ask_again(pull.claim)
                if pull.entries and not pull.claim.lacking:
                    self._start(pull, now_ms)
            for late in [found for found in pull.readers if now_ms >= found[1].until_ms]:
                self._counters["remote_readers_late"] += 1
                if pull.step is Step.PULLING and late[1] is pull.first:
                    say_late(pull, now_ms)
                pull.readers.remove(late)
                self._answer(*late, now_ms)
            if pull.step is not Step.PULLING and now_ms >= pull.due_ms:
                self._counters["remote_pulls_late"] += 1
                self._give_up(pull, now_ms)

    def _start(self, pull: RemotePull, now_ms: int) -> None:
        memory = pull.pool.memory
        assert pull.claim is not None
        assert pull.lease is not None
        assert memory is not None
        pull.step, pull.began_ms = Step.PULLING, now_ms
        pull.timeout_ms = max(self._limits.copy_timeout_ms, pull.first.until_ms - now_ms)
        pull.pool.begin_writing(pull.claim)
        for entry, page in zip(pull.entries, pull.claim.pages, strict=True):
            entry.page = page
        self._out.append(
            PullRemote(
                pull.number,
                pull.address,
                pull.pool.number,
                list(pull.claim.pages),
                pull.lease.space,
                [page for page, _ in pull.pages],
                pull.timeout_ms,
                returns=pull.back.traceparent if pull.back is not None else "",
                num_bytes=len(pull.pages) * memory.page_bytes * memory.num_ranks,
            )
        )

    def next_deadline_ms(self) -> int | None:
        """When advance() has something to do without an event."""
        due = [p.due_ms for p in self.pulls.values() if p.step is not Step.PULLING]
        due += [p.ask_ms for p in self.pulls.values() if p.step is Step.CLAIMING and p.ask_ms is not None]
        due += [reader.until_ms for p in self.pulls.values() for _, reader in p.readers]
        return min(due, default=None)

    # -- the end ----------------------------------------------------------------------------------

    def _give_up(self, pull: RemotePull, now_ms: int, lost: str = "") -> None:
        """Nothing more comes of it: free what it claimed and has not used, answer its readers, then unpin. Those of
        other hand-offs are wanted again, but for what is at a `lost` address: all of them would wait for the next loss,
        which answers one."""
        del self.pulls[pull.number]
        del self._arriving[pull.pool.number, pull.missing[0]]
        if pull.claim is not None:
            pull.pool.cancel(pull.claim)
        if pull.lease is not None:
            self._out.append(AskPeer(pull.address, wire.RemoteRelease(lease_id=pull.lease.lease_id)))
        for home, reader in pull.readers:
            other = reader is not pull.first and reader.call.handoff_id != pull.first.call.handoff_id
            other = (other or pull.back is not None) and reader.call.source_mempool != lost
            if not (other and self.want(home, reader, now_ms)):
                self._answer(home, reader, now_ms)
        for home, entry in pull.own:
            home.index.unpin([entry])
