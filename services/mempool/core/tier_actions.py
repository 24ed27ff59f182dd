"""What moves between two tiers of memory: limits, copies, results, answers. No I/O. Decided in tiers.py."""

from collections.abc import Collection
from dataclasses import dataclass

from services.mempool.core.entry import Entry
from shared.errors import InvariantBroken
from shared.ids import Epoch, PageId, SpaceId


@dataclass(frozen=True, slots=True)
class TierLimits:
    """When pages move by themselves, and how much may be on its way."""

    begin_free_ratio: float = 0.05  # of the fast pages: with fewer free ones, blocks begin to leave
    end_free_ratio: float = 0.10  # with as many free, or about to be, they stop
    max_pages_per_copy: int = 64
    max_pages_in_flight: int = 256
    max_tickets: int = 256
    retry_ms: int = 1_000  # after a failed copy nothing leaves by itself for so long
    pause_ms: int = 50  # nor after nothing could leave
    ask_ms: int = 150  # so long a swap waits for engines to let go of what they cache

    def __post_init__(self) -> None:
        if not 0 <= self.begin_free_ratio <= self.end_free_ratio < 1:
            raise InvariantBroken(f"free ratios {self.begin_free_ratio} and {self.end_free_ratio}")


@dataclass(frozen=True, slots=True)
class CopyPages:
    """Copy page by page; answer with Tiers.on_copied(copy_id, ...), always. Sources are pinned until then.

    Whoever copies reads a source's word before and after (rule 4) and reports a change as stale.
    """

    copy_id: int
    source: SpaceId
    source_pages: list[PageId]
    source_epochs: list[Epoch]
    target: SpaceId
    target_pages: list[PageId]
    target_epochs: list[Epoch]


@dataclass(frozen=True, slots=True)
class CopyResult:
    """How a copy ended (shared/transfer: Moved, TransferError)."""

    stale: Collection[int] = ()  # positions whose source had changed: the target holds garbage
    failed: bool = False  # nothing arrived
    quarantined: Collection[PageId] = ()  # targets that may still be written: on_settled() names them later


@dataclass(frozen=True, slots=True)
class SwapDone:
    """A ticket's end.

    `entries`: of swap_out, what is in the slow space now and has left the fast one, in no order; of swap_in, for
    every block that was asked its entry in the fast space, *pinned* (the receiver unpins it), or None.
    """

    ticket: int
    entries: list[Entry | None]


TierAction = CopyPages | SwapDone
