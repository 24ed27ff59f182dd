"""GPU to GPU in a fixed pair, by NCCL: one operation a page, a transfer's pages in one group, a stream of its own.

MemServe sends one call a block (section 7) and pays for it (Figure 11); grouped, 2 MiB pages reach 67 GB/s, call by
call 47, and 32 KiB blocks 1.5 and 0.6 (facts.md). Imported pages are five times as fast: this path is for GPUs that
cannot map each other, and for the comparison.

NCCL has no addresses of the other end and no order but that of calls. So a pull asks the source (served.py), which
posts its sends and answers; the puller posts its receives in the order of the answers. Each direction has a
communicator of its own, and nothing else uses them. A communicator cannot forget one operation: after a deadline it
is aborted, and with it the link; the owner connects again or takes another path.
"""

from collections import deque
from typing import Any

import msgspec

from shared.errors import ClusterError, PeerProtocolError
from shared.kernels.copy_pages.driver import CopyDriver
from shared.transfer.describe import EndDescription, RegionDescription, decode
from shared.transfer.errors import PathUnavailable, TransferFailed
from shared.transfer.interface import PathName, Peer, Region, RegionKind
from shared.transfer.link import BaseLink
from shared.transfer.nccl_library import ID_BYTES, NcclLibrary
from shared.transfer.pieces import Pieces
from shared.transfer.provider import BaseTransport
from shared.transfer.quarantine import Quarantine
from shared.transfer.served import Answer, Ask, AskedAttempt, Cancel
from shared.transfer.served_link import MaySend, Sending, ServedLink
from shared.transfer.transfer_job import Attempt
from shared.wire.codec import MALFORMED


class NcclEnd(msgspec.Struct, frozen=True):
    """The payload: the ids of the two communicators, made by the end whose instance sorts first; b"" of the other."""

    first_pulls: bytes = b""
    second_pulls: bytes = b""


class Sends:
    """A group of sends. The bytes flow when the puller posts its receives."""

    def __init__(self, link: "NcclLink", buffers: list[tuple[int, int]]) -> None:
        self._link = link
        self._buffers = buffers
        self._posted = False
        self.over = False

    def poll(self) -> bool:
        """See served_link.Sending: posted is enough, the puller's lease keeps the source pages until it is done."""
        self.over = True  # whatever raises below has ended the pair, and that sends nothing
        if not self._posted:
            self._posted = self._link.post_sends(self, self._buffers)
            self.over = False
            return False
        self.over = self._link.sends_accepted(self)
        return self.over


class NcclPull:
    """Ask, post the receives, wait for their event; see link.Attempt."""

    def __init__(self, link: "NcclLink", asked: AskedAttempt, buffers: list[tuple[int, int]]) -> None:
        self._link = link
        self._asked = asked
        self._buffers = buffers
        self._event = 0

    def poll(self) -> bool:
        """See link.Attempt."""
        if not self._event:
            if not self._asked.poll():
                return False
            self._event = self._link.post_receives(self._asked.number, self._buffers)
            return False
        if not self._link.passed(self._event):
            return False
        self._link.give_event(self._event)
        self._event = 0
        return True

    def cancel(self, *, peer_is_dead: bool) -> bool:
        """The receives cannot be taken back: abort, then wait until the stream is idle."""
        if self._asked.answer is not None and self._asked.answer.outcome == "refused":
            return True  # nothing was posted, here or there
        self._link.break_pair("a transfer failed; NCCL can only end the pair")
        return self._link.is_idle()


class NcclLink(ServedLink):
    """One pair. Lost for good after the first failure."""

    path = PathName.NCCL

    def __init__(
        self, library: NcclLibrary, driver: CopyDriver, comms: tuple[int, int], **common: Any
    ) -> None:
        """`comms`: the communicator of my pulls, that of the peer's pulls; owned by the link."""
        super().__init__(**common)
        self._library = library
        self._driver = driver
        self._pulls, self._serves_on = comms
        driver.make_current()
        self._stream, self._send_stream = driver.create_stream(), driver.create_stream()
        self._idle_event = driver.create_event()
        self._idle_recorded = False
        self._events: list[int] = []
        self._behind: set[int] = set()  # events that are recorded behind their receives
        self._unsent: deque[Sends] = deque()  # in the order of the questions; the first may be posted already
        self._turns: deque[int] = (
            deque()
        )  # answered pulls whose receives are not posted, in the order of answers

    def _begin(self, source: RegionDescription, target: Region, pieces: Pieces, deadline_s: float) -> Attempt:
        buffers = _buffers(target.address, pieces.target_offsets.tolist(), pieces.sizes.tolist())
        return NcclPull(self, self.ask(source.name, target.name, pieces, deadline_s), buffers)

    def _send_pieces(self, number: int, mine: Region, theirs: RegionDescription, pieces: Pieces) -> Sending:
        sends = Sends(self, _buffers(mine.address, pieces.source_offsets.tolist(), pieces.sizes.tolist()))
        self._unsent.append(sends)
        return sends

    def _handle(self, message: Ask | Cancel | Answer) -> None:
        if isinstance(message, Answer) and message.outcome == "sent":
            self._turns.append(message.transfer)
        super()._handle(message)

    def post_sends(self, sends: Sends, buffers: list[tuple[int, int]]) -> bool:
        """When it is their turn and the communicator takes calls. Raises: TransferError."""
        if self._unsent[0] is not sends or not self._library.ready(self._serves_on):
            return False
        self._driver.make_current()
        self._library.send(self._serves_on, buffers, self._send_stream)
        return True

    def sends_accepted(self, sends: Sends) -> bool:
        """Whether this group of sends is on the stream. Raises: TransferFailed.

        Only then the next group is posted: "ready" is the communicator's, so with two groups in progress the later one
        could be answered first, and the puller would receive one group's bytes as the other's.
        """
        assert self._unsent[0] is sends
        if not self._library.ready(self._serves_on):
            return False
        self._unsent.popleft()
        return True

    def post_receives(self, number: int, buffers: list[tuple[int, int]]) -> int:
        """When it is their turn: the event behind them; else 0. Raises: TransferError."""
        if self._turns[0] != number or not self._library.ready(self._pulls):
            return 0
        self._turns.popleft()
        self._driver.make_current()
        self._library.receive(self._pulls, buffers, self._stream)
        return self._events.pop() if self._events else self._driver.create_event()

    def passed(self, event: int) -> bool:
        """Whether the receives before this event are done. Raises: TransferFailed when the communicator broke."""
        if not self._library.ready(self._pulls):
            return False  # the receives are not on the stream yet, and so cannot be the event
        try:
            self._driver.make_current()
            if event not in self._behind:
                self._driver.record(event, self._stream)
                self._behind.add(event)
            return self._driver.passed(event)
        except ClusterError as error:
            raise TransferFailed(error.message) from error

    def give_event(self, event: int) -> None:
        """For the next transfer."""
        self._behind.discard(event)
        self._events.append(event)

    def break_pair(self, reason: str) -> None:
        """Abort both communicators. On the thread; once."""
        self.peer_lost(reason)
        self._cut()

    def is_idle(self) -> bool:
        """Whether nothing of this link runs on the GPU any more."""
        try:
            self._driver.make_current()
            if not self._idle_recorded:
                self._driver.record(self._idle_event, self._stream)
                self._idle_recorded = True
            return self._driver.passed(self._idle_event)
        except ClusterError:
            return False

    def _disconnect(self) -> None:
        for comm in (self._pulls, self._serves_on):
            self._library.abort(comm)


class NcclTransport(BaseTransport):
    """See interface.Transport. For one peer: describe() makes ids for one pair."""

    path = PathName.NCCL

    def __init__(
        self,
        instance: str,
        library: NcclLibrary,
        driver: CopyDriver,
        *,
        quarantine: Quarantine | None = None,
        may_send: MaySend = lambda region, pages: True,
    ) -> None:
        """`driver` of the GPU that all regions are on; it stays the caller's."""
        super().__init__(instance, quarantine=quarantine)
        self._library = library
        self._driver = driver
        self._may_send = may_send
        self._ids: NcclEnd | None = None

    def register(self, region: Region) -> None:
        """See interface.Transport."""
        if region.kind is RegionKind.HOST:
            raise PathUnavailable("NCCL moves GPU memory only")
        super().register(region)

    def _payload(self) -> bytes | None:
        if self._ids is None:
            self._ids = NcclEnd(self._library.unique_id(), self._library.unique_id())
        return msgspec.msgpack.encode(self._ids)

    def _open(self, peer: Peer) -> BaseLink:
        end = decode(peer.description)
        if end.instance == self.instance:
            raise PeerProtocolError(f"both ends of a pair are called {self.instance!r}")
        first = self.instance < end.instance
        ids = self._ids if first else _ids_of(end)
        if ids is None:
            raise PathUnavailable("describe() comes before connect(): it makes the pair's ids")
        rank = 0 if first else 1
        return self._thread.call(lambda: self._join(peer, end, ids, rank)).result()

    def _join(self, peer: Peer, end: EndDescription, ids: NcclEnd, rank: int) -> NcclLink:
        self._driver.make_current()
        opened = (self._library.open(ids.first_pulls, rank), self._library.open(ids.second_pulls, rank))
        return NcclLink(
            self._library,
            self._driver,
            opened if rank == 0 else (opened[1], opened[0]),
            channel=peer.channel,
            may_send=self._may_send,
            thread=self._thread,
            regions=self.regions,
            peer=end,
            reason="GPUs of a fixed pair",
            quarantine=self._quarantine,
            on_settled=peer.on_settled,
            on_lost=self._lost,
        )


def _buffers(address: int, offsets: list[int], sizes: list[int]) -> list[tuple[int, int]]:
    return [(address + offset, size) for offset, size in zip(offsets, sizes, strict=True)]


def _ids_of(end: EndDescription) -> NcclEnd:
    try:
        found = msgspec.msgpack.decode(end.payloads.get(PathName.NCCL.value, b""), type=NcclEnd)
    except MALFORMED as error:
        raise PeerProtocolError(f"bad NCCL payload of {end.instance}: {error}") from error
    if len(found.first_pulls) != ID_BYTES or len(found.second_pulls) != ID_BYTES:
        raise PeerProtocolError(f"{end.instance} sent no NCCL ids")
    return found
