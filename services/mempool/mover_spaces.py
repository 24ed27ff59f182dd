"""Makes and unmakes the mappings of spaces, on the mover's background thread."""

from collections.abc import Sequence

from services.mempool.mover_regions import HostRegion, MappedRegion, MappedSpace, RankRegion, map_host
from shared.errors import ClusterError
from shared.transfer.errors import PathUnavailable
from shared.transfer.reslice import KvEnd


class Mapper:
    """One per mover. One thread at a time."""

    def __init__(self) -> None:
        self._spaces: dict[int, MappedSpace] = {}

    def map(self, number: int, regions: Sequence[RankRegion], end: KvEnd | None) -> MappedSpace:
        """Raises: PathUnavailable; nothing is mapped then."""
        found: list[MappedRegion] = []
        try:
            for rank, where in enumerate(regions):
                found.append(self._map(number, rank, where))
        except ClusterError:
            for mapped in found:
                mapped.close()
            raise
        space = self._spaces[number] = MappedSpace(number, found, end)
        return space

    def _map(self, number: int, rank: int, where: RankRegion) -> MappedRegion:
        if isinstance(where, HostRegion):
            return map_host(number, rank, where)
        raise PathUnavailable(f"space {number}: pages on {where.device} cannot be mapped")

    def unmap(self, space: MappedSpace) -> None:
        """Nothing may be copying any more."""
        del self._spaces[space.number]
        space.close()

    def close(self) -> None:
        """Unmap all that is left; nothing may be copying any more."""
        for space in list(self._spaces.values()):
            self.unmap(space)
