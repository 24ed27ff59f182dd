"""A link whose pulls the source serves (served.py): both roles, the books, the bounds. A path adds how bytes go out."""

import time
from collections.abc import Callable
from typing import Any, Protocol

from shared.errors import PeerError
from shared.transfer.describe import RegionDescription
from shared.transfer.errors import TransferError, TransferFailed, TransferRefused
from shared.transfer.interface import Channel, Region
from shared.transfer.link import BaseLink
from shared.transfer.pieces import Pieces
from shared.transfer.served import (
    MAX_SERVED,
    Answer,
    Ask,
    AskedAttempt,
    Cancel,
    ask_for,
    describe_error,
    pack,
    pieces_of,
    unpack,
)

MaySend = Callable[[str, frozenset[int]], bool]  # my region, its pages: may this peer have them?


class Sending(Protocol):
    """Bytes on their way to a puller."""

    def poll(self) -> bool:
        """True when every byte is in place. Raises: TransferError when it failed."""
        ...

    @property
    def over(self) -> bool:
        """Whether nothing of it can write any more."""
        ...


class ServedPull:
    """A peer's pull that this side serves: a Job of the thread. Answers once, when it writes no more."""

    def __init__(self, link: "ServedLink", ask: Ask, sending: Sending) -> None:
        self.cancelled = False
        self._link = link
        self._ask = ask
        self._sending = sending
        self._detail = ""

    def is_failed(self) -> bool:
        """See transfer_thread.Job."""
        return False

    def step(self, now_s: float) -> bool:
        """See transfer_thread.Job."""
        try:
            if not self._sending.poll():
                return False
        except Exception as error:  # noqa: BLE001  the puller must hear of it, as of any end
            self._detail = self._detail or (
                describe_error(error) if isinstance(error, TransferError) else repr(error)
            )
            if not self._sending.over:
                return False
        outcome = "failed" if self._detail else "cancelled" if self.cancelled else "sent"
        self._link.answer(Answer(transfer=self._ask.transfer, outcome=outcome, detail=self._detail))
        return True


class ServedLink(BaseLink):
    """See interface.Link."""

    def __init__(self, *, channel: Channel | None, may_send: MaySend, **common: Any) -> None:
        super().__init__(**common)
        self._channel = channel
        self._may_send = may_send
        self._asked: dict[int, AskedAttempt] = {}  # at most MAX_IN_FLIGHT: an unanswered pull stays in flight
        self._serving: dict[int, ServedPull] = {}
        self._next = 0

    def _send_pieces(self, number: int, mine: Region, theirs: RegionDescription, pieces: Pieces) -> Sending:
        """Start to send bytes of `mine` into the peer's region, for its question of that number. On the thread.

        Raises: TransferError.
        """
        raise TransferFailed(f"path {self.path} serves no pulls")

    def ask(self, source: str, target: str, pieces: Pieces, deadline_s: float) -> AskedAttempt:
        """Ask the source for these pieces. On the thread. Raises: PeerLost, TransferFailed without a channel."""
        if self._channel is None:
            raise TransferFailed("no control channel to ask the source on")
        self._next += 1
        timeout_ms = int((deadline_s - time.monotonic()) * 1000)
        asked = AskedAttempt(self._channel, ask_for(self._next, source, target, pieces, timeout_ms))
        self._asked[self._next] = asked
        return asked

    def on_message(self, message: bytes) -> None:
        """See interface.Link."""
        found = unpack(message)
        self._thread.post(lambda: self._handle(found))

    def _handle(self, message: Ask | Cancel | Answer) -> None:
        if isinstance(message, Answer):
            asked = self._asked.pop(message.transfer, None)
            if asked is not None:
                asked.answer = message
        elif isinstance(message, Cancel):
            serving = self._serving.get(message.transfer)
            if serving is not None:  # else it was answered already, and the puller has that answer
                serving.cancelled = True
        else:
            self._serve(message)

    def _serve(self, ask: Ask) -> None:
        try:
            sending = self._start_serving(ask)
        except (TransferError, TransferRefused) as error:
            outcome = "refused" if isinstance(error, TransferRefused) else "failed"
            self._send(Answer(transfer=ask.transfer, outcome=outcome, detail=describe_error(error)))
            return
        job = ServedPull(self, ask, sending)
        self._serving[ask.transfer] = job
        if not job.step(time.monotonic()):
            self._thread.add(job)

    def _start_serving(self, ask: Ask) -> Sending:
        if self.lost_reason is not None:
            raise TransferFailed(f"this end is lost: {self.lost_reason}")
        if len(self._serving) >= MAX_SERVED or ask.transfer in self._serving:
            raise TransferRefused(f"{len(self._serving)} pulls of {self.peer} wait here already")
        mine, theirs = self._mine(ask.source), self._theirs(ask.target)
        pieces = pieces_of(ask)
        pieces.check(mine.num_bytes, theirs.num_bytes)
        if not self._may_send(mine.name, pieces.source_pages(mine.page_bytes)):
            raise TransferRefused("some of these pages are not leased to this peer")
        return self._send_pieces(ask.transfer, mine, theirs, pieces)

    def answer(self, answer: Answer) -> None:
        """Of a pull that was served and is over: only that strikes it from the books. A question that is refused
        never was in them, and may have the number of one that runs."""
        self._serving.pop(answer.transfer, None)
        self.unmap_if_unused()
        self._send(answer)

    def _send(self, answer: Answer) -> None:
        """To the puller; a puller that is gone needs none."""
        if self._channel is None or self.is_cut:
            return
        try:
            self._channel.send(pack(answer))
        except PeerError as error:
            self.peer_lost(error.message)

    def _serves(self) -> bool:
        return bool(self._serving)
