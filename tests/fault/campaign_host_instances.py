"""Instances of the campaign on two hosts: engines with a space of their own, and callers of the nine calls."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.fault.campaign_actors import NUM_RANKS, Owned
from tests.fault.campaign_instances import Instance, PageInstance, next_incarnation
from tests.fault.campaign_prompt import Prompt
from tests.fault.campaign_rig import PAGE_BYTES, Actor, Clock, Zygote


class HostInstance(PageInstance):
    """An engine whose space has so many pages.

    Attributes: `away`, `coming`: by number of the swap, what is parked elsewhere, and of it what was asked for.
    """

    def __init__(self, zygote: Zygote, name: str, socket: Path, log: Path, num_pages: int) -> None:
        super().__init__(zygote, name, socket, log)
        self.num_pages = num_pages
        self.away: dict[int, list[bytes]] = {}
        self.coming: dict[int, Prompt] = {}
        self.kept: set[bytes] = set()  # by the mempool that runs now, in host memory
        self.lent: set[int] = set()  # offers of this instance's pages

    def spawn(self, kind: str, role: str, **order: Any) -> Actor:
        order |= {"capacity": self.num_pages * PAGE_BYTES * NUM_RANKS}
        return super().spawn(kind, f"host-{role}", **order)

    def void(self) -> None:
        super().void()
        self.away, self.coming, self.kept = {}, {}, set()

    def memory_lost(self) -> None:
        super().memory_lost()
        self.coming, self.kept = {}, set()

    def mempool_died(self) -> None:
        """A successor knows no swaps and no loans; what is in host memory is a block like others."""
        super().mempool_died()
        self.coming, self.kept, self.lent = {}, set(), set()

    def link_cut(self, parts: Iterable[str]) -> None:
        super().link_cut(parts)
        if f"{self.name}.core" in set(parts):
            self.coming, self.kept = {}, set()


class CallerInstance(Instance):
    """One process that calls the nine calls for an engine. `owned`: by space (num_pages), what it allocated there."""

    def __init__(self, zygote: Zygote, name: str, serves: str, socket: Path, log: Path) -> None:
        super().__init__(zygote, name, socket, log)
        self.serves = serves
        self.parts: dict[str, Actor | None] = {f"{name}.api": None}
        self.owned: dict[int, dict[int, int]] = {}
        self.addresses: list[bytes] = []  # all of them, also of other hosts

    def start(self, clock: Clock) -> Iterator[str]:
        self.void()
        self.incarnation = next_incarnation()
        yield f"{self.name}: caller attaches"
        api = self.spawn("api", "caller", serves=self.serves, api_socket=str(self._socket))
        clock.until_attached(lambda: api.ask("attach"), f"{self.name} is connected")

    def reattach(self, clock: Clock) -> Iterator[str]:
        yield f"{self.name}: caller is attached again"
        api = self.part("api")
        clock.until_attached(lambda: api.ask("attach"), f"{self.name} is connected again")
        return True

    def held_in(self, num_pages: int) -> Iterable[Owned]:
        """Pages of one space that nobody else may get."""
        return self.owned.get(num_pages, {}).items() if self.may_touch else ()

    def forget(self) -> None:
        """What its connection held is nobody's."""
        self.owned, self.addresses = {}, []

    def void(self) -> None:
        super().void()
        self.forget()

    def memory_lost(self) -> None:
        self.forget()

    def mempool_died(self) -> None:
        self.forget()

    def link_cut(self, parts: Iterable[str]) -> None:
        if f"{self.name}.api" in set(parts):
            self.forget()
