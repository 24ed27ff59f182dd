"""transfer() by the caller's own copies, where it holds all pages: no other process is asked (decision 0032).

    conditions hold -> pages marked, this process's flight registered -> mempool lives? words as expected?
        -> copy -> words unchanged? mempool lived until now? -> the answer;  else the mempool is asked as ever

The caller holds its sources, so they cannot change, and has allocated the targets, so nobody else writes them. The
words of both, read before and after, and the connection, looked at after them, say that this was so all the time: a
mempool's word counts while it lives. Any doubt sends the call the mediated way, whose errors are the contract's.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.errors import ClusterError, CopyFailed, InvalidRequest, PeerGone, PeerTimeout, StaleEpoch
from shared.ids import InstanceId
from shared.mempool.direct_checks import FROMS, LOOK_ROWS, NOT_HELD, SOURCE_WORDS, TARGET_WORDS, TOS, Checks
from shared.mempool.direct_ways import Way, Ways
from shared.mempool.flights import Flight
from shared.mempool.held_pages import Columns, HeldPages, Pages, Stretch, is_known, stretch_of
from shared.wire.mempool_api import CopiedDirectly, PageAddress, Transfer, TransferFlags, instance_key

SPIN_S = 0.0003  # a short copy is waited for without a turn of the loop: 64 MiB take 0.2 ms on NVLink
TURNS_S = 0.02  # then a turn of the loop between two looks; later a pause too
PAUSE_S = 0.0005
STARVED_S = 0.001  # the loop gets a turn at least so often, however short the copies are
IDLE_TIMEOUT_S = 5.0  # of a call that must wait for a copy
SAID_S = 1.0  # the mempool hears so often how much was copied

logger = logging.getLogger(__name__)
U64 = NDArray[np.uint64]


class _Begun(NamedTuple):  # whose making costs a third of a frozen dataclass's
    flight: Flight
    num_bytes: int
    # the tables, which stay mapped as long as this refers to them, and what they said of each page
    source_table: U64
    source_words: U64
    target_table: U64
    target_words: U64


def part_ends(count: int, first: int) -> list[int]:
    """Where the parts of a set end: the first has `first` pages (0: all), each other one at least twice as many as the
    one before it, so that its checks are done before that one's bytes are there."""
    ends: list[int] = []
    done, size = 0, first or count
    while count - done >= 3 * size:
        done += size
        ends.append(done)
        size *= 2
    return [*ends, count]


def _cutter(addresses: Sequence[PageAddress]) -> Callable[[int, int], Stretch | None]:
    """Makes the stretch from one number to another, one after the other; not distinct if a page was in one before."""
    seen: set[int] = set()

    def cut(begin: int, end: int) -> Stretch | None:
        found = stretch_of(addresses[begin:end])
        if found is not None:
            pages = found.pages.tolist()
            found = found if seen.isdisjoint(pages) else found._replace(is_distinct=False)
            seen.update(pages)
        return found

    return cut


def _parts(
    sources: Sequence[PageAddress], targets: Sequence[PageAddress], first: int
) -> Iterator[tuple[Stretch | None, Stretch | None]]:
    """Made when they are asked for: columns of long lists while the first pages are copied."""
    parts_of_sources, parts_of_targets = _cutter(sources), _cutter(targets)
    for begin, end in pairwise((0, *part_ends(len(sources), first))):
        yield parts_of_sources(begin, end), parts_of_targets(begin, end)


class Direct:
    """Of one connection to the nine calls, on its loop, until close(); after it nothing is copied here.

    Args:
        socket: the mempool's for engines and clients, where the spaces are mapped.
        instance: of the connection.
        lives: whether the mempool's end of that connection is open at this moment.
        say: tells the mempool how much was copied.
    Attributes: `counters`: transfers that began here ("direct"), and mediated ones by why. `num_bytes`: copied here.
    """

    def __init__(
        self,
        socket: Path,
        instance: InstanceId,
        lives: Callable[[], bool],
        say: Callable[[CopiedDirectly], None],
    ) -> None:
        self.held = HeldPages(instance_key(instance))
        self.ways = Ways(socket, instance, self.close)
        self.counters: Counter[str] = Counter()
        self.num_bytes = 0
        self._lives, self._say = lives, say
        self._said = (0, 0, 0)  # transfers, bytes, mediated ones
        self._said_s = self._turn_s = time.perf_counter()
        self._flights: list[Flight] = []  # that nobody waits for any more
        self._unsettled: dict[
            int, list[tuple[Columns, Pages]]
        ] = {}  # by call: pages of the mempool's transfers

    # -- a transfer ---------------------------------------------------------------------------------

    async def transfer(
        self,
        instance: InstanceId,
        sources: Sequence[PageAddress],
        targets: Sequence[PageAddress],
        timeout_ms: int,
    ) -> bool:
        """Copy whole pages, if that is possible here. False: ask the mempool; nothing runs, and targets hold anything.

        Raises: StaleEpoch, CopyFailed, PeerGone; pages that are still written stay busy.
        Cost: 10 us (two AMD cores) and the copy; for lists other than AddressList 0.2 us a page, partly beside it;
            twice that without numba.
        """
        deadline_s = time.perf_counter() + timeout_ms / 1000
        begun, why = self._begin_parts(instance, sources, targets)
        if why and not begun:
            self.counters[f"mediated: {why}"] += 1
            return False
        kept = await self._land_all(begun, deadline_s)
        if why:  # of a later part; what has arrived is in pages that nobody has named yet
            self.counters[f"mediated: {why}"] += 1
            return False
        self.counters["direct"] += 1
        if not self._lives():  # asked last: words that were read while the mempool lived were true
            raise PeerGone("the mempool was lost during the transfer")
        if not kept:
            raise StaleEpoch("a page was reused or given up while it was copied")
        self.num_bytes += sum([each.num_bytes for each in begun])
        now = time.perf_counter()
        if now - self._said_s > SAID_S:
            self.tell()
        if now - self._turn_s > STARVED_S:
            await asyncio.sleep(0)
            self._turn_s = time.perf_counter()
        return True

    def _begin_parts(
        self, instance: InstanceId, sources: Sequence[PageAddress], targets: Sequence[PageAddress]
    ) -> "tuple[list[_Begun], str]":
        """Copies under way, each while the one before it runs, and why there is no other one, if there ought to be."""
        if len(sources) != len(targets) or not sources:
            return [], "lists"
        parts: Iterable[tuple[Stretch | None, Stretch | None]]
        if not (is_known(sources) and is_known(targets)) and (first := self._first_part(sources, targets)):
            parts = _parts(sources, targets, first)
        else:
            parts = ((stretch_of(sources), stretch_of(targets)),)
        begun: list[_Begun] = []
        try:
            for source, target in parts:
                one: _Begun | str = "lists"
                if source is not None and target is not None:
                    one = self._begin(instance, source, target)
                if isinstance(one, str):
                    return begun, one
                begun.append(one)
        except BaseException:
            self._flights += [each.flight for each in begun]
            raise
        return begun, ""

    def _first_part(self, sources: Sequence[PageAddress], targets: Sequence[PageAddress]) -> int:
        """Pages of it; 0 where the list is too short to be cut."""
        first = self.ways.first_pages(sources[0], targets[0])
        return first if len(sources) >= 3 * first else 0

    def _begin(self, instance: InstanceId, source: Stretch, target: Stretch) -> "_Begun | str":
        """A copy under way, or why there is none."""
        if self.ways.name_of(target.key) != instance or not (source.is_distinct and target.is_distinct):
            return "lists"
        if source.space == target.space and not set(source.pages.tolist()).isdisjoint(target.pages.tolist()):
            return "lists"  # copies of a set are in no order: what is written may have been read, or not
        here, there = self.held.columns(source), self.held.columns(target)
        if here is None or there is None:
            return "not held"
        if there.shared:  # others may be told to copy into them, by the mempool
            return "own pages"
        self._reap()
        checks = self.ways.checks
        how = checks.hold(
            source.pages, source.epochs, here.epochs, here.counts,
            target.pages, target.epochs, there.epochs, there.counts,
        )  # fmt: skip
        if how == NOT_HELD:
            return "not held"
        way: Way | str = "no way"
        try:
            way = self._way(source, target)
        finally:
            if isinstance(way, str):  # or an error
                checks.leave(source.pages, here.counts, target.pages, there.counts)
        if isinstance(way, str):
            return way
        flight = Flight(checks, source, here, target, there)
        try:
            begun = self._start(way, flight, checks, how)
        except BaseException:  # whatever had begun of it is waited for, by those who need the pages
            self._flights.append(flight)
            raise
        if isinstance(begun, str):
            flight.end()
            flight.land()
        return begun

    def _way(self, source: Stretch, target: Stretch) -> Way | str:
        way = self.ways.between(source, target)
        if isinstance(way, str):
            return way
        is_inside = source.last < way.source.num_pages and target.last < way.target.num_pages
        return way if is_inside else "lists"

    def _start(self, way: Way, flight: Flight, checks: Checks, how: int) -> "_Begun | str":
        """Look, then copy. Into owned sources others may be told to copy: their words say if one has begun to."""
        if self.ways.closed or not self._lives():  # behind the flight's registration: see CallerMemory
            return "no mempool"
        source, target = flight.source, flight.target
        source_table, target_table = way.source.words, way.target.words
        found = np.empty((LOOK_ROWS, source.pages.size), np.uint64)
        if not checks.look(
            source_table, source.pages, source.epochs, target_table, target.pages, target.epochs,
            how, *way.bases, way.size, found,
        ):  # fmt: skip
            return "words"
        page_bytes = int(way.size)
        try:
            flight.started(way.submit(found[FROMS], found[TOS], page_bytes))
        except ClusterError as error:
            if getattr(error, "running", False):  # its pages stay busy for good
                raise CopyFailed(error.message) from error
            logger.warning("a copy by this process was refused: %s", error.message)
            return "refused"
        num_bytes = source.pages.size * page_bytes
        return _Begun(flight, num_bytes, source_table, found[SOURCE_WORDS], target_table, found[TARGET_WORDS])

    async def _land_all(self, begun: "list[_Begun]", deadline_s: float) -> bool:
        """Wait until nothing of them runs; whether all words are then what they were. Raises: CopyFailed; copies that
        run still are in `_flights`."""
        kept, same = True, self.ways.checks.same
        spin_until_s = time.perf_counter() + SPIN_S
        for number, (flight, _, source_table, source_words, target_table, target_words) in enumerate(begun):
            try:
                # Most often it ends in this wait, and is worth no coroutine then.
                if not flight.ended(max(0.0, spin_until_s - time.perf_counter())):
                    await self._ended(flight, spin_until_s, deadline_s)
                flight.land()
            except BaseException:  # it, if it runs, and those behind it are nobody's now
                self._flights += [each.flight for each in begun[number:] if not each.flight.land()]
                raise
            kept &= same(source_table, flight.source.pages, source_words)
            kept &= same(target_table, flight.target.pages, target_words)
        return kept

    async def _ended(self, flight: Flight, spin_until_s: float, deadline_s: float) -> None:
        """Wait until nothing of it runs. Raises: CopyFailed."""
        begin_s = now = time.perf_counter()
        while not flight.ended(max(0.0, spin_until_s - now)):
            now = time.perf_counter()
            if now >= deadline_s:
                raise CopyFailed(f"{flight.target.pages.size} pages did not arrive in time")
            if flight.futures:  # on threads, which need the interpreter's lock
                await asyncio.wait(map(asyncio.wrap_future, flight.futures), timeout=deadline_s - now)
            elif now >= spin_until_s:
                await asyncio.sleep(0 if now - begin_s < TURNS_S else PAUSE_S)

    def tell(self) -> None:
        """Have the mempool count what was copied since the last time."""
        begun = self.counters["direct"]
        now = (begun, self.num_bytes, self.counters.total() - begun)
        more = [new - old for new, old in zip(now, self._said, strict=True)]
        self._said, self._said_s = now, time.perf_counter()
        if any(more):
            self._say(CopiedDirectly(transfers=more[0], num_bytes=more[1], mediated=more[2]))

    # -- beside other calls ---------------------------------------------------------------------------

    def _reap(self) -> None:
        if self._flights:
            self._flights = [flight for flight in self._flights if not flight.land()]

    def is_busy(self, addresses: Sequence[PageAddress], *, writing: bool = False) -> bool:
        """Whether a copy of this object touches one of these pages, or, with `writing`, writes it."""
        self._reap()
        return self.held.is_busy(addresses, writing=writing)

    async def _idle(self, addresses: Sequence[PageAddress], *, writing: bool = False) -> None:
        deadline_s = time.perf_counter() + IDLE_TIMEOUT_S
        while self.is_busy(addresses, writing=writing):
            if time.perf_counter() > deadline_s:
                raise PeerTimeout("a copy of this process does not end")
            await asyncio.sleep(PAUSE_S)  # a GPU sets no event of asyncio's

    async def give_up(self, addresses: Sequence[PageAddress]) -> None:
        """They are sent back behind this, or passed on: no copy of this object touches them any more, nor will.

        Raises: PeerTimeout; nothing has changed.
        """
        await self._idle(addresses)
        self.held.given_up(addresses)

    def name(self, addresses: Sequence[PageAddress]) -> None:
        """insert() of these pages is sent behind this. Raises: InvalidRequest."""
        if self.is_busy(addresses):
            raise InvalidRequest("a copy still touches one of the pages")
        self.held.disowned(addresses)

    async def mediate(
        self, call: Transfer, sources: Sequence[PageAddress], targets: Sequence[PageAddress]
    ) -> None:
        """The mempool's transfer is sent behind this: until answered() its pages are not copied here.

        Raises: InvalidRequest, as the mempool does; PeerTimeout. Nothing has changed then.
        """
        if self.is_busy(targets):
            raise InvalidRequest("targets are allocated pages, not named yet, that nothing else writes")
        if call.flags & TransferFlags.FREE_SOURCE:
            await self.give_up(sources)
        else:
            await self._idle(sources, writing=True)
        if call.insert:
            self.held.disowned(targets)
        self._unsettled[call.call_id] = self.held.mediate([*sources, *targets])

    def answered(self, call_id: int, code: str = "") -> None:
        """The mempool's answer to any call, or the call was never sent. `code`: of its error. If pages did not arrive,
        something may write the targets still: they stay the mempool's until they are allocated again."""
        begun = self._unsettled.pop(call_id, None)
        if begun is not None and code != CopyFailed.code:
            self.held.settle(begun)

    def close(self) -> None:
        """Nothing is copied here from now on. Mappings end, in the background, when the last copy has. Any thread."""
        self.ways.close()
