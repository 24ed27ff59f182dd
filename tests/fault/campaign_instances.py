"""One engine instance as the conductor sees it: its processes, and what it holds of the pool by its own words.

What is noted here as pinned or held is what the mempool must respect: a page is noted once the instance surely has
it, and no longer from the moment in which the instance is told to let it go.
"""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.fault.campaign_actors import NUM_RANKS, Owned
from tests.fault.campaign_rig import Actor, Clock, Zygote

QUOTA_PAGES = 10
_incarnations = itertools.count(1)


def next_incarnation() -> int:
    """A number that no instance had before."""
    return next(_incarnations)


class Lease:
    """Pages that a front leased. `ours`: an engine core has taken it over."""

    def __init__(self, lease_id: str, pages: list[Owned]) -> None:
        self.lease_id = lease_id
        self.pages = pages
        self.ours = False


class Instance:
    """Processes that one supervisor starts and ends together."""

    works_in_pages = False
    num_ranks = 1

    def __init__(self, zygote: Zygote, name: str, socket: Path, log: Path) -> None:
        self.name = name
        self.incarnation = 0
        self.parts: dict[str, Actor | None] = {}
        self.writes: dict[int, int] = {}  # page -> epoch, granted and not sealed
        self.sealed: dict[int, tuple[int, bytes]] = {}  # page -> (epoch, hash), pinned by this engine
        self.leases: dict[str, Lease] = {}
        self.acquiring = False  # its front waits for an answer
        self.copying = False  # it is in the middle of its copies
        self._zygote = zygote
        self._socket = socket
        self._log = log

    @property
    def alive(self) -> bool:
        """Whether any of its processes runs."""
        return any(part is not None and part.alive for part in self.parts.values())

    @property
    def is_whole(self) -> bool:
        """Whether all of them run."""
        return all(part is not None and part.alive for part in self.parts.values())

    def part(self, kind: str) -> Actor:
        actor = self.parts[f"{self.name}.{kind}"]
        assert actor is not None
        return actor

    def spawn(self, kind: str, role: str, **order: Any) -> Actor:
        """Start one process in place of an earlier one."""
        name = f"{self.name}.{kind}"
        earlier = self.parts[name]
        if earlier is not None:
            earlier.close()
        order |= {"role": role, "socket": str(self._socket), "instance": self.name, "flags": []}
        self.parts[name] = actor = Actor(self._zygote, order, self._log)
        return actor

    def listeners(self) -> list[Actor]:
        """Processes that can say that they lost the mempool."""
        return [part for name, part in self.parts.items() if part is not None and "rank" not in name]

    @property
    def may_touch(self) -> bool:
        """Whether a process lives that reads or writes pages."""
        return any(p is not None and p.alive for name, p in self.parts.items() if "front" not in name)

    def pinned(self) -> Iterable[Owned]:
        """Pages that must stay sealed under these epochs."""
        if not self.may_touch:
            return
        yield from ((page, epoch) for page, (epoch, _) in self.sealed.items())
        for lease in self.leases.values():
            yield from lease.pages

    def held(self) -> Iterable[Owned]:
        """Pages that nobody else may get."""
        return self.writes.items() if self.may_touch else ()

    def void(self) -> None:
        """All of its processes are dead."""
        self.writes, self.sealed, self.leases = {}, {}, {}
        self.acquiring = self.copying = False

    def memory_lost(self) -> None:
        """The pool begins anew, with other pages."""
        self.writes, self.sealed, self.leases = {}, {}, {}

    def mempool_died(self) -> None:
        """What no successor can know is void."""
        raise NotImplementedError

    def link_cut(self, parts: Iterable[str]) -> None:
        """The mempool saw these processes leave."""
        raise NotImplementedError

    def start(self, clock: Clock) -> Iterator[str]:
        """All processes anew."""
        raise NotImplementedError

    def reattach(self, clock: Clock) -> Iterator[str]:
        """Wait until it is attached again; returns False if it has to begin anew."""
        raise NotImplementedError

    def scribble(self) -> None:
        """What is left of it goes on with a step that was under way."""

    def await_links(self, clock: Clock) -> None:
        for actor in self.listeners():
            clock.until_attached(lambda a=actor: not a.ask("is_lost"), f"{self.name} {actor.role} attached")


class PageInstance(Instance):
    """Front, core and ranks of an engine that works in the pages."""

    works_in_pages = True
    num_ranks = NUM_RANKS

    def __init__(self, zygote: Zygote, name: str, socket: Path, log: Path) -> None:
        super().__init__(zygote, name, socket, log)
        kinds = ["front", "core", *(f"rank{n}" for n in range(NUM_RANKS))]
        self.parts = {f"{name}.{kind}": None for kind in kinds}

    def ranks(self) -> list[Actor]:
        return [self.part(f"rank{n}") for n in range(NUM_RANKS)]

    def start(self, clock: Clock) -> Iterator[str]:
        self.void()
        self.incarnation = next_incarnation()
        for number in range(NUM_RANKS):
            yield f"{self.name}: rank {number} attaches"
            self.spawn(f"rank{number}", "rank", rank=number).ask("attach")
        yield f"{self.name}: engine attaches"
        self.spawn("core", "core", quota=QUOTA_PAGES).ask("attach")
        yield f"{self.name}: front attaches"
        self.spawn("front", "front")
        self.await_links(clock)

    def reattach(self, clock: Clock) -> Iterator[str]:
        core = self.part("core")
        if core.ask("is_lost"):
            yield f"{self.name}: reattach with Holding"
        else:
            yield f"{self.name}: front is attached again"
        refusals: list[str] = []

        def is_settled() -> bool:
            answer = core.ask("reattach")  # harmless while attached: a cut link is noticed a little later
            if answer not in ("attached", "not yet"):
                refusals.append(answer)
                return True
            return not any(actor.ask("is_lost") for actor in self.listeners())

        clock.until_attached(is_settled, f"{self.name} is attached again")
        return not refusals

    def mempool_died(self) -> None:
        self.leases = {key: lease for key, lease in self.leases.items() if lease.ours}

    def link_cut(self, parts: Iterable[str]) -> None:
        """Leases without expiry stay: an engine may work in them."""

    def scribble(self) -> None:
        for rank in self.ranks():
            if rank.alive and self.writes:
                rank.ask("scribble", list(self.writes.items()))


class CopyInstance(Instance):
    """An engine process that copies, and a front that leases for it."""

    def __init__(self, zygote: Zygote, name: str, socket: Path, log: Path, *, has_front: bool) -> None:
        super().__init__(zygote, name, socket, log)
        self.parts = {f"{name}.{kind}": None for kind in (["engine", "front"] if has_front else ["engine"])}
        self.ready_s = 0.0  # when it last said that a handoff is ready

    def start(self, clock: Clock) -> Iterator[str]:
        self.void()
        self.incarnation = next_incarnation()
        yield f"{self.name}: engine attaches"
        self.spawn("engine", "copy", quota=QUOTA_PAGES)
        if f"{self.name}.front" in self.parts:
            yield f"{self.name}: front attaches"
            self.spawn("front", "front")
        self.await_links(clock)

    def reattach(self, clock: Clock) -> Iterator[str]:
        yield f"{self.name}: attaches again by itself"
        if not self.copying:  # it waits for the views of the earlier memory to go
            self.await_links(clock)
        return True

    def mempool_died(self) -> None:
        """Copying engines report nothing: whatever they had is lost, and they know (is_sealed)."""
        self.memory_lost()

    def link_cut(self, parts: Iterable[str]) -> None:
        self.leases = {}
        if f"{self.name}.engine" in set(parts):
            self.writes = {}
