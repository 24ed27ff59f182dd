"""Transports whose "peer" is this process: its own mappings instead of descriptors from elsewhere."""

from collections.abc import Callable, Mapping

from services.mempool.mover_bounce import BounceCopier
from services.mempool.mover_engines import CopyEngine
from shared.kernels.copy_pages.copier import Copier
from shared.transfer.describe import EndDescription, decode
from shared.transfer.interface import MappedPages, PathName, Peer
from shared.transfer.quarantine import Quarantine
from shared.transfer.shm import ShmTransport

INSTANCE = "this mempool"


class OwnHostTransport(ShmTransport):
    """Host memory of spaces that this process has mapped already."""

    def _map(self, peer: Peer) -> tuple[EndDescription, Mapping[str, MappedPages], Callable[[], None]]:
        return decode(peer.description), peer.mapped, _nothing


class StagedTransport(OwnHostTransport):
    """Through pinned slots: between a GPU and host memory that is not page-locked, and between GPUs that cannot reach
    each other. The CPU's part is done on this transport's thread, so that nothing else waits for it."""

    path = PathName.STAGED

    def __init__(self, quarantine: Quarantine, engines: Mapping[int, CopyEngine]) -> None:
        """`engines`: by ordinal; they stay the caller's."""
        super().__init__(INSTANCE, quarantine=quarantine, threads=0)
        self._engines = engines
        self._bouncing: dict[tuple[int, int], BounceCopier] = {}

    def _copier_for(self, source_device: int, target_device: int) -> tuple[Copier, int]:
        if source_device < 0 or target_device < 0:
            return engine_for(self._engines, source_device, target_device)
        pair = (source_device, target_device)
        if pair not in self._bouncing:
            self._bouncing[pair] = BounceCopier(self._engines[source_device], self._engines[target_device])
        return self._bouncing[pair], 0

    def _release(self) -> None:
        for copier in self._bouncing.values():
            copier.close()


def engine_for(
    engines: Mapping[int, CopyEngine], source_device: int, target_device: int
) -> tuple[Copier, int]:
    """The GPU of the target copies; into host memory that of the source."""
    engine = engines[target_device if target_device >= 0 else source_device]
    return engine, engine.into if target_device >= 0 else engine.out


def _nothing() -> None:
    """Mappings outlive the links."""
