"""What the keeper holds: numbers of descriptors by space, kind and page. No I/O: closing them is the caller's.

    space -> kind -> runs, sorted by first page, never overlapping

A run either has one descriptor per page (`cuda-page`, `process`) or one for all its pages (`pages`, `table`).
Neighbours with one descriptor a page and equal meta are one run, so that a pool of 16,384 pages is one run and
one array of 64 KiB, however many messages it came in.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from shared.errors import ResourceError, StaleEpoch
from shared.ids import Epoch
from shared.wire.keeper import MAX_FDS, MAX_META_BYTES, MAX_SPACE_CHARS

ONE_PER_PAGE = frozenset(("cuda-page", "process"))
MAX_SPACES = 64
MAX_META_TOTAL_BYTES = 4 << 20
MAX_PAGE = 1 << 32  # page ids are u32


class KeeperFull(ResourceError):
    """A bound of the keeper is reached."""

    code = "keeper.full"


class BadRange(ResourceError):
    """Pages that cannot be kept or forgotten like that."""

    code = "keeper.range"


class Run:
    """Pages [first, first + count). `fds` has one entry per page, or one for all."""

    __slots__ = ("count", "fds", "first", "meta")

    def __init__(self, first: int, count: int, meta: bytes, fds: "array[int]") -> None:
        self.first = first
        self.count = count
        self.meta = meta
        self.fds = fds

    @property
    def end(self) -> int:
        """The page behind the last."""
        return self.first + self.count


class Floor:
    """Which connection may change anything: the one whose Hello named the highest boot generation."""

    def __init__(self) -> None:
        self.highest = Epoch(0)
        self._holder = 0

    def take(self, connection: int, generation: Epoch) -> Epoch:
        """The generation that had it before. The same generation again: a mempool that reconnected.

        Raises: StaleEpoch.
        """
        if generation < self.highest or generation < 1:
            raise StaleEpoch(f"generation {generation} asks, {self.highest} was here")
        previous, self.highest = self.highest, generation
        self._holder = connection
        return previous

    def check(self, connection: int) -> None:
        """Raises: StaleEpoch unless this connection has the floor."""
        if connection != self._holder:
            raise StaleEpoch(f"the floor belongs to the mempool of generation {self.highest}")

    def is_holder(self, connection: int) -> bool:
        """Whether it has the floor."""
        return connection == self._holder


class Ledger:
    """All runs. Every method that returns a list of numbers says: close these."""

    def __init__(self, max_fds: int) -> None:
        self.max_fds = max_fds
        self.num_fds = 0
        self._meta_bytes = 0
        self._spaces: dict[str, dict[str, list[Run]]] = {}

    def keep(
        self, space: str, kind: str, first: int, count: int, meta: bytes, fds: Sequence[int]
    ) -> list[int]:
        """Take over `fds`; returns those that were kept for the same pages before. Cost: O(log runs + fds).

        Raises: KeeperFull, BadRange; then nothing has changed and `fds` are still the caller's.
        """
        self._check(space, first, count)
        wanted = count if kind in ONE_PER_PAGE else 1
        if len(fds) != wanted:
            raise BadRange(f"{len(fds)} descriptors for {count} {kind}: {wanted} expected")
        if len(meta) > MAX_META_BYTES:
            raise KeeperFull(f"meta of {len(meta)} bytes, at most {MAX_META_BYTES}")
        if space not in self._spaces and len(self._spaces) >= MAX_SPACES:
            raise KeeperFull(f"{MAX_SPACES} spaces are kept already")
        if self._meta_bytes + len(meta) > MAX_META_TOTAL_BYTES:
            raise KeeperFull(f"{self._meta_bytes} bytes of meta are kept already")
        replaced = self._count_fds(space, kind, first, count)
        if self.num_fds - replaced + len(fds) > self.max_fds:
            raise KeeperFull(
                f"{self.num_fds} descriptors are kept, at most {self.max_fds}: raise RLIMIT_NOFILE"
            )
        closed = self._cut(space, kind, first, count)
        runs = self._spaces.setdefault(space, {}).setdefault(kind, [])
        self._insert(runs, Run(first, count, meta, array("i", fds)), merge=kind in ONE_PER_PAGE)
        self.num_fds += len(fds)
        return closed

    def forget(self, space: str, kind: str, first: int, count: int) -> list[int]:
        """What was kept of these pages. Raises: BadRange for a part of pages that one descriptor covers."""
        self._check(space, first, count)
        self._count_fds(space, kind, first, count)
        closed = self._cut(space, kind, first, count)
        kinds = self._spaces.get(space)
        if kinds is not None and not any(kinds.values()):
            del self._spaces[space]
        return closed

    def held(self, space: str, kind: str, after: int) -> tuple[int, int, bytes, Sequence[int]] | None:
        """(first page, count, meta, descriptors) of the first run that reaches past page `after`.

        At most MAX_FDS descriptors, which stay the ledger's. None: there is no more.
        """
        runs = self._spaces.get(space, {}).get(kind, [])
        place = _place(runs, after)
        if place == len(runs):
            return None
        run = runs[place]
        if kind not in ONE_PER_PAGE:
            return run.first, run.count, run.meta, run.fds
        skip = max(0, after - run.first)
        fds = run.fds[skip : skip + MAX_FDS]
        return run.first + skip, len(fds), run.meta, fds

    def summary(self) -> Iterator[tuple[str, dict[str, int]]]:
        """(space, descriptors by kind)."""
        for space, kinds in self._spaces.items():
            yield space, {kind: sum(len(run.fds) for run in runs) for kind, runs in kinds.items() if runs}

    def _check(self, space: str, first: int, count: int) -> None:
        if not 0 < len(space) <= MAX_SPACE_CHARS:
            raise BadRange(f"a space's name has 1 to {MAX_SPACE_CHARS} characters")
        if first < 0 or count < 1 or first + count > MAX_PAGE:
            raise BadRange(f"{count} pages from {first}")

    def _count_fds(self, space: str, kind: str, first: int, count: int) -> int:
        """How many descriptors _cut would close. Raises: BadRange when it would cut one in two."""
        runs = self._spaces.get(space, {}).get(kind, [])
        total = 0
        for run in _overlapping(runs, first, first + count):
            if kind in ONE_PER_PAGE:
                total += min(run.end, first + count) - max(run.first, first)
            elif first <= run.first and run.end <= first + count:
                total += 1
            else:
                raise BadRange(f"one descriptor covers pages {run.first} to {run.end - 1}: all or none")
        return total

    def _cut(self, space: str, kind: str, first: int, count: int) -> list[int]:
        runs = self._spaces.get(space, {}).get(kind, [])
        end = first + count
        overlapping = list(_overlapping(runs, first, end))
        closed: list[int] = []
        left: list[Run] = []
        for run in overlapping:
            self._meta_bytes -= len(run.meta)
            if kind not in ONE_PER_PAGE:
                closed += run.fds
                continue
            begin, stop = max(run.first, first) - run.first, min(run.end, end) - run.first
            closed += run.fds[begin:stop]
            if begin > 0:
                left.append(Run(run.first, begin, run.meta, run.fds[:begin]))
            if stop < run.count:
                left.append(Run(end, run.count - stop, run.meta, run.fds[stop:]))
        if overlapping:
            place = runs.index(overlapping[0])
            runs[place : place + len(overlapping)] = left
            self._meta_bytes += sum(len(run.meta) for run in left)
        self.num_fds -= len(closed)
        return closed

    def _insert(self, runs: list[Run], run: Run, *, merge: bool) -> None:
        place = _place(runs, run.first)
        runs.insert(place, run)
        self._meta_bytes += len(run.meta)
        if not merge:
            return
        for left in (place, place - 1):  # with the run behind it, then with the one before it
            if 0 <= left < len(runs) - 1:
                one, two = runs[left], runs[left + 1]
                if one.end == two.first and one.meta == two.meta:
                    one.fds.extend(two.fds)
                    one.count += two.count
                    self._meta_bytes -= len(two.meta)
                    del runs[left + 1]


def _place(runs: list[Run], page: int) -> int:
    """Index of the first run that reaches past `page`."""
    place = bisect_right(runs, page, key=lambda run: run.first)
    return place - 1 if place and runs[place - 1].end > page else place


def _overlapping(runs: list[Run], first: int, end: int) -> Iterator[Run]:
    for place in range(_place(runs, first), len(runs)):
        if runs[place].first >= end:
            return
        yield runs[place]
