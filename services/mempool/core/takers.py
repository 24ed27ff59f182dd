"""Which spaces of this mempool could borrow from one, and why none can: memory is not set aside for nobody. No I/O."""

from collections.abc import Mapping

from services.mempool.core.lending import Lending
from services.mempool.core.loan_pool import why_not
from services.mempool.core.pool import Pool
from services.mempool.core.wishes import Word

MOST_REASONS = 4  # of a sentence in a log


class Takers:
    """Of one desk. Args: after_ms: what was so for as long is worth a word; engines come one after the other."""

    def __init__(self, pools: Mapping[int, Pool], lending: Lending, after_ms: int) -> None:
        self._pools, self._lending, self._after_ms = pools, lending, after_ms
        self._since_ms: dict[int, tuple[str, int]] = {}
        self._said: dict[int, str] = {}

    def look(self, number: int, now_ms: int) -> Word | None:
        """Before each decision about this space. Returns: what the log should say, once for each reason."""
        why = self.why_none(number)
        if self._since_ms.get(number, ("", 0))[0] != why:
            self._since_ms[number] = why, now_ms
        since_ms = self._since_ms.get(number, ("", now_ms))[1]
        if not why or now_ms - since_ms < self._after_ms or self._said.get(number) == why:
            return None
        self._said[number] = why
        return Word("memory_fits_nobody", {"space": number, "reason": why})

    def forget(self, number: int) -> None:
        """The space is over."""
        self._since_ms.pop(number, None)
        self._said.pop(number, None)

    def why_none(self, number: int) -> str:
        """ "": some space could borrow from this one. Cost: O(spaces)."""
        reasons: list[str] = []
        for other, pool in self._pools.items():
            if other == number or pool.memory is None or pool.memory.is_behind:
                continue
            why = why_not(self._pools[number], pool)
            if not why and self._lending.num_back(other) is None:
                why = "no host memory is behind it, out of which it would ask"
            if not why:
                return ""
            reasons.append(f"space {other}: {why}")
        return "; ".join(reasons[:MOST_REASONS]) or "there is no other space of engines here"
