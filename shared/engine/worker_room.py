"""Handed-over prompts wait here for room in the engine's pages, with their own pages held where they are.

Bringing them would take pages that running requests need next: one of those would be preempted, or the leases of
waiting requests would be in each other's way, and what prefill had computed would be computed again (decision 0028).
Rules: shared/room.
"""

import asyncio
import contextlib
import time

from shared.background_task import begin_task
from shared.engine.interface import Engine, EngineRoom
from shared.engine.worker_config import WorkerSettings
from shared.engine.worker_pages import PromptPages
from shared.errors import ClusterError
from shared.observe import metrics
from shared.observe.log import get_logger
from shared.room.growth import Need, growth_pages
from shared.room.queue import Figures, RoomQueue
from shared.wire.handoff import HandoffState
from shared.wire.mempool import SpaceStatus
from shared.wire.reports import Room
from shared.wire.requests import SamplingSpec

LOOK_S = 0.25  # between two looks at the engine's pages
LOOK_SOON_S = 0.02  # while somebody waits
MOST_SHARE = 0.75  # of all pages: who may need more waits for no more
_log = get_logger("worker.room")
_NO_MEMORY = ("withdrawn", "released", "leased")  # states of pages that are not the engine's to have


class DecodeRoom:
    """From open() to close(). Used only from the loop."""

    def __init__(self, engine: Engine, pages: PromptPages, settings: WorkerSettings) -> None:
        self._engine, self._pages, self._settings = engine, pages, settings
        self._queue = RoomQueue()
        self._figures: Figures | None = None
        self._sources: list[str] = []  # engines in the same pages
        self._begun: dict[str, asyncio.Event] = {}
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._waited = metrics.histogram_ms(
            "quire_worker_room_wait_ms", "How long handed-over prompts waited for room in decode's pages."
        )
        self._overdue = metrics.counter(
            "quire_worker_room_overdue_total",
            "Handed-over prompts that began without room, after their time.",
        )

    def open(self) -> None:
        """Begin to look. Needs the running loop."""
        self._task = begin_task(self._follow(), "decode-room")

    async def close(self) -> None:
        """Harmless when closed already."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    @property
    def now(self) -> Room | None:
        """For reports. Those that wait here, or are on their way in, are owed what they need."""
        seen = self._figures
        if seen is None:
            return None
        owed = growth_pages(seen.needs, in_use=seen.in_use) + self._queue.pages
        return Room(seen.num_pages, seen.free, owed, seen.answer_tokens)

    async def enter(self, key: str, handoff: HandoffState, num_tokens: int, sampling: SamplingSpec) -> float:
        """Return when the prompt may begin; ms that it waited. In order of arrival; cancelling it is harmless."""
        if self._figures is None or not self._settings.handoff_room_ms:
            return 0.0
        began_ms, ttl_ms = _now_ms(), self._settings.handoff_ttl_ms
        keeps = self._pages.can_keep(handoff)
        most_ms = (
            self._settings.handoff_room_ms if keeps else min(self._settings.handoff_room_ms, ttl_ms // 2)
        )
        self._queue.ask(key, self._need(handoff, num_tokens, sampling), until_ms=began_ms + most_ms)
        event = self._begun[key] = asyncio.Event()
        try:
            self._admit()
            while not event.is_set():
                self._wanted.set()
                if keeps:
                    self._pages.keep_handoff(handoff)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ttl_ms / 3000):
                        await event.wait()
                self._admit()  # an engine that does not answer keeps nobody beyond its time
        finally:
            del self._begun[key]
        waited_ms = _now_ms() - began_ms
        self._waited.observe(waited_ms)
        self._overdue.inc(waited_ms >= most_ms)
        return float(waited_ms)

    def entered(self, key: str) -> None:
        """The engine is about to get it."""
        self._queue.entered(key)

    def leave(self, key: str) -> None:
        """It is over, wherever it was. Unknown ones are ignored."""
        self._queue.leave(key)

    def _need(self, handoff: HandoffState, num_tokens: int, sampling: SamplingSpec) -> Need:
        """Pages of the prompt, unless it lies in the engine's own pages already, and of its answers."""
        assert self._figures is not None
        block_tokens, most = self._engine.description.block_tokens, int(MOST_SHARE * self._figures.num_pages)
        is_here = any(name.startswith(f"engine {handoff.source}:") for name in self._sources)
        begin = min(most, 1 if is_here else -(-num_tokens // block_tokens) + 1)  # the last block is copied
        answer = min(sampling.max_tokens, self._figures.answer_tokens) * max(1, sampling.n)
        return Need(begin, min(most - begin, -(-answer // block_tokens)))

    def _admit(self) -> None:
        for key in self._queue.admit(self._figures, now_ms=_now_ms()):
            if (event := self._begun.get(key)) is not None:
                event.set()

    async def _follow(self) -> None:
        while True:
            question = self._queue.question()
            try:
                seen = await self._engine.room()
            except ClusterError:  # it died: others say so
                seen = None
            except Exception:  # noqa: BLE001  an engine that cannot count must not keep everybody waiting
                if self._figures is not None:
                    _log.error("room_unknown", exc_info=True)
                seen = None
            space = await self._pages.space() if seen is not None else None
            self._note(seen, space)
            self._queue.figures_came(question)
            self._admit()
            if len(self._queue):
                await asyncio.sleep(LOOK_SOON_S)
            else:
                self._wanted.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._wanted.wait()

    def _note(self, seen: EngineRoom | None, space: SpaceStatus | None) -> None:
        if seen is None or space is None:
            self._figures = None
            return
        by_state = space.pages_by_state
        present = sum(by_state.values()) - sum(by_state.get(name, 0) for name in _NO_MEMORY)
        num_pages = present // max(1, len(space.engines))  # engines have even parts
        unpinned = by_state.get("free", 0) + max(0, space.num_indexed - space.num_pinned + space.num_ahead)
        free = max(0, min(seen.unused + unpinned, num_pages - seen.own))
        self._figures = Figures(num_pages, free, seen.in_use, seen.needs, seen.answer_tokens)
        self._sources = space.engines


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
