"""An engine that works in the pages of a real mempool, in this process: it maps them, fills and reads them."""

import mmap

from shared.ids import BlockHash, InstanceId
from shared.kv.words import u32_bytes, u32_list, u64_bytes, u64_list
from shared.transport.unix_blocking import BlockingUnixLink
from shared.transport.unix_socket import close_fds
from shared.wire import mempool as wire
from tests.integration.mempool_rig import DESCRIPTION, SEED, until

Owned = tuple[int, int]


class PagesEngine:
    """Attached as rank and engine. `device`: "cpu:" and a name for a space of its own."""

    def __init__(self, socket, instance: str, device: str = "cpu", quota: int = 0, **fields) -> None:
        self.granted: list[Owned] = []
        self.answers: list[wire.FromMempool] = []
        described = fields.get("description", DESCRIPTION)
        common = {"instance": InstanceId(instance), "description": described, "device": device}
        self.links = []
        self.cached: list[Owned] = []
        self.in_use: list[Owned] = []
        attached, fds = self._attach(socket, wire.Attach(kind="rank", **common))
        self.page_bytes, self.num_pages = attached.page_bytes, attached.num_pages
        self.memory_id = attached.memory_id
        self._pages = mmap.mmap(fds[0], attached.num_pages * attached.page_bytes)
        close_fds(fds)
        more = {"quota_pages": quota, "works_in_pages": True} | common | fields
        _, fds = self._attach(socket, wire.Attach(kind="engine", **more))
        close_fds(fds)
        self.calls = 0

    def _attach(self, socket, message: wire.Attach):
        link = BlockingUnixLink(
            socket, out=wire.TO_MEMPOOL, into=wire.FROM_MEMPOOL, on_message=self._on_message
        )
        link.connect()
        reply, _, fds = link.call(message, timeout_ms=60_000)
        assert isinstance(reply, wire.Attached), reply
        link.start()
        self.links.append(link)
        return reply, fds

    def _on_message(self, _seq, message, _raw, fds) -> None:
        close_fds(fds)
        if isinstance(message, wire.Granted):
            self.granted += zip(u32_list(message.pages), u64_list(message.epochs), strict=True)
        elif isinstance(message, wire.Vacate):
            self.vacate(message)
        elif not isinstance(message, wire.Shrink):
            self.answers.append(message)
        else:
            self.give_back(message.count)

    def say(self, message: wire.ToMempool) -> None:
        self.links[1].send(message)

    def give_back(self, count: int) -> None:
        pages, self.granted[:] = self.granted[:count], self.granted[count:]
        if pages:
            self.say(wire.GiveBack(**lists(pages)))

    def vacate(self, asked: wire.Vacate) -> None:
        """It caches sealed pages, and uses those that are in `in_use`."""
        pages = set(zip(u32_list(asked.pages), u64_list(asked.epochs), strict=True)) - set(self.in_use)
        stock = [own for own in self.granted if own in pages]
        self.granted[:] = [own for own in self.granted if own not in pages]
        self.say(wire.GiveBack(**lists(stock)))
        self.say(wire.Unpin(**lists([own for own in self.cached if own in pages])))
        self.cached = [own for own in self.cached if own not in pages]
        self.say(wire.Vacated(number=asked.number))

    def save(self, hashes: list[BlockHash], contents: list[bytes]) -> list[Owned]:
        """Write and seal a prompt's blocks; they stay pinned. The mempool knows then: others may ask."""
        until(lambda: len(self.granted) >= len(hashes), f"{len(hashes)} pages are granted")
        pages, self.granted[:] = self.granted[: len(hashes)], self.granted[len(hashes) :]
        for (page, _), data in zip(pages, contents, strict=True):
            self.write(page, data)
        self.say(
            wire.Sealed(
                **lists(pages),
                hashes=b"".join(hashes),
                parents=b"".join([SEED, *hashes][: len(hashes)]),
                valid_tokens=u32_bytes([4] * len(pages)),
            )
        )
        self.cached += pages
        self._answer(wire.Match(call_id=self._next_call(), hashes=hashes[0]))
        return pages

    def unpin(self, pages: list[Owned]) -> None:
        self.cached = [own for own in self.cached if own not in pages]
        self.say(wire.Unpin(**lists(pages)))

    def acquire(self, hashes: list[BlockHash]) -> list[int]:
        """Pages of what is there; their lease goes at once."""
        asked = wire.Acquire(call_id=self._next_call(), hashes=b"".join(hashes), wait_ms=30_000)
        return u32_list(self._answer(asked).pages)

    def _next_call(self) -> int:
        self.calls += 1
        return self.calls

    def _answer(self, asked):
        def found():
            return next((a for a in self.answers if getattr(a, "call_id", 0) == asked.call_id), None)

        self.say(asked)
        until(lambda: found() is not None, "an answer")
        return found()

    def write(self, page: int, data: bytes) -> None:
        self._pages[page * self.page_bytes : page * self.page_bytes + len(data)] = data

    def read(self, page: int, length: int) -> bytes:
        return bytes(self._pages[page * self.page_bytes : page * self.page_bytes + length])

    def close(self) -> None:
        for link in self.links:
            link.close()
        self._pages.close()


def lists(pages: list[Owned]) -> dict[str, bytes]:
    return {"pages": u32_bytes(p for p, _ in pages), "epochs": u64_bytes(e for _, e in pages)}
