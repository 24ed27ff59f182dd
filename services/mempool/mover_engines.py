"""One GPU's copy engines behind the Copier interface: page-locked host memory directly, other by pinned slots."""

from services.mempool.mover_gpu import Gpu
from shared.kernels.copy_pages.copier import DEFAULT_TIMEOUT_S
from shared.kernels.copy_pages.copies import Copies, Direction, Order
from shared.kernels.copy_pages.cuda_copier import CudaCopier, Ticket
from shared.kernels.copy_pages.plan import Always, Choice, Method
from shared.transfer.page_stream import PageStream

LANES = 4  # streams of one set: one copy engine alone reaches a third of NVLink's rate


class PinnedRanges:
    """Host addresses that are page-locked. Read by any thread, changed by one."""

    def __init__(self) -> None:
        self._ranges: tuple[tuple[int, int], ...] = ()  # (first, end), sorted, never touching each other

    def add(self, first: int, num_bytes: int) -> None:
        """From now on copy engines read and write there."""
        merged: list[tuple[int, int]] = []
        for begin, end in sorted((*self._ranges, (first, first + num_bytes))):
            if merged and merged[-1][1] == begin:
                begin = merged.pop()[0]
            merged.append((begin, end))
        self._ranges = tuple(merged)

    def remove(self, first: int, num_bytes: int) -> None:
        """All that was added from there on, over this length."""
        end = first + num_bytes
        parts = [((begin, min(until, first)), (max(begin, end), until)) for begin, until in self._ranges]
        self._ranges = tuple(part for both in parts for part in both if part[0] < part[1])

    @property
    def num_bytes(self) -> int:
        """All together."""
        return sum(end - begin for begin, end in self._ranges)

    def cover(self, first: int, end: int) -> bool:
        """Whether all of this is."""
        return any(begin <= first and end <= until for begin, until in self._ranges)


class CopyEngine:
    """One GPU: streams for each direction, a copier, whole pages from other GPUs. See copier.Copier for submit()."""

    def __init__(self, gpu: Gpu, pinned: PinnedRanges) -> None:
        """Raises: CopyFailed."""
        self.gpu = gpu
        self.page_stream = PageStream(gpu.copy, lanes=LANES, keeps_context=True)
        method = Method.BATCH if gpu.copy.has_batch else Method.LOOP
        self.copier = CudaCopier(gpu.copy, chooser=Always(Choice(method, LANES)))
        self.into = gpu.copy.create_stream()
        self.out = gpu.copy.create_stream()
        self._pinned = pinned

    def submit(
        self,
        copies: Copies,
        direction: Direction,
        *,
        stream: int,
        order: Order = Order.STREAM,
        staging: bool = False,
        kernels: bool = False,
    ) -> Ticket:
        """See copier.Copier. Pages are leased or granted to the copy, so staging is right where it is needed. Copy
        engines alone copy: a kernel of this process would wait for the engine's to end, and hold them up."""
        if direction in (Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST) and not self._is_pinned(
            copies, direction
        ):
            choice = Always(Choice(Method.STAGED))
            return self.copier.submit(
                copies, direction, stream=stream, order=order, staging=True, chooser=choice
            )
        return self.copier.submit(copies, direction, stream=stream, order=order, staging=staging)

    def _is_pinned(self, copies: Copies, direction: Direction) -> bool:
        host = copies.sources if direction is Direction.HOST_TO_DEVICE else copies.targets
        return self._pinned.cover(int(host.min()), int((host + copies.sizes).max()))

    def close(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """When nothing is in flight."""
        self.copier.close(timeout_s)
        self.page_stream.close()
        self.gpu.copy.make_current()
        self.gpu.copy.destroy_stream(self.into)
        self.gpu.copy.destroy_stream(self.out)
