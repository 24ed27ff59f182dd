"""The other process of bench_transfer.py: pages and slabs on GPU 1, served to the puller order by order."""

import mmap
import os
import socket
import sys
import traceback

from loadtest.transfer_rig import (
    EPOCH,
    FDS_PER_FRAME,
    NUM,
    SETS,
    ChannelOverWire,
    Gpu,
    OwnPages,
    Wire,
    more_descriptors,
    nccl_round,
    region,
    torch_pair,
)
from shared.ids import Epoch
from shared.kernels.copy_pages.cuda_copier import CudaCopier
from shared.kv.page import PageState, pack_word
from shared.kv.page_table import HEADER_WORDS, table_bytes
from shared.transfer.config import TransferSettings, apply_ucx_environment
from shared.transfer.imported import ImportedTransport
from shared.transfer.interface import Peer, RegionKind
from shared.transfer.nixl import NixlTransport


class Owner:
    """The process on GPU 1."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.gpu = Gpu(1)
        self.pages: OwnPages | None = None
        self.page_bytes = 0
        self.transport: NixlTransport | None = None

    def run(self) -> None:
        """Serve orders until the puller ends."""
        while True:
            (name, *arguments), _ = self.wire.receive("order", 600.0)
            if name == "end":
                return
            try:
                self.wire.send("answer", getattr(self, name.replace("-", "_"))(*arguments))
            except Exception as error:  # noqa: BLE001  the puller reports it and goes on
                traceback.print_exc()
                self.wire.send("answer", {"error": repr(error)})

    def make(self, num_handles: int, handle_bytes: int, page_bytes: int) -> float:
        """Pages, each filled with its number + 1, sealed in a page table of its own."""
        self.gpu.copy.make_current()
        self.pages = self.gpu.pages(num_handles, handle_bytes)
        self.page_bytes = page_bytes
        num_pages = num_handles * handle_bytes // page_bytes
        for page in range(num_pages):
            self.gpu.call(
                "cuMemsetD32Async", self.pages.address + page * page_bytes, page + 1, page_bytes // 4, 0
            )
        self.gpu.call("cuCtxSynchronize")
        self.table_fd = os.memfd_create("table")
        os.ftruncate(self.table_fd, table_bytes(num_pages))
        words = memoryview(mmap.mmap(self.table_fd, table_bytes(num_pages))).cast("Q")
        for page in range(num_pages):
            words[HEADER_WORDS + page] = pack_word(Epoch(EPOCH), PageState.SEALED)
        return self.pages.made_s

    def export(self) -> tuple[bytes, str]:
        """All descriptors in frames, then the description and where the page table is."""
        assert self.pages is not None
        for first in range(0, self.pages.num_handles, FDS_PER_FRAME):
            fds = self.pages.export(first)
            self.wire.send("fds", first + FDS_PER_FRAME < self.pages.num_handles, fds)
            for fd in fds:
                os.close(fd)
            more_descriptors(self.wire)
        num_pages = self.pages.num_handles * self.pages.handle_bytes // self.page_bytes
        transport = ImportedTransport("owner", lambda source, target: (CudaCopier(self.gpu.copy), 0))
        transport.register(
            region("theirs", RegionKind.CUDA_PAGES, self.pages.address, self.page_bytes, num_pages, self.gpu)
        )
        return transport.describe(), f"/proc/{os.getpid()}/fd/{self.table_fd}"

    def drop(self) -> None:
        """Release the pages."""
        assert self.pages is not None
        self.pages.close()
        self.pages = None
        os.close(self.table_fd)

    def nccl(self, port: int) -> None:
        """Send what the puller receives."""
        torch = torch_pair(1, port)
        buffer = torch.ones(NUM * SETS[0], dtype=torch.uint8, device="cuda:1")
        while (order := self.wire.receive("round")[0]) is not None:
            size, num, grouped, rounds = order
            for _ in range(rounds):
                nccl_round(torch, buffer, size, num, 1, grouped=grouped)
        torch.distributed.destroy_process_group()

    def nixl(self, num_bytes: int) -> bytes:
        """A slab, registered; its description."""
        self.gpu.copy.make_current()
        address = self.gpu.slab(num_bytes)
        self.gpu.mark(address, num_bytes, 1)
        self.transport = NixlTransport("owner", mode="write", prepare=self.gpu.copy.make_current)
        self.transport.register(
            region("theirs", RegionKind.CUDA_SLAB, address, SETS[0], num_bytes // SETS[0], self.gpu)
        )
        return self.transport.describe()

    def nixl_link(self, description: bytes) -> None:
        """Connect to the puller."""
        assert self.transport is not None
        link = self.transport.connect(Peer(description, channel=ChannelOverWire(self.wire)))
        self.wire.on_message = link.on_message

    def nixl_close(self) -> None:
        """End the link, free the slab."""
        assert self.transport is not None
        self.transport.close()
        self.gpu.copy.make_current()
        self.gpu.free_slabs()


if __name__ == "__main__":
    apply_ucx_environment(TransferSettings())
    Owner(Wire(socket.socket(fileno=int(sys.argv[1])))).run()
