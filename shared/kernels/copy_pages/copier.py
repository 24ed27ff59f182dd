"""The interface of a provider: hand in a set of copies, get a ticket, ask the ticket. One process, many threads.

CudaCopier (copy engines) and CpuCopier (memmove) implement it; one conformance suite holds both.
"""

from typing import Protocol

from shared.kernels.copy_pages.copies import Copies, Direction, Order
from shared.kernels.copy_pages.plan import Plan

MAX_PENDING = 256  # sets in flight of one copier
DEFAULT_TIMEOUT_S = 30.0


class Ticket(Protocol):
    """One set in flight. Until it is done its targets belong to the copier, and (STREAM, ANY) so do its sources."""

    plan: Plan

    def done(self) -> bool:
        """Whether every byte is at its target, visible to the host and to every stream from now on.

        Never blocks, except that a staged copy to the host does its share of CPU work here.
        Raises: CopyFailed when the copy failed.
        """
        ...

    def wait(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Return when done. Raises: CopyTimeout at the deadline, CopyFailed."""
        ...


class Copier(Protocol):
    """Stream-ordered batches of copies."""

    def submit(
        self,
        copies: Copies,
        direction: Direction,
        *,
        stream: int,
        order: Order = Order.STREAM,
        staging: bool = False,
        kernels: bool = False,
    ) -> Ticket:
        """Start a set behind the earlier work of `stream`; later work of that stream sees the targets written.

        Args:
            stream: a CUstream handle of this GPU, never the legacy default one; a number of the caller's own for
                copies by CPU, where sets of one number run one after another.
            order: when sources may be read; see Order. STREAM unless the source is known to be at rest.
            staging: the CPU may read host sources during this call and write host targets during later calls of
                this copier; sources and targets are at rest until the set is done, on its own stream too.
            kernels: this GPU may copy by its multiprocessors: every address is mapped for its kernels (host memory is
                page-locked; a kernel that reads other memory ends the whole context), and this process is the one
                that computes here, since kernels of two processes take turns. Not with DURING_CALL.
        Raises: InvalidCopies, nothing was started; CopyQueueFull, likewise; CopyFailed, and what had been
            started is over unless it says `running`.
        """
        ...

    def close(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Wait for what is in flight, then free what the copier owns, but no staging memory of a set that failed and
        may still run. What failed is told to who asks its ticket.

        Raises: CopyTimeout.
        """
        ...
