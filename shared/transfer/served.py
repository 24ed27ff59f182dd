"""Pulls that the source serves: the puller asks, naming its target pages (that is the grant), the source sends.

Used where reading from afar is slow or impossible: UCX over TCP reads at a tenth of what it writes, cuda_ipc reads
are off without NVLink, ucxx has no one-sided operation, and pages that are not imported need a copy by their owner.

    puller                       source
    Ask ------------------------> validates, sends
        <------------- bytes ---
        <----------------------- Answer(ok | why not)
    deadline: Cancel -----------> Answer(cancelled) once it writes no more

Until an Answer comes or the source is proven dead, the target pages of a failed pull stay quarantined.
"""

from typing import Literal, TypeAlias

import msgspec
import numpy as np

from shared.errors import PeerError, PeerProtocolError
from shared.transfer.errors import PeerLost, TransferError, TransferFailed, TransferRefused
from shared.transfer.interface import MAX_MESSAGE_BYTES, MAX_PIECES, Channel
from shared.transfer.pieces import Pieces
from shared.wire.codec import MALFORMED

MAX_SERVED = 256  # pulls that one peer may have waiting here


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag="ask"):
    """puller -> source. Columns are raw little-endian u64."""

    transfer: int
    source: str
    target: str
    source_offsets: bytes
    target_offsets: bytes
    sizes: bytes
    timeout_ms: int


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """puller -> source: stop, and answer when nothing of it can write any more."""

    transfer: int


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """source -> puller: this transfer writes no more. `data`: what the path needs (staging slots)."""

    transfer: int
    outcome: Literal["sent", "refused", "failed", "cancelled"]
    detail: str = ""
    data: bytes = b""


Message: TypeAlias = Ask | Cancel | Answer
_decoder = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> bytes:
    """For the channel."""
    return msgspec.msgpack.encode(message)


def unpack(raw: bytes) -> Message:
    """Raises: PeerProtocolError on anything pack() cannot have made."""
    if len(raw) > MAX_MESSAGE_BYTES:
        raise PeerProtocolError(f"a transfer message of {len(raw)} bytes; at most {MAX_MESSAGE_BYTES}")
    try:
        return _decoder.decode(raw)
    except MALFORMED as error:
        raise PeerProtocolError(f"bad transfer message: {error}") from error


def ask_for(transfer: int, source: str, target: str, pieces: Pieces, timeout_ms: int) -> Ask:
    """The question for these pieces."""
    return Ask(
        transfer=transfer,
        source=source,
        target=target,
        source_offsets=pieces.source_offsets.tobytes(),
        target_offsets=pieces.target_offsets.tobytes(),
        sizes=pieces.sizes.tobytes(),
        timeout_ms=max(1, timeout_ms),
    )


def pieces_of(ask: Ask) -> Pieces:
    """Raises: TransferRefused on columns of unequal or too great length."""
    if len(ask.sizes) % 8 or not len(ask.sizes) == len(ask.source_offsets) == len(ask.target_offsets):
        raise TransferRefused("columns of unequal length")
    if len(ask.sizes) > 8 * MAX_PIECES:
        raise TransferRefused(f"{len(ask.sizes) // 8} pieces; at most {MAX_PIECES}")
    columns = (np.frombuffer(raw, "<u8") for raw in (ask.source_offsets, ask.target_offsets, ask.sizes))
    return Pieces(*columns)


class AskedAttempt:
    """The puller's side of one served pull; see link.Attempt. The link hands it the Answer."""

    def __init__(self, channel: Channel, ask: Ask) -> None:
        """Raises: PeerLost when the channel is gone; then nobody was asked."""
        self.answer: Answer | None = None
        self._channel = channel
        self._ask = ask
        self._cancelled = False
        try:
            channel.send(pack(ask))
        except PeerError as error:
            raise PeerLost(f"the control channel is gone: {error}") from error

    @property
    def number(self) -> int:
        """Which of the link's questions this is."""
        return self._ask.transfer

    def poll(self) -> bool:
        """See link.Attempt."""
        if self.answer is None:
            return False
        if self.answer.outcome == "sent":
            return True
        raise TransferFailed(f"the source {self.answer.outcome} it: {self.answer.detail or 'no detail'}")

    def cancel(self, *, peer_is_dead: bool) -> bool:
        """See link.Attempt. A living source must answer; a dead one writes no more once the path is cut."""
        if self.answer is not None or peer_is_dead:
            return True
        if not self._cancelled:
            self._cancelled = True
            try:
                self._channel.send(pack(Cancel(transfer=self._ask.transfer)))
            except PeerError:
                return False  # only proof of death can settle it now
        return False


def describe_error(error: TransferError | TransferRefused) -> str:
    """For Answer.detail."""
    return f"{error.code}: {error.message}"[:500]
