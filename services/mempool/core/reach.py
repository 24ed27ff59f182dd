"""Which clients know that blocks of their instance's space do not pass between hosts. No I/O.

Blocks on GPUs leave a host, and come to one, through the host memory behind them (dram.py). Where there is none each
hand-off and each fetch between hosts is a miss, so whoever places requests must not count on them.
"""

from collections.abc import Callable, Mapping

from services.mempool.core.actions import Action, Send
from services.mempool.core.pool import Pool
from shared.ids import InstanceId
from shared.wire.mempool_reach import HostReach


class Reach:
    """Of one mempool.

    Args:
        clients: instances of clients by their connections, a view.
        space: in which an instance's engine is, or would be.
        landing: the space in host memory through which blocks of this one pass; None: there is none.
    """

    def __init__(
        self,
        clients: Mapping[int, InstanceId],
        space: Callable[[InstanceId], Pool],
        landing: Callable[[Pool], Pool | None],
    ) -> None:
        self._clients = clients
        self._space = space
        self._landing = landing
        self._confined: set[int] = set()  # connections that were told that blocks do not pass

    def news(self, address: str) -> list[Action]:
        """After an attachment, which may bring memory: for those who do not know. Cost: O(clients).

        Args: address: where other hosts reach this mempool; "": nobody does, so nobody asks.
        """
        if not address:
            return []
        out: list[Action] = []
        for connection, instance in self._clients.items():
            crosses = self._landing(self._space(instance)) is not None
            if crosses == (connection in self._confined):
                self._confined ^= {connection}
                out.append(Send(connection, HostReach(crosses=crosses)))
        return out

    def forget(self, connection: int) -> None:
        """It closed. Unknown ones are ignored."""
        self._confined.discard(connection)
