"""ZeroMQ's wire protocol (ZMTP 3.1, mechanism NULL), without sockets: frames to bytes, bytes to messages.

    greeting [64 B], then on both sides: READY command, then messages and PING/PONG commands
    frame: [flags][length, 1 or 8 B big-endian][bytes]; a message is frames with MORE, then one without

Spoken with libzmq 4.x, which the tests hold against it. Source: ZeroMQ RFC 37/ZMTP.
"""

from collections.abc import Sequence

from shared.errors import PeerProtocolError

GREETING = b"\xff" + bytes(7) + b"\x01\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
GREETING_BYTES = 64
MAX_COMMAND_BYTES = 4_096
MORE, LONG, COMMAND = 1, 2, 4
_SIGNATURE = slice(0, 10)
_PING, _PONG, _READY = b"\x04PING", b"\x04PONG", b"\x05READY"
_PING_CONTEXT = 7  # a PING's name and its u16 time to live stand before the context, which the PONG repeats
_SMALL = 4_096  # a read of fewer bytes is no object of its own while its frame is not whole
_JOINED = 65_536  # bytes of small reads in one object, about
_SHORT = [[bytes((flags, length)) for length in range(256)] for flags in (0, MORE)]


def encode(frames: Sequence[bytes]) -> list[bytes]:
    """A message as pieces to be written one after the other. Cost: about 0.3 us a frame."""
    out: list[bytes] = []
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        length = len(frame)
        if length < 256:
            out.append(_SHORT[index != last][length])
        else:
            out.append(bytes((LONG | (index != last),)) + length.to_bytes(8, "big"))
        out.append(frame)
    return out


def _command(body: bytes) -> bytes:
    assert len(body) < 256, "our own commands are short"
    return bytes((COMMAND, len(body))) + body


def ready(socket_type: bytes) -> bytes:
    """The command that ends a handshake: what kind of socket this is; no identity of its own."""
    pairs = ((b"Socket-Type", socket_type), (b"Identity", b""))
    return _command(_READY + b"".join(bytes((len(k),)) + k + len(v).to_bytes(4, "big") + v for k, v in pairs))


def ping(ttl_ms: int) -> bytes:
    """Asks for a PONG; the peer may give the connection up after `ttl_ms` without any bytes."""
    return _command(_PING + (ttl_ms // 100).to_bytes(2, "big"))


def pong_for(command: bytes) -> bytes | None:
    """The answer to a command's body: a PONG to a PING, else none. Raises: PeerProtocolError."""
    if not command.startswith(_PING):
        return None
    context = command[_PING_CONTEXT:]
    if len(command) < _PING_CONTEXT or len(context) > 16:
        raise PeerProtocolError(f"PING of {len(command)} bytes")
    return _command(_PONG + context)


def check_greeting(greeting: bytes) -> None:
    """Takes the beginning of a greeting, too. Raises: PeerProtocolError unless it can be one of ZMTP 3, NULL."""
    length = len(greeting)
    if greeting[:1] != b"\xff"[:length] or (length > 9 and not greeting[9] & 1):
        raise PeerProtocolError("the peer does not speak ZeroMQ")
    if length > 10 and greeting[10] < 3:
        raise PeerProtocolError(f"ZMTP {greeting[10]} is too old")
    if length >= 32 and greeting[12:32] != GREETING[12:32]:
        raise PeerProtocolError(f"mechanism {greeting[12:32].rstrip(bytes(1))!r}")


def socket_type_of(command: bytes) -> bytes:
    """Socket type that a READY command names. Raises: PeerProtocolError when it is none or names none."""
    if not command.startswith(_READY):
        raise PeerProtocolError(f"want READY, got {command[:16]!r}")
    at = len(_READY)
    while at < len(command):
        name_end = at + 1 + command[at]
        value = name_end + 4
        end = value + int.from_bytes(command[name_end:value], "big")
        if end > len(command):
            raise PeerProtocolError("READY is cut off")
        if command[at + 1 : name_end].lower() == b"socket-type":
            return command[value:end]
        at = end
    raise PeerProtocolError("READY names no socket type")


class Reader:
    """Bytes after the greeting, as they come, to commands and messages.

    Args:
        max_frame_bytes: a longer frame breaks the connection.
        max_message_bytes: so does a message whose long frames (of 256 bytes and more) are more together.
        max_frames: of a message, the rest is dropped.
    """

    __slots__ = (
        "_data", "_frames", "_long_bytes", "_max_frame_bytes", "_max_frames", "_max_message_bytes", "_missing",
        "_pieces", "_pos",
    )  # fmt: skip

    def __init__(self, *, max_frame_bytes: int, max_message_bytes: int, max_frames: int) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._max_message_bytes = max_message_bytes
        self._max_frames = max_frames
        self._long_bytes = 0  # of long frames of a message that is not whole
        self._data = b""
        self._pos = 0
        self._pieces: list[bytes | bytearray] = []  # of a frame that is not whole
        self._missing = 0  # bytes that it lacks at least
        self._frames: list[bytes] = []  # of a message that is not whole

    def feed(self, data: bytes) -> None:
        """Bytes that came; next() has returned None before."""
        if self._pieces:
            self._missing -= len(data)
            if self._missing > 0:
                self._keep(data)
                return
            self._pieces.append(data)
            data = b"".join(self._pieces)
            self._pieces = []
        elif self._pos < len(self._data):  # feed() again before next() said None
            data = self._data[self._pos :] + data
        self._data, self._pos = data, 0

    def _keep(self, data: bytes) -> None:
        """Of a frame that drips in: small reads share buffers, for an object each would take many times their bytes.
        Large ones stay as they came: they are copied once, when the frame is whole.
        """
        last = self._pieces[-1]
        if len(data) >= _SMALL:
            self._pieces.append(data)
        elif type(last) is bytearray and len(last) < _JOINED:
            last += data
        else:
            self._pieces.append(bytearray(data))

    def next(self) -> list[bytes] | bytes | None:
        """A whole message's frames, a command's body, or None until more is fed.

        Raises: PeerProtocolError when the stream cannot be right; it is of no use afterwards.
        """
        data, pos, frames = self._data, self._pos, self._frames
        size, most = len(data), self._max_frames
        while (left := size - pos) >= 2:
            flags = data[pos]
            if flags < LONG and self._max_frame_bytes > 255:  # nearly every frame: short, and of a message
                start = pos + 2
                end = start + data[pos + 1]
                if end > size:
                    return self._wait(pos, end - size)
                if len(frames) < most:
                    frames.append(data[start:end])
                pos = end
                if not flags:
                    self._pos = pos
                    self._frames = []
                    self._long_bytes = 0
                    return frames
                continue
            if flags & LONG:
                if left < 9:
                    return self._wait(pos, 9 - left)
                start = pos + 9
                length = int.from_bytes(data[pos + 1 : start], "big")
            else:
                start = pos + 2
                length = data[pos + 1]
            before = self._long_bytes
            if length > self._max_frame_bytes or before + length > self._max_message_bytes or flags > 7:
                raise PeerProtocolError(f"frame with flags {flags} and {length} bytes behind {before}")
            end = start + length
            if end > size:
                return self._wait(pos, end - size)
            frame = data[start:end]
            pos = end
            if flags & COMMAND:
                if flags & MORE or length > MAX_COMMAND_BYTES:
                    raise PeerProtocolError(f"command with flags {flags} and {length} bytes")
                self._pos = pos
                return frame
            if len(frames) < most:
                frames.append(frame)
            self._long_bytes = before + length
            if not flags & MORE:
                self._pos = pos
                self._frames = []
                self._long_bytes = 0
                return frames
        return self._wait(pos, 2 - left)

    def _wait(self, pos: int, missing: int) -> None:
        rest = self._data[pos:]
        if rest:
            self._pieces = [rest]
            self._missing = missing
        self._data, self._pos = b"", 0
