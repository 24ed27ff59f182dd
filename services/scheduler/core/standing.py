"""Free instances in the orders in which placements look at them, kept from one placement to the next. No I/O.

A queue that drains is shorter at every look, but those that drain do so alike: their order is that of the moments at
which they are through, and time alone does not change it. Those that are through are in the order of what was placed
on them since. So an order by queue is two sorted lists, and a walk along it merges them.

Cost: O(log N) comparisons for an instance on which something was placed, ended or reported since the last look, and
one step of a walk for each that is looked at, whatever N is.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping
from heapq import heappop, heappush, merge
from itertools import islice
from typing import Any

from services.scheduler.core.instances import Instance, PoolKey, SpaceKey
from services.scheduler.core.policies import Candidate, cost
from services.scheduler.core.rates import Rates, rates_of
from shared.ids import InstanceId
from shared.wire.reports import Role

Key = tuple[Any, ...]  # what is sorted by, an instance's name, its Row
Families = Collection[str]


class Row:
    """One instance's place in the orders."""

    __slots__ = ("candidate", "dues_ms", "group", "known", "places", "pool", "queue_ms", "rates", "space",
                 "through_ms")  # fmt: skip

    def __init__(self, known: Instance) -> None:
        self.known = known
        self.group: _Group | None = None  # None: it is full
        self.candidate: Candidate | None = None  # None: its queue drains, so every look makes another
        self.rates: Rates | None = None
        self.places: list[tuple[list[Key], Key]] = []
        self.pool: PoolKey | None = None
        self.space: SpaceKey | None = None
        self.queue_ms = self.through_ms = (
            0.0  # placed since the report; when the reported queue is worked off
        )
        # when it is looked at again, whatever happens: all that the heap has of it, the next one last
        self.dues_ms = [math.inf]


class _Order:
    """By queue, and then by what else is in the key."""

    __slots__ = ("draining", "through")

    def __init__(self) -> None:
        self.through: list[Key] = []
        self.draining: list[Key] = []  # by when they are through, and what comes behind that

    def walk(self, now_ms: int, most_ms: float) -> Iterable[Key]:
        """Queues of at most `most_ms`, the shortest first."""
        if not self.draining and (not self.through or self.through[-1][0] <= most_ms):
            return self.through
        return self._merged(now_ms, most_ms)

    def _merged(self, now_ms: int, most_ms: float) -> Iterator[Key]:
        draining = ((key[0] - now_ms, *key[1:]) for key in self.draining)
        for key in merge(self.through, draining):
            if key[0] > most_ms:
                return
            yield key

    def longest_ms(self, now_ms: int) -> float:
        """The longest queue; 0 where there is none."""
        through = self.through[-1][0] if self.through else 0.0
        return max(through, self.draining[-1][0] - now_ms) if self.draining else through


class _Group:
    """Free instances of one role whose KV is alike."""

    __slots__ = ("family", "idle", "loaded", "queued", "role")

    def __init__(self, role: Role, family: str) -> None:
        self.role: Role = role
        self.family = family
        self.queued = _Order()  # queue, turn, name
        self.idle = _Order()  # queue, how many decode there, turn, name
        self.loaded: list[Key] = []  # load as the policies without predictions see it, turn, name


class Standing:
    """Of some instances, those that are not full. Add to `changed` who did, then refresh(), then ask a Field.

    Args: most_share, most_tokens: of requests and of tokens that wait; from there on an instance is full.
    """

    def __init__(
        self, instances: Iterable[Instance], *, most_share: float = math.inf, most_tokens: float = math.inf
    ) -> None:
        self.rows = {known.instance: Row(known) for known in instances}
        self.changed: set[InstanceId] = set(self.rows)
        self.groups: dict[Role, dict[str, _Group]] = {"prefill": {}, "decode": {}, "colocated": {}}
        self.pools: dict[PoolKey, list[Key]] = {}  # decode instances by load
        self.spaces: dict[SpaceKey, dict[InstanceId, Row]] = {}
        self.unmodelled: dict[InstanceId, None] = {}  # free ones without coefficients
        self.rooms: list[Key] = []  # room in pages of those that say, the least first
        sizes = (row.known.description.block_tokens for row in self.rows.values())
        self.block_tokens = max(1, min(sizes, default=1))  # of the smallest blocks
        self._most_share, self._most_tokens = most_share, most_tokens
        self._due: list[tuple[float, InstanceId]] = []

    def refresh(self, *, now_ms: int) -> None:
        """Look again at those that changed, or that time has changed."""
        due = self._due
        while due and due[0][0] <= now_ms:
            _, name = heappop(due)
            self.rows[name].dues_ms.pop()
            self.changed.add(name)
        for name in self.changed:
            row = self.rows.get(name)
            if row is not None:
                self._take_out(row)
                self._put_in(row, now_ms)
        self.changed.clear()

    def longest_queue_ms(self, now_ms: int) -> float:
        """Of all that are free."""
        longest_ms = 0.0
        for groups in self.groups.values():
            for group in groups.values():
                longest_ms = max(longest_ms, group.queued.longest_ms(now_ms))
        return longest_ms

    def _take_out(self, row: Row) -> None:
        for rows, key in row.places:
            del rows[bisect_left(rows, key)]
        row.places.clear()
        name = row.known.instance
        if row.pool is not None:
            if not self.pools[row.pool]:
                del self.pools[row.pool]
            row.pool = None
        if row.space is not None:
            others = self.spaces[row.space]
            del others[name]
            if not others:
                del self.spaces[row.space]
            row.space = None
        group, row.group, row.candidate = row.group, None, None
        if group is not None:
            self.unmodelled.pop(name, None)
            if not group.loaded:
                del self.groups[group.role][group.family]

    def _put_in(self, row: Row, now_ms: int) -> None:
        known = row.known
        name, role, turn = known.instance, known.role, known.chosen_at
        view, through_ms, due_ms = known.load.standing(now_ms=now_ms)
        drains = through_ms > now_ms
        if drains and through_ms < due_ms:
            due_ms = through_ms
        if due_ms < row.dues_ms[-1]:
            row.dues_ms.append(due_ms)
            heappush(self._due, (due_ms, name))
        if view.requests_share >= self._most_share or view.prefill_tokens >= self._most_tokens:
            return
        row.queue_ms, row.through_ms = view.queue_ms, through_ms
        row.rates = rates_of(known, view)
        group = self.groups[role].get(known.family_key)
        if group is None:
            group = self.groups[role][known.family_key] = _Group(role, known.family_key)
        row.group = group
        if drains:
            queue_ms, queued, idle = through_ms + view.queue_ms, group.queued.draining, group.idle.draining
        else:
            queue_ms, queued, idle = view.queue_ms, group.queued.through, group.idle.through
            row.candidate = Candidate(known, view, 0, name, row.rates)
        loaded = (cost(role, view), turn, name, row)
        places = row.places
        if view.room_blocks is not None:
            places.append((self.rooms, (view.room_blocks, name, row)))
        places.append((queued, (queue_ms, turn, name, row)))
        places.append((idle, (queue_ms, view.num_decodes, turn, name, row)))
        places.append((group.loaded, loaded))
        if role == "decode" and known.pool_key is not None:
            row.pool = known.pool_key
            places.append((self.pools.setdefault(known.pool_key, []), loaded))
        for rows, key in places:
            insort(rows, key)
        if known.space_key is not None:
            row.space = known.space_key
            self.spaces.setdefault(known.space_key, {})[name] = row
        if known.model is None:
            self.unmodelled[name] = None


class Field:
    """A standing as one request sees it.

    Args: reach: tokens within an instance's reach; without: instances that it does not want; most_queue_ms: whoever
    has a longer queue is left out too.
    """

    __slots__ = ("_made", "_without", "most_queue_ms", "now_ms", "reach", "standing")

    def __init__(
        self,
        standing: Standing,
        reach: Mapping[InstanceId, int],
        *,
        now_ms: int,
        without: Collection[InstanceId] = (),
        most_queue_ms: float = math.inf,
    ) -> None:
        self.standing = standing
        self.reach = reach
        self.now_ms = now_ms
        self.most_queue_ms = most_queue_ms
        self._without = without
        self._made: dict[InstanceId, Candidate] = {}

    def but(self, without: Collection[InstanceId]) -> "Field":
        """Without these too."""
        left_out = {*self._without, *without}
        return Field(
            self.standing, self.reach, now_ms=self.now_ms, without=left_out, most_queue_ms=self.most_queue_ms
        )

    def calm(self, most_queue_ms: float) -> "Field":
        """Without those whose queue is longer: itself where there are none."""
        if self.standing.longest_queue_ms(self.now_ms) <= most_queue_ms:
            return self
        return Field(
            self.standing, self.reach, now_ms=self.now_ms, without=self._without, most_queue_ms=most_queue_ms
        )

    def beyond(self, queue_ms: float) -> list[Candidate]:
        """Those whose queue is longer, by role, the shortest first."""
        roles: tuple[Role, ...] = ("prefill", "decode", "colocated")
        return [self.candidate(k[-1]) for role in roles for k in self.by_queue(role) if k[0] > queue_ms]

    def lacks_models(self) -> InstanceId | None:
        """The first by name of those that sent no coefficients, if there is one."""
        unmodelled = self.standing.unmodelled
        return min((name for name in unmodelled if name not in self._without), default=None)

    def pairs(self) -> set[str]:
        """Families that have both prefill and decode instances."""
        return set(self.families("prefill")).intersection(self.families("decode"))

    def rows(self, *roles: Role) -> list[Row]:
        """All of these roles, or of every role, in no order."""
        rows = self.standing.rows.values()
        return [row for row in rows if (not roles or row.known.role in roles) and self.has(row)]

    def families(self, role: Role) -> Families:
        """Of the instances that there are of this role."""
        groups = self.standing.groups[role]
        if not self._without and self.most_queue_ms == math.inf:
            return groups.keys()
        return [family for family in groups if any(True for _ in self.by_load(role, (family,)))]

    def num_families(self, role: Role) -> int:
        """At most: of all that are not full."""
        return len(self.standing.groups[role])

    def by_queue(self, role: Role, families: Families | None = None) -> Iterable[Key]:
        """(queue, turn, name, row), the shortest queue first."""
        walks = [g.queued.walk(self.now_ms, self.most_queue_ms) for g in self._groups(role, families)]
        return self._wanted(walks)

    def idlest(self, roles: Iterable[Role], families: Families | None, most: int) -> list[Key]:
        """The first `most` by (queue, how many decode there, turn, name, row)."""
        found: list[Key] = []
        num_walks = 0
        for role in roles:
            for group in self._groups(role, families):
                walk = group.idle.walk(self.now_ms, self.most_queue_ms)
                if type(walk) is list and not self._without:
                    found += walk[:most]
                else:
                    found += islice(self._wanted([walk]), most)
                num_walks += 1
        if num_walks > 1:
            found.sort()
        return found[:most]

    def by_load(self, role: Role, families: Families | None = None) -> Iterable[Key]:
        """(load, turn, name, row), the least loaded first."""
        return self._calm(self._wanted([group.loaded for group in self._groups(role, families)]))

    def of_pool(self, pool: PoolKey | None) -> Iterable[Key]:
        """Decode instances of a mempool, as by_load()."""
        rows = self.standing.pools.get(pool, []) if pool is not None else []
        return self._calm(self._wanted([rows]))

    def of_space(self, space: SpaceKey) -> Iterable[Row]:
        """Instances that work in this memory."""
        return [row for row in self.standing.spaces.get(space, {}).values() if self.has(row)]

    def find(self, name: InstanceId) -> Row | None:
        """The instance of that name, if it is here."""
        row = self.standing.rows.get(name)
        return row if row is not None and self.has(row) else None

    def has(self, row: Row) -> bool:
        """Not full, wanted, and its queue is not too long."""
        return (
            row.group is not None
            and row.known.instance not in self._without
            and self.queue_ms(row) <= self.most_queue_ms
        )

    def queue_ms(self, row: Row) -> float:
        """Now."""
        if row.through_ms <= self.now_ms:
            return row.queue_ms
        return row.through_ms + row.queue_ms - self.now_ms

    def candidates(self, rows: Iterable[Row]) -> list[Candidate]:
        """candidate() of each. Cost: none for one that holds nothing and whose queue does not drain."""
        reach = self.reach
        return [
            row.candidate
            if row.candidate is not None and row.known.instance not in reach
            else self.candidate(row)
            for row in rows
        ]

    def candidate(self, row: Row) -> Candidate:
        """One object for an instance, however often it is asked for."""
        name = row.known.instance
        tokens = self.reach.get(name, 0)
        if not tokens and row.candidate is not None:
            return row.candidate
        found = self._made.get(name)
        if found is None:
            view = row.known.load.view(now_ms=self.now_ms)
            found = self._made[name] = Candidate(row.known, view, tokens, name, row.rates)
        return found

    def _groups(self, role: Role, families: Families | None) -> list[_Group]:
        groups = self.standing.groups[role]
        if families is None:
            return list(groups.values())
        return [group for family, group in groups.items() if family in families]

    def _wanted(self, walks: list[Iterable[Key]]) -> Iterable[Key]:
        walk = walks[0] if len(walks) == 1 else merge(*walks)
        if not self._without:
            return walk
        return (key for key in walk if key[-2] not in self._without)

    def _calm(self, walk: Iterable[Key]) -> Iterable[Key]:
        if self.most_queue_ms == math.inf:
            return walk
        return (key for key in walk if self.queue_ms(key[-1]) <= self.most_queue_ms)
