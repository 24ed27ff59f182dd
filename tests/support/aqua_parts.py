"""What an Aqua is made of, without a mempool, for unit tests."""

import torch

from shared.aqua import consumer as consumer_module
from shared.aqua.settings import AquaSettings
from shared.errors import OutOfPages
from shared.ids import Epoch, InstanceId, PageId, SpaceId
from shared.vmm.errors import BadMapping
from shared.wire.mempool_api import Evacuated, PageAddress

PAGE_BYTES = 4_096
SETTINGS = AquaSettings("s", "a", "i", 8 * PAGE_BYTES, timeout_ms=10_000)


class Parts:
    """`open`: those that are not closed. `held`: pages that are allocated, with their kind; `most`: how many of a kind
    there are. `mapped`, `taken`: places with a page, and in use."""

    def __init__(self, monkeypatch):
        self.open, self.connects, self.on_evacuated, self.on_alloc = set(), True, None, lambda: None
        self.num_pages, self.on_transfer = 0, lambda sources, targets: None
        self.held, self.most, self.mapped, self.taken = {}, {}, set(), set()
        replaced = {
            "OwnSpace": self._own, "open_window": self._window, "mempool_device": lambda *_: "cpu:i",
            "LocalMemory": lambda window, _: window, "MemPoolApi": self._api, "MempoolClient": self._client,
        }  # fmt: skip
        for name, stand_in in replaced.items():
            monkeypatch.setattr(consumer_module, name, stand_in)

    def part(self, name, **members):
        self.open.add(name)
        close = members.pop("close", lambda _: self.open.discard(name))
        return type(name, (), {"close": close} | members)()

    def _own(self, *_):
        return self.part("own", page_bytes=PAGE_BYTES, num_pages=8, instance=InstanceId("i"))

    def _window(self, *_):
        def take(_, count):
            first = max(self.taken, default=-1) + 1
            self.taken.update(range(first, first + count))
            return first

        def give_back(_, first, count):
            self.taken.difference_update(range(first, first + count))

        def map_pages(_, first, pages):
            places = set(range(first, first + len(pages)))
            if places & self.mapped:
                raise BadMapping("mapped already")
            self.mapped |= places

        def unmap(_, first, count):
            places = set(range(first, first + count))
            if not places <= self.mapped:
                raise BadMapping("not mapped")
            self.mapped -= places

        here = {"take": take, "give_back": give_back, "map": map_pages, "unmap": unmap}

        def view(_, first, shape, dtype, owner=None):
            return torch.zeros(shape, dtype=dtype)

        return self.part("window", wait=lambda _: None, view=view, **here)

    def _api(self, *_, on_evacuated, **__):
        self.on_evacuated = on_evacuated

        async def connect(_):
            pass

        async def alloc_mem(_, count, kind):
            self.on_alloc()
            if list(self.held.values()).count(kind) + count > self.most.get(kind, count * 1_000):
                raise OutOfPages(f"{count} of {kind}")
            found = [self.address() for _ in range(2 * count if kind == "leased" else count)]
            self.held |= dict.fromkeys(found[:count], kind) | dict.fromkeys(found[count:], "dram")
            return found

        async def free_mem(_, addresses):
            for address in addresses:
                self.held.pop(address, None)

        async def transfer(_, instance, sources, targets, *, timeout_ms):
            self.on_transfer(sources, targets)

        return self.part("api", connect=connect, alloc_mem=alloc_mem, free_mem=free_mem, transfer=transfer)

    def address(self):
        self.num_pages += 1
        return PageAddress(1, 0, SpaceId(0), PageId(self.num_pages), Epoch(1))

    def evacuate(self, address):
        """This lent page, by the mempool."""
        self.held.pop(address)
        self.on_evacuated(Evacuated(addresses=address.to_bytes()))

    def _client(self, *_):
        async def wait_connected(_, timeout_ms):
            return self.connects

        async def close(_):
            self.open.discard("client")

        return self.part("client", start=lambda _: None, wait_connected=wait_connected, close=close)
