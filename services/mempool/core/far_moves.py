"""Blocks at far places that go elsewhere while they are read: the part of Far that decides which. No I/O.

lent pages are wanted back: all that are mapped there, to host memory, as many at once as there are places for
pages are lent again: what is in host memory back to them, a few at once (far_pace.py)

Cached blocks that lie in lent pages make way then, to host memory: a block that is read goes over the link at every
step, one that is cached when somebody asks for it. Until those that are read are there, no cached ones come.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from services.mempool.core.actions import Action, KillProcess
from services.mempool.core.far_pace import num_back
from services.mempool.core.far_state import FarCopy, FarNeed, Job, Place, PlaceState, User, can_map
from services.mempool.core.loan_pool import LoanPool
from services.mempool.core.pool import Pool


class FarMoves(ABC):
    """See Far, which has these."""

    counters: Counter[str]
    _pools: Mapping[int, Pool]
    _behind: Callable[[int], Sequence[int]]
    _users: list[User]
    _jobs: list[Job]
    _copies: dict[int, FarCopy]
    _out: list[Action]
    drain: Callable[[int, int, int], None]
    num_leaving: Callable[[int], int]

    @abstractmethod
    def advance(self) -> None: ...

    @abstractmethod
    def _alive(self, user: User) -> set[int]: ...

    def let_go(self, number: int, now_ms: int) -> None:
        """Lent pages of this space are wanted back: what is read there goes elsewhere.

        Said again until they are back: as many move as there are places for, the others when those are free again.
        """
        for user in self._users:
            mine = [(n, one) for n, one in user.places.items() if one.where[0].number == number]
            mapped = [(n, one) for n, one in mine if one.state is PlaceState.MAPPED]
            if mapped and not user.is_gone:
                user.pace.taken(now_ms)
                user.awaits_lent = False  # in the pause, cached blocks may lie in what is lent
                # with no place free, and none to come, they are lost
                waits = user.free or any(p.state is not PlaceState.MAPPED for p in user.places.values())
                self._move(user, mapped[: len(user.free)] if waits else mapped)
        if self._jobs:
            self.advance()

    def end_readers(self, number: int) -> None:
        """Lent pages of this space are overdue: whoever reads there still is killed."""
        for user in self._users:
            if user.is_killed or all(one.where[0].number != number for one in user.places.values()):
                continue
            user.is_killed = True
            self.counters["far_engines_killed"] += 1
            processes = sorted(self._alive(user))
            self._out += [KillProcess(process, "lent pages past their deadline") for process in processes]

    def _move(self, user: User, places: Sequence[tuple[int, Place]], *, is_back: bool = False) -> None:
        """Their bytes shall be at other places."""
        if not places:
            return
        job = Job(user, 0, [one.where[1].block_hash for _, one in places], list(places), is_back)
        for position, (_, one) in enumerate(places):
            one.state = PlaceState.LEAVING
            one.where[0].index.pin([one.where[1]])
            job.waiting.append((position, one.where))
        self._jobs.append(job)

    def bring_back(self, now_ms: int, *, is_busy: bool) -> None:
        """Blocks in host memory go back to lent pages, when it is time for that and nothing else is to be copied.

        Args: is_busy: others move blocks for which a request waits. Cost: a look at the lent spaces; where there is
        room, or could be, at the places of an engine, every EVERY_MS.
        """
        for user in self._users if not self._jobs else ():
            if user.is_gone or now_ms < user.pace.calm_at_ms or not (lent := self._lent(user)):
                continue
            if is_busy:
                user.pace.later(now_ms)
                continue
            most = num_back(len(user.free), sum(place.num_at_hand for place in lent))
            in_dram = (each for each in user.places.items() if each[1].where[0].is_dram)
            chosen = list(islice((each for each in in_dram if each[1].state is PlaceState.MAPPED), most))
            user.awaits_lent = bool(chosen)
            room = sum(place.num_free for place in lent)
            self._make_way(lent, len(chosen) - room, now_ms)
            if not (going := chosen[:room]):
                user.pace.later(now_ms)
                continue
            user.pace.returned(now_ms)
            self._move(user, going, is_back=True)
            self.advance()
            return

    def _make_way(self, lent: Sequence[Pool], count: int, now_ms: int) -> None:
        """So many cached blocks are to leave these spaces; said again until there is room."""
        for place in lent:
            part = min(count, place.num_at_hand - place.num_free)
            if part > 0:
                self.drain(place.number, part, now_ms)
                count -= part

    def awaits_lent(self, number: int) -> bool:
        """Whether engines of this space read blocks in host memory that go to lent pages as soon as there is room."""
        return any(
            u.awaits_lent and u.places and u.pool.number == number for u in self._users if not u.is_gone
        )

    def evacuates(self, copy_id: int) -> bool:
        """Whether it brings blocks that are read in lent pages away from there."""
        copy = self._copies.get(copy_id)
        return copy is not None and bool(copy.job.old) and not copy.job.is_back

    def uses(self, pool: Pool) -> bool:
        """Whether processes of an engine of this space may read blocks in place still."""
        return any(user.pool is pool for user in self._users)

    def num_at(self, number: int) -> int:
        """Pages of this space that are mapped at far places, or about to be. Cost: a look at every place."""
        return sum(one.where[0].number == number for user in self._users for one in user.places.values())

    def _lent(self, user: User) -> list[Pool]:
        """Where pages lent to its space, which its ranks can map, are free or have blocks that nobody pins."""
        found = [self._pools[number] for number in self._behind(user.pool.number)] if user.places else []
        return [place for place in found if place.is_loan and can_map(user.pool, place) and place.num_at_hand]

    def need(self, number: int) -> FarNeed:
        """Of this space now; a refusal is said once. Cost: a look at every place of its engines."""
        mine = [user for user in self._users if user.pool.number == number and not user.is_gone]
        wanted = refused = 0
        for user in mine:
            for place in user.places.values():
                pool = place.where[0]
                # one that leaves host memory has a lent page already
                wanted += pool.is_dram and place.state in (PlaceState.MAPPING, PlaceState.MAPPED)
            refused, user.refused = refused + user.refused, 0
        if not wanted + refused:
            return FarNeed()
        # whether a lender's budget is open does not matter: what is copied there soon needs no second page
        lent = [x for x in self._pools.values() if isinstance(x, LoanPool) and x.consumer is mine[0].pool]
        room = sum(x.num_at_hand + self.num_leaving(x.number) for x in lent if can_map(x.consumer, x))
        short = max(0, wanted + refused - room)
        return FarNeed(short, refused > 0 and short > 0)

    def next_deadline_ms(self) -> int | None:
        """When bring_back() has something to look at."""
        due = [u.pace.calm_at_ms for u in self._users if not (self._jobs or u.is_gone) and self._lent(u)]
        return min(due, default=None)
