"""Pages that are not mapped here, through host memory that both ends map: the owner copies out, the puller copies in.

`transfer` never imports pages (importing costs 80 us each and belongs to link-up), so a page made since goes this way
until the import has happened. Each end has a staging region of slots (a sealed memfd) that the other maps.

A failed pull holds slots, not target pages: the owner writes only to slots, and a slot is lent again when it answered.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from shared.errors import ClusterError
from shared.kernels.copy_pages.copies import Copies
from shared.transfer.describe import RegionDescription
from shared.transfer.errors import PathUnavailable, TransferError, TransferFailed
from shared.transfer.interface import Channel, MappedPages, PathName, Peer, Region, RegionKind
from shared.transfer.link import BaseLink
from shared.transfer.mapped import CopierFor, TicketAttempt, direction_of
from shared.transfer.pieces import Pieces
from shared.transfer.served import AskedAttempt
from shared.transfer.served_link import MaySend, Sending, ServedLink
from shared.transfer.shm import ShmTransport
from shared.transfer.transfer_job import Attempt

MAX_ROUND = 64  # slots of one question: 128 MiB of 2 MiB pages


class StagedPull:
    """Rounds of: ask for some pieces into slots, wait, copy the slots to their targets; see link.Attempt."""

    def __init__(
        self, link: "StagedLink", source: str, target: Region, pieces: Pieces, deadline_s: float
    ) -> None:
        self._link = link
        self._source = source
        self._target = target
        self._pieces = pieces
        self._deadline_s = deadline_s
        self._next = 0  # first piece that nobody was asked for
        self._round: tuple[int, list[int]] = (0, [])  # first piece and slots of the round under way
        self._asked: AskedAttempt | None = None
        self._copying: Sending | None = None

    def poll(self) -> bool:
        """See link.Attempt."""
        if self._copying is not None:
            if not self._copying.poll():
                return False
            self._copying = None
            self._give_slots_back()
        if self._asked is not None:
            if not self._asked.poll():
                return False
            self._asked = None
            self._copying = self._link.copy_in(self._target, self._pieces, *self._round)
            return False
        if self._next == len(self._pieces):
            return True
        self._ask_round()
        return False

    def cancel(self, *, peer_is_dead: bool) -> bool:
        """See link.Attempt: only a copy into the target pages has to end; slots wait for the owner's answer."""
        if self._asked is not None:
            if not self._asked.cancel(peer_is_dead=peer_is_dead):
                self._link.lend_until_answered(self._asked, self._round[1])
            else:
                self._give_slots_back()
            self._asked, self._round = None, (0, [])
        if self._copying is None:
            self._give_slots_back()  # of a round whose copy out of them was refused
            return True
        try:
            done = self._copying.poll()
        except TransferError:
            done = self._copying.over
        if done:
            self._give_slots_back()
            self._copying = None
        return done

    def _ask_round(self) -> None:
        slots = self._link.take_slots(min(MAX_ROUND, len(self._pieces) - self._next))
        if not slots:
            return  # all lent: ask again in the next round of the thread
        first, self._next = self._next, self._next + len(slots)
        self._round = (first, slots)
        try:
            self._asked = self._link.ask_into_slots(
                self._source, self._pieces, first, slots, self._deadline_s
            )
        except TransferError:
            self._give_slots_back()
            raise

    def _give_slots_back(self) -> None:
        self._link.give_slots(self._round[1])
        self._round = (self._round[0], [])


class StagedLink(ServedLink):
    """One peer whose staging region is mapped here, and that maps ours."""

    path = PathName.STAGED

    def __init__(
        self,
        *,
        staging: Region,
        theirs: Mapping[str, MappedPages],
        copier_for: CopierFor,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self._staging = staging
        self._their_staging = theirs
        self._copier_for = copier_for
        self._free = deque(range(staging.num_pages))
        self._lent: list[tuple[AskedAttempt, list[int]]] = []

    def _begin(self, source: RegionDescription, target: Region, pieces: Pieces, deadline_s: float) -> Attempt:
        if len(pieces) and int(pieces.sizes.max()) > self._staging.page_bytes:
            raise TransferFailed(f"a piece is larger than a staging slot of {self._staging.page_bytes} bytes")
        return StagedPull(self, source.name, target, pieces, deadline_s)

    def take_slots(self, wanted: int) -> list[int]:
        """Up to that many; first those come back whose question has been answered late."""
        still = []
        for asked, slots in self._lent:
            if asked.answer is not None or self.is_dead:
                self._free.extend(slots)
            else:
                still.append((asked, slots))
        self._lent = still
        return [self._free.popleft() for _ in range(min(wanted, len(self._free)))]

    def give_slots(self, slots: list[int]) -> None:
        """Nobody writes to them any more."""
        self._free.extend(slots)

    def lend_until_answered(self, asked: AskedAttempt, slots: list[int]) -> None:
        """The pull failed and the owner may still write to them."""
        self._lent.append((asked, slots))

    def ask_into_slots(
        self, source: str, pieces: Pieces, first: int, slots: list[int], deadline_s: float
    ) -> AskedAttempt:
        """One round's question."""
        last = first + len(slots)
        targets = np.asarray(slots, np.uint64) * np.uint64(self._staging.page_bytes)
        part = Pieces(pieces.source_offsets[first:last], targets, pieces.sizes[first:last])
        return self.ask(source, self._staging.name, part, deadline_s)

    def copy_in(self, target: Region, pieces: Pieces, first: int, slots: list[int]) -> Sending:
        """The slots of one round to their targets."""
        last = first + len(slots)
        sources = np.asarray(slots, np.uint64) * np.uint64(self._staging.page_bytes)
        return self._copy(
            Copies(
                sources + np.uint64(self._staging.address),
                pieces.target_offsets[first:last] + np.uint64(target.address),
                pieces.sizes[first:last],
            ),
            -1,
            target.device,
        )

    def _send_pieces(self, number: int, mine: Region, theirs: RegionDescription, pieces: Pieces) -> Sending:
        """The owner's side: my pages into the puller's slots."""
        if theirs.name not in self._their_staging:
            raise TransferFailed(f"{theirs.name!r} of {self.peer} is no staging region that is mapped here")
        slots = self._their_staging[theirs.name]
        return self._copy(
            Copies(
                pieces.source_offsets + np.uint64(mine.address),
                pieces.target_offsets + np.uint64(slots.address),
                pieces.sizes,
            ),
            mine.device,
            -1,
        )

    def _copy(self, copies: Copies, source_device: int, target_device: int) -> TicketAttempt:
        copier, stream = self._copier_for(source_device, target_device)
        try:
            ticket = copier.submit(copies, direction_of(source_device, target_device), stream=stream)
        except ClusterError as error:
            if getattr(error, "running", False):  # a part of it runs: it is one that never ends
                return TicketAttempt(_Refused(error))
            raise TransferFailed(error.message) from error
        return TicketAttempt(ticket)


class _Refused:
    """A set that the driver refused behind its first copies; see mapped.Ticket."""

    def __init__(self, error: ClusterError) -> None:
        self._error = error

    def done(self) -> bool:
        """See mapped.Ticket."""
        raise self._error


class StagedTransport(ShmTransport):
    """See interface.Transport. The staging region is one host region among those that are registered."""

    path = PathName.STAGED

    def __init__(
        self,
        instance: str,
        staging: Region,
        *,
        copier_for: CopierFor | None = None,
        may_send: MaySend = lambda region, pages: True,
        **shm: Any,
    ) -> None:
        """`copier_for` copies between regions and host memory; without it the CPU does, for host regions only."""
        super().__init__(instance, push=True, **shm)
        if staging.kind is not RegionKind.HOST:
            raise PathUnavailable("a staging region is host memory")
        self._staging = staging
        self._copies = copier_for or self._copier_for
        self._may_send = may_send
        self.register(staging)

    def _open(self, peer: Peer) -> BaseLink:
        end, mapped, close = self._map(peer)
        return StagedLink(
            staging=self._staging,
            theirs=mapped,
            copier_for=self._copies,
            channel=_needed(peer.channel),
            may_send=self._may_send,
            thread=self._thread,
            regions=self.regions,
            peer=end,
            reason="pages not imported: through shared host memory",
            quarantine=self._quarantine,
            on_settled=peer.on_settled,
            on_lost=self._lost,
            unmap=close,
        )


def _needed(channel: Channel | None) -> Channel:
    if channel is None:
        raise PathUnavailable("the staged path needs a control channel")
    return channel
