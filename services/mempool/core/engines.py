"""Engines and the pages granted to them: quotas, demand, quarantine. No I/O.

An engine's pages are *held* from grant to seal. They count against its quota, which is cut when the engines
together ask for more than the pool's granted share, so that sealed pages always have room.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from services.mempool.core.page_state import PageEvent
from services.mempool.core.page_table import PageTable
from shared.ids import Epoch, InstanceId, PageId


@dataclass(slots=True)
class Engine:
    """One attached engine process. `process` names the living process, over all its connections."""

    connection: int
    process: int
    instance: InstanceId
    instance_epoch: Epoch
    quota: int
    demand: int  # pages asked for and not granted yet
    held: set[PageId] = field(default_factory=set)


class Engines:
    """All attached engines of one pool, and the pages of lost ones."""

    def __init__(self, table: PageTable, granted_share: float) -> None:
        self._table = table
        self._max_granted = max(1, int(table.num_pages * granted_share))
        self.attached: dict[int, Engine] = {}
        # page -> process that may still write it, and the instance that it was
        self.quarantine: dict[PageId, tuple[int, InstanceId]] = {}

    def attach(self, engine: Engine) -> None:
        """From now on pages may be granted to it."""
        self.attached[engine.connection] = engine

    def of_instance(self, instance: InstanceId) -> list[Engine]:
        """Attached engines of one instance."""
        return [engine for engine in self.attached.values() if engine.instance == instance]

    def cap(self, engine: Engine) -> int:
        """Pages that it may hold: its quota, or its even part of the granted share."""
        return min(engine.quota, max(1, self._max_granted // len(self.attached)))

    def ask(self, engine: Engine, count: int) -> None:
        """NeedPages: more demand, never beyond the quota."""
        engine.demand = min(engine.demand + count, engine.quota)

    def holds(self, engine: Engine, page: int, epoch: int) -> bool:
        """Whether the engine speaks of a page that is its own, under the page's present epoch."""
        return page in engine.held and self._table.epochs[page] == epoch

    def serve(self, make_room: Callable[[], bool]) -> dict[int, list[tuple[PageId, Epoch]]]:
        """Grant pages to whoever asked, the engine with the fewest first, until none is left.

        Args: make_room: frees one page, or returns False.
        Returns: connection -> what it was granted.
        """
        granted: dict[int, list[tuple[PageId, Epoch]]] = {}
        asking = [e for e in self.attached.values() if e.demand > 0]
        while asking := [e for e in asking if e.demand > 0 and len(e.held) < self.cap(e)]:
            got = self._table.grant()
            if got is None:
                if not make_room():
                    break
                continue
            engine = min(asking, key=lambda e: len(e.held))
            engine.held.add(got[0])
            engine.demand -= 1
            granted.setdefault(engine.connection, []).append(got)
        return granted

    def excess(self) -> dict[int, int]:
        """connection -> pages held beyond its cap."""
        over = {c: len(e.held) - self.cap(e) for c, e in self.attached.items()}
        return {connection: count for connection, count in over.items() if count > 0}

    def lose(self, connection: int) -> Engine | None:
        """The connection ended, the process perhaps not: held pages wait for proof of its death."""
        engine = self.attached.pop(connection, None)
        if engine is None:
            return None
        for page in sorted(engine.held):
            self._table.apply(page, PageEvent.HOLDER_LOST)
            self.quarantine[page] = (engine.process, engine.instance)
        engine.held.clear()
        return engine

    def bury(self, process: int) -> int:
        """The process is proven dead and its engines are lost: its pages are free. How many."""
        return self._end_quarantine(lambda holder: holder[0] == process, PageEvent.HOLDER_DEAD)

    def let_go(self, process: int, instance: InstanceId) -> int:
        """The process says that it writes none of the pages that it lost as this instance. How many."""
        return self._end_quarantine(lambda holder: holder == (process, instance), PageEvent.ACKNOWLEDGED)

    def _end_quarantine(self, proven: Callable[[tuple[int, InstanceId]], bool], event: PageEvent) -> int:
        pages = [page for page, holder in self.quarantine.items() if proven(holder)]
        for page in pages:
            del self.quarantine[page]
            self._table.free(page, event)
        return len(pages)
