"""Links over memory that is mapped in this process: one copy by plain addresses (shared/kernels/copy_pages).

shm.py and imported.py differ in how the peer's pages came here and in who copies. A copy here is this process's own
doing: it ends whether the peer lives or not, so only a copy engine that stands still leaves pages quarantined.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from shared.errors import ClusterError
from shared.kernels.copy_pages.copier import Copier
from shared.kernels.copy_pages.copies import Copies, Direction
from shared.transfer.describe import RegionDescription
from shared.transfer.errors import TransferFailed
from shared.transfer.interface import MappedPages, PathName, Region
from shared.transfer.link import BaseLink
from shared.transfer.pieces import Pieces
from shared.transfer.transfer_job import Attempt


class Ticket(Protocol):
    """Something in flight that can be asked; copier.Ticket, page_stream.PageTicket."""

    def done(self) -> bool:
        """Whether every byte is in place. Raises: ClusterError."""
        ...


class TicketAttempt:
    """A set of copies in flight; see link.Attempt."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket

    def poll(self) -> bool:
        """See link.Attempt."""
        try:
            return self._ticket.done()
        except ClusterError as error:
            raise TransferFailed(error.message) from error

    @property
    def over(self) -> bool:
        """Whether nothing of it can write any more."""
        return self.cancel(peer_is_dead=False)

    def cancel(self, *, peer_is_dead: bool) -> bool:
        """A copy cannot be stopped; it has settled when it is done or has failed for good."""
        try:
            return self._ticket.done()
        except ClusterError as error:
            return not getattr(error, "running", False)


# (source device, target device) -> the copier and stream that serve it; device -1 is host memory
CopierFor = Callable[[int, int], tuple[Copier, int]]


def direction_of(source_device: int, target_device: int) -> Direction:
    """By CUDA ordinals; -1 is host memory."""
    if source_device < 0:
        return Direction.HOST_TO_HOST if target_device < 0 else Direction.HOST_TO_DEVICE
    if target_device < 0:
        return Direction.DEVICE_TO_HOST
    return Direction.DEVICE_TO_DEVICE if source_device == target_device else Direction.PEER


class MappedLink(BaseLink):
    """A peer whose regions are mapped here."""

    def __init__(
        self,
        path: PathName,
        mapped: Mapping[str, MappedPages],
        copier_for: CopierFor,
        **common: Any,
    ) -> None:
        self.path = path
        super().__init__(**common)
        self._mapped = mapped
        self._copier_for = copier_for

    def _begin(self, source: RegionDescription, target: Region, pieces: Pieces, deadline_s: float) -> Attempt:
        here = self._where(source.name)
        return self._copy(
            Copies.of(
                pieces.source_offsets + np.uint64(here.address),
                pieces.target_offsets + np.uint64(target.address),
                pieces.sizes,
            ),
            here.device,
            target.device,
        )

    def _begin_push(
        self, source: Region, target: RegionDescription, pieces: Pieces, deadline_s: float
    ) -> Attempt:
        here = self._where(target.name)
        return self._copy(
            Copies.of(
                pieces.source_offsets + np.uint64(source.address),
                pieces.target_offsets + np.uint64(here.address),
                pieces.sizes,
            ),
            source.device,
            here.device,
        )

    def _where(self, region: str) -> MappedPages:
        if region not in self._mapped:
            raise TransferFailed(f"region {region!r} of {self.peer} is not mapped here")
        return self._mapped[region]

    def _copy(self, copies: Copies, source_device: int, target_device: int) -> Attempt:
        copier, stream = self._copier_for(source_device, target_device)
        try:
            ticket = copier.submit(copies, direction_of(source_device, target_device), stream=stream)
        except ClusterError as error:
            raise TransferFailed(error.message) from error
        return TicketAttempt(ticket)
