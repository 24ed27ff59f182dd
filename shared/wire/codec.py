"""Frames of the control plane: [schema][seq, 8 B big-endian][msgpack body][raw frames ...].

Bodies are frozen, tagged msgspec structs; bulk data (token ids, page lists, hashes) travels as raw extra
frames. Nothing from a socket is unpickled. New fields get defaults and none changes its type, so
that neighbours of different versions understand each other; golden bytes in tests/ hold that.
"""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from shared.errors import PeerProtocolError

MAX_BODY_BYTES = 32 << 20
MAX_MESSAGE_BYTES = MAX_BODY_BYTES + (
    16 << 20
)  # with its raw frames: the longest prompt's token ids are 8 MiB
MAX_RAW_FRAMES = 8

# what msgspec raises on bytes that are nothing it writes: it lets bad UTF-8 through as it is, and gives up where arrays
# are nested a thousand deep
MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

T = TypeVar("T")


class Channel(Generic[T]):
    """Encoder and decoder of one channel's union of messages.

    Args: schema: name and version, e.g. b"quire.requests/1"; body: the union type.
    """

    def __init__(self, schema: bytes, body: Any) -> None:
        self.schema = schema
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(body)

    def pack(self, message: T, *, seq: int = 0, raw: Sequence[bytes] = ()) -> list[bytes]:
        """Frames of a message, ready for send_multipart."""
        return [self.schema, seq.to_bytes(8, "big"), self._encoder.encode(message), *raw]

    def unpack(self, frames: Sequence[bytes]) -> tuple[int, T, list[bytes]]:
        """Inverse of pack: (seq, message, raw frames).

        Raises: PeerProtocolError on anything that pack() cannot have made.
        """
        if not 3 <= len(frames) <= 3 + MAX_RAW_FRAMES:
            raise PeerProtocolError(f"{len(frames)} frames")
        schema, seq, body = frames[0], frames[1], frames[2]
        if schema != self.schema:
            raise PeerProtocolError(f"want schema {self.schema!r}, got {bytes(schema[:40])!r}")
        if len(seq) != 8 or len(body) > MAX_BODY_BYTES:
            raise PeerProtocolError(f"seq of {len(seq)} bytes, body of {len(body)} bytes")
        try:
            return int.from_bytes(seq, "big"), self._decoder.decode(body), list(frames[3:])
        except MALFORMED as error:
            raise PeerProtocolError(f"bad body on {self.schema.decode()}: {error}") from error
