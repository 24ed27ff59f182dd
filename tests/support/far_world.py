"""Engines with far places in page_world.py, without a model: what examples of them are made of (far_model.py).

Copies and mappings end when the example lets them; a mempool may die, and its successor knows nothing of far places.
Every step reads every slot of its requests through the block table as the ranks know it.
"""

from typing import Any, NamedTuple
from unittest import mock

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig

from services.mempool.core.actions import MapFarPages, Send
from shared.engine.fair_far_scheduler import AsyncFairFarPageScheduler, FairFarPageScheduler
from shared.engine.far_scheduler import AsyncFarPageScheduler, FarPageScheduler
from shared.kv.words import u32_list
from shared.wire.mempool_far import FarMapped, UnmapFar
from tests.support import page_engine
from tests.support.page_engine import Row, SimEngine
from tests.support.page_world import World, hashes_of
from tests.support.told_slices import ToldSlices
from tests.unit.mempool_harness import BLOCK_TOKENS

RANK = 10_000  # connection


class Sizes(NamedTuple):
    """Pages and places."""

    num_pages: int = 12
    far_blocks: int = 24
    far_places: int = 32
    dram_pages: int = 60
    lent_pages: int = 10


SIZES = Sizes()


class Slots(list):
    """Of own pages by number; behind them, of far places, what is mapped there."""

    far: "FarWorld"

    def __getitem__(self, index: Any) -> Any:
        num_pages = self.far.num_pages
        if isinstance(index, int) and index >= num_pages:
            space, page = self.far.maps[index - num_pages]
            return self.far.mempool.swap._slots[space][page]
        return super().__getitem__(index)


class FarWorld(World):
    """With one rank. `maps`: (space, page) by place."""

    def __init__(self, name: str, sizes: Sizes = SIZES) -> None:
        self.sizes = sizes
        self.maps: dict[int, tuple[int, int]] = {}
        self.asked: list[tuple[int, Any]] = []
        self.holds_maps = False
        super().__init__(name, sizes.num_pages, swap_pages=sizes.dram_pages)
        own = Slots(self.slots)
        own.far = self
        self.slots = self.mempool.swap._slots[0] = own
        self._hear_what_is_mapped()

    def _hear_what_is_mapped(self) -> None:
        swaps, take = self.mempool.swap.swaps, self.mempool.swap.swaps.take_actions

        def taken() -> list[Any]:
            actions = take()
            for action in actions:
                if isinstance(action, MapFarPages):
                    where = [(action.space, page) for page in action.pages]
                    self.asked.append((action.number, dict(zip(action.places, where, strict=True))))
                elif isinstance(action, Send) and isinstance(action.message, UnmapFar):
                    self.asked.append((action.message.number, u32_list(action.message.places)))
            return actions

        swaps.take_actions = taken

    @property
    def now_ms(self) -> int:
        """It goes on without a mempool."""
        return self.mempool.now_ms if self.mempool else self._now_ms

    def lose_mempool(self) -> None:
        """And what it mapped: what its successor maps takes the place of that."""
        self._now_ms = self.now_ms
        super().lose_mempool()
        self.maps.clear()
        self.asked.clear()

    def start_successor(self, keep_memory: bool = True, **how: Any) -> None:
        """See World."""
        super().start_successor(keep_memory, **how)
        self.mempool.now_ms = self.mempool.swap.now_ms = self._now_ms
        self._hear_what_is_mapped()

    def attach_rank(self, engine: SimEngine) -> None:
        """The engine has far places from now on, as soon as it is attached itself."""
        self.mempool.pool.memory.engines.attach_rank(
            RANK, engine.process, engine.instance, 0, self.sizes.far_places
        )

    def map_one(self) -> bool:
        """The rank does what it was asked first."""
        if not self.asked:
            return False
        number, what = self.asked.pop(0)
        if isinstance(what, dict):
            assert not set(what) & set(self.maps)
            self.maps |= what
        else:
            for place in what:
                del self.maps[place]
        self.mempool.say(RANK, FarMapped(number=number))
        return True

    def pump(self, connection: int | None = None, count: int = 1_000) -> None:
        super().pump(connection, count)
        if connection is None and not self.holds_maps and self.asked:
            while self.map_one():
                continue
            self.pump()

    def lend(self) -> None:
        """From now on there are lent pages."""
        self.mempool.swap.lend(self.sizes.lent_pages)
        self.mempool.go_on()

    def want_back(self, number: int) -> None:
        """What is mapped there now shall move."""
        self.mempool.swap.want_back(number)
        self.mempool.go_on()

    def advance(self, by_ms: int) -> None:
        """As World, for the pace of what goes back, too."""
        if self.mempool is None:
            self._now_ms += by_ms
            return
        self.mempool.swap.now_ms += by_ms
        super().advance(by_ms)
        self.mempool.go_on()

    def assert_unchanged(self, page: int, epoch: int, why: str) -> None:
        """Of a far place: it is mapped still."""
        place = page - self.num_pages
        if place >= 0:
            assert self.mempool is None or place in self.maps, f"place {place} was unmapped: {why}"
        else:
            super().assert_unchanged(page, epoch, why)


class _SimFar(page_engine._Sim, FarPageScheduler):
    """Synchronous."""


class _SimAsyncFar(page_engine._Sim, AsyncFarPageScheduler):
    """With steps ahead."""


class _SimFairFar(page_engine._Sim, ToldSlices, FairFarPageScheduler):
    """Synchronous, in fair slices."""


class _SimAsyncFairFar(page_engine._Sim, ToldSlices, AsyncFairFarPageScheduler):
    """With steps ahead, in fair slices."""


class FarEngine(SimEngine):
    """See SimEngine."""

    def __init__(self, world: FarWorld, socket: str, **how: Any) -> None:
        sizes = world.sizes
        extra = {"far_places": sizes.far_places, "far_blocks": sizes.far_blocks}
        kinds = {
            (1, False): _SimFar,
            (2, False): _SimAsyncFar,
            (1, True): _SimFairFar,
            (2, True): _SimAsyncFairFar,
        }
        num_blocks = sizes.num_pages + 1 + sizes.far_places
        with (
            mock.patch.object(page_engine, "KINDS", kinds),
            mock.patch.object(page_engine, "KVCacheConfig", lambda *a: KVCacheConfig(num_blocks, *a[1:])),
            mock.patch.object(page_engine, "MORE", extra),
        ):
            super().__init__(world, "far", socket, **how)
        world.attach_rank(self)
        self.front = world.client(self.instance)

    def add_with_lease(self, request_id: str, prompt: bytes, max_tokens: int, most_blocks: int) -> None:
        """With a lease of what the mempool has of the prompt's first blocks."""
        hashes = hashes_of(prompt)[: min(most_blocks, len(prompt) // BLOCK_TOKENS)]
        self.add(request_id, prompt, max_tokens, self.world.acquired(self.front, hashes) if hashes else {})

    def _rows_of(self, output: SchedulerOutput) -> list[Row]:
        gone = set(output.finished_req_ids) | set(output.preempted_req_ids or ())
        for change in getattr(output, "quire_far", ()):
            row = self.rows.get(change.request_id)
            if row is not None and change.request_id not in gone:
                end = change.position + len(change.block_ids)
                assert end <= len(row.blocks)
                row.blocks[change.position : end] = change.block_ids
        return super()._rows_of(output)
