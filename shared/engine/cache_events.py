"""Changes of an engine's prefix cache, from the engine core's process to the worker's front.

A ZeroMQ PUSH/PULL pair on a unix socket of this worker. The events are hints for the prompt tree, so a front
that does not keep up loses some instead of slowing the engine.
"""

from collections.abc import Callable

import msgspec
import zmq

from shared.engine.interface import CacheEvent
from shared.ids import BlockHash
from shared.kv.block_hash import split_hashes

HIGH_WATER_EVENTS = 4096
_KINDS = ("stored", "removed", "cleared")


class CacheEventSender:
    """In the engine core's process."""

    def __init__(self, address: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_EVENTS)
        self._socket.connect(address)
        self.dropped = 0

    def send(self, kind: str, hashes: list[BlockHash]) -> None:
        """Never blocks; drops when the front does not keep up."""
        if not hashes and kind != "cleared":
            return
        try:
            self._socket.send(msgspec.msgpack.encode((kind, b"".join(hashes))), zmq.NOBLOCK)
        except zmq.Again:
            self.dropped += 1


class CacheEventReceiver:
    """In the front: calls back for every event. poll() drains what has arrived."""

    def __init__(self, address: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_EVENTS)
        self._socket.bind(address)

    def poll(self, callback: Callable[[CacheEvent], None]) -> None:
        """Deliver everything that is waiting, at most HIGH_WATER_EVENTS events."""
        for _ in range(HIGH_WATER_EVENTS):
            try:
                raw = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            kind, joined = msgspec.msgpack.decode(raw, type=tuple[str, bytes])
            if kind in _KINDS:
                callback(CacheEvent(kind, split_hashes(joined)))  # type: ignore[arg-type]

    def close(self) -> None:
        """Unbinds."""
        self._socket.close()
