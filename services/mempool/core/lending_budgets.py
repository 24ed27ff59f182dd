"""Which budget each producer has: the settings' one, or a share of what the mover measured of its GPUs. No I/O."""

from collections.abc import Collection, Mapping

from services.mempool.core.lending_copies import LendingCopies
from services.mempool.core.wishes import Word
from shared.lending.budget import auto_budget_bytes_per_s
from shared.lending.rules import AUTO_BUDGET, LendingRules


class LendingBudgets:
    """Of one mempool.

    Host memory lent by engines on CPUs has no budget by itself: the mover measures no pair there, and its threads
    (`mempool.mover_threads`) bound what copies take of the machine.
    """

    def __init__(self, rules: LendingRules, copies: LendingCopies) -> None:
        self._is_auto, self._copies = rules.budget_bytes_per_s == AUTO_BUDGET, copies
        self._warned: set[int] = set()  # producers that lend without
        self.gb_per_s: Mapping[tuple[str, str], float] = {}  # of pairs of GPUs, as far as they were measured
        copies.limit(rules.fixed_budget_bytes_per_s)

    def look(self, producer: int, devices: Collection[str], *, is_lending: bool) -> Word | None:
        """Before each decision about this space. What was measured once stays when a later look finds nothing.

        Returns: what the log should say, once: its budget, or that it lends without one.
        """
        if not self._is_auto:
            return None
        found = auto_budget_bytes_per_s(devices, self.gb_per_s)
        if found and found != self._copies.limit_of(producer):
            self._copies.limit_one(producer, found)
            return Word("lending_budget", {"space": producer, "bytes_per_s": found})
        if not is_lending or self._copies.limit_of(producer) or producer in self._warned:
            return None
        self._warned.add(producer)
        reason = "no copy between its GPUs and others was measured" if devices else "it is host memory"
        return Word("lending_without_budget", {"space": producer, "reason": reason})
