"""Who only calls, and pages that the mempool wants for itself. No I/O."""

from dataclasses import dataclass, field

from shared.ids import InstanceId, PageId

SPARE_PART = 4  # such a part of the spare pages may go to blocks that nobody waits for (decisions 0029, 0054)


@dataclass(slots=True)
class Client:
    """A connection that only calls."""

    connection: int
    instance: InstanceId


@dataclass(slots=True, eq=False)
class Claim:
    """Pages that the mempool wants for itself, before any engine gets more. Granted, once they are here."""

    wanted: int
    pages: list[PageId] = field(default_factory=list)
    asks: bool = True  # engines to give pages back
    lends: bool = False  # they become leased, not granted
    evicts: bool = True  # False: engines can spare as many, and blocks stay where they are
    is_last: bool = False  # nobody waits for it: what comes goes to the others first

    @property
    def lacking(self) -> int:
        """How many are still to come."""
        return self.wanted - len(self.pages)

    def split(self, count: int) -> list[PageId]:
        """Its first pages, the caller's from now on."""
        pages, self.pages = self.pages[:count], self.pages[count:]
        self.wanted -= count
        return pages
