"""Changes of an engine's prefix cache, from the engine core's process to the worker's front.

A ZeroMQ PUSH/PULL pair on a unix socket of this worker. The events are hints for the prompt tree, so a front
that does not keep up loses some instead of slowing the engine; after such a gap it is told everything anew.
"""

from collections.abc import Callable

import msgspec
import zmq

from shared.engine.interface import CacheEvent
from shared.ids import BlockHash
from shared.kv.block_hash import split_hashes

HIGH_WATER_EVENTS = 4096
BLOCKS_PER_EVENT = 1024  # when everything is told
_KINDS = ("stored", "removed", "cleared")


class CacheEventSender:
    """In the engine core's process. Cost: a dictionary entry per cached block, to tell all of them after a gap."""

    def __init__(self, address: str, high_water_events: int = HIGH_WATER_EVENTS) -> None:
        self._socket = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, high_water_events)
        self._socket.connect(address)
        self._held: dict[BlockHash, None] = {}  # a set that keeps its order
        self._has_gap = False
        self.dropped = 0

    def send(self, kind: str, hashes: list[BlockHash]) -> None:
        """Never blocks; drops when the front does not keep up."""
        if not hashes and kind != "cleared":
            return
        if kind == "stored":
            self._held.update(dict.fromkeys(hashes))
        elif kind == "removed":
            for block_hash in hashes:
                self._held.pop(block_hash, None)
        else:
            self._held.clear()
        if self._has_gap:
            self._has_gap = not self._tell_all()
        else:
            self._has_gap = not self._try(kind, hashes)
        self.dropped += self._has_gap

    def _tell_all(self) -> bool:
        held = list(self._held)
        return self._try("cleared", []) and all(
            self._try("stored", held[begin : begin + BLOCKS_PER_EVENT])
            for begin in range(0, len(held), BLOCKS_PER_EVENT)
        )

    def _try(self, kind: str, hashes: list[BlockHash]) -> bool:
        try:
            self._socket.send(msgspec.msgpack.encode((kind, b"".join(hashes))), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Disconnects; what has not left is lost."""
        self._socket.close()


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
