"""Which gateways ask here, and which are gone for good. No I/O.

    unknown -(GatewayHello)-> here -(its last connection ends)-> lost -(GatewayHello)-> here
    lost -(GRACE_MS)-> unknown, told once by tick(): nobody will tell the ends of what was placed for it

A gateway that only lost its connection has its requests running and is back within a second.
"""

from collections import Counter
from dataclasses import dataclass, field

GRACE_MS = 10_000  # well beyond ALIVE_TIMEOUT_MS, after which workers end what a silent gateway asked for
TURN_COUNTS_MS = 300  # of the time between two ticks: beyond it this process stood still, as did its sockets
MAX_NAME = 64


@dataclass(slots=True)
class Gateways:
    """By connection. Bounded by the connections, and by those that ended within GRACE_MS."""

    _names: dict[bytes, str] = field(default_factory=dict)
    _num_connections: Counter[str] = field(default_factory=Counter)
    _lost: dict[str, int] = field(default_factory=dict)  # when, the longest first
    _awake_ms: int = 0  # ticks' time
    _ticked_ms: int | None = None

    def hello(self, connection: bytes, name: str) -> None:
        """Whose connection it is; the first word counts."""
        if connection not in self._names and 0 < len(name) <= MAX_NAME:
            self._names[connection] = name
            self._num_connections[name] += 1
            self._lost.pop(name, None)

    def name(self, connection: bytes) -> str:
        """ "": it has not said."""
        return self._names.get(connection, "")

    def lost(self, connection: bytes) -> None:
        """The connection has ended."""
        name = self._names.pop(connection, "")
        if not name:
            return
        self._num_connections[name] -= 1
        if not self._num_connections[name]:
            del self._num_connections[name]
            self._lost[name] = self._awake_ms

    def tick(self, *, now_ms: int) -> list[str]:
        """Gateways that are gone since the last tick."""
        last_ms, self._ticked_ms = self._ticked_ms, now_ms
        if last_ms is not None:
            self._awake_ms += min(max(0, now_ms - last_ms), TURN_COUNTS_MS)
        gone = [name for name, lost_ms in self._lost.items() if self._awake_ms - lost_ms >= GRACE_MS]
        for name in gone:
            del self._lost[name]
        return gone
