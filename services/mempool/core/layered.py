"""Blocks that leave for the decode side while their prompt is computed, layer by layer (MemServe 5.2). No I/O.

    StepLayers -> pages claimed in the target's space -> CopyPages with a LayerCut: each layer when it is written
    step over  -> Sealed, LayersSealed: which of the blocks the step sealed; these are pinned until the copy has ended
    both ended -> the target pages of sealed blocks are sealed, indexed and pinned for the reader, the others are free

Sources are not sealed while they are read. What makes the bytes right: a layer is read when its word says that this
step has written it, nobody writes it again before the seal, and the engine says of each block whether that step sealed
it. Whatever else became of a source (given back, written anew, lost with its engine) ends as an unsealed block: its
copy is thrown away, and the reader's own Acquire brings what is missing as ever.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from services.mempool.core import parse
from services.mempool.core.actions import Action, CopyPages, LayerCut, StepOver
from services.mempool.core.claims import SPARE_PART
from services.mempool.core.entry import Entry
from services.mempool.core.pool import Pool
from services.mempool.core.pull import ASK_AGAIN_MS, SPARE_WITHIN_MS, Pull, Reader, cut_of
from services.mempool.core.pulls import Pulls
from shared.errors import PeerProtocolError
from shared.ids import BlockHash, Epoch, HandoffId, InstanceId, PageId
from shared.kv.page import PageState
from shared.wire import mempool as wire

MAX_OPEN = 64  # copies by layer, waiting or running; beyond them a prompt goes when it is computed
PATIENCE_MS = 30_000  # of a copy: the longest step that it waits for
HOLD_MS = 30_000  # after the last of a prompt's copies: so long its blocks wait for the reader
MAX_HELD = 1024  # prompts whose blocks do; the oldest are let go

Announced = tuple[PageId, Epoch, BlockHash]


@dataclass(slots=True)
class LayerPull(Pull):
    """A Pull whose sources are being written. `sources`: those of its blocks that are sealed, pinned."""

    origin: Pool | None = None
    connection: int = 0  # of the engine that writes them
    blocks: list[Announced] = field(default_factory=list)  # one for each claimed page
    cut: LayerCut | None = None
    is_started: bool = False  # its sources are counted as read; `copying` is also said of what never began
    is_decided: bool = False  # LayersSealed has come, or never will
    is_copied: bool = False


@dataclass(slots=True)
class Held:
    """Blocks of one prompt that are in its reader's space, pinned."""

    pool: Pool
    entries: list[Entry] = field(default_factory=list)
    until_ms: int = 0
    num_came: int = 0  # blocks that were copied before their reader came


class LayerPulls:
    """Begins and ends LayerPulls, which are in `pulls` as all others: readers find them there.

    Args:
        pools, space_of: of the mempool, views.
        touch: called with pools whose actions are due.
    """

    def __init__(
        self,
        pulls: Pulls,
        pools: Mapping[int, Pool],
        space_of: Mapping[InstanceId, int],
        touch: Callable[[Pool], None],
    ) -> None:
        self._pulls = pulls
        self._touch = touch
        self._pools = pools
        self._space_of = space_of
        self._open: list[LayerPull] = []
        self._over: list[Action] = []
        self._held: OrderedDict[HandoffId, Held] = OrderedDict()
        pulls.layers = self

    def on_message(
        self, pool: Pool, connection: int, message: wire.StepLayers | wire.LayersSealed, now_ms: int
    ) -> None:
        """Of an engine of `pool`. Raises: PeerProtocolError; nothing has changed then."""
        if pool.memory is None or connection not in pool.memory.engines.attached:
            raise PeerProtocolError(f"{type(message).__name__} from a client")
        most = self._pulls.limits.max_blocks_per_call
        pages = parse.pages(message.pages, message.epochs, most)
        if isinstance(message, wire.LayersSealed):
            for pull in self._of(connection):
                if pull.cut is not None and pull.cut.step <= message.step:
                    self._decide(pull, pages if pull.cut.step == message.step else [], now_ms)
            return
        hashes, cached = parse.hashes(message.hashes, most), parse.hashes(message.cached, most)
        if not len(hashes) == len(pages) == len(set(hashes)) == len({page for page, _ in pages}):
            raise PeerProtocolError(f"{len(pages)} pages, {len(hashes)} hashes, or one of them twice")
        if message.step <= 0:
            self._given_up(message.handoff_id)
            return
        target = self._pools.get(self._space_of.get(message.target, -1))
        if target is not None and target.leases.is_closed(message.handoff_id):
            return  # its reader has come, or never will
        cut = cut_of(target, [pool]) if target is not None else None
        is_alike = target is not None and (target.shares_content(pool) if not pages else cut is not None)
        if target is None or target is pool or not is_alike:
            self._pulls.counters["layers_not_for_here"] += 1
            return
        if not pages or cut is None:
            self._send_ahead(pool, target, cached, message.handoff_id, now_ms)
            return
        here = [entry for h in (*cached, *hashes) if (entry := target.index.get(h)) is not None]
        self.hold(message.handoff_id, target, here, now_ms)
        self._pulls.push(pool, target, cached, now_ms, handoff_id=message.handoff_id)
        announced = [(page, Epoch(epoch), h) for (page, epoch), h in zip(pages, hashes, strict=True)]
        cut = replace(
            cut, instance=self._instance(pool, connection), step=message.step, traceparent=message.traceparent
        )
        self._begin(pool, target, connection, announced, message.handoff_id, cut, now_ms)

    def _send_ahead(
        self, pool: Pool, target: Pool, hashes: Sequence[BlockHash], handoff_id: HandoffId, now_ms: int
    ) -> None:
        """Sealed blocks whose reader has not come, where there is room: until it does, they are in nobody's way."""
        assert target.memory is not None
        here = [entry for h in hashes if (entry := target.index.get(h)) is not None]
        self._expect(handoff_id, target, now_ms)
        self.hold(handoff_id, target, here, now_ms)
        new = [h for h in hashes if self._pulls.is_new(target, h)]
        ahead = self._num_ahead(target)
        room = max(0, (target.num_spare + ahead) // SPARE_PART - ahead)
        self._pulls.counters["blocks_ahead_refused"] += max(0, len(new) - room)
        sent = self._pulls.push(
            pool, target, new[:room], now_ms, handoff_id=handoff_id, within_ms=SPARE_WITHIN_MS
        )
        self._pulls.counters["blocks_ahead"] += sent

    def _num_ahead(self, pool: Pool) -> int:
        """Pages there of blocks whose reader has not come, and of those on their way."""
        held = sum(len(each.entries) for each in self._held.values() if each.pool is pool)
        pulls = [p for p in self._pulls.pulls.values() if p.is_ahead and p.pool is pool]
        return held + sum(p.claim.wanted for p in pulls)

    def on_handoff(self, pool: Pool, message: wire.HandoffReady, now_ms: int) -> None:
        """The prompt is done. What its last step sealed leaves while its reader is on its way. Raises: as above."""
        held = self._held.get(message.handoff_id)
        if held is None or held.pool is pool or held.pool.leases.is_closed(message.handoff_id):
            return
        hashes = parse.hashes(message.hashes, self._pulls.limits.max_blocks_per_call)
        missing = [h for h in hashes if h not in held.pool.index]
        self._send_ahead(pool, held.pool, missing, message.handoff_id, now_ms)

    def make_way(self, pool: Pool, reader: Reader, wanted: int, now_ms: int) -> None:
        """The reader needs so many pages there. Blocks that wait for pages and that nobody waits for do without: those
        whose own reader has not come, and what goes back (pd_caching.py). Of the former, where they are there already,
        the last come are let go, as far as it takes."""
        for pull in list(self._pulls.pulls.values()):
            if (pull.is_ahead or pull.goes_back) and pull.pool is pool and not (pull.copying or pull.readers):
                pool.cancel(pull.claim)
                self._pulls.end(pull, now_ms)
        for handoff_id, held in reversed(list(self._held.items())):
            if pool.num_spare >= wanted:
                break
            if held.pool is pool and handoff_id != reader.call.handoff_id:
                self._pulls.counters["blocks_ahead_let_go"] += len(held.entries)
                self.let_go(handoff_id)

    def count_ahead(self, spaces: Sequence[wire.SpaceStatus]) -> list[wire.SpaceStatus]:
        """The same, with num_ahead. Cost: a step a block that is held."""
        ahead: Counter[int] = Counter()
        for held in self._held.values():
            ahead[held.pool.number] += sum(entry.pins == 1 for entry in held.entries)
        return [structs.replace(space, num_ahead=ahead[space.number]) for space in spaces]

    @staticmethod
    def _instance(pool: Pool, connection: int) -> InstanceId:
        assert pool.memory is not None
        return pool.memory.engines.attached[connection].instance

    def _begin(
        self,
        pool: Pool,
        target: Pool,
        connection: int,
        announced: Sequence[Announced],
        handoff_id: HandoffId,
        cut: LayerCut,
        now_ms: int,
    ) -> None:
        assert pool.memory is not None
        assert target.memory is not None
        engine, table = pool.memory.engines.attached[connection], pool.memory.table
        blocks = [
            (page, epoch, h)
            for page, epoch, h in announced
            if pool.memory.engines.holds(engine, page, epoch)
            and table.states[page] == PageState.WRITING
            and self._pulls.is_new(target, h)
        ]
        if not blocks or len(blocks) > target.memory.table.num_pages:
            return
        if len(self._open) >= MAX_OPEN:
            self._pulls.counters["layers_refused"] += 1
            return
        pull = LayerPull(
            next(self._pulls.numbers), target, [], [], target.claim(len(blocks), keeps=True),
            now_ms + self._pulls.limits.pull_patience_ms, is_push=True, is_counted=False, handoff_id=handoff_id,
            ask_ms=now_ms + ASK_AGAIN_MS, origin=pool, connection=connection, blocks=blocks, cut=cut,
        )  # fmt: skip
        self._open.append(pull)
        self._pulls.add(pull, [h for _, _, h in blocks])
        self._pulls.counters["pulls_by_layer"] += 1

    def has(self, pull: Pull) -> bool:
        """Whether it is one of these."""
        return isinstance(pull, LayerPull)

    def start(self, pull: Pull, now_ms: int) -> CopyPages:
        """Its pages are here."""
        assert isinstance(pull, LayerPull)
        pull.is_started, pull.until_ms = True, now_ms + PATIENCE_MS
        assert pull.origin is not None
        assert pull.origin.memory is not None
        pull.origin.memory.read_early.update(page for page, _, _ in pull.blocks)
        sources = [(pull.origin.number, page) for page, _, _ in pull.blocks]
        assert pull.cut is not None
        cut = replace(pull.cut, is_over=pull.is_decided)
        return CopyPages(pull.number, pull.pool.number, list(pull.claim.pages), sources, PATIENCE_MS, cut)

    def _of(self, connection: int) -> list[LayerPull]:
        return [pull for pull in self._open if pull.connection == connection and not pull.is_decided]

    def _decide(self, pull: LayerPull, sealed: Sequence[tuple[PageId, int]], now_ms: int) -> None:
        """From now on its sealed sources are pinned; the rest is lost."""
        pull.is_decided = True
        if pull.copying and not pull.is_copied:
            self._over.append(StepOver(pull.number))
        pool, named = pull.origin, set(sealed)
        assert pool is not None
        assert pool.memory is not None
        for page, epoch, block_hash in pull.blocks:
            entry = pool.index.get(block_hash)
            is_its = entry is not None and entry.page == page and pool.memory.table.epochs[page] == epoch
            if entry is not None and is_its and (page, epoch) in named:
                pool.index.pin([entry])
                pull.sources.append((pool, entry))
        if not pull.sources and pull.handoff_id is not None:
            self.let_go(pull.handoff_id)  # its prompt was given up
        if pull.is_copied or not (pull.sources or pull.copying):
            self._finish(pull, now_ms)

    def on_copied(self, pull: Pull, now_ms: int) -> None:
        """Every layer is there."""
        assert isinstance(pull, LayerPull)
        self._read_over(pull)
        pull.is_copied = True
        if pull.is_decided:
            self._finish(pull, now_ms)

    def _finish(self, pull: LayerPull, now_ms: int) -> None:
        """Seal what was sealed at the source and has come; the other pages are free."""
        claim, pages = (
            pull.claim,
            dict(zip((page for page, _, _ in pull.blocks), pull.claim.pages, strict=False)),
        )
        entries = []
        if pull.is_copied:
            for _, entry in pull.sources:
                to = pages.pop(entry.page)
                entries.append(entry.at(to))
        claim.pages = [page for page in claim.pages if page not in {entry.page for entry in entries}]
        pull.pool.cancel(claim)
        here = pull.pool.take_in(entries)
        if pull.handoff_id is not None:
            self.hold(pull.handoff_id, pull.pool, here, now_ms, came_for=pull.readers)
        self._pulls.counters["blocks_by_layer"] += len(entries)
        self._pulls.counters["blocks_by_layer_lost"] += len(pull.blocks) - len(entries)
        for reader in pull.readers:
            reader.came["peer"] += len(entries)
        self._pulls.end(pull, now_ms)
        self._touch(pull.pool)

    def take_actions(self) -> list[Action]:
        """What copies under way are to be told."""
        actions, self._over = self._over, []
        return actions

    def advance(self, now_ms: int) -> None:
        """Give up on an engine that says nothing, and on readers that do not come."""
        for pull in [pull for pull in self._open if pull.is_copied and now_ms >= pull.until_ms]:
            self._decide(pull, [], now_ms)
        while self._held and (oldest := next(iter(self._held.items())))[1].until_ms <= now_ms:
            self.let_go(oldest[0])

    def next_deadline_ms(self) -> int | None:
        """When advance() has something to do without an event."""
        due = [pull.until_ms for pull in self._open if pull.is_copied]
        due += [held.until_ms for held in list(self._held.values())[:1]]
        return min(due, default=None)

    def hold(
        self, handoff_id: HandoffId, pool: Pool, entries: Sequence[Entry], now_ms: int,
        *, came_for: Sequence[Reader] | None = None,
    ) -> None:  # fmt: skip
        """Pin what came, or was there, until the reader has it: whatever its space needs room for meanwhile.

        What was on its way when the hand-off ended waits for nobody. `came_for`: it was copied, these readers hear so.
        """
        if entries and (held := self._expect(handoff_id, pool, now_ms)) is not None:
            pool.index.pin(entries)
            held.entries += entries
            if came_for is not None and all(r.call.handoff_id != handoff_id for r in came_for):
                held.num_came += len(entries)

    def num_came(self, handoff_id: HandoffId) -> int:
        """Blocks that were copied for a hand-off before its reader was here to hear so."""
        held = self._held.get(handoff_id)
        return held.num_came if held is not None else 0

    def _expect(self, handoff_id: HandoffId, pool: Pool, now_ms: int) -> Held | None:
        """Its reader will come to this space. None: it has come, or never will."""
        if pool.leases.is_closed(handoff_id):
            return None
        before = self._held.get(handoff_id)
        if before is not None and before.pool is not pool:  # the instance has come back in another space
            self.let_go(handoff_id)
        held = self._held.setdefault(handoff_id, Held(pool))
        self._held.move_to_end(handoff_id)
        held.until_ms = now_ms + HOLD_MS
        if len(self._held) > MAX_HELD:
            self.let_go(next(iter(self._held)))
        return held

    def _given_up(self, handoff_id: HandoffId) -> None:
        """Its blocks are worth as much as any other's, those on their way too."""
        for pull in self._pulls.pulls.values():
            if pull.handoff_id == handoff_id:
                pull.handoff_id = None
        self.let_go(handoff_id)

    def let_go(self, handoff_id: HandoffId) -> None:
        """The reader has its lease, or there will be none."""
        held = self._held.pop(handoff_id, None)
        if held is not None:
            held.pool.index.unpin(held.entries)
            self._touch(held.pool)

    def forget_space(self, pool: Pool) -> None:
        """It is over: nobody's reader comes there."""
        for handoff_id in [each for each, held in self._held.items() if held.pool is pool]:
            self.let_go(handoff_id)

    def forget(self, connection: int, now_ms: int) -> None:
        """The engine's connection ended: of what it had not sealed nothing will be."""
        for pull in self._of(connection):
            self._decide(pull, [], now_ms)

    def ended(self, pull: Pull) -> None:
        """However it ended, nothing more will be heard of it."""
        if isinstance(pull, LayerPull):
            self._open.remove(pull)
            self._read_over(pull)

    def _read_over(self, pull: LayerPull) -> None:
        """Its copy has ended, if one was begun."""
        if not pull.is_started or pull.is_copied:
            return
        assert pull.origin is not None
        assert pull.origin.memory is not None
        read = pull.origin.memory.read_early
        for page, _, _ in pull.blocks:
            read[page] -= 1
            if not read[page]:
                del read[page]
        self._touch(pull.origin)
