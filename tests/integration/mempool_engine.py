"""An engine process for tests: python -m tests.integration.mempool_engine SOCKET INSTANCE QUOTA."""

import json
import sys
import time
from pathlib import Path

from shared.ids import Epoch, HandoffId, InstanceId, PageId
from shared.mempool.engine_attachment import EngineAttachment, SealEntry
from shared.transport.unix_blocking import BlockingUnixLink
from shared.wire import mempool as wire
from tests.integration.mempool_rig import DESCRIPTION, SEED, chain, content, until


class Engine:
    def __init__(self, socket: str, instance: str, quota: int) -> None:
        self.socket = socket
        self.attachment = EngineAttachment(socket, InstanceId(instance), DESCRIPTION, quota)
        self.links = []
        assert self.attachment.wait_connected(30)

    def take(self, count: int) -> list[tuple[PageId, Epoch]]:
        pages = []

        def enough() -> bool:
            pages.extend(self.attachment.take_pages(count - len(pages)))
            return len(pages) == count

        until(enough, f"{count} pages are granted")
        return pages

    def save(self, *names: str) -> list:
        return self.save_behind(0, *names)

    def save_behind(self, first: int, *names: str) -> list:
        """The blocks of the chain from `first` on."""
        hashes = chain(*names)
        parents = [SEED, *hashes][first:]
        hashes = hashes[first:]
        pages = self.take(len(hashes))
        self.attachment.writing(pages)
        for (page, _), block_hash in zip(pages, hashes, strict=True):
            self.attachment.page_view(page)[:] = content(block_hash)
        lines = zip(pages, hashes, parents, strict=False)
        self.attachment.seal([SealEntry(page, epoch, h, parent, 4) for (page, epoch), h, parent in lines])
        return pages

    def scribble(self, page: list[int], at: int) -> None:
        """Change a byte of a page, sealed or not, as no engine may."""
        self.attachment.page_view(PageId(page[0]))[at] ^= 0x10

    def hold(self, granted: int, writing: int) -> list:
        """Take pages and leave some of them half written."""
        pages = self.take(granted + writing)
        self.attachment.writing(pages[:writing])
        for page, _ in pages[:writing]:
            self.attachment.page_view(page)[:100] = b"x" * 100
        return pages

    def ready(self, handoff_id: str, *names: str) -> None:
        self.attachment.handoff_ready(HandoffId(handoff_id), chain(*names), 5000)

    def read(self, pages: list, names: list[str]) -> list[bool]:
        """Whether each page is sealed and holds its block, checked like any copy reader does."""
        out = []
        for (page, epoch), block_hash in zip(pages, chain(*names), strict=True):
            before = self.attachment.is_sealed(page, epoch)
            copy = bytes(self.attachment.page_view(page))
            out.append(before and self.attachment.is_sealed(page, epoch) and copy == content(block_hash))
        return out

    def attach_and_leave(self, pages: int) -> None:
        """A second attachment of this process that ends without a word, while the process lives on."""
        granted = []
        link = BlockingUnixLink(
            Path(self.socket),
            out=wire.TO_MEMPOOL,
            into=wire.FROM_MEMPOOL,
            on_message=lambda seq, message, raw, fds: granted.append(message),
        )
        link.connect()
        instance = InstanceId("leaver")
        link.call(wire.Attach(kind="engine", instance=instance, description=DESCRIPTION, quota_pages=pages))
        link.start()
        until(lambda: granted, "pages are granted")
        link.close()

    def counters(self) -> dict[str, int]:
        return self.attachment.counters

    def boot(self) -> int:
        return self.attachment.boot_generation


def main() -> None:
    engine = Engine(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    print(json.dumps("attached"), flush=True)
    for line in sys.stdin:
        command, *args = json.loads(line)
        print(json.dumps(getattr(engine, command)(*args)), flush=True)
    time.sleep(0)


if __name__ == "__main__":
    main()
