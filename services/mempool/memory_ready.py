"""Memory for whoever attaches, made before anything is decided about it (core/memory_ahead.py)."""

from collections.abc import Iterable

from services.mempool.core.actions import CreateMemory
from services.mempool.core.space import Plan
from services.mempool.memory import PoolMemory
from shared.ids import Epoch


class MemoryReady:
    """Of one attachment at a time: make() before it, take() while it is decided, drop() behind it."""

    def __init__(self, boot_generation: Epoch) -> None:
        self._boot_generation = boot_generation
        self._ready: list[tuple[tuple[int, int, int, bool], PoolMemory]] = []

    def make(self, planned: Iterable[Plan]) -> str:
        """All of these, or none: why not; "" when they are there. Cost: some system calls each, and no page."""
        self.drop()
        try:
            for each in planned:
                self._make(each.num_pages, each.page_bytes, each.num_ranks, each.pages_per_slab > 0)
        except OSError as error:  # memory, descriptors or mappings are short, or a file may not be so large
            self.drop()
            return f"memory for pages cannot be made: {error.strerror or error}"
        return ""

    def take(self, action: CreateMemory) -> PoolMemory:
        """The caller's to close. Raises: OSError where it was not made ahead and cannot be made now."""
        key = action.num_pages, action.page_bytes, action.num_ranks, action.pages_per_slab > 0
        if not any(known == key for known, _ in self._ready):
            self._make(*key)
        at = next(at for at, (known, _) in enumerate(self._ready) if known == key)
        return self._ready.pop(at)[1]

    def _make(self, num_pages: int, page_bytes: int, num_ranks: int, table_only: bool) -> None:
        made = PoolMemory(num_pages, page_bytes, self._boot_generation, num_ranks, table_only=table_only)
        self._ready.append(((num_pages, page_bytes, num_ranks, table_only), made))

    def drop(self) -> None:
        """What was not taken."""
        while self._ready:
            self._ready.pop()[1].close()
