"""Bytes of the unix channel, without sockets: cut a stream into messages, and build messages.

    [u32 total][u16 num_frames][u16 num_fds][u32 length] * num_frames [frames ...]      little-endian

`total` counts everything after itself. `num_fds` says how many of the descriptors that came with
the stream belong to this message; they ride on its first byte.
"""

import struct
from collections.abc import Iterator, Sequence

from shared.errors import PeerProtocolError
from shared.wire.codec import MAX_RAW_FRAMES

MAX_MESSAGE_BYTES = 32 << 20
MAX_FDS = 250  # the kernel passes 253 at once
_HEAD = struct.Struct("<IHH")
_MAX_FRAMES = 3 + MAX_RAW_FRAMES


def pack_message(
    frames: Sequence[bytes],
    *,
    num_fds: int = 0,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    max_fds: int = MAX_FDS,
) -> bytes:
    """One message ready to write. Raises: PeerProtocolError when it exceeds the bounds of the channel."""
    lengths = [len(frame) for frame in frames]
    total = 4 + 4 * len(frames) + sum(lengths)
    if total > max_message_bytes or len(frames) > _MAX_FRAMES or num_fds > max_fds:
        raise PeerProtocolError(
            f"message of {total} bytes, {len(frames)} frames and {num_fds} fds is too large"
        )
    head = _HEAD.pack(total, len(frames), num_fds)
    return b"".join((head, struct.pack(f"<{len(frames)}I", *lengths), *frames))


class Deframer:
    """Collects bytes of a stream and hands out whole messages. It never holds more than one message's bound
    and what one read brought."""

    def __init__(self, *, max_message_bytes: int = MAX_MESSAGE_BYTES, max_fds: int = MAX_FDS) -> None:
        self._buffer = bytearray()
        self._max_message_bytes = max_message_bytes
        self._max_fds = max_fds

    def feed(self, data: bytes) -> Iterator[tuple[list[bytes], int]]:
        """(frames, num_fds) of every message that `data` completed.

        Raises: PeerProtocolError when the stream cannot be right; it is of no use afterwards.
        """
        self._buffer += data
        while len(self._buffer) >= _HEAD.size:
            total, num_frames, num_fds = _HEAD.unpack_from(self._buffer)
            too_large = total > self._max_message_bytes or num_fds > self._max_fds
            if too_large or not 1 <= num_frames <= _MAX_FRAMES:
                raise PeerProtocolError(f"message of {total} bytes, {num_frames} frames, {num_fds} fds")
            if total < 4 + 4 * num_frames:
                raise PeerProtocolError(f"{num_frames} frames do not fit in {total} bytes")
            if len(self._buffer) < 4 + total:
                return
            yield self._take(total, num_frames), num_fds

    def _take(self, total: int, num_frames: int) -> list[bytes]:
        lengths = struct.unpack_from(f"<{num_frames}I", self._buffer, _HEAD.size)
        start = _HEAD.size + 4 * num_frames
        if start + sum(lengths) != 4 + total:
            raise PeerProtocolError(f"frame lengths {lengths} do not add up to {total} bytes")
        frames = []
        for length in lengths:
            frames.append(bytes(self._buffer[start : start + length]))
            start += length
        del self._buffer[: 4 + total]
        return frames
