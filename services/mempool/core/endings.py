"""Spaces that end: those whose processes are gone, with nothing in them, make room for others. No I/O.

A space outlives its processes: an engine that comes back finds its blocks, and gets its memory again (lifetimes.py). So
one ends only when a newcomer needs a space and there may be no further one; then the longest deserted ends that holds
nothing: no block, no page in use, no pin, lease, hand-off, loan or offer, and no copy. One without memory goes before
one that has some. Whoever comes with its name later is taken as a new one. Its number is nobody's any more.
Host memory behind spaces ends when the last of these has, and pages on loan with their lender or borrower.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from services.mempool.core import space
from services.mempool.core.actions import Action, EndSpace
from services.mempool.core.belonging import is_taken, pool_for
from services.mempool.core.loans import Shelf
from services.mempool.core.pool import Pool
from shared.ids import InstanceId, SpaceId
from shared.wire import mempool as wire

if TYPE_CHECKING:
    from services.mempool.core.mempool import Mempool


class Endings:
    """Of one mempool, all of whose parts are asked whether they use a space, and told that it is over.

    Args: space_of, clients, members: of the mempool; an instance that was there is forgotten with its space.
    `is_kept`: whether the shell cannot let go of a space's memory: other hosts have its addresses.
    """

    def __init__(
        self,
        core: "Mempool",
        space_of: dict[InstanceId, int],
        clients: Mapping[int, InstanceId],
        members: Mapping[int, int],
    ) -> None:
        self._core, self._space_of, self._clients, self._members = core, space_of, clients, members
        self.is_kept: Callable[[int], bool] = lambda number: False

    # -- when -------------------------------------------------------------------------------------

    def make_room(self, message: wire.Attach, process: int) -> list[Action]:
        """Before an engine or rank attaches: if it needs a space of its own and there may be no further one, another
        ends. Nothing does for who is refused anyhow. Cost: nothing in a mempool that is not full.

        Raises: PeerProtocolError on an impossible description.
        """
        core, pools = self._core, self._core.pools
        if not pools.is_full or pools.is_used_up:
            return []
        last = self._space_of.get(message.instance)
        if pool_for(message, pools, last, is_full=False) is not None or is_taken(
            message, process, None, pools
        ):
            return []
        planned = space.plan(space.described(message), message, core.limits)
        return self._end_some() if planned.num_pages else []

    def make_room_behind(self, pool: Pool, message: wire.Attach) -> list[Action]:
        """The same for the host memory that a space is to have behind it."""
        pools, description = self._core.pools, message.description
        if not pools.is_full or pools.is_used_up or description is None:
            return []
        return self._end_some() if self._core.dram.wants(pool, description) else []

    def _end_some(self) -> list[Action]:
        """One, as a rule: a successor may have more than it may make."""
        actions: list[Action] = []
        while self._core.pools.is_full and (ended := self._end_oldest()):
            actions += ended
        return actions

    def _end_oldest(self) -> list[Action]:
        pools = self._core.pools
        found = [pool for pool in pools.values() if self._may_end(pool)]
        if not found or pools.num_spaces < 2:  # one is always there, for clients whose engine has not come
            return []
        return self._end(min(found, key=lambda pool: (pool.has_present, pool.seen_ms, pool.number)))

    # -- whether ----------------------------------------------------------------------------------

    def _may_end(self, pool: Pool) -> bool:
        return (
            pool.is_bare
            and not self._is_named(pool.number)
            and not self._is_copied(pool)
            and not self._is_lent(pool.number)
            and self._is_idle_behind(pool)
            and not self.is_kept(pool.number)
        )

    def _is_named(self, number: int) -> bool:
        """By a connection: a front whose engine is gone waits for its return."""
        return (
            number in self._members.values()
            or any(self._space_of.get(instance) == number for instance in self._clients.values())
            or self._core.callers.use(number)
        )

    def _is_copied(self, pool: Pool) -> bool:
        """Whether something waits to be copied from or to there: what is under way has pages or pins already."""
        core = self._core
        pulls = (
            pool in (pull.pool, *(source for source, _ in pull.sources)) for pull in core.pulls.pulls.values()
        )
        far = (
            pool in (pull.pool, *(each for each, _ in pull.own), *(each for each, _ in pull.readers))
            for pull in core.remote.pulls.values()
        )
        return any(pulls) or any(far) or core.swaps.far.uses(pool)

    def _is_idle_behind(self, pool: Pool) -> bool:
        """Whether nothing leaves it for host memory, or comes back, and none of its blocks are there alone."""
        dram = self._core.dram
        numbers = (pool.number, *(shelf.number for shelf in self._shelves(pool.number)))
        return dram.may_forget(pool) and all(map(dram.is_idle, numbers))

    def _is_lent(self, number: int) -> bool:
        """Offers that are worth nothing count until the coordinator knows."""
        loans = self._core.lending.loans
        return (
            any(offer.producer == number for offer in loans.offers.values())
            or any(loan.space == number for loan in loans.loans.values())
            or any(shelf.lent for shelf in self._shelves(number))
        )

    def _shelves(self, number: int) -> list[Shelf]:
        shelves = self._core.lending.loans.shelves
        return [shelf for pair, shelf in shelves.items() if number in pair]

    # -- how --------------------------------------------------------------------------------------

    def _end(self, pool: Pool) -> list[Action]:
        core, number = self._core, pool.number
        for instance in [name for name, where in self._space_of.items() if where == number]:
            del self._space_of[instance]
            core.api.api.homes.end(instance)
        for shelf in self._shelves(number):
            core.lending.copies.end(shelf)
            del core.lending.shelves[shelf.number], core.lending.loans.shelves[shelf.producer, shelf.consumer]
            self._forget(core.pools[shelf.number])
        core.pulls.push_back.forget(number)
        core.layers.forget_space(pool)
        actions = pool.flush()  # its last words
        core.lending.copies.forget(number)
        if core.desk is not None:
            core.desk.parties.pop(number, None)
            core.desk.takers.forget(number)
        self._forget(pool)
        core.counters["spaces_ended"] += 1
        return [*actions, EndSpace(number)]

    def _forget(self, pool: Pool) -> None:
        """What every space has, those of pages on loan too."""
        core = self._core
        core.dram.forget(pool)
        core.api.api.homes.forget(SpaceId(pool.number))
        core.counters.update(pool.counters)
        del core.pools[pool.number]
        core.dram.link()
