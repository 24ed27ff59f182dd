"""A process's own pages in its host's mempool: the process attaches like an engine, but with a quota of none.

The mempool makes the memory, on the process's device, owns it, and is the only writer of its page table. The process
gets the same descriptors as an engine's; which of the pages it may write is what it allocates (nine calls).
"""

import contextlib
from pathlib import Path

from shared.errors import InvalidRequest, ResourceError
from shared.ids import Epoch, InstanceId, SpaceId
from shared.kv.layout import LENDER, TENSORS, EngineDescription
from shared.mempool.client import MempoolClient
from shared.mempool.page_quota import PageQuota
from shared.mempool.rank_memory import RankMemory, SlabUser


def describe(instance: str, page_bytes: int, layout: str, *, only_lends: bool = False) -> EngineDescription:
    """Pages of `page_bytes`, whose content is this instance's alone. `layout`: "token-major": an allocation each."""
    return EngineDescription(
        model="", fingerprint=f"aqua {instance}", dtype="bytes", layout=layout,
        backend=LENDER if only_lends else TENSORS,
        block_tokens=1, block_bytes=page_bytes, max_model_len=1,
    )  # fmt: skip


class OwnSpace:
    """Attached from construction to close().

    Args:
        device: as in wire.Attach: "cpu:" and a name, or "cuda:" and the GPU's UUID.
        capacity_bytes: of all pages. Host memory is used as it is written, a GPU's at once.
        only_lends: nothing of its own will lie there, so that the mempool puts no host memory behind it.
    Raises: ResourceError when the mempool refuses; ClusterError when it cannot be reached; InvalidRequest when it has
        pages of this name from before, and not as many.
    """

    def __init__(
        self,
        socket: str | Path,
        instance: InstanceId,
        device: str,
        page_bytes: int,
        capacity_bytes: int,
        layout: str = "layers-blocks",
        *,
        only_lends: bool = False,
    ) -> None:
        self.instance = instance
        self.description = describe(instance, page_bytes, layout, only_lends=only_lends)
        self.memory = RankMemory(
            socket, instance, self.description, 0, device=device, capacity_bytes=capacity_bytes,
            on_bug=lambda: None,  # the process is its user's
        )  # fmt: skip
        self._engine = PageQuota(socket, instance, self.description, 0)
        try:
            self._compare(only_lends=only_lends)
            self.header = self._engine.attach()
        except BaseException:
            self.memory.close()
            raise

    def _compare(self, *, only_lends: bool) -> None:
        """Who has a name first decides how many pages its space has, as long as it is there. A lender may use less."""
        found, asked = self.memory.header.num_pages, self.memory.asked_pages
        if asked and (found < asked or (found > asked and not only_lends)):
            raise InvalidRequest(
                f"{asked} pages were asked for, and the mempool has {found} of {self.memory.header.page_bytes} bytes "
                f"under the name {self.instance!r} since it was first used: choose another name, or ask for as many"
            )

    @property
    def boot_generation(self) -> Epoch:
        """Of the mempool."""
        return Epoch(self.header.boot_generation)

    @property
    def num_pages(self) -> int:
        """Of the space."""
        return self.header.num_pages

    @property
    def page_bytes(self) -> int:
        """The mempool's: what was asked for, rounded up."""
        return self.header.page_bytes

    async def number(self, client: MempoolClient) -> SpaceId | None:
        """Of the space in its mempool; None while the mempool does not answer."""
        status = await client.status()
        for space in status.spaces if status is not None else ():
            if space.content_key == self.description.content_key and space.engines:
                return SpaceId(space.number)
        return None

    def let_memory_go(self) -> None:
        """This process maps none of the pages: the mempool may give their memory back to the device at any time."""
        self.memory.stay_attached(_MapsNothing())

    def come_back(self) -> None:
        """Behind let_memory_go(), once: a successor of the mempool hears that this process touches no page. Nothing
        happens when none is there, or it has not the memory.
        """
        with contextlib.suppress(ResourceError):
            if self._engine.reattach(None) and self._engine.header is not None:
                self.header = self._engine.header

    def close(self) -> None:
        """The mempool drops the pages when this process has ended."""
        self._engine.close()
        self.memory.close()


class _MapsNothing(SlabUser):
    def unmap(self, slabs: object, bytes_per_s: int = 0) -> None:
        """None is mapped."""

    def map(self, slabs: object, fds: object) -> None:
        """Their bytes are for others."""
